"""Integrated gradients: compared with closed forms and plain copies, and refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.calibration_models import known, rng
from torch import Tensor, nn

from workbench import attributions, compose, data, neo, sample, sculpt, vote
from workbench.core.outputs.class_scores import Logits


def seeded(make: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def smooth(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 12), nn.Tanh(), nn.Linear(12, outputs)).double()


def test_the_noise_is_carried_by_its_own_number_alone() -> None:
    """x = [mu, raw]: the prediction is mu, the aleatoric risk softplus(raw), each of one number only."""
    x = torch.randn(5, 2, generator=rng(0), dtype=torch.float64)
    attribution = attributions.integrated_gradients(known(), x, baseline=torch.tensor([0.5, -1.0]), steps=32)
    softplus = nn.functional.softplus
    zero = torch.zeros(5, dtype=torch.float64)
    torch.testing.assert_close(attribution.values["prediction"], torch.stack([x[:, 0] - 0.5, zero], 1))
    rise = softplus(x[:, 1]) - softplus(torch.tensor(-1.0).double())
    torch.testing.assert_close(attribution.values["aleatoric"], torch.stack([zero, rise], 1))
    assert attribution.left_out == {}
    assert attribution.names == ("prediction", "aleatoric", "total")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_that_are_turned_off_around_the_call_change_nothing(mode: Any) -> None:
    model, x = seeded(lambda: vote.Wrapper(2)(smooth(3, 1))), torch.randn(4, 3, generator=rng(0)).double()
    expected = attributions.integrated_gradients(model, x)
    with mode():
        inside = attributions.integrated_gradients(model, x.clone())
    assert inside.left_out == expected.left_out
    torch.testing.assert_close(inside.values, expected.values, rtol=0, atol=0)


def test_linear_voters_add_what_their_mean_weight_does() -> None:
    wrapped = seeded(lambda: vote.Wrapper(3)(nn.Linear(4, 1).double()))
    x = torch.rand(6, 4, generator=rng(1), dtype=torch.float64)
    attribution = attributions.integrated_gradients(wrapped, x, batch_size=4)
    weight = torch.stack([member.weight[0] for member in wrapped.voters()]).mean(0).detach()
    torch.testing.assert_close(attribution.values["prediction"], weight * (x - x.mean(0)))
    for row, change in ((0, attribution.before), (5, attribution.before)):
        y = torch.stack([member(x[row]) for member in wrapped.voters()]).detach()
        assert change["epistemic"][row].item() == pytest.approx(y.std(correction=0).item())


@pytest.mark.slow
def test_risks_of_classes_are_those_of_a_fine_sum_over_plain_copies() -> None:
    """Three hundred places on the way, copy by copy; and completeness (Sundararajan et al., 2017)."""
    wrapped = seeded(lambda: vote.Wrapper(3, output="logits")(smooth(9, 3)))
    x = torch.rand(2, 1, 3, 3, generator=rng(2), dtype=torch.float64)
    attribution = attributions.integrated_gradients(wrapped, x, baseline=0.2, steps=40)
    members = [copy.deepcopy(member).eval() for member in wrapped.voters()]

    def of(x: Tensor) -> dict[str, Tensor]:
        p = torch.stack([member(x).softmax(1) for member in members])
        total = torch.special.entr(p.mean(0)).sum(1)
        aleatoric = torch.special.entr(p).sum(2).mean(0)
        return {"prediction": p.mean(0)[range(2), classes], "aleatoric": aleatoric, "epistemic": total - aleatoric}

    classes = torch.stack([member(x).softmax(1) for member in members]).mean(0).argmax(1).tolist()
    for name in ("prediction", "aleatoric", "epistemic"):
        total = torch.zeros_like(x)
        for k in range(300):
            at = (0.2 + (k + 0.5) / 300 * (x - 0.2)).requires_grad_()
            total += torch.autograd.grad(of(at)[name].sum(), at)[0] / 300
        torch.testing.assert_close(attribution.values[name], total * (x - 0.2), rtol=1e-4, atol=1e-6)
        difference = (of(x)[name] - of(torch.full_like(x, 0.2))[name]).detach()
        torch.testing.assert_close(attribution.values[name].flatten(1).sum(1), difference, rtol=1e-4, atol=1e-6)
        assert attribution.gap[name].abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [sample.Wrapper(4, output="logits"), compose(vote.Wrapper(2, output="logits"), sculpt.Wrapper())],
    ids=["sample", "heads"],
)
def test_sums_are_complete_whatever_the_wrapper(method: Any) -> None:
    """Also of what draws at random, and of a ReLU network in single precision."""
    model = seeded(lambda: method(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))))
    x = torch.rand(5, 6, generator=rng(3))
    before = torch.random.get_rng_state()
    grads = [p.grad for p in model.parameters()]
    attribution = attributions.integrated_gradients(model, x, baseline=0.0, steps=64, batch_size=3)
    assert attribution.left_out == {}
    for name, gap in attribution.gap.items():
        assert bool((gap.abs() <= 0.05 * attribution.values[name].abs().sum(1)).all())
    assert torch.equal(before, torch.random.get_rng_state())
    assert [p.grad for p in model.parameters()] == grads
    assert model.training  # as it was
    again = attributions.integrated_gradients(model, x, baseline=0.0, steps=64, batch_size=3)
    assert all(torch.equal(attribution.values[name], again.values[name]) for name in attribution.names)


@pytest.mark.slow
def test_a_risk_whose_gradients_are_cut_off_is_left_out_with_the_reason() -> None:
    wrapped = seeded(
        lambda: compose(vote.Wrapper(2), neo.Wrapper())(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    )
    x = torch.rand(30, 3, generator=rng(4))
    wrapped.fit(x)
    attribution = attributions.integrated_gradients(wrapped, x[:4], baseline=0.0)
    assert set(attribution.names) | set(attribution.left_out) == {"prediction", "epistemic", "vacuitic", "total"}
    assert tuple(attribution.left_out) == ("vacuitic",)  # neo looks at features that are detached
    with pytest.raises(ValueError, match=r"vacuitic: it has no gradient.*attributions\.occlusion"):
        attributions.integrated_gradients(wrapped, x[:4], baseline=0.0, names=["vacuitic"])


class CutOff(nn.Module):
    """Its second half has no gradient: the sum is off."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 3 * x.detach().sum(1, keepdim=True)


