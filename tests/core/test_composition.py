"""Composed wrappers in every order: compared with their parts and with computations by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.models import mlp
from torch import Tensor, nn

from workbench import compose, neo, sample, sculpt, vote
from workbench.core.calls.predict import plan_of, run
from workbench.core.method import Call

MAKERS = {
    "vote": lambda: vote.Wrapper(3),
    "sample": lambda: sample.Wrapper(4),
    "sculpt": lambda: sculpt.Wrapper(n_layers=1),
    "neo": lambda: neo.Wrapper(),
}
PAIRS: list[tuple[str, ...]] = list(itertools.combinations(MAKERS, 2))
TRIPLES: list[tuple[str, ...]] = list(itertools.combinations(MAKERS, 3))


# ---- every composition -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [p for p in PAIRS + TRIPLES if len({"vote", "sample", "sculpt"} & set(p)) > 1])
def test_total_squared_is_the_sum_of_squares(names: tuple[str, ...]) -> None:
    wrapped: Any = compose(*(MAKERS[name]() for name in names))(mlp()).eval()
    if "neo" in names:
        wrapped.fit(torch.randn(50, 3))
    _, risk = wrapped(torch.randn(20, 3), return_risk=True)
    parts = [risk[name].double() for name in ("aleatoric", "epistemic") if risk[name] is not None]
    assert torch.allclose(risk.total.double().square(), sum(p.square() for p in parts), rtol=1e-5)


@pytest.mark.parametrize("names", PAIRS + TRIPLES + [tuple(MAKERS)])
def test_every_composition_gives_the_risks_of_its_parts(names: tuple[str, ...]) -> None:
    model = mlp()
    wrapped: Any = compose(*(MAKERS[name]() for name in names))(model).eval()
    x = torch.randn(6, 3)
    if "neo" in names:
        wrapped.fit(torch.randn(50, 3))
    y, risk = wrapped(x, return_risk=True)
    expected = {"total"} if set(names) != {"neo"} else set()
    expected |= {"epistemic"} if {"vote", "sample"} & set(names) else set()
    expected |= {"aleatoric"} if "sculpt" in names else set()
    expected |= {"vacuitic"} if "neo" in names else set()
    assert set(risk.names()) == expected
    for name in expected:
        assert risk[name].shape == ((6,) if name == "vacuitic" else y.shape)
        assert bool(torch.isfinite(risk[name]).all())
    if not {"vote", "sample"} & set(names):
        assert torch.equal(wrapped(x), model(x))
        assert torch.allclose(y, model(x), atol=1e-6)


@pytest.mark.parametrize("names", PAIRS + TRIPLES)
def test_the_order_of_wrapping_does_not_matter(names: tuple[str, ...]) -> None:
    model = mlp()
    x, rows = torch.randn(6, 3), torch.randn(50, 3)
    reference: Any = compose(*(MAKERS[name]() for name in names))(model).eval()
    keys = reference.state_dict().keys()
    if "neo" in names:
        reference.fit(rows)
    torch.manual_seed(5)
    y, risk = reference(x, return_risk=True)
    for order in itertools.permutations(names):
        composed: Any = compose(*(MAKERS[name]() for name in order))(model)
        nested: Any = model
        for name in order:
            nested = MAKERS[name]()(nested)
        for other in (composed, nested):
            assert other.methods == reference.methods
            assert other.state_dict().keys() == keys
            other.load_state_dict(reference.state_dict())
            torch.manual_seed(5)
            y_other, risk_other = other.eval()(x, return_risk=True)
            assert torch.equal(y_other, y)
            assert risk_other.names() == risk.names()
            assert all(torch.equal(risk_other[name], risk[name]) for name in risk)


def test_neo_beside_others_changes_none_of_their_numbers() -> None:
    model = mlp()
    both: Any = compose(sculpt.Wrapper(), neo.Wrapper())(model).eval()
    alone: Any = sculpt.Wrapper()(model).eval()
    alone.set_risk_parameters({name: p for name, p in both.named_risk_parameters() if "sculpt" in name})
    single: Any = neo.Wrapper()(model).eval()
    rows, x = torch.randn(50, 3), torch.randn(5, 3)
    both.fit(rows), single.fit(rows)
    _, risk = both(x, return_risk=True)
    assert torch.equal(risk.aleatoric, alone(x, return_risk=True)[1])
    assert torch.equal(risk.total, risk.aleatoric)
    assert torch.allclose(risk.vacuitic, single(x, return_risk=True)[1], atol=1e-5)


def test_vote_and_sculpt_by_hand_from_the_voters_and_their_heads() -> None:
    wrapped: Any = compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1))(mlp()).eval()
    x = torch.randn(7, 3)
    y, risk = wrapped(x, return_risk=True)
    p = dict(wrapped.named_parameters())
    trunk = [torch.tanh(x @ p["0.weight@vote"][i].T + p["0.bias@vote"][i]) for i in range(3)]
    locs = torch.stack([h @ p["2.weight@vote"][i].T + p["2.bias@vote"][i] for i, h in enumerate(trunk)])
    raws = [h @ p["2.weight@sculpt@vote"][i].T + p["2.bias@sculpt@vote"][i] for i, h in enumerate(trunk)]
    sigmas = torch.nn.functional.softplus(torch.stack(raws))
    assert torch.allclose(y, locs.mean(0), atol=1e-6)
    assert torch.allclose(risk.epistemic, locs.var(0, correction=0).sqrt(), atol=1e-6)
    assert torch.allclose(risk.aleatoric, sigmas.square().mean(0).sqrt(), atol=1e-6)


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("share", [None, "rank1", 1, 2])
def test_sharing_voters_compose_with_sculpt_in_both_orders(share: Any, n_layers: int) -> None:
    model, x = mlp(), torch.randn(6, 3)
    first: Any = vote.Wrapper(3, share=share)(sculpt.Wrapper(n_layers=n_layers)(model)).eval()
    second: Any = sculpt.Wrapper(n_layers=n_layers)(vote.Wrapper(3, share=share)(model)).eval()
    assert first.state_dict().keys() == second.state_dict().keys()
    second.load_state_dict(first.state_dict())
    y, risk = first(x, return_risk=True)
    answers = torch.stack([voter(x) for voter in first.voters()])
    assert torch.allclose(y, answers.mean(0), atol=1e-6)
    assert torch.allclose(risk.epistemic, answers.std(0, correction=0), atol=1e-6)
    y_second, risk_second = second(x, return_risk=True)
    assert torch.equal(y, y_second)
    assert all(torch.equal(risk[name], risk_second[name]) for name in risk)
    assert len({round(v, 5) for v in risk.aleatoric.flatten().tolist()}) == 6


@pytest.mark.parametrize("share", [None, "rank1", 1])
@pytest.mark.parametrize("where", ["activations", "weights", "inputs"])
def test_noise_of_size_zero_leaves_voters_and_heads_alone(where: str, share: Any) -> None:
    model, x = mlp(), torch.randn(6, 3)
    quiet = sample.Wrapper(2, sample.Bernoulli(0.0), where=where)
    both: Any = compose(vote.Wrapper(3, share=share), sculpt.Wrapper(n_layers=1))(model).eval()
    three: Any = compose(vote.Wrapper(3, share=share), sculpt.Wrapper(n_layers=1), quiet)(model).eval()
    three.set_risk_parameters(dict(both.named_risk_parameters()))
    y, risk = both(x, return_risk=True)
    y_three, risk_three = three(x, return_risk=True)
    assert torch.allclose(y, y_three, atol=1e-6)
    assert all(torch.allclose(risk[name], risk_three[name], atol=1e-6) for name in risk)


# ---- outputs, units and losses ---------------------------------------------------------------------------------------


def test_losses_and_draws_take_a_risk() -> None:
    wrapped: Any = compose(vote.Wrapper(3), sculpt.Wrapper())(mlp()).eval()
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    y_pred, risk = wrapped(x, return_risk=True)
    for dist in (sculpt.Normal, sculpt.Normal(), sculpt.Laplace):
        assert torch.equal(dist.loss_function(y, y_pred, risk), dist.loss_function(y, y_pred, risk.aleatoric))
        draws = [dist.sample((y_pred, r), generator=torch.Generator().manual_seed(0)) for r in (risk, risk.aleatoric)]
        assert torch.equal(*draws)


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
def test_both_executors_give_the_same_numbers(strategy: str) -> None:
    wrapper = compose(vote.Wrapper(3, strategy=strategy), sculpt.Wrapper())
    wrapped: Any = wrapper(mlp()).eval()
    x = torch.randn(6, 3)
    y, risk = wrapped(x, return_risk=True)
    answers = torch.stack([voter(x) for voter in wrapped.voters()])
    assert torch.allclose(y, answers.mean(0), atol=1e-6)
    assert torch.allclose(risk.epistemic, answers.std(0, correction=0), atol=1e-6)
    assert strategy in wrapped.explain()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        scores = self.head(torch.tanh(self.trunk(x)))
        return {"scores": scores, "top": scores.argmax(-1), "rows": len(x)}


@pytest.mark.parametrize("name", ["sculpt", "neo"])
def test_whole_numbers_and_texts_of_the_model_stay_as_they_are(name: str) -> None:
    model = TwoHeads()
    wrapped: Any = MAKERS[name]()(model).eval()
    x = torch.randn(20, 3)
    if name == "neo":
        wrapped.fit(x)
    y, _ = wrapped(x, return_risk=True)
    expected = model(x)
    assert torch.allclose(y["scores"], expected["scores"], atol=1e-6)
    assert torch.equal(y["top"], expected["top"])
    assert y["rows"] == 20


def test_whole_numbers_of_voters_are_decided_by_majority() -> None:
    wrapped: Any = vote.Wrapper(3)(TwoHeads()).eval()
    x = torch.randn(20, 3)
    votes = torch.stack([voter(x)["top"] for voter in wrapped.voters()])
    y, risk = wrapped(x, return_risk=True)
    assert torch.equal(y["top"], (votes.sum(0) >= 2).long())
    assert y["top"].dtype == torch.int64
    assert risk["top"] is None
    assert risk["scores"].shape == (20, 2)


def test_a_scaling_gives_predictions_and_risks_in_original_units() -> None:
    wrapped: Any = compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1))(mlp()).eval()
    x = torch.randn(6, 3)
    y, risk = wrapped(x, return_risk=True)
    means, scales = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 0.5])
    wrapped.scale(x_mean=means, x_scale=scales, y_mean=torch.tensor([5.0]), y_scale=torch.tensor([10.0]))
    original = x * scales + means
    y_scaled, risk_scaled = wrapped(original, return_risk=True)
    assert torch.allclose(y_scaled, 10 * y + 5, atol=1e-4)
    assert all(torch.allclose(risk_scaled[name], 10 * risk[name], atol=1e-4) for name in risk)
    answers = torch.stack([voter(original) for voter in wrapped.voters()])
    assert torch.allclose(y_scaled, answers.mean(0), atol=1e-4)
    restored: Any = compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1))(mlp()).eval()
    restored.load_state_dict(wrapped.state_dict())
    assert torch.equal(restored(original), wrapped(original))
    with pytest.raises(ValueError, match="y_scale must be positive"):
        wrapped.scale(y_mean=torch.zeros(1), y_scale=torch.zeros(1))
    assert torch.equal(restored(original), wrapped(original))


def test_numbers_of_another_shape_than_the_scaling_are_refused_instead_of_repeated() -> None:
    wrapped: Any = compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1))(torch.nn.Linear(3, 2)).eval()
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    wrapped.scale(x_mean=torch.ones(3), x_scale=torch.full((3,), 2.0), y_mean=torch.zeros(2), y_scale=torch.ones(2))
    expected = wrapped(x)
    for columns in (1, 2, 4):  # one column would count as each of the three
        with pytest.raises(
            ValueError, match=rf"the input is \[6, {columns}\], but the model was given .*x_mean.* of shape \[3\]"
        ):
            wrapped(torch.randn(6, columns), return_risk=True)
    with pytest.raises(ValueError, match=r"the target is \[6, 1\], .*y_mean"):
        wrapped.loss(torch.nn.MSELoss(), x, y[:, :1])
    wrapped.loss(torch.nn.MSELoss(), x, y).backward()
    assert torch.equal(wrapped(x), expected)
    assert torch.allclose(wrapped(x[2]), expected[2])  # one row
    assert torch.allclose(wrapped(x.expand(2, 6, 3)), expected.expand(2, 6, 2))
    wrapped.scale(x_mean=torch.ones(1, 3), x_scale=torch.full((1, 3), 2.0), y_mean=0.0, y_scale=1.0)
    assert torch.equal(wrapped(x), expected)
    wrapped.scale(y_mean=torch.zeros(6), y_scale=torch.ones(6))
    with pytest.raises(ValueError, match=r"the output is \[6, 2\], .*y_mean.* of shape \[6\]"):
        wrapped(x)


@pytest.mark.parametrize("name", ["x_mean", "x_scale", "y_mean", "y_scale"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scaling_is_finite(name: str, value: float) -> None:
    wrapped: Any = vote.Wrapper(2)(mlp())
    moments = dict.fromkeys(("x_mean", "x_scale", "y_mean", "y_scale"), torch.ones(1))
    with pytest.raises(ValueError, match=f"{name} must be"):
        wrapped.scale(**{**moments, name: torch.tensor([value])})
    assert wrapped.scaling is None


def test_composing_nothing_gives_the_plain_model_with_the_interface_of_a_wrapped_one() -> None:
    model = mlp()
    wrapped: Any = compose()(model).eval()
    x = torch.randn(4, 3)
    y, risk = wrapped(x, return_risk=True)
    assert torch.equal(y, model(x))
    assert risk.names() == ()


def test_attention_under_two_vmaps_is_refused_and_what_runs_instead_is_right() -> None:
    """Fused attention crashes the interpreter under nested vmap, so it must not get there."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.project(x)[:, None]
            mask = torch.ones(len(x), 1, 3, 3, dtype=torch.bool)
            return self.head(nn.functional.scaled_dot_product_attention(h, h, h, attn_mask=mask)[:, 0])

    model, x = Attention(), torch.randn(5, 3, 4)

    def wrap(strategy: str) -> Any:
        return compose(vote.Wrapper(2, share=1, strategy=strategy), sculpt.Wrapper(n_layers=1))(model)

    with pytest.raises(RuntimeError, match="two vmaps"):
        wrap("vmap")(x, return_risk=True)
    for strategy, training in (("auto", True), ("auto", False), ("vmap", False)):  # to predict, one vmap is enough
        wrapped = wrap(strategy).train(training)
        y, risk = wrapped(x, return_risk=True)
        torch.testing.assert_close(y, torch.stack([voter(x) for voter in wrapped.voters()]).mean(0))
        torch.testing.assert_close(risk.total**2, risk.aleatoric**2 + risk.epistemic**2)


