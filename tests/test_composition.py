"""Numbers of composed wrappers against closed forms and against computations by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from models import mlp
from torch import Tensor, nn

from workbench import Risk, compose, neo, sample, sculpt, vote

MAKERS = {
    "vote": lambda: vote.Wrapper(3),
    "sample": lambda: sample.Wrapper(4),
    "sculpt": lambda: sculpt.Wrapper(n_layers=1),
    "neo": lambda: neo.Wrapper(),
}
PAIRS: list[tuple[str, ...]] = list(itertools.combinations(MAKERS, 2))
TRIPLES: list[tuple[str, ...]] = list(itertools.combinations(MAKERS, 3))


pytestmark = pytest.mark.usefixtures("seeded")


def linear(slope: float = 2.0, offset: float = 1.0) -> nn.Linear:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(slope)
        model.bias.fill_(offset)
    return model


def set_biases(wrapped: Any, values: list[float]) -> None:
    """Voters that all have the weight of the given model, and these biases."""
    wrapped.set_risk_parameters({**wrapped.risk_parameters(), "bias@vote": torch.tensor(values)[:, None]})


def softplus(raw: float) -> float:
    return float(torch.nn.functional.softplus(torch.tensor(raw)))


# ---- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [None, "rank1", 1])
def test_one_voter_equals_itself_with_no_risk(share: Any) -> None:
    wrapped: Any = vote.Wrapper(1, share=share)(mlp()).eval()
    x = torch.randn(5, 3)
    y, risk = wrapped(x, return_risk=True)
    assert torch.equal(y, wrapped.voters()[0](x))
    assert torch.equal(risk, torch.zeros(5, 1))


def test_one_voter_at_the_given_weights_equals_the_model() -> None:
    model = mlp()
    wrapped: Any = vote.Wrapper(1, finetune=True)(model).eval()
    x = torch.randn(5, 3)
    assert torch.equal(wrapped(x), model(x))


def test_voters_that_differ_by_constants_give_their_mean_and_deviation() -> None:
    wrapped: Any = vote.Wrapper(3, finetune=True)(linear()).eval()
    set_biases(wrapped, [0.0, 3.0, 9.0])
    x = torch.tensor([[0.0], [1.0]])
    y, risk = wrapped(x, return_risk=True)
    assert torch.allclose(y, torch.tensor([[4.0], [6.0]]))
    assert torch.allclose(risk, torch.full((2, 1), 14.0**0.5))  # mean of 16, 1 and 25


def test_dropout_on_the_weights_has_the_variance_of_a_bernoulli() -> None:
    p, n = 0.25, 4000
    wrapped: Any = sample.Wrapper(n, sample.Bernoulli(p), where="inputs", strategy="vmap")(linear(slope=2.0)).eval()
    x = torch.tensor([[3.0]])
    y, risk = wrapped(x, return_risk=True)
    deviation = 6.0 * (p / (1 - p)) ** 0.5
    assert y.item() == pytest.approx(7.0, abs=4 * deviation / n**0.5)
    assert risk.item() == pytest.approx(deviation, rel=0.1)


@pytest.mark.parametrize("where", ["activations", "weights", "inputs"])
def test_noise_of_size_zero_leaves_the_prediction_alone(where: str) -> None:
    model = mlp()
    x = torch.randn(5, 3)
    for distribution in (sample.Bernoulli(0.0), sample.Normal(0.0)):
        wrapped: Any = sample.Wrapper(3, distribution, where=where)(model).eval()
        y, risk = wrapped(x, return_risk=True)
        assert torch.allclose(y, model(x), atol=1e-6)
        assert float(risk.detach().max()) < 1e-6


def test_the_total_of_vote_and_sculpt_follows_the_law_of_total_variance() -> None:
    wrapped: Any = compose(vote.Wrapper(2, finetune=True), sculpt.Wrapper())(linear()).eval()
    raw = torch.tensor([[0.5], [2.0]])
    names = wrapped.risk_parameters()
    heads = {name: torch.zeros_like(p) for name, p in names.items() if "sculpt" in name and "weight" in name}
    heads |= {name: raw for name in names if "sculpt" in name and "bias" in name}
    assert len(heads) == 2
    wrapped.set_risk_parameters({**names, **heads, "bias@vote": torch.tensor([[0.0], [4.0]])})
    y, risk = wrapped(torch.tensor([[1.0]]), return_risk=True)
    aleatoric = (softplus(0.5) ** 2 + softplus(2.0) ** 2) / 2
    assert isinstance(risk, Risk)
    assert y.item() == pytest.approx(4.0)
    assert risk.epistemic.item() == pytest.approx(2.0)
    assert risk.aleatoric.item() == pytest.approx(aleatoric**0.5)
    assert risk.total.item() == pytest.approx((aleatoric + 4.0) ** 0.5)


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
@pytest.mark.parametrize("level", [1e6, -1e6])
def test_large_values_give_no_negative_variance_and_no_nan(level: float, strategy: str) -> None:
    wrapped: Any = compose(vote.Wrapper(3, finetune=True, strategy=strategy), sculpt.Wrapper())(
        linear(slope=1e-3)
    ).eval()
    set_biases(wrapped, [level, level, level])
    x = torch.randn(64, 1)
    _, risk = wrapped(x, return_risk=True)
    for name in risk:
        assert bool((risk[name] >= 0).all()), name
    assert float(risk.epistemic.detach().max()) <= 0.1  # the rounding of float32 at 1e6
    set_biases(wrapped, [level, level + 8, level + 16])
    _, risk = wrapped(x, return_risk=True)
    assert torch.allclose(risk.epistemic, torch.full((64, 1), (2 * 64 / 3) ** 0.5), rtol=0.02)


@pytest.mark.parametrize("names", [p for p in PAIRS + TRIPLES if len({"vote", "sample", "sculpt"} & set(p)) > 1])
def test_total_squared_is_the_sum_of_squares(names: tuple[str, ...]) -> None:
    wrapped: Any = compose(*(MAKERS[name]() for name in names))(mlp()).eval()
    if "neo" in names:
        wrapped.fit(torch.randn(50, 3))
    _, risk = wrapped(torch.randn(20, 3), return_risk=True)
    parts = [risk[name].double() for name in ("aleatoric", "epistemic") if risk[name] is not None]
    assert torch.allclose(risk.total.double().square(), sum(p.square() for p in parts), rtol=1e-5)


# ---- every composition -----------------------------------------------------------------------------------------------


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
    alone.set_risk_parameters({name: p for name, p in both.risk_parameters().items() if "sculpt" in name})
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
    three.set_risk_parameters(both.risk_parameters())
    y, risk = both(x, return_risk=True)
    y_three, risk_three = three(x, return_risk=True)
    assert torch.allclose(y, y_three, atol=1e-6)
    assert all(torch.allclose(risk[name], risk_three[name], atol=1e-6) for name in risk)


# ---- class outputs ---------------------------------------------------------------------------------------------------


def entropy(probs: Tensor) -> Tensor:
    return -(probs * probs.log()).sum(-1)


@pytest.mark.parametrize("output", ["logits", "probs"])
def test_class_risks_are_entropies_and_mutual_information(output: str) -> None:
    model: nn.Sequential = mlp(4)
    if output == "probs":
        model.append(nn.Softmax(-1))
    wrapped: Any = vote.Wrapper(3, output=output)(model).eval()
    x = 3 * torch.randn(6, 3)
    scores = torch.stack([voter(x) for voter in wrapped.voters()])
    probs = scores.softmax(-1) if output == "logits" else scores
    y, risk = wrapped(x, return_risk=True)
    mean = probs.mean(0)
    joint = probs / 3  # of voter and class, for each row
    marginal = joint.sum(0, keepdim=True) * joint.sum(-1, keepdim=True)
    information = (joint * (joint / marginal).log()).sum((0, -1))
    assert risk.total.shape == (6,)
    assert torch.allclose(y.softmax(-1) if output == "logits" else y, mean, atol=1e-6)
    assert torch.allclose(risk.total, entropy(mean), atol=1e-5)
    assert torch.allclose(risk.aleatoric, entropy(probs).mean(0), atol=1e-5)
    assert torch.allclose(risk.epistemic, information, atol=1e-5)
    assert torch.allclose(risk.total, risk.aleatoric + risk.epistemic, atol=1e-5)
    assert torch.equal(wrapped(x), y)


def test_class_risks_of_certain_scores_are_finite() -> None:
    wrapped: Any = vote.Wrapper(2, output="logits", finetune=True)(linear_classes(1000.0)).eval()
    y, risk = wrapped(torch.ones(3, 1), return_risk=True)
    assert torch.allclose(y.softmax(-1)[:, 0], torch.ones(3))
    assert all(bool((risk[name].abs() < 1e-6).all()) for name in risk)


def linear_classes(scale: float) -> nn.Linear:
    model = nn.Linear(1, 3)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[scale], [0.0], [-scale]]))
        model.bias.zero_()
    return model


@pytest.mark.parametrize("output", ["logits", "probs"])
def test_class_risks_of_sample_alone_add_up(output: str) -> None:
    model = mlp(3)
    if output == "probs":
        model.append(nn.Softmax(-1))
    wrapped: Any = sample.Wrapper(6, sample.Bernoulli(0.3), output=output)(model).eval()
    _, risk = wrapped(torch.randn(8, 3), return_risk=True)
    assert torch.allclose(risk.total, risk.aleatoric + risk.epistemic, atol=1e-5)
    assert float(risk.epistemic.detach().max()) > 1e-4


def test_sculpted_logits_average_the_probabilities_under_their_noise() -> None:
    wrapped: Any = sculpt.Wrapper(sculpt.LogitNormal, output="logits", n_layers=1)(mlp(3)).eval()
    x = torch.randn(5, 3)
    y, risk = wrapped(x, return_risk=True)
    p = dict(wrapped.named_parameters())
    hidden = torch.tanh(wrapped[0](x))
    raw = hidden @ p["2.weight@sculpt"].T + p["2.bias@sculpt"]
    sigma = torch.nn.functional.softplus(raw)
    noise = torch.randn(20_000, 5, 3, generator=torch.Generator().manual_seed(2))
    mean = (wrapped[2](hidden) + sigma * noise).softmax(-1).mean(0)
    assert torch.allclose(risk.total, entropy(mean), atol=0.03)
    assert torch.equal(y.argmax(-1), wrapped(x).argmax(-1))


# ---- a Risk in the losses, and gradients -----------------------------------------------------------------------------


def test_losses_and_draws_take_a_risk() -> None:
    wrapped: Any = compose(vote.Wrapper(3), sculpt.Wrapper())(mlp()).eval()
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    y_pred, risk = wrapped(x, return_risk=True)
    for dist in (sculpt.Normal, sculpt.Normal(), sculpt.Laplace):
        assert torch.equal(dist.loss_function(y, y_pred, risk), dist.loss_function(y, y_pred, risk.aleatoric))
        draws = [dist.sample((y_pred, r), generator=torch.Generator().manual_seed(0)) for r in (risk, risk.aleatoric)]
        assert torch.equal(*draws)


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
def test_gradients_are_finite_where_voters_agree_exactly(strategy: str) -> None:
    wrapped: Any = vote.Wrapper(3, finetune=True, strategy=strategy)(mlp())
    _, risk = wrapped(torch.randn(5, 3), return_risk=True)
    assert torch.equal(risk, torch.zeros(5, 1))
    risk.sum().backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in wrapped.parameters())


def test_gradients_of_class_risks_are_finite_where_voters_are_certain_and_agree() -> None:
    wrapped: Any = vote.Wrapper(2, output="logits", finetune=True)(linear_classes(1000.0))
    _, risk = wrapped(torch.ones(3, 1), return_risk=True)
    (risk.total + risk.epistemic + risk.aleatoric).sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in wrapped.parameters())


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


def test_composing_nothing_gives_the_plain_model_with_the_interface_of_a_wrapped_one() -> None:
    model = mlp()
    wrapped: Any = compose()(model).eval()
    x = torch.randn(4, 3)
    y, risk = wrapped(x, return_risk=True)
    assert torch.equal(y, model(x))
    assert risk.names() == ()


def test_attention_under_two_vmaps_is_refused_and_the_loop_is_right() -> None:
    """Fused attention crashes the interpreter under nested vmap, so it must not get there."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.project(x)[:, None]
            mask = torch.ones(len(x), 1, 3, 3, dtype=torch.bool)
            return self.head(nn.functional.scaled_dot_product_attention(h, h, h, attn_mask=mask)[:, 0])

    model, x = Attention().eval(), torch.randn(5, 3, 4)
    both = [vote.Wrapper(2, share=1), sculpt.Wrapper(n_layers=1)]
    with pytest.raises(RuntimeError, match="two vmaps"):
        compose(vote.Wrapper(2, share=1, strategy="vmap"), sculpt.Wrapper(n_layers=1))(model)(x, return_risk=True)
    wrapped: Any = compose(*both)(model)
    y, risk = wrapped(x, return_risk=True)
    torch.testing.assert_close(y, torch.stack([voter(x) for voter in wrapped.voters()]).mean(0))
    torch.testing.assert_close(risk.total**2, risk.aleatoric**2 + risk.epistemic**2)


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
