"""Anomaly detection in streams: risks that depend on earlier values only, and alarms."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.data.split_drawing import whole_number
from workbench.metrics._inputs import numbers

CHUNK_SIZE = 256  # windows compared with all earlier ones at once


def novelty(series: Any, window: int = 1) -> Tensor:
    """Vacuitic risk of a series without a model: how much its latest values differ from everything before.

    At each time t, with w = window, it is the distance between the latest w values and the most similar w values that ended at least w steps
    earlier, in units of the range of the values so far:

        risk_t = sqrt(t / w) min_s |x_(t-w+1..t) - x_(s-w+1..s)| / (max - min)

    The distance is the left matrix profile (Yeh et al. 2016, without their normalization of each window). The nearest distance shrinks as a
    series gets longer; the square root of the time makes early and late risks comparable (chosen empirically on series of the Numenta Anomaly
    Benchmark, `workbench bench nab`).

    Args:
        series: finite values [time]. The cost grows with the square of their number.
        window: number of values compared at once; 1 only detects values that never occurred before.

    Returns:
        Risks [time], float64, between 0 and sqrt(time); 0 where there are no earlier values. They do not depend on later values.

    Raises:
        TypeError: series holds no numbers, or window is not an integer.
        ValueError: series is not [time] (pass several series one by one) or not finite, or window is less than 1.

    Example:
        >>> risk = novelty([0.0, 1.0, 0.0, 1.0, 3.0, 1.0, 3.0])
        >>> [round(value, 2) for value in risk.tolist()]
        [0.0, 1.0, 0.0, 0.0, 1.33, 0.0, 0.0]
    """
    values = _series("series", series).detach()
    if whole_number("window", window) < 1:
        raise ValueError(f"window must be at least 1; found {window}")
    risk = torch.zeros_like(values)
    if len(values) < 2 * window:
        return risk
    rows = values.unfold(0, window, 1)  # row i ends at value i + window - 1
    nearest = []
    for first in range(window, len(rows), CHUNK_SIZE):
        current, earlier = rows[first : first + CHUNK_SIZE], rows[: min(first + CHUNK_SIZE, len(rows)) - window]
        # distances by matrix products would lose precision where they are small
        distances = torch.cdist(current, earlier, compute_mode="donot_use_mm_for_euclid_dist")
        too_late = torch.arange(len(earlier))[None] > torch.arange(first, first + len(current))[:, None] - window
        nearest.append(distances.masked_fill(too_late.to(distances.device), math.inf).amin(1))
    span = (values.cummax(0).values - values.cummin(0).values)[2 * window - 1 :]
    time = torch.arange(2 * window - 1, len(values), device=values.device).to(values)
    distance = torch.cat(nearest)
    risk[2 * window - 1 :] = torch.where(span > 0, (time / window).sqrt() * distance / span, 0)
    return risk


def anomaly_likelihood(risk: Any, short: int = 10, long: int | None = None, start: int = 100) -> Tensor:
    """How unusual the latest risks of a series are compared with earlier ones, which makes risks of different series comparable.

    A risk that is always high is not informative. The mean m of the `short` latest risks is compared with the mean and standard deviation of
    the `long` risks before the latest one, as if they were normal; the result is the tail probability on a log scale (Ahmad et al. 2017,
    section 3.2, where it is 1 - 10^-likelihood):

        likelihood_t = -log10 Q((m_t - mean_t) / deviation_t)

    Args:
        risk: finite risks [time] of any scale, in time order.
        short: number of latest risks to average; 1 for anomalies of single values.
        long: number of earlier risks to compare with; None: all.
        start: number of first risks whose likelihood is 0.

    Returns:
        Likelihoods [time], float64, at least 0; infinite where a risk exceeds earlier ones that were all 0. They do not depend on later risks.

    Raises:
        TypeError: a number is not an integer.
        ValueError: risk is not [time] or not finite, or a number is out of range.

    Example:
        >>> risk = torch.tensor([1.0, 2.0, 3.0] * 100)
        >>> risk[250] = 9.0
        >>> likelihood = anomaly_likelihood(risk, short=1)
        >>> int(likelihood.argmax()), bool(likelihood[251:].max() < 1 < 10 < likelihood[250])
        (250, True)
    """
    risk = _series("risk", risk)
    for name, number, minimum in (("short", short, 1), ("long", 2 if long is None else long, 2), ("start", start, 2)):
        if whole_number(name, number) < minimum:
            raise ValueError(f"{name} must be at least {minimum}; found {number}")
    shifted = risk - risk[0]  # to keep precision in the sums
    sums = F.pad(shifted.cumsum(0), (1, 0))
    time = torch.arange(len(risk), device=risk.device)
    since = (time + 1 - short).clamp_min(0)
    latest = (sums[time + 1] - sums[since]) / (time + 1 - since)
    mean, deviation = _moments_before(shifted, len(risk) if long is None else min(long, len(risk)))
    z = torch.where(latest > mean, (latest - mean) / deviation, 0)
    likelihood = -torch.special.log_ndtr(-z) / math.log(10)
    return torch.where((time >= start) & (latest > mean), likelihood, 0)


def _moments_before(values: Tensor, long: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of the `long` values before each time, [time] each.

    They are joined from the end of one block of `long` values and the beginning of the next, so that nothing is computed from values that are
    not among them: a difference of running sums would keep the rounding error of the largest value for good.
    """

    def running(rows: Tensor) -> list[Tensor]:
        """Return the sums of the first 0, 1, ... numbers of each row, and their sums and sums of squares about its first number."""
        about = rows - rows[:, :1]
        return [F.pad(part.cumsum(1), (1, 0)) for part in (rows, about, about.square())]

    blocks = F.pad(values, (0, -len(values) % long)).unfold(0, long, long)
    time = torch.arange(len(values), device=values.device)
    block, late = time // long, time % long
    early = torch.where(block > 0, long - late, 0)
    total, sums, squares = (part[block, late] for part in running(blocks))
    ends = [part[(block - 1).clamp_min(0), early] for part in running(blocks.flip(1))]
    count, n_late, n_early = (n.clamp_min(1).to(values) for n in (late + early, late, early))
    gap = (ends[0] / n_early - total / n_late).square() * late * early / count
    scatter = squares - sums.square() / n_late + ends[2] - ends[1].square() / n_early + gap
    floor = 1e-12 * (squares + ends[2])  # rounding error of the differences
    return (total + ends[0]) / count, (scatter.clamp_min(0).maximum(floor) / count).sqrt()


