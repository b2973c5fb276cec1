"""Metrics of prediction intervals of real values: coverage, width and a score of both; shapes and memory as in `regression`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from workbench.distributions import Normal
from workbench.metrics._inputs import family_of, level_in_unit
from workbench.metrics._pieces import reduce_terms, value_pieces
from workbench.metrics.registry import metric
from workbench.metrics.regression import Family, central, pits


@metric(None, 0, 1)
def picp(
    prediction: Any,
    risk: Any,
    target: Any,
    level: float = 0.9,
    distribution: Family = Normal,
    reduction: str = "mean",
    *,
    void: float | None = None,
    mask: Any = None,
) -> Tensor:
    """Prediction interval coverage probability: share of targets inside the central interval; best at `level`.

    Args:
        prediction: [...], any shape.
        risk: Standard deviation >= 0, shaped like prediction (or a Risk: its total).
        target: Shaped like prediction.
        level: Probability of the interval, strictly between 0 and 1.
        distribution: Family of the predicted distribution, class or instance.
        reduction: "mean", or "none" for each element's term (1 inside, 0 outside).
        void: Number that marks missing targets, such as 0 or NaN in depth maps.
        mask: Boolean mask shaped like target, True for elements that count.

    Example:
        >>> import torch
        >>> picp(torch.zeros(2, 1), torch.ones(2, 1), torch.tensor([[1.6], [1.7]]))
        tensor(0.5000, dtype=torch.float64)
    """
    level_in_unit("level", level)
    pieces = pits(prediction, risk, target, distribution, void, mask)
    return reduce_terms(((central(u) <= level).double() for u in pieces), reduction)


@metric("min")
def mpiw(
    prediction: Any,
    risk: Any,
    level: float = 0.9,
    distribution: Family = Normal,
    reduction: str = "mean",
    *,
    mask: Any = None,
) -> Tensor:
    """Mean width of the central prediction interval, in units of the prediction; lower is sharper.

    Args:
        prediction: [...], any shape.
        risk: Standard deviation >= 0, shaped like prediction (or a Risk: its total).
        level: Probability of the interval, strictly between 0 and 1.
        distribution: Family of the predicted distribution, class or instance.
        reduction: "mean", or "none" for each element's width.
        mask: Boolean mask shaped like prediction, True for elements that count.

    Example:
        >>> import torch
        >>> mpiw(torch.zeros(1, 1), torch.ones(1, 1))
        tensor(3.2897, dtype=torch.float64)
    """
    ends = (
        _interval(loc, sd, level, distribution) for loc, sd in value_pieces(prediction=prediction, risk=risk, mask=mask)
    )
    return reduce_terms((upper - lower for lower, upper in ends), reduction)


@metric("min")
def interval_score(
    prediction: Any,
    risk: Any,
    target: Any,
    level: float = 0.9,
    distribution: Family = Normal,
    reduction: str = "mean",
    *,
    void: float | None = None,
    mask: Any = None,
) -> Tensor:
    """Interval score: width plus 2 / (1 - level) times the distance of the target outside the interval; lower is better.

    A proper score of the central interval, in units of the target (Gneiting & Raftery 2007).

    Args:
        prediction: [...], any shape.
        risk: Standard deviation >= 0, shaped like prediction (or a Risk: its total).
        target: Shaped like prediction.
        level: Probability of the interval, strictly between 0 and 1.
        distribution: Family of the predicted distribution, class or instance.
        reduction: "mean", or "none" for each element's term.
        void: Number that marks missing targets, such as 0 or NaN in depth maps.
        mask: Boolean mask shaped like target, True for elements that count.

    Example:
        >>> import torch
        >>> interval_score(torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[2.0]]))
        tensor(10.3926, dtype=torch.float64)
    """
    pieces = value_pieces(prediction=prediction, risk=risk, target=target, void=void, mask=mask)
    ends = ((*_interval(loc, sd, level, distribution), y) for loc, sd, y in pieces)
    return reduce_terms((_winkler(lower, upper, y, level) for lower, upper, y in ends), reduction)


@metric("min")
def winkler_score(
    lower: Any,
    upper: Any,
    target: Any,
    level: float = 0.9,
    reduction: str = "mean",
    *,
    void: float | None = None,
    mask: Any = None,
) -> Tensor:
    """Interval score of any intervals, such as conformal ones: width plus 2 / (1 - level) times the target's distance outside.

    In units of the target; lower is better; proper for the central interval (Winkler 1972; Gneiting & Raftery 2007). `interval_score` is the
    same for the interval of a distribution.

    Args:
        lower, upper: Ends of the intervals, lower <= upper, shaped like target.
        target: [...], any shape.
        level: Nominal probability of the intervals, strictly between 0 and 1.
        reduction: "mean", or "none" for each element's term.
        void: Number that marks missing targets, such as 0 or NaN in depth maps.
        mask: Boolean mask shaped like target, True for elements that count.

    Example:
        >>> import torch
        >>> winkler_score(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.5, 1.25]), level=0.9)
        tensor(3.5000, dtype=torch.float64)
    """
    level_in_unit("level", level)
    pieces = value_pieces(lower=lower, upper=upper, target=target, void=void, mask=mask)
    return reduce_terms((_winkler(low, high, y, level) for low, high, y in pieces), reduction)


def _winkler(lower: Tensor, upper: Tensor, target: Tensor, level: float) -> Tensor:
    if (lower > upper).any():
        raise ValueError(
            f"lower must be <= upper, but it is above in {int((lower > upper).sum())} of {lower.numel()} intervals"
        )
    outside = (lower - target).clamp_min(0) + (target - upper).clamp_min(0)
    return upper - lower + 2 / (1 - level) * outside


def _interval(prediction: Tensor, risk: Tensor, level: float, distribution: Family) -> tuple[Tensor, Tensor]:
    level_in_unit("level", level)
    distribution = family_of(distribution)
    return tuple(distribution.icdf(q, prediction, risk) for q in ((1 - level) / 2, (1 + level) / 2))  # type: ignore[return-value]
