"""A yes or no, for which a model gives one number, is calibrated as the two classes softmax([0, logit])."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import vote
from workbench.attributions import permutation_importance
from workbench.calibration import calibrate, selective, top_uncertain
from workbench.data import Data
from workbench.outputs import Binary, Logits, Probs
from workbench.plots import matrix
from workbench.widgets import Explorer

LABELS = {"row": 1, "flat row": 1, "labels": 3}


class Net(nn.Module):
    """Scores [n, labels], or [n]; as logits, probabilities or in a dict; `two` gives both classes along a last dimension."""

    def __init__(self, shape: str, form: str = "logits", in_dict: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc, self.shape, self.form, self.in_dict = nn.Linear(2, LABELS[shape]), shape, form, in_dict

    def logit(self, x: Tensor) -> Tensor:
        logit = 6 * self.fc(x)
        return logit[:, 0] if self.shape == "flat row" else logit

    def forward(self, x: Tensor) -> Any:
        y = self.logit(x) if self.form == "logits" else self.logit(x).sigmoid()
        return {"y": y, "loss": y.mean()} if self.in_dict else y


class Two(Net):
    """The same as two classes, [n, 2] or [n, labels, 2]."""

    def forward(self, x: Tensor) -> Tensor:
        logit = self.logit(x)
        logit = logit[:, 0] if self.shape == "row" else logit
        scores = torch.stack([0 * logit, logit], -1)
        return scores if self.form == "logits" else scores.softmax(-1)


def rows(shape: str, n: int = 200) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=draw)
    y = torch.rand(n, LABELS[shape], generator=draw) < (2 * x.sum(1, keepdim=True)).sigmoid()
    return x, y[:, 0] if shape == "flat row" else y


def both(shape: str, form: str = "logits", in_dict: bool = False) -> tuple[Any, Any]:
    """Return the wrapped model of one number, and the same voters with two classes."""
    output = Binary(logits=form == "logits")
    one = vote.Wrapper(3, output={"y": output, "loss": "mean"} if in_dict else output)(Net(shape, form, in_dict)).eval()
    two = vote.Wrapper(3, output=Logits(dim=-1) if form == "logits" else Probs(dim=-1))(Two(shape, form)).eval()
    two.load_state_dict(one.state_dict(), strict=False)  # another meaning
    return one, two


def of(y: Any) -> Tensor:
    return y["y"] if isinstance(y, dict) else y


@pytest.mark.parametrize("in_dict", [False, True], ids=["tensor", "dict"])
@pytest.mark.parametrize("form", ["logits", "probs"])
@pytest.mark.parametrize("shape", LABELS)
def test_temperature_is_that_of_two_classes(shape: str, form: str, in_dict: bool) -> None:
    one, two = both(shape, form, in_dict)
    x, y = rows(shape)
    flat = y[:, 0] if shape == "row" else y
    calibrated, expected = calibrate(one, (x, y.float())), calibrate(two, (x, flat.long()))
    temperature = calibrated.temperature.item()
    assert temperature == pytest.approx(expected.temperature.item(), rel=1e-3)
    assert abs(temperature - 1) > 0.1
    before, (after, risk) = of(one(x)).detach(), calibrated(x, return_risk=True)
    after, total = of(after), of(risk.total)
    assert after.shape == before.shape == total.shape
    assert torch.equal(of(calibrated(x)), after)
    p = (before if form == "logits" else before.logit()).div(temperature).sigmoid()
    torch.testing.assert_close(after.sigmoid() if form == "logits" else after, p, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(total, -(p.xlogy(p) + (1 - p).xlogy(1 - p)), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(of(risk.aleatoric) + of(risk.epistemic), total)
    old = F.binary_cross_entropy(before.sigmoid() if form == "logits" else before, y.float())
    assert F.binary_cross_entropy(p, y.float()) < old
    assert torch.equal(calibrated.predict_set(x, 0.8), expected.predict_set(x, 0.8))


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
@pytest.mark.parametrize("form", ["logits", "probs"])
@pytest.mark.parametrize("shape", ["row", "flat row"])
def test_conformal_sets_are_those_of_two_classes_and_cover(shape: str, form: str, score: Any) -> None:
    one, two = both(shape, form)
    x, y = rows(shape, 3000)
    flat = y.reshape(-1).long()
    sets = calibrate(one, (x[:1000], y[:1000]), "conformal", score=score).predict_set(
        x[1000:], 0.9, generator=torch.Generator().manual_seed(0)
    )
    expected = calibrate(two, (x[:1000], flat[:1000]), "conformal", score=score).predict_set(
        x[1000:], 0.9, generator=torch.Generator().manual_seed(0)
    )
    assert sets.shape == (2000, 2)
    assert (sets != expected).float().mean() < 2e-3
    assert sets.gather(1, flat[1000:, None]).float().mean() == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("by", ["total", "epistemic", "confidence"])
@pytest.mark.parametrize("shape", LABELS)
def test_decisions_are_those_of_two_classes(shape: str, by: str) -> None:
    one, two = both(shape)
    x, y = rows(shape)
    flat = y[:, 0] if shape == "row" else y
    for per in ("row", "position") if shape == "labels" or by == "confidence" else ("row",):
        chosen = selective(one, (x, y), by, per=per)
        expected = selective(two, (x, flat.long()), by, per=per)
        torch.testing.assert_close(chosen.curve, expected.curve)
        decision, wanted = chosen.predictor(coverage=0.5)(x), expected.predictor(coverage=0.5)(x)
        assert decision.kept.float().mean() == pytest.approx(0.5, abs=0.01)
        torch.testing.assert_close(decision.risk.reshape(wanted.risk.shape), wanted.risk, atol=1e-5, rtol=1e-4)
    assert torch.equal(top_uncertain(one, x, 5, by).indices, top_uncertain(two, x, 5, by).indices)


def test_explanations_plots_and_explorers_show_the_probability_of_yes() -> None:
    one, two = both("row")
    x, y = rows("row")
    importance = permutation_importance(one, (x, y), n_repeats=2).mean
    expected = permutation_importance(two, (x, y[:, 0].long()), n_repeats=2).mean
    assert importance.keys() == expected.keys() == {"prediction", "aleatoric", "epistemic", "total", "error"}
    for name, value in importance.items():
        torch.testing.assert_close(value, expected[name], atol=1e-4, rtol=1e-3)
    matrix({"one": one, "two": two}, (x, y[:, 0].long()))  # which refuses models that give different things
    explorer = Explorer({"one": one, "two": two}, Data.from_arrays(x, y[:, 0].long()))
    probs = [answer.probs for answer in explorer.each_model().values()]
    torch.testing.assert_close(*probs)


def test_a_certain_yes_or_no_stays_certain() -> None:
    class Sure(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).masked_fill(x[:, :1] > 5, torch.inf).masked_fill(x[:, :1] < -5, -torch.inf)

    x, y = rows("row", 40)
    x[0], x[1] = torch.tensor([9.0, 0.0]), torch.tensor([-9.0, 0.0])
    y[0], y[1] = True, False
    calibrated = calibrate(vote.Wrapper(2, output="binary")(Sure(2, 1)), (x, y))
    logits, risk = calibrated(x[:2], return_risk=True)
    assert logits.flatten().tolist() == [torch.inf, -torch.inf]
    assert risk.total.flatten().tolist() == [0, 0]


def test_what_makes_no_sense_for_a_yes_or_no_is_refused() -> None:
    x, y = rows("row")
    one, _ = both("row")
    for method in ("variance", "isotonic"):
        with pytest.raises(ValueError, match="is for values, but the targets are class numbers"):
            calibrate(one, (x, y), method)
    with pytest.raises(
        ValueError, match=r"a yes or no, and the targets are fractions \[200\]: calibration needs 0 or 1"
    ):
        calibrate(one, (x, y * 0.7))
    with pytest.raises(ValueError, match="class numbers go from 0 to 2, but the model gives 2 scores"):
        calibrate(one, (x, y.long() * 2))
    labels, _ = both("labels")
    with pytest.raises(ValueError, match=r"score='lac': the targets are \[200, 3\]; .*or labels of a row"):
        calibrate(labels, rows("labels"), "conformal")


def test_values_beside_a_yes_or_no_are_still_the_calibrated_output() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            value, sure = self.fc(x).split(1, 1)
            return {"value": value, "sure": sure}

    x, _ = rows("row")
    wrapped = vote.Wrapper(3, output={"value": "values", "sure": "binary"})(Pair())
    assert calibrate(wrapped, (x, x[:, :1])).scale > 0