def first_alarms(risk: Any, rest: int) -> Tensor:
    """Keep the risks that are higher than each of the `rest` risks before them; the others become minus infinity.

    A lasting anomaly raises one alarm, and another one only if it gets worse. For every threshold applied to the result, no alarm follows a
    higher one within `rest` values.

    Args:
        risk: risks [time] in time order; infinity is allowed.
        rest: number of earlier values to compare with.

    Returns:
        Risks [time], float64. They do not depend on later risks.

    Raises:
        TypeError: rest is not an integer.
        ValueError: risk is not [time] or has NaN, or rest is less than 1.

    Example:
        >>> first_alarms([1.0, 3.0, 2.0, 3.0, 4.0, 1.0, 2.0], rest=2)
        tensor([1., 3., -inf, -inf, 4., -inf, -inf], dtype=torch.float64)
    """
    risk = _series("risk", risk, finite=False)
    if whole_number("rest", rest) < 1:
        raise ValueError(f"rest must be at least 1; found {rest}")
    earlier = torch.cat([risk.new_full((rest,), -math.inf), risk[:-1]])
    return torch.where(risk > earlier.unfold(0, rest, 1).amax(1), risk, -math.inf)


def _series(name: str, values: Any, finite: bool = True) -> Tensor:
    array = numbers(name, values, finite=finite)
    if array.dim() != 1:
        raise ValueError(f"{name} must have shape [time], found {list(array.shape)}")
    return array


__all__ = ["anomaly_likelihood", "first_alarms", "novelty"]