def test_gradients_that_do_not_add_up_are_refused_and_not_given() -> None:
    wrapped = seeded(lambda: vote.Wrapper(2)(CutOff()))
    x = torch.rand(3, 2, generator=rng(5)) + 1
    attribution = attributions.integrated_gradients(wrapped, x, baseline=0.0)
    assert "prediction" not in attribution.names  # of the risk, what is cut off is the same for all voters
    assert "the sum of row 0 is" in attribution.left_out["prediction"]
    assert "cut off" in attribution.left_out["prediction"]
    with pytest.raises(ValueError, match="prediction: the sum of row 0 is"):
        attributions.integrated_gradients(wrapped, x, baseline=0.0, names=["prediction"])


def test_where_voters_agree_nothing_carries_their_risk() -> None:
    wrapped = vote.Wrapper(2, finetune=True)(nn.Linear(2, 1))
    attribution = attributions.integrated_gradients(wrapped, torch.rand(3, 2, generator=rng(6)))
    assert attribution.names == ("prediction", "epistemic", "total")
    assert not bool(attribution.values["epistemic"].any())


def test_one_of_several_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 1).double(), nn.Linear(2, 1).double()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.a(a) * self.b(b)

    wrapped = seeded(lambda: vote.Wrapper(3)(Two()))
    a, b = (torch.rand(5, n, generator=rng(n), dtype=torch.float64) for n in (3, 2))
    by_place = attributions.integrated_gradients(wrapped, (a, b), of=1, baseline=0.0, batch_size=2)
    by_name = attributions.integrated_gradients(wrapped, {"a": a, "b": b}, of="b", baseline=0.0)
    factors = [(member.a(a) * member.b.weight * b).detach() for member in wrapped.voters()]
    torch.testing.assert_close(by_place.values["prediction"], torch.stack(factors).mean(0))
    torch.testing.assert_close(by_name.values["epistemic"], by_place.values["epistemic"])