def test_heads_of_voters_that_draw_in_evaluation_mode_draw_as_their_axes_say() -> None:
    """All heads run under one vmap where nothing is drawn; where something is, voters draw apart and the heads of one alike."""

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.head(x)
            return y + torch.randn_like(y)

    with torch.no_grad():
        model = Drawing().eval()
        model.head.weight.zero_(), model.head.bias.zero_()
        wrapped: Any = compose(vote.Wrapper(3, share=1), sculpt.Wrapper(n_layers=1))(
            nn.Sequential(nn.Linear(4, 4), model)
        )
        for name, parameter in wrapped.named_parameters():
            if "head" in name:
                parameter.zero_()
        branched, _ = run(wrapped, plan_of(wrapped, Call(training=False, return_risk=True)), (torch.randn(5, 4),), {})
    (drawn,) = branched.leaves  # [voters, heads, rows, 1]
    assert torch.equal(drawn[:, 0], drawn[:, 1])
    assert len({float(outputs.sum()) for outputs in drawn[:, 0]}) == 3


class Recomputing(nn.Module):
    """Batch norm that is recomputed in the backward pass, where it must be in the mode that it was in."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.utils.checkpoint.checkpoint(lambda v: torch.tanh(self.norm(self.a(v))), x, use_reentrant=False)
        return self.b(h)


def test_neo_beside_voters_leaves_recomputed_layers_in_training_mode() -> None:
    torch.manual_seed(0)
    model, x = Recomputing(), torch.randn(12, 3)
    gradients = []
    for extra in ((), (neo.Wrapper(),)):
        torch.manual_seed(1)
        wrapped: Any = compose(vote.Wrapper(3), *extra)(model).train()
        y, _ = wrapped(x, return_risk=True)
        y.square().sum().backward()
        gradients.append({name: p.grad for name, p in wrapped.named_parameters() if "@vote" in name})
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad)


@pytest.mark.slow
def test_noise_reaches_heads_that_are_computed_together() -> None:
    def epistemic(strategy: str) -> Tensor:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
            noisy = sample.Wrapper(400, sample.Bernoulli(0.3))
            wrapped: Any = compose(vote.Wrapper(1, strategy=strategy), sculpt.Wrapper(n_layers=1), noisy)(model).eval()
            return wrapped(torch.ones(1, 2), return_risk=True)[1]["epistemic"]

    torch.testing.assert_close(epistemic("vmap"), epistemic("loop"), rtol=0.2, atol=0)
