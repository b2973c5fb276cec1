"""Calibration of models that return a structure of outputs: equal to that of the same models returning the tensor alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from workbench import Risk, compose, fit, neo, sculpt, top_uncertain, vote
from workbench.calibration import calibrate, selective
from workbench.distributions import Quantiles
from workbench.outputs import Logits

X = torch.linspace(-2, 2, 120).reshape(60, 2)
Y = X.sum(1, keepdim=True) + 0.5 * torch.sin(40 * X[:, :1])
LABELS = (Y[:, 0] > -1).long() + (Y[:, 0] > 1).long()
NEW = torch.tensor([[0.0, 0.5], [1.0, -1.0], [4.0, 4.0]])


class Pair(NamedTuple):
    hidden: Tensor
    scores: Tensor


class Net(nn.Module):
    def __init__(self, outputs: int, shape: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.shape = nn.Linear(2, 8), nn.Linear(8, outputs), shape

    def forward(self, x: Tensor) -> Any:
        h = self.first(x).tanh()
        return self.shape(h, self.last(h))


SHAPES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {  # what is given, and the name of the scores in it
    "dict": (lambda h, y: {"hidden": h, "scores": y}, "scores"),
    "named tuple": (Pair, "scores"),
    "tuple": (lambda h, y: (h, [y]), "1.0"),
}


def part(tree: Any, name: str) -> Tensor:
    if isinstance(tree, Tensor):
        return tree
    return tree[1][0] if name == "1.0" else tree["scores"] if isinstance(tree, dict) else tree.scores


def both(
    make: Callable[..., Any], shape: str, outputs: int, meaning: Any, fitted: bool = False
) -> tuple[Any, Any, str]:
    """The same wrapped model twice: one gives a structure, the other the tensor alone."""
    kind, name = SHAPES[shape]
    wrapped = []
    for said, form in (({name: meaning}, kind), (meaning, lambda _, y: y)):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            wrapped.append(make(output=said)(Net(outputs, form)))
        if fitted:
            wrapped[-1].fit(X)
    return wrapped[0], wrapped[1], name


CALIBRATED: dict[str, tuple[Callable[..., Any], int, Any, Callable[[Any], Any]]] = {
    "temperature": (lambda **o: vote.Wrapper(3, **o), 3, Logits(), lambda w: calibrate(w, (X, LABELS))),
    "sets": (lambda **o: vote.Wrapper(3, **o), 3, Logits(), lambda w: calibrate(w, (X, LABELS), "conformal")),
    "variance": (
        lambda **o: compose(vote.Wrapper(3, **o), sculpt.Wrapper()),
        1,
        "values",
        lambda w: calibrate(w, (X, Y), "variance"),
    ),
    "isotonic": (
        lambda **o: compose(vote.Wrapper(3, **o), sculpt.Wrapper()),
        1,
        "values",
        lambda w: calibrate(calibrate(w, (X, Y), "variance"), (X, Y), "isotonic"),
    ),
    "watched": (
        lambda **o: compose(vote.Wrapper(3, **o), neo.Wrapper()),
        1,
        "values",
        lambda w: calibrate(w, (X, Y), "conformal"),
    ),
    "quantile heads": (
        lambda **o: sculpt.Wrapper(Quantiles(), **o),
        1,
        "values",
        lambda w: calibrate(w, (X, Y), "conformal", score="cqr"),
    ),
}


@pytest.mark.filterwarnings("ignore:.*stranger by vacuitic risk")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CALIBRATED)
def test_the_named_output_is_calibrated_and_put_back(name: str, shape: str) -> None:
    make, outputs, meaning, calibration = CALIBRATED[name]
    structured, alone, at = both(make, shape, outputs, meaning, fitted=name == "watched")
    ours, expected = calibration(structured), calibration(alone)
    y, risk = ours(NEW, return_risk=True)
    wanted, wanted_risk = expected(NEW, return_risk=True)
    assert torch.equal(part(y, at), wanted)
    assert torch.equal(part(ours(NEW), at), expected(NEW))
    plain, plain_risk = structured.eval()(NEW, return_risk=True)
    assert type(y) is type(plain)
    if isinstance(wanted_risk, Risk):
        assert risk.names() == wanted_risk.names()
        assert all(torch.equal(part(risk[cause], at), wanted_risk[cause]) for cause in wanted_risk)
    else:
        assert type(risk) is type(plain_risk)
        assert torch.equal(part(risk, at), wanted_risk)
    for answer in ("interval", "predict_set", "quantile"):
        try:
            asked = getattr(expected, answer)(NEW, 0.8)
        except (AttributeError, TypeError, ValueError):
            continue
        predicted = getattr(ours, answer)(NEW, 0.8)
        pairs = zip(predicted, asked, strict=True) if isinstance(asked, tuple) else [(predicted, asked)]
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("by", ["epistemic", "confidence"])
def test_abstention_is_that_of_the_named_output(shape: str, by: str) -> None:
    structured, alone, at = both(lambda **o: vote.Wrapper(3, **o), shape, 3, Logits())
    ours, expected = (selective(w, (X, LABELS), by=by).predictor(coverage=0.5)(NEW) for w in (structured, alone))
    assert torch.equal(ours.kept, expected.kept)
    assert torch.equal(ours.risk, expected.risk)
    assert torch.equal(part(ours.prediction, at), expected.prediction)
    if by == "epistemic":
        assert all(map(torch.equal, top_uncertain(structured, X, 5, by), top_uncertain(alone, X, 5, by)))


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_are_trained_by_the_named_output(shape: str) -> None:
    pair = both(lambda **o: compose(vote.Wrapper(2, **o), sculpt.Wrapper()), shape, 1, "values")[:2]
    for wrapped in pair:
        fit(wrapped, (X, Y), epochs=3, progress=False)
    ours, expected = ((wrapped.scaling.y_mean, *wrapped.parameters()) for wrapped in pair)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_a_lone_tensor_in_a_structure_needs_no_name() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrapped = vote.Wrapper(3)(Net(1, lambda _, y: {"y": y}))
    low, high = calibrate(wrapped, (X, Y), "conformal").interval(NEW)
    assert low.shape == high.shape == (3, 1)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (None, "found: 'hidden', 'scores'. Name it"),
        ({"hidden": "values", "scores": "values"}, "found: 'hidden', 'scores'. Name it"),
        ({"hidden": "mean", "scores": "mean"}, "found: none"),
    ],
)
def test_several_or_none_are_refused(output: Any, words: str) -> None:
    wrapped = vote.Wrapper(3, output=output)(Net(1, SHAPES["dict"][0]))
    with pytest.raises(TypeError, match=words):
        calibrate(wrapped, (X, Y), "variance")
    with pytest.raises((TypeError, ValueError), match=r"name only that one|Name it"):
        calibrate(wrapped, (X, Y), "conformal")