def test_what_can_have_none_is_refused() -> None:
    wrapped = seeded(lambda: vote.Wrapper(2)(nn.Linear(2, 1)))
    x = torch.rand(3, 2, generator=rng(7))
    asked = attributions.integrated_gradients
    for wrong, said in (
        ({"x": torch.ones(3, 2, dtype=torch.long)}, "x holds whole numbers .* attributions.occlusion takes tokens"),
        ({"x": x.clone().fill_(torch.nan)}, "x is NaN or infinite in 3 of 3 rows"),
        ({"x": x[0]}, r"x has shape \[2\]; expected \[n, ...\]"),
        ({"x": x, "of": 0}, "x is a single input"),
        ({"x": (x, x), "of": 2}, "of=2: the model has several inputs; say which is changed, of 0, 1"),
        ({"x": (x, x[:2]), "of": 0}, r"x\[1\] has 2 rows, and x\[0\] 3"),
        ({"x": x, "names": ["vacuitic"]}, "the model gives prediction, epistemic, total; found 'vacuitic'"),
        ({"x": x, "steps": 0}, "steps must be"),
        ({"x": x, "tolerance": 2}, "tolerance: expected a share"),
        ({"x": x, "baseline": torch.zeros(3)}, "does not broadcast to a row"),
    ):
        with pytest.raises(ValueError, match=said):
            asked(wrapped, **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not wrapped"):
        asked(nn.Linear(2, 1), x)
    maps = seeded(lambda: vote.Wrapper(2, output=Logits(dim=1))(nn.Conv2d(1, 2, 3, padding=1)))
    attribution = asked(maps, torch.rand(2, 1, 4, 4, generator=rng(8)))
    assert attribution.values["total"].shape == (2, 1, 4, 4)
    assert repr(attribution) == "IntegratedGradients([2, 1, 4, 4]: prediction, aleatoric, epistemic, total)"


# ---- several inputs of the others
class Both(nn.Module):
    """The mean of an image, times a number beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(1, 1, bias=False)

    def forward(self, image: Tensor, number: Tensor) -> Tensor:
        return self.last(image.flatten(1).mean(1, keepdim=True)) * number


def test_occlusion_covers_one_of_several_inputs_and_leaves_the_others() -> None:
    wrapped = seeded(lambda: vote.Wrapper(3)(Both()))
    image, number = torch.rand(3, 1, 4, 4, generator=rng(9)), torch.tensor([[1.0], [2.0], [-3.0]])
    weight = torch.stack([member.last.weight.squeeze() for member in wrapped.voters()]).detach()
    for inputs, of in (((image, number), 0), ({"image": image, "number": number}, "image")):
        attribution = attributions.occlusion(wrapped, inputs, of=of, window=1, baseline=0.0, batch_size=7)
        wanted = weight.mean() * image[:, 0] / 16 * number[:, :, None]
        torch.testing.assert_close(attribution.change["prediction"], wanted.double(), rtol=1e-4, atol=1e-6)
        epistemic = weight.std(correction=0) * image[:, 0] / 16 * number[:, :, None].abs()
        torch.testing.assert_close(attribution.change["epistemic"], epistemic.double(), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"x has shape \[3, 1\]"):
        attributions.occlusion(wrapped, (image, number), of=1)
    with pytest.raises(ValueError, match="of=None: the model has several inputs"):
        attributions.occlusion(wrapped, (image, number))


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.a(a) + self.b(b)


def test_permutation_shuffles_the_columns_of_one_of_several_inputs() -> None:
    wrapped = seeded(lambda: vote.Wrapper(3)(Tables()))
    a, b = torch.randn(300, 2, generator=rng(10)), torch.randn(300, 1, generator=rng(11))
    whole = seeded(lambda: vote.Wrapper(3)(nn.Linear(3, 1, bias=False)))
    ((_, stacked),) = whole.named_risk_parameters()
    with torch.no_grad():
        for k, member in enumerate(wrapped.voters()):
            stacked[k].copy_(torch.cat([member.a.weight, member.b.weight], 1))
    y = a.sum(1, keepdim=True)
    columns = {"a1": [0], "a2": [1]}
    wanted = attributions.permutation_importance(whole, (torch.cat([a, b], 1), y), columns=columns, n_repeats=3)
    asked = attributions.permutation_importance
    for inputs, of in (((a, b), 0), ({"a": a, "b": b}, "a")):
        importance = asked(wrapped, (inputs, y), of=of, columns=columns, n_repeats=3)
        for name in wanted.names:
            torch.testing.assert_close(importance.values[name], wanted.values[name], rtol=1e-3, atol=1e-5)
        few = asked(wrapped, (inputs, None), of=of, n_repeats=2, max_rows=100)
        assert (few.columns, few.rows, few.names) == (("x1", "x2"), 100, ("prediction", "epistemic", "total"))
    assert asked(wrapped, {"a": a, "b": b}, of="b", n_repeats=2).columns == ("x1",)
    with pytest.raises(ValueError, match="of=None: the model has several inputs; say which is changed, of 0, 1"):
        asked(wrapped, ((a, b), y))
    with pytest.raises(ValueError, match="x is a single input; leave it out"):
        asked(whole, torch.cat([a, b], 1), of=0)
    with pytest.raises(TypeError, match=r"x\['b'\]: expected a tensor"):
        asked(wrapped, {"a": a, "b": "b"}, of="a")
    assert (
        asked(seeded(lambda: vote.Wrapper(2)(nn.Linear(10, 1))), data.load("diabetes"), n_repeats=2).columns[0] == "age"
    )
