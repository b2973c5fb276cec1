"""Answers of a model for held-out rows, which calibrations are fitted to, and checks of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from workbench.calibration.support import REAL
from workbench.core.batches.rows import bad_rows
from workbench.core.batches.target_forms import is_one_hot, shape_advice
from workbench.core.outputs.meanings import IGNORED
from workbench.core.saving.training_data import Facts
from workbench.errors import WorkbenchWarning
from workbench.metrics._inputs import level_in_unit
from workbench.risk import Risk

RISKS = tuple(kind.name for kind in fields(Risk))
MIN_ROWS = 10  # for fitting temperature, variance scale and recalibration


@dataclass(frozen=True, eq=False)
class Answers:
    """Outputs of a model for held-out rows: predictions [n, ...], risks [n, ...] and targets [n, ...]; at least float32.

    Class scores have the classes in the last dimension, wherever the model has them. `offsets` [levels, n, ...] are the differences between the
    quantiles of quantile heads, if requested, and the prediction. `of_inputs` holds the requested functions of the inputs by name, one number
    per row. `drawn` tells whether the model drew random numbers. `facts` describe the rows. `support` is the range of the targets that the
    model's distribution allows.
    """

    y: Tensor
    risk: Risk
    target: Tensor
    offsets: Tensor | None = None
    of_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    drawn: bool = False
    facts: Facts = field(default_factory=dict)
    support: tuple[float, float] = REAL

    @property
    def labels(self) -> bool:
        """Whether the targets are class numbers."""
        return not self.target.is_floating_point()

    @property
    def known(self) -> Tensor:
        """Mask of the targets that have a class, bool [n, ...]; pixels and tokens without one are -100."""
        return self.target != IGNORED

    @property
    def is_interval(self) -> bool:
        """Whether the model predicts (lower, upper) for one target."""
        return not self.labels and self.y.dim() == 2 and self.y.shape[1] == 2 and self.target.shape == (len(self.y), 1)


def check_finite(y: Tensor, risks: Risk, target: Tensor, first: int = 0) -> None:
    """Raise unless predictions [n, ...], risks [n, ...] and targets [n, ...] of the rows from number `first` on are finite."""
    # a score of minus infinity is legitimate: it excludes a class
    finite = y if target.is_floating_point() else y.where(~y.isneginf(), 0.0)
    for label, values in (
        ("the prediction", finite),
        *((f"the {name} risk", risks[name]) for name in risks),
        ("y", target),
    ):
        if len(bad := bad_rows(values)):
            rows = f"rows {first} to {first + len(values) - 1}" if first else f"{len(values)} rows"
            raise ValueError(f"{label} is NaN or infinite in {len(bad)} of {rows}, first in row {first + int(bad[0])}")


def check_rows(answers: Answers, what: str) -> None:
    """Raise if there are too few rows to fit one number: the relative error of a standard deviation is 1 / sqrt(2 n)."""
    rows = int(answers.known.reshape(len(answers.y), -1).any(1).sum()) if answers.labels else len(answers.y)
    if rows < MIN_ROWS:
        raise ValueError(
            f"{what} needs at least {MIN_ROWS} held-out rows, there are {rows}; with fewer, the fitted number is off by more than a fifth"
        )


def check_values(answers: Answers, what: str) -> None:
    """Raise unless predictions and targets are values of the same shape."""
    if answers.labels:
        raise ValueError(f"{what} is for values, but the targets are class numbers ({answers.target.dtype})")
    if answers.y.shape != answers.target.shape:
        hint = shape_advice(answers.target, answers.y)
        raise ValueError(
            f"y: targets have shape {list(answers.target.shape)}, predictions {list(answers.y.shape)}; they must be the same{hint}"
        )


def check_labels(answers: Answers, what: str) -> None:
    """Raise unless predictions are class scores and targets are matching class numbers."""
    y, labels = answers.y, answers.target
    if not answers.labels:
        raise ValueError(
            f"{what} is for classes, but the targets are values ({labels.dtype}); give int64 class numbers"
        )
    if y.dim() < 2 or y.shape[-1] < 2 or labels.shape != y.shape[:-1]:
        raise ValueError(
            f"y: class numbers have shape {list(labels.shape)}, predictions {list(y.shape)}; they must be [rows, ...] and [rows, ..., classes]"
            + (
                "; convert one-hot rows to class numbers, y.argmax(1)"
                if is_one_hot(labels)
                else "; for values, such as counts, give y.float()"
                if labels.shape == y.shape
                else ""
            )
        )
    labels = labels[answers.known]
    if labels.numel() and (labels.min() < 0 or labels.max() >= y.shape[-1]):
        raise ValueError(
            f"y: class numbers go from {int(labels.min())} to {int(labels.max())}, but the model gives {y.shape[-1]} scores"
        )


def check_known(answers: Answers) -> None:
    """Raise if no target has a class."""
    if not answers.known.any():
        raise ValueError(f"y: no row, pixel or token has a class, all are {IGNORED}")


def risk_named(risk: Risk, by: str) -> Tensor:
    """Return the risk of this name, if it was measured."""
    if by not in RISKS or risk[by] is None:
        available = ", ".join(risk.names()) or "none at all (the plain baseline)"
        raise ValueError(f"by={by!r}: the model measures no such risk; it gives {available}")
    return risk[by]


def positive_total(risk: Risk) -> Tensor:
    """Return the total risk of held-out rows, if it is above 0 in all of them, so that prediction and risk define a distribution."""
    total = risk_named(risk, "total")
    if (zero := ~(total > 0)).any():
        raise ValueError(
            f"the total risk is 0 in {int(zero.sum())} of {zero.numel()} held-out values, which no scale changes: use method='conformal' with "
            "score='absolute', or wrap with sculpt as well, which learns the noise"
        )
    return total


def level(name: str, value: Any) -> Fraction:
    """Return a probability strictly between 0 and 1 as an exact decimal fraction: 0.9 is nine tenths, not the nearest float."""
    level_in_unit(name, value)
    return Fraction(repr(float(value)))


def log_probabilities(y: Tensor, output: str) -> Tensor:
    """Return normalized log-probabilities [..., classes] from the output of a classifier."""
    if output == "probs":
        y = y.clamp_min(torch.finfo(y.dtype).tiny).log()
    return y.log_softmax(-1)


def all_where_nan(chosen: Tensor, scores: Tensor) -> Tensor:
    """Return sets of classes [rows, ..., classes] with all classes where a score is NaN, and warn: nothing can be left out there."""
    if (unknown := scores.isnan().any(-1, keepdim=True)).any():
        rows = int(unknown.flatten(1).any(1).sum())
        warnings.warn(
            f"{rows} of {len(chosen)} rows get all classes: the scores of the model are NaN there; look for NaN in the input",
            WorkbenchWarning,
            stacklevel=3,
        )
    return chosen | unknown
