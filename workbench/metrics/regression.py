"""Metrics of real-valued predictions: error, likelihood, calibration and width of intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.distributions import Distribution, Normal
from workbench.metrics._inputs import errors_of, family_of, level_in_unit, numbers, predicted, reduce, risks, same_shape
from workbench.metrics.registry import metric

Family = Distribution | type[Distribution]


class CoverageCurve(NamedTuple):
    """Expected and observed coverage of central intervals, each [levels], float64."""

    expected: Tensor
    observed: Tensor


@metric("min")
def rmse(prediction: Any, target: Any) -> Tensor:
    """Root mean squared error, in units of the target; lower is better.

    Args:
        prediction: [...], any shape.
        target: Shaped like prediction.

    Example:
        >>> rmse(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [4.0]]))
        tensor(1.4142, dtype=torch.float64)
    """
    return errors_of(prediction, target).square().mean().sqrt()


@metric("min")
def mae(prediction: Any, target: Any, reduction: str = "mean") -> Tensor:
    """Mean absolute error, in units of the target; lower is better.

    Args:
        prediction: [...], any shape.
        target: Shaped like prediction.
        reduction: "mean", or "none" for every element's term.

    Example:
        >>> mae(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [4.0]]))
        tensor(1., dtype=torch.float64)
    """
    return reduce(errors_of(prediction, target).abs(), reduction)


@metric("min", -math.inf)
def nll(prediction: Any, risk: Any, target: Any, distribution: Family = Normal, reduction: str = "mean") -> Tensor:
    """Mean negative log-likelihood of the targets, in nats; lower is better.

    Args:
        prediction: [...], any shape.
        risk: Standard deviation > 0, shaped like prediction and in its units (or a Risk: its total).
        target: Shaped like prediction.
        distribution: Predicted distribution, class or instance.
        reduction: "mean", or "none" for every element's term.

    Example:
        >>> nll(torch.tensor([[0.0]]), torch.tensor([[1.0]]), torch.tensor([[0.0]]))
        tensor(0.9189, dtype=torch.float64)
    """
    prediction, risk, target = predicted(prediction, risk, target, positive=True)
    return reduce(-family_of(distribution).log_prob(target, prediction, risk), reduction)


@metric("min")
def crps(prediction: Any, risk: Any, target: Any, distribution: Family = Normal, reduction: str = "mean") -> Tensor:
    """Mean continuous ranked probability score, in units of the target; lower is better (Gneiting & Raftery 2007).

    Args:
        prediction: [...], any shape.
        risk: Standard deviation >= 0, shaped like prediction and in its units (or a Risk: its total).
        target: Shaped like prediction.
        distribution: Predicted distribution, class or instance, with a closed form (all but Cauchy).
        reduction: "mean", or "none" for every element's term.

    Example:
        >>> crps(torch.tensor([[0.0]]), torch.tensor([[1.0]]), torch.tensor([[0.0]]))
        tensor(0.2337, dtype=torch.float64)
    """
    prediction, risk, target = predicted(prediction, risk, target)
    return reduce(family_of(distribution).crps(target, prediction, risk), reduction)


def coverage_curve(
    prediction: Any,
    risk: Any,
    target: Any,
    levels: Sequence[float] | Tensor | None = None,
    distribution: Family = Normal,
) -> CoverageCurve:
    """Share of targets inside the central interval of each level: observed equals expected for calibrated risks.

    Args:
        prediction: [...], any shape.
        risk: Standard deviation >= 0, shaped like prediction (or a Risk: its total).
        target: Shaped like prediction.
        levels: Probabilities strictly between 0 and 1; 0.05, 0.10, ... 0.95 by default.
        distribution: Predicted distribution, class or instance.

    Returns:
        expected [levels] (the levels) and observed [levels] (shares of targets).

    Example:
        >>> target = torch.tensor([[0.1], [1.0], [5.0]])
        >>> coverage_curve(torch.zeros(3, 1), torch.ones(3, 1), target, levels=[0.5, 0.9]).observed
        tensor([0.3333, 0.6667], dtype=torch.float64)
    """
    u = pit(prediction, risk, target, distribution)
    expected = checked_levels(levels).to(u.device)
    return CoverageCurve(expected, count_inside((2 * u - 1).abs(), expected) / u.numel())


@metric("min", 0, 1)
def calibration_error(
    prediction: Any,
    risk: Any,
    target: Any,
    distribution: Family = Normal,
    levels: Sequence[float] | Tensor | None = None,
) -> Tensor:
    """Mean absolute gap between expected and observed coverage of central intervals, from 0 to 1; lower is better.

    Args:
        prediction: [...], any shape.
        risk: Standard deviation >= 0, shaped like prediction (or a Risk: its total).
        target: Shaped like prediction.
        distribution: Predicted distribution, class or instance.
        levels: Probabilities strictly between 0 and 1; 0.05, 0.10, ... 0.95 by default.

    Example:
        >>> calibration_error(torch.zeros(3, 1), torch.ones(3, 1), torch.zeros(3, 1))
        tensor(0.5000, dtype=torch.float64)
    """
    curve = coverage_curve(prediction, risk, target, levels, distribution)
    return (curve.observed - curve.expected).abs().mean()


@metric("min", 0, 1)
def quantile_calibration_error(
    prediction: Any,
    risk: Any,
    target: Any,
    distribution: Family = Normal,
    levels: Sequence[float] | Tensor | None = None,
) -> Tensor:
    """Mean absolute gap between p and the share of targets below the predicted p-quantile; lower is better.

    Sees a bias that central intervals can't (Kuleshov et al. 2018, with absolute in place of squared gaps).

    Args:
        prediction: [...], any shape.
        risk: Standard deviation >= 0, shaped like prediction (or a Risk: its total).
        target: Shaped like prediction.
        distribution: Predicted distribution, class or instance.
        levels: Probabilities strictly between 0 and 1; 0.05, 0.10, ... 0.95 by default.

    Example:
        >>> quantile_calibration_error(torch.zeros(2, 1), torch.ones(2, 1), torch.tensor([[9.0], [9.0]]))
        tensor(0.5000, dtype=torch.float64)
    """
    u = pit(prediction, risk, target, distribution)
    expected = checked_levels(levels).to(u.device)
    return (count_inside(u, expected) / u.numel() - expected).abs().mean()


@metric(None, 0, 1)
def picp(
    prediction: Any, risk: Any, target: Any, level: float = 0.9, distribution: Family = Normal, reduction: str = "mean"
) -> Tensor:
    """Prediction interval coverage probability: share of targets inside the central interval; best at `level`.

    Args:
        prediction: [...], any shape.
        risk: Standard deviation >= 0, shaped like prediction (or a Risk: its total).
        target: Shaped like prediction.
        level: Probability of the interval, strictly between 0 and 1.
        distribution: Predicted distribution, class or instance.
        reduction: "mean", or "none" for every element's term (1 inside, 0 outside).

    Example:
        >>> picp(torch.zeros(2, 1), torch.ones(2, 1), torch.tensor([[1.6], [1.7]]))
        tensor(0.5000, dtype=torch.float64)
    """
    level_in_unit("level", level)
    u = pit(prediction, risk, target, distribution)
    return reduce(((2 * u - 1).abs() <= level).double(), reduction)


@metric("min")
def mpiw(
    prediction: Any, risk: Any, level: float = 0.9, distribution: Family = Normal, reduction: str = "mean"
) -> Tensor:
    """Mean width of the central prediction interval, in units of the prediction; lower is sharper.

    Args:
        prediction: [...], any shape.
        risk: Standard deviation >= 0, shaped like prediction (or a Risk: its total).
        level: Probability of the interval, strictly between 0 and 1.
        distribution: Predicted distribution, class or instance.
        reduction: "mean", or "none" for every element's width.

    Example:
        >>> mpiw(torch.zeros(1, 1), torch.ones(1, 1))
        tensor(3.2897, dtype=torch.float64)
    """
    prediction, risk = numbers("prediction", prediction), risks(risk)
    same_shape(prediction=prediction, risk=risk)
    lower, upper = _interval(prediction, risk, level, distribution)
    return reduce(upper - lower, reduction)


@metric("min")
def interval_score(
    prediction: Any, risk: Any, target: Any, level: float = 0.9, distribution: Family = Normal, reduction: str = "mean"
) -> Tensor:
    """Interval score: width plus 2 / (1 - level) times how far the target lies outside; lower is better.

    A proper score of the central interval, in units of the target (Gneiting & Raftery 2007).

    Args:
        prediction: [...], any shape.
        risk: Standard deviation >= 0, shaped like prediction (or a Risk: its total).
        target: Shaped like prediction.
        level: Probability of the interval, strictly between 0 and 1.
        distribution: Predicted distribution, class or instance.
        reduction: "mean", or "none" for every element's term.

    Example:
        >>> interval_score(torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[2.0]]))
        tensor(10.3926, dtype=torch.float64)
    """
    prediction, risk, target = predicted(prediction, risk, target)
    lower, upper = _interval(prediction, risk, level, distribution)
    outside = (lower - target).clamp_min(0) + (target - upper).clamp_min(0)
    return reduce(upper - lower + 2 / (1 - level) * outside, reduction)


@metric("min")
def sharpness(risk: Any) -> Tensor:
    """Root mean square of the risks, in units of the prediction; lower is sharper (compare only calibrated risks).

    Args:
        risk: Standard deviation >= 0, [...] (or a Risk: its total).

    Example:
        >>> sharpness(torch.tensor([[3.0], [4.0]]))
        tensor(3.5355, dtype=torch.float64)
    """
    return risks(risk).square().mean().sqrt()


def checked_levels(levels: Sequence[float] | Tensor | None) -> Tensor:
    """Levels [levels] in float64, each strictly between 0 and 1."""
    if levels is None:
        return torch.arange(1, 20, dtype=torch.float64) / 20
    checked = numbers("levels", levels).flatten()
    for level in checked.tolist():
        level_in_unit("every level", level)
    return checked


def count_inside(values: Tensor, levels: Tensor) -> Tensor:
    """For every level the number of values up to it, [levels], float64."""
    return torch.searchsorted(values.detach().flatten().sort().values, levels, right=True).double()


def pit(prediction: Any, risk: Any, target: Any, distribution: Family) -> Tensor:
    """Probability integral transform: the predicted cdf at the target."""
    prediction, risk, target = predicted(prediction, risk, target)
    return family_of(distribution).cdf(target, prediction, risk)


def _interval(prediction: Tensor, risk: Tensor, level: float, distribution: Family) -> tuple[Tensor, Tensor]:
    level_in_unit("level", level)
    distribution = family_of(distribution)
    return tuple(distribution.icdf(q, prediction, risk) for q in ((1 - level) / 2, (1 + level) / 2))  # type: ignore[return-value]
