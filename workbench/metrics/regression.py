"""Metrics of real-valued predictions: error, likelihood and calibration.

Predictions, risks and targets have one shape: rows, several targets, horizons or maps. All elements have equal weight; those excluded by `void`
or `mask` are ignored, whatever their values. Memory is bounded to tens of MiB besides the arguments, or about twenty times the size of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.distributions import Distribution, Normal
from workbench.metrics._inputs import family_of, level_in_unit, numbers
from workbench.metrics._pieces import check_not_empty, reduce_terms, value_pieces
from workbench.metrics.registry import metric

Family = Distribution | type[Distribution]


class CoverageCurve(NamedTuple):
    """Expected and observed coverage of central intervals, each [levels], float64."""

    expected: Tensor
    observed: Tensor


@metric("min")
def rmse(prediction: Any, target: Any, *, void: float | None = None, mask: Any = None) -> Tensor:
    """Root mean squared error, in units of the target; lower is better.

    Args:
        prediction: [...], any shape.
        target: Shaped like prediction.
        void: Number that marks missing targets, such as 0 or NaN in depth maps.
        mask: Boolean mask shaped like target, True for elements that count.

    Example:
        >>> rmse(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [4.0]]))
        tensor(1.4142, dtype=torch.float64)
    """
    return reduce_terms((error.square() for error in errors(prediction, target, void, mask)), "mean").sqrt()


@metric("min")
def mae(
    prediction: Any, target: Any, reduction: str = "mean", *, void: float | None = None, mask: Any = None
) -> Tensor:
    """Mean absolute error, in units of the target; lower is better.

    Args:
        prediction: [...], any shape.
        target: Shaped like prediction.
        reduction: "mean", or "none" for each element's term.
        void: Number that marks missing targets, such as 0 or NaN in depth maps.
        mask: Boolean mask shaped like target, True for elements that count.

    Example:
        >>> mae(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [4.0]]))
        tensor(1., dtype=torch.float64)
    """
    return reduce_terms((error.abs() for error in errors(prediction, target, void, mask)), reduction)


@metric("min", -math.inf)
def nll(
    prediction: Any,
    risk: Any,
    target: Any,
    distribution: Family = Normal,
    reduction: str = "mean",
    *,
    void: float | None = None,
    mask: Any = None,
) -> Tensor:
    """Mean negative log-likelihood of the targets, in nats; lower is better.

    Args:
        prediction: [...], any shape.
        risk: Standard deviation > 0, shaped like prediction and in its units (or a Risk: its total).
        target: Shaped like prediction.
        distribution: Family of the predicted distribution, class or instance.
        reduction: "mean", or "none" for each element's term.
        void: Number that marks missing targets, such as 0 or NaN in depth maps.
        mask: Boolean mask shaped like target, True for elements that count.

    Example:
        >>> nll(torch.tensor([[0.0]]), torch.tensor([[1.0]]), torch.tensor([[0.0]]))
        tensor(0.9189, dtype=torch.float64)
    """
    log_prob = family_of(distribution).log_prob
    pieces = value_pieces(prediction=prediction, risk=risk, target=target, void=void, mask=mask, positive=True)
    return reduce_terms((-log_prob(y, loc, sd) for loc, sd, y in pieces), reduction)


@metric("min")
def crps(
    prediction: Any,
    risk: Any,
    target: Any,
    distribution: Family = Normal,
    reduction: str = "mean",
    *,
    void: float | None = None,
    mask: Any = None,
) -> Tensor:
    """Mean continuous ranked probability score, in units of the target; lower is better (Gneiting & Raftery 2007).

    Args:
        prediction: [...], any shape.
        risk: Standard deviation >= 0, shaped like prediction and in its units (or a Risk: its total).
        target: Shaped like prediction.
        distribution: Predicted distribution, class or instance, with a closed form (all but Cauchy).
        reduction: "mean", or "none" for each element's term.
        void: Number that marks missing targets, such as 0 or NaN in depth maps.
        mask: Boolean mask shaped like target, True for elements that count.

    Example:
        >>> crps(torch.tensor([[0.0]]), torch.tensor([[1.0]]), torch.tensor([[0.0]]))
        tensor(0.2337, dtype=torch.float64)
    """
    score = family_of(distribution).crps
    pieces = value_pieces(prediction=prediction, risk=risk, target=target, void=void, mask=mask)
    return reduce_terms((score(y, loc, sd) for loc, sd, y in pieces), reduction)


def coverage_curve(
    prediction: Any,
    risk: Any,
    target: Any,
    levels: Sequence[float] | Tensor | None = None,
    distribution: Family = Normal,
    *,
    void: float | None = None,
    mask: Any = None,
) -> CoverageCurve:
    """Share of targets inside the central interval of each level; observed equals expected for calibrated risks.

    Args:
        prediction: [...], any shape.
        risk: Standard deviation >= 0, shaped like prediction (or a Risk: its total).
        target: Shaped like prediction.
        levels: Probabilities strictly between 0 and 1; 0.05, 0.10, ... 0.95 by default.
        distribution: Family of the predicted distribution, class or instance.
        void: Number that marks missing targets, such as 0 or NaN in depth maps.
        mask: Boolean mask shaped like target, True for elements that count.

    Returns:
        expected [levels] (the levels) and observed [levels] (shares of targets).

    Example:
        >>> target = torch.tensor([[0.1], [1.0], [5.0]])
        >>> coverage_curve(torch.zeros(3, 1), torch.ones(3, 1), target, levels=[0.5, 0.9]).observed
        tensor([0.3333, 0.6667], dtype=torch.float64)
    """
    expected = checked_levels(levels)
    inside, count = counts_inside(pits(prediction, risk, target, distribution, void, mask), expected, central)
    check_not_empty(count)
    return CoverageCurve(expected.to(inside.device), inside / count)


@metric("min", 0, 1)
def calibration_error(
    prediction: Any,
    risk: Any,
    target: Any,
    distribution: Family = Normal,
    levels: Sequence[float] | Tensor | None = None,
    *,
    void: float | None = None,
    mask: Any = None,
) -> Tensor:
    """Mean absolute gap between expected and observed coverage of central intervals, from 0 to 1; lower is better.

    Args:
        prediction: [...], any shape.
        risk: Standard deviation >= 0, shaped like prediction (or a Risk: its total).
        target: Shaped like prediction.
        distribution: Family of the predicted distribution, class or instance.
        levels: Probabilities strictly between 0 and 1; 0.05, 0.10, ... 0.95 by default.
        void: Number that marks missing targets, such as 0 or NaN in depth maps.
        mask: Boolean mask shaped like target, True for elements that count.

    Example:
        >>> calibration_error(torch.zeros(3, 1), torch.ones(3, 1), torch.zeros(3, 1))
        tensor(0.5000, dtype=torch.float64)
    """
    curve = coverage_curve(prediction, risk, target, levels, distribution, void=void, mask=mask)
    return (curve.observed - curve.expected).abs().mean()


@metric("min", 0, 1)
def quantile_calibration_error(
    prediction: Any,
    risk: Any,
    target: Any,
    distribution: Family = Normal,
    levels: Sequence[float] | Tensor | None = None,
    *,
    void: float | None = None,
    mask: Any = None,
) -> Tensor:
    """Mean absolute gap between p and the share of targets below the predicted p-quantile; lower is better.

    Detects a bias that central intervals can't (Kuleshov et al. 2018, with absolute instead of squared gaps).

    Args:
        prediction: [...], any shape.
        risk: Standard deviation >= 0, shaped like prediction (or a Risk: its total).
        target: Shaped like prediction.
        distribution: Family of the predicted distribution, class or instance.
        levels: Probabilities strictly between 0 and 1; 0.05, 0.10, ... 0.95 by default.
        void: Number that marks missing targets, such as 0 or NaN in depth maps.
        mask: Boolean mask shaped like target, True for elements that count.

    Example:
        >>> quantile_calibration_error(torch.zeros(2, 1), torch.ones(2, 1), torch.tensor([[9.0], [9.0]]))
        tensor(0.5000, dtype=torch.float64)
    """
    expected = checked_levels(levels)
    inside, count = counts_inside(pits(prediction, risk, target, distribution, void, mask), expected)
    check_not_empty(count)
    return (inside / count - expected.to(inside.device)).abs().mean()


@metric("min")
def sharpness(risk: Any, *, mask: Any = None) -> Tensor:
    """Root mean square of the risks, in units of the prediction; lower is sharper (compare only calibrated risks).

    Args:
        risk: Standard deviation >= 0, [...] (or a Risk: its total).
        mask: Boolean mask shaped like risk, True for elements that count.

    Example:
        >>> sharpness(torch.tensor([[3.0], [4.0]]))
        tensor(3.5355, dtype=torch.float64)
    """
    return reduce_terms((piece.square() for (piece,) in value_pieces(risk=risk, mask=mask)), "mean").sqrt()


def checked_levels(levels: Sequence[float] | Tensor | None) -> Tensor:
    """Return levels [levels] in float64, each strictly between 0 and 1."""
    if levels is None:
        return torch.arange(1, 20, dtype=torch.float64) / 20
    checked = numbers("levels", levels).flatten()
    for level in checked.tolist():
        level_in_unit("every level", level)
    return checked


def count_inside(values: Tensor, levels: Tensor) -> Tensor:
    """Return the number of values up to each level, [levels], float64."""
    return torch.searchsorted(values.detach().flatten().sort().values, levels, right=True).double()


def counts_inside(
    transforms: Iterable[Tensor], levels: Tensor, position: Callable[[Tensor], Tensor] = lambda u: u
) -> tuple[Tensor, int]:
    """Return the number of positions up to each level over all pieces, [levels], and the number of all positions."""
    inside, count = torch.zeros_like(levels), 0
    for u in transforms:
        inside = inside.to(u.device) + count_inside(position(u), levels.to(u.device))
        count += u.numel()
    return inside, count


def central(u: Tensor) -> Tensor:
    """Return the level of the smallest central interval that contains the target, from a probability integral transform."""
    return (2 * u - 1).abs()


def pit(
    prediction: Any,
    risk: Any,
    target: Any,
    distribution: Family = Normal,
    *,
    void: float | None = None,
    mask: Any = None,
) -> Tensor:
    """Probability integral transform: the predicted cdf at each target; uniform on [0, 1] if calibrated (Dawid 1984).

    Args:
        prediction: [...], any shape.
        risk: Standard deviation >= 0, shaped like prediction (or a Risk: its total).
        target: Shaped like prediction.
        distribution: Family of the predicted distribution, class or instance.
        void: Number that marks missing targets, such as 0 or NaN in depth maps.
        mask: Boolean mask shaped like target, True for elements that count.

    Returns:
        Shaped like prediction; with void or mask, flattened, of the elements that count.

    Example:
        >>> pit(torch.zeros(2), torch.ones(2), torch.tensor([0.0, 1.6449]))
        tensor([0.5000, 0.9500], dtype=torch.float64)
    """
    return reduce_terms(pits(prediction, risk, target, distribution, void, mask), "none")


def errors(prediction: Any, target: Any, void: Any = None, mask: Any = None) -> Iterator[Tensor]:
    """Yield pieces of prediction - target."""
    pieces = value_pieces(prediction=prediction, target=target, void=void, mask=mask)
    return (first - second for first, second in pieces)


def pits(prediction: Any, risk: Any, target: Any, distribution: Any, void: Any, mask: Any) -> Iterator[Tensor]:
    """Yield pieces of the probability integral transform, see `pit`."""
    cdf = family_of(distribution).cdf
    pieces = value_pieces(prediction=prediction, risk=risk, target=target, void=void, mask=mask)
    return (cdf(y, loc, sd) for loc, sd, y in pieces)
