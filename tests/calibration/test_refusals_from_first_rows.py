"""What cannot be calibrated is refused from the answers for the first rows, not after those for all rows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from workbench import calibrate, compose, sculpt, vote
from workbench.calibration import adapt_batch_norm, selective, top_uncertain

X = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
Y, LABELS = X[:, :1], torch.arange(60) % 3
BATCHES = 6


class Counted(nn.Linear):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return super().forward(x)


def values() -> Any:
    return compose(vote.Wrapper(2), sculpt.Wrapper(n_layers=1))(Counted(2, 1))


def classes() -> Any:
    return vote.Wrapper(2, output="logits")(Counted(2, 3))


def number() -> Any:
    return sculpt.Wrapper()(nn.Sequential(Counted(2, 1), nn.Flatten(0)))


def calls_of(function: Callable[[], Any]) -> int:
    Counted.calls = 0
    function()
    return Counted.calls


def loader(x: Tensor, y: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=10)


@pytest.mark.parametrize(
    ("model", "y", "method", "options", "says"),
    [
        (values, LABELS, "variance", {}, "the targets are class numbers"),
        (values, LABELS, None, {}, r"class numbers have shape \[10\], predictions \[10, 1\]"),
        (values, Y[:, 0], "variance", {}, r"targets have shape \[10\], predictions \[10, 1\].*y\[:, None\]"),
        (values, Y[:, 0], "isotonic", {}, r"targets have shape \[10\]"),
        (values, Y[:, 0], "conformal", {}, r"targets have shape \[10\]"),
        (values, Y, "temperature", {}, "for classes, but the targets are values"),
        (values, Y, "conformal", {"score": "lac"}, "for classes, but the targets are values"),
        (values, Y, "conformal", {"groups": "class"}, "groups='class' is for classes"),
        (values, Y, None, {"score": "lac"}, "'score'"),
        (values, Y, "conformal", {"score": "normalized", "by": "vacuitic"}, "measures no such risk"),
        (classes, LABELS + 1, None, {}, "class numbers go from 1 to 3"),
        (classes, LABELS + 1, "conformal", {}, "but the model gives 3 scores"),
        (classes, LABELS.float(), None, {}, "the targets are floats"),
        (classes, LABELS, "variance", {}, "for values"),
        (classes, LABELS, "conformal", {"score": "absolute"}, "for values"),
        (number, Y[:, 0], "variance", {"per_output": True}, r"per_output=True needs predictions \[rows, outputs\]"),
        (number, Y[:, 0], "isotonic", {"per_output": True}, r"per_output=True needs predictions \[rows, outputs\]"),
        (classes, LABELS.where(X[:, 0] > -9, -100), "conformal", {"score": "cqr"}, "for values"),
    ],
)
def test_answers_for_the_first_rows_show_it(
    model: Callable[[], Any], y: Tensor, method: str | None, options: dict[str, Any], says: str
) -> None:
    wrapped = model()
    once = calls_of(lambda: wrapped(X[:10]))
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}

    def refused() -> None:
        with pytest.raises((ValueError, TypeError), match=says):
            calibrate(wrapped, loader(X, y), method, **options)

    assert calls_of(refused) <= 3 * once  # one batch, and passes that look for the form of the output
    assert all(torch.equal(tensor, before[name]) for name, tensor in wrapped.state_dict().items())


@pytest.mark.parametrize(
    ("function", "options", "says"),
    [
        (selective, {"by": "vacuitic"}, "measures no such risk"),
        (selective, {"per": "position", "by": "aleatoric", "y": LABELS}, "class numbers have shape"),
        (selective, {"y": Y[:, 0]}, "targets have shape"),
        (selective, {"error": "mae"}, "error must be a function"),
        (top_uncertain, {"by": "vacuitic"}, "measures no such risk"),
        (top_uncertain, {"k": "5"}, "k must be a whole number"),
        (top_uncertain, {"k": 0}, "k must be a whole number"),
    ],
)
def test_rankings_show_it(function: Any, options: dict[str, Any], says: str) -> None:
    wrapped = values()
    y = options.pop("y", Y)
    once = calls_of(lambda: wrapped(X[:10]))
    options = {"k": 3, **options} if function is top_uncertain else options

    def refused() -> None:
        with pytest.raises((ValueError, TypeError), match=says):
            function(wrapped, loader(X, y), **options)

    assert calls_of(refused) <= 3 * once


def test_a_number_that_is_not_finite_is_told_with_its_row() -> None:
    wrapped = values()
    target = Y.clone()
    target[25] = math.nan
    once = calls_of(lambda: wrapped(X[:10]))

    def refused() -> None:
        with pytest.raises(ValueError, match="y is NaN or infinite in 1 of rows 20 to 29, first in row 25"):
            calibrate(wrapped, loader(X, target), "variance")

    assert calls_of(refused) < BATCHES * once


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        ("conformal", {"joint": "no"}, "joint must be True or False"),
        ("conformal", {"randomized": "no"}, "randomized must be True or False"),
        ("conformal", {"penalty": "0.1"}, "penalty must be a number of at least 0"),
        ("conformal", {"k_reg": -1}, "k_reg must be a number of at least 0"),
        ("variance", {"per_output": "yes"}, "per_output must be True or False"),
        ("isotonic", {"per_output": "yes"}, "per_output must be True or False"),
    ],
)
def test_options_are_checked_first(method: str, options: dict[str, Any], says: str) -> None:
    wrapped = values()

    def refused() -> None:
        with pytest.raises((ValueError, TypeError), match=says):
            calibrate(wrapped, (X, Y), method, **options)

    assert calls_of(refused) == 0


@pytest.mark.parametrize(
    ("coverage", "says"),
    [(90, "coverage must lie strictly between 0 and 1"), (0.999, "needs at least 999 held-out rows, there are 60")],
)
def test_the_coverage_is_checked_before_a_prediction(coverage: float, says: str) -> None:
    intervals, sets = calibrate(values(), (X, Y), "conformal"), calibrate(classes(), (X, LABELS), "conformal")

    def refused() -> None:
        for ask in (intervals.interval, sets.predict_set):
            with pytest.raises(ValueError, match=says):
                ask(X, coverage=coverage)

    assert calls_of(refused) == 0


def test_a_missing_package_is_told_from_the_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    wrapped = classes()
    once = calls_of(lambda: wrapped(X[:10]))

    def refused() -> None:
        with pytest.raises(ModuleNotFoundError, match="this needs scipy"):
            calibrate(wrapped, loader(X, LABELS), "temperature")

    assert calls_of(refused) <= 3 * once


def test_a_first_batch_without_classes_is_no_obstacle() -> None:
    labels = LABELS.where(torch.arange(60) >= 10, -100)
    assert calibrate(classes(), loader(X, labels), "temperature").temperature > 0


@pytest.mark.parametrize(
    ("x", "options", "says"),
    [
        (X.where(torch.arange(60)[:, None] != 5, torch.nan), {}, "NaN or infinite statistics after 60 rows"),
        (X, {"prior": "1"}, "prior must be 0 or more"),
        (X, {"batch_size": 0}, "batch_size must be a whole number"),
    ],
)
def test_batch_norms_are_not_adapted_to_such_inputs(x: Tensor, options: dict[str, Any], says: str) -> None:
    wrapped = vote.Wrapper(2)(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    with pytest.raises(ValueError, match=says):
        adapt_batch_norm(wrapped, x, **options)
