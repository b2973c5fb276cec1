"""Metrics of forecast horizons and of joint targets: calibration of each step and over time, scores of forecasts and of whole paths.

A path is one row of the target: the steps of a horizon, or several targets. Steps excluded by `void` or `mask` are ignored, and the rest of the
path is scored; paths without any remaining step do not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.distributions import Normal
from workbench.metrics import _pieces
from workbench.metrics._inputs import check_integer, family_of, level_in_unit, numbers, real, same_shape
from workbench.metrics._pieces import reduce_terms, valid_mask
from workbench.metrics.registry import metric
from workbench.metrics.regression import Family, central, checked_levels, counts_inside, pits


class StepCoverage(NamedTuple):
    """Coverage of central intervals at each step of a horizon, float64.

    Args:
        expected: [levels], the levels.
        observed: [steps, levels], shares of targets inside the interval; NaN for a step without targets.
        error: [steps], mean absolute gap between them, the calibration error of each step.
        rows: [steps], number of targets.
    """

    expected: Tensor
    observed: Tensor
    error: Tensor
    rows: Tensor


def coverage_by_step(
    prediction: Any,
    risk: Any,
    target: Any,
    dim: int = 1,
    levels: Sequence[float] | Tensor | None = None,
    distribution: Family = Normal,
    *,
    void: float | None = None,
    mask: Any = None,
) -> StepCoverage:
    """Share of targets inside central intervals for each step of a horizon, to see whether risk grows as errors do.

    `coverage_curve` and `calibration_error` of each step separately; over all steps together, early risks that are too large cancel late ones
    that are too small.

    Args:
        prediction: [n, steps, ...].
        risk: Standard deviation >= 0, shaped like prediction (or a Risk: its total).
        target: Shaped like prediction.
        dim: Dimension of the steps.
        levels: Probabilities strictly between 0 and 1; 0.05, 0.10, ... 0.95 by default.
        distribution: Family of the predicted distribution, class or instance.
        void: Number that marks missing targets, such as NaN.
        mask: Boolean mask shaped like target, True for elements that count.

    Returns:
        expected [levels], observed [steps, levels], error [steps] and rows [steps].

    Example:
        >>> target = torch.tensor([[0.1, 4.0], [-0.2, 5.0]])
        >>> coverage_by_step(torch.zeros(2, 2), torch.ones(2, 2), target, levels=[0.9]).observed.tolist()
        [[1.0], [0.0]]
    """
    tensors = {"prediction": prediction, "risk": getattr(risk, "total", risk), "target": target}
    tensors = {name: real(name, value) for name, value in tensors.items()}
    family_of(distribution)
    shape = tensors["target"].shape
    if isinstance(dim, bool) or not isinstance(dim, int | np.integer):
        raise TypeError(f"dim must be the dimension of the steps, a whole number, found {dim!r:.100}")
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"target has no dimension {dim} of steps, found {tuple(shape)}")
    # check the input as a whole, so that errors report the full shape
    for _ in _pieces.value_pieces(**tensors, void=void, mask=mask):
        pass
    expected = checked_levels(levels)
    keep = valid_mask(mask, void, tensors["target"], shape)
    steps = []
    for step in range(shape[dim]):
        loc, sd, y = (tensor.select(dim, step) for tensor in tensors.values())
        chosen = None if keep is None else keep.select(dim, step)
        steps.append(counts_inside(pits(loc, sd, y, distribution, None, chosen), expected, central))
    inside = torch.stack([row.to(steps[-1][0].device) for row, _ in steps])
    count = torch.tensor([n for _, n in steps], dtype=torch.float64, device=inside.device)
    _pieces.check_not_empty(count.any())
    expected, observed = expected.to(inside.device), inside / count[:, None]
    return StepCoverage(expected, observed, (observed - expected).abs().mean(-1), count)


def coverage_over_time(
    lower: Any, upper: Any, target: Any, window: int, *, void: float | None = None, mask: Any = None
) -> Tensor:
    """Share of targets inside their intervals over a moving window, to see whether coverage lasts.

    Args:
        lower, upper: Ends of the intervals [times, ...] in the order of time; an empty interval, lower above upper, contains nothing.
        target: Shaped like them; all but the first dimension (steps of a horizon, series) are pooled.
        window: Number of times in the window.
        void: Number that marks missing targets, such as NaN.
        mask: Boolean mask shaped like target, True for elements that count.

    Returns:
        [times - window + 1], float64; NaN for a window without targets. The first window has the times 0 to window - 1.

    Example:
        >>> coverage_over_time(torch.zeros(4), torch.ones(4), torch.tensor([0.5, 0.5, 2.0, 2.0]), window=2)
        tensor([1.0000, 0.5000, 0.0000], dtype=torch.float64)
    """
    low, high, y = (real(name, value) for name, value in (("lower", lower), ("upper", upper), ("target", target)))
    same_shape(lower=low, upper=high, target=y)
    if y.ndim == 0:
        raise ValueError("target must have shape [times, ...], found one number")
    check_integer("window", window, maximum=len(y))
    keep = valid_mask(mask, void, y, y.shape)
    keep = torch.ones_like(y, dtype=torch.bool) if keep is None else keep.to(y.device)
    low, high = (numbers(name, end.to(y.device), finite=False) for name, end in (("lower", low), ("upper", high)))
    keep = keep.to(low.device)
    y = numbers("target", y.where(keep.to(y.device), 0), full=y)
    inside = (low <= y) & (y <= high) & keep
    _pieces.check_not_empty(keep.any())
    hits, targets = (_window_sums(counted[:, None].flatten(1).sum(1), window) for counted in (inside, keep))
    return hits.double() / targets.double()


def _window_sums(counts: Tensor, window: int) -> Tensor:
    """Return the sum of each window of whole numbers, as differences of their running sums, which are exact."""
    sums = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return sums[window:] - sums[:-window]


@metric("min")
def mase(
    prediction: Any,
    target: Any,
    past: Any,
    season: int = 1,
    reduction: str = "mean",
    *,
    void: float | None = None,
    mask: Any = None,
) -> Tensor:
    """Mean absolute scaled error of forecasts; below 1, they beat the in-sample seasonal naive forecast, one season ahead.

    |target - prediction| / mean of |past[t] - past[t - season]|, the in-sample error of the naive forecast (Hyndman & Koehler 2006). It is
    unitless, so that series of different units can be averaged.

    Args:
        prediction: [n, steps], or of k series [n, steps, k].
        target: Shaped like prediction.
        past: Values known before all targets [time], or of k series [time, k], each scaled by its own past.
        season: Season length in time steps; 1 is the naive forecast.
        reduction: "mean", or "none" for each element's term.
        void: Number that marks missing targets, such as NaN.
        mask: Boolean mask shaped like target, True for elements that count.

    Raises:
        ValueError: The past is not longer than a season, or is the same in all seasons, so that the scale is 0.

    Example:
        >>> mase(torch.tensor([[3.0, 3.0]]), torch.tensor([[4.0, 6.0]]), past=torch.tensor([1.0, 3.0, 2.0]))  # (1 + 3) / 2 / 1.5
        tensor(1.3333, dtype=torch.float64)
    """
    check_integer("season", season)
    history = numbers("past", past)
    shape = real("target", target).shape
    if (
        history.ndim < 1
        or history.shape[1:] != shape[len(shape) - history.ndim + 1 :]
        or history.ndim > max(1, len(shape))
    ):
        raise ValueError(
            f"past must have shape [time], or [time, k] for targets [..., k]; found {tuple(history.shape)} for {tuple(shape)}"
        )
    if len(history) <= season:
        raise ValueError(f"past has {len(history)} times, and season={season} needs more than {season}")
    scale = (history[season:] - history[:-season]).abs().mean(0)
    if (scale == 0).any():
        raise ValueError(f"past is the same in all seasons of {season}: its naive forecast has no error to scale by")
    unit = scale.expand(shape)
    pieces = _pieces.value_pieces(prediction=prediction, target=target, unit=unit, void=void, mask=mask)
    return reduce_terms(((y - p).abs() / u.to(p.device) for p, y, u in pieces), reduction)


@metric("min")
def pinball(
    quantiles: Any,
    target: Any,
    levels: Sequence[float] | Tensor | float,
    reduction: str = "mean",
    *,
    void: float | None = None,
    mask: Any = None,
) -> Tensor:
    """Pinball loss of predicted quantiles, averaged over the levels; lower is better.

    level * (target - quantile) above the quantile, (1 - level) * (quantile - target) below it (Koenker & Bassett 1978), in units of the
    target. For many equidistant levels, twice its mean approaches the CRPS.

    Args:
        quantiles: [levels, ...], one prediction for each level.
        target: [...].
        levels: Probability of each quantile, strictly between 0 and 1; a number for a single one.
        reduction: "mean", or "none" for each element's mean over the levels.
        void: Number that marks missing targets, such as NaN.
        mask: Boolean mask shaped like target, True for elements that count.

    Example:
        >>> pinball(torch.tensor([[0.0], [1.0]]), torch.tensor([2.0]), levels=[0.5, 0.9])  # (0.5 * 2 + 0.9 * 1) / 2
        tensor(0.9500, dtype=torch.float64)
    """
    probabilities = checked_levels([levels] if isinstance(levels, int | float) else levels)
    predicted = real("quantiles", quantiles)
    if not predicted.ndim or len(predicted) != len(probabilities):
        raise ValueError(
            f"quantiles must have shape [levels, *target], one for each of {len(probabilities)} levels; found {tuple(predicted.shape)}"
        )

    def losses(q: Tensor, y: Tensor) -> Tensor:
        p = probabilities.to(q.device).reshape(-1, *[1] * (q.ndim - 1))
        return torch.maximum(p * (y - q), (p - 1) * (y - q)).mean(0)

    pieces = _pieces.sample_pieces(target, void=void, mask=mask, quantiles=predicted)
    return reduce_terms((losses(q, y) for q, y in pieces), reduction)


@metric("min")
def energy_score(
    samples: Any,
    target: Any,
    fair: bool = False,
    reduction: str = "mean",
    *,
    void: float | None = None,
    mask: Any = None,
) -> Tensor:
    """Energy score of samples of several targets: E||x - y|| - E||x - x'|| / 2 with Euclidean norms; lower is better.

    The multivariate continuous ranked probability score (Gneiting & Raftery 2007), proper for the joint distribution, in units of the target:
    bring targets of different units to one scale first. m samples need m^2 norms, but no more memory than the samples.

    Args:
        samples: [m, n, ...].
        target: [n, ...]; all but the first dimension form one vector.
        fair: Whether to estimate the score of the distribution behind the samples without bias (m >= 2) instead of scoring the samples
            themselves as the whole distribution.
        reduction: "mean", or "none" for each row's term.
        void: Number that marks missing targets, such as NaN.
        mask: Boolean mask shaped like target, True for elements that count.

    Example:
        >>> samples = torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]]])
        >>> energy_score(samples, torch.tensor([[0.0, 0.0]]))
        tensor(1.2500, dtype=torch.float64)
    """
    if not isinstance(fair, bool):
        raise TypeError(f"fair must be True or False, found {fair!r:.100}")
    paths = _paths(samples, target, void, mask, minimum=1 + fair)
    return reduce_terms((_energy(draws, y, fair) for draws, y, _ in paths), reduction)


@metric(None, 0, 1)
def path_coverage(
    samples: Any,
    target: Any,
    level: float = 0.9,
    reduction: str = "mean",
    *,
    void: float | None = None,
    mask: Any = None,
) -> Tensor:
    """Share of paths that lie inside a joint band of samples at every step; best at `level`.

    Intervals that contain 90 % of targets at each step contain far fewer than 90 % of whole paths. The band is mean +- q sd of the samples at
    each step, with one q for all steps: the ceil(level (m + 1))-th smallest of the samples' largest deviations, each from the mean of the
    others in units of their standard deviation (a simultaneous band, Kolsrud 2007; Montiel Olea & Plagborg-Moller 2019).

    Args:
        samples: [m, n, ...], whole paths (steps must not be shuffled separately); m >= level / (1 - level) and m >= 3.
        target: [n, ...]; all but the first dimension form one path.
        level: Probability of the band, strictly between 0 and 1.
        reduction: "mean", or "none" for each row's term (1 inside, 0 outside).
        void: Number that marks missing targets, such as NaN.
        mask: Boolean mask shaped like target, True for elements that count.

    Example:
        >>> samples = torch.tensor([[-1.0, -1.1], [0.1, 0.0], [1.0, 1.2]])[:, None]  # three paths of two steps, for one row
        >>> path_coverage(samples, torch.tensor([[0.2, 0.1]]), level=0.5), path_coverage(samples, torch.tensor([[0.2, 9.0]]), level=0.5)
        (tensor(1., dtype=torch.float64), tensor(0., dtype=torch.float64))
    """
    level_in_unit("level", level)
    paths = _paths(samples, target, void, mask, minimum=3)
    return reduce_terms((_inside_band(*piece, _rank(level, len(piece[0]))) for piece in paths), reduction)


def _paths(samples: Any, target: Any, void: Any, mask: Any, minimum: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield pieces of samples [m, rows, k], target [rows, k] and the mask of steps that count [rows, k]; others are 0 in samples and target."""
    samples, target = real("samples", samples), real("target", target)
    if target.ndim == 0 or samples.shape[1:] != target.shape or len(samples) < minimum:
        raise ValueError(
            f"samples must have shape [m >= {minimum}, *target] of a target [n, ...], "
            f"found {tuple(samples.shape)} for target {tuple(target.shape)}"
        )
    keep = valid_mask(mask, void, target, target.shape)
    rows = max(1, _pieces.PIECE_SIZE * len(target) // samples.numel())
    for start in range(0, len(target), rows):
        part = slice(start, start + rows)
        draws, y = (
            samples[:, part].flatten(2) if target.ndim > 1 else samples[:, part, None],
            target[part].reshape(-1, target[0].numel()),
        )
        inside = torch.ones_like(y, dtype=torch.bool) if keep is None else keep[part].reshape(y.shape).to(y.device)
        if keep is not None:
            has_steps = inside.any(-1)
            inside, y, draws = inside[has_steps], y[has_steps], draws[:, has_steps.to(draws.device)]
            if not len(y):
                continue
            draws, y = draws.where(inside.to(draws.device), 0), y.where(inside, 0)
        yield numbers("samples", draws, full=samples), numbers("target", y, full=target), inside


def _energy(samples: Tensor, target: Tensor, fair: bool) -> Tensor:
    m = len(samples)
    spread = torch.zeros_like(target[:, 0])
    for i in range(m - 1):  # one sample against the others needs no more memory than the samples
        spread = spread + (samples[i + 1 :] - samples[i]).norm(dim=-1).sum(0)
    return (samples - target).norm(dim=-1).mean(0) - spread / (m * (m - 1) if fair else m * m)


def _rank(level: float, m: int) -> int:
    """Return the rank of the deviation that bounds the band among those of m samples."""
    rank = math.ceil(level * (m + 1) - 1e-9)
    if rank > m:
        raise ValueError(
            f"a band of level {level} needs at least {math.ceil(level / (1 - level) - 1e-9)} samples, found {m}"
        )
    return rank


def _inside_band(samples: Tensor, target: Tensor, counts: Tensor, rank: int) -> Tensor:
    m = len(samples)
    mean, squares = samples.mean(0), samples.var(0) * (m - 1)
    gap = (samples - mean).abs()
    # standard deviation of the other samples, for each sample; its distance from their mean is gap * m / (m - 1)
    others_sd = ((squares - gap.square() * m / (m - 1)).clamp_min(0) / (m - 2)).sqrt()
    width = _largest(gap * m / (m - 1), others_sd, counts).sort(0).values[rank - 1]
    return (_largest((target - mean).abs(), samples.std(0), counts) <= width).double()


def _largest(gap: Tensor, sd: Tensor, counts: Tensor) -> Tensor:
    """Return the largest gap of a path in standard deviations; if the standard deviation is 0, any gap counts as infinite."""
    scaled = torch.where(sd > 0, gap / sd.where(sd > 0, 1), torch.where(gap > 0, math.inf, 0.0))
    return scaled.where(counts, 0).amax(-1)
