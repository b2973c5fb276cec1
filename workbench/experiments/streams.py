"""Risks of streams, each made of what was known when its value came, and when they are worth an alarm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from workbench.data.split_drawing import whole_number
from workbench.metrics._inputs import numbers

ROWS = 256  # windows that are compared with all before them at a time


def novelty(series: Any, window: int = 1) -> Tensor:
    """How unlike everything before them the latest values of a series are: its vacuitic risk, without a model.

    At each time t, with w = window, the distance of the latest w values to the nearest w values that ended at least w before, in units of the
    range of the values so far:

        risk_t = sqrt(t / w) min_s |x_(t-w+1..t) - x_(s-w+1..s)| / (max - min)

    The distance is the left matrix profile (Yeh et al. 2016, without their scaling of each window). The longer a series, the nearer its nearest
    value: the root of the time makes risks early and late in a series alike (chosen on series of the Numenta Anomaly Benchmark,
    `workbench bench nab`; it is no law).

    Args:
        series: values [time], finite. The work grows with the square of their number.
        window: how many values are compared at once; 1 asks only for values that were never met.

    Returns:
        Risks [time], float64, at least 0 and at most sqrt(time); 0 where nothing is before. Later values change none of them.

    Raises:
        TypeError: series holds no numbers, or window is no whole number.
        ValueError: series is not [time] (ask about several one by one) or not finite, or window is less than 1.

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
    for first in range(window, len(rows), ROWS):
        now, before = rows[first : first + ROWS], rows[: min(first + ROWS, len(rows)) - window]
        # sums of products would lose the small distances
        distances = torch.cdist(now, before, compute_mode="donot_use_mm_for_euclid_dist")
        late = torch.arange(len(before))[None] > torch.arange(first, first + len(now))[:, None] - window
        nearest.append(distances.masked_fill(late.to(distances.device), math.inf).amin(1))
    span = (values.cummax(0).values - values.cummin(0).values)[2 * window - 1 :]
    time = torch.arange(2 * window - 1, len(values), device=values.device).to(values)
    distance = torch.cat(nearest)
    risk[2 * window - 1 :] = torch.where(span > 0, (time / window).sqrt() * distance / span, 0)
    return risk


def anomaly_likelihood(risk: Any, short: int = 10, long: int | None = None, start: int = 100) -> Tensor:
    """How unusual the latest risks of a series are beside those before: makes risks of different series comparable.

    A risk that is always high says nothing. The mean m of the `short` latest risks is compared with mean and standard deviation of the `long`
    risks before the latest one, as if they were normal, and the tail probability is told on a log scale (Ahmad et al. 2017, section 3.2,
    where it is 1 - 10^-risk):

        likelihood_t = -log10 Q((m_t - mean_t) / deviation_t)

    Args:
        risk: risks [time] of any scale, in the order of time, finite.
        short: how many of the latest risks speak together; 1 for anomalies that last for one value.
        long: how many risks before are compared with; None: all.
        start: before so many risks were met, likelihoods are 0.

    Returns:
        [time], float64, at least 0; infinite where a risk is higher than earlier ones that were all 0. Later risks change none of them.

    Raises:
        TypeError: a number is not whole.
        ValueError: risk is not [time] or not finite, or a number is out of range.

    Example:
        >>> risk = torch.tensor([1.0, 2.0, 3.0] * 100)
        >>> risk[250] = 9.0
        >>> likelihood = anomaly_likelihood(risk, short=1)
        >>> int(likelihood.argmax()), bool(likelihood[251:].max() < 1 < 10 < likelihood[250])
        (250, True)
    """
    risk = _series("risk", risk)
    for name, number, least in (("short", short, 1), ("long", 2 if long is None else long, 2), ("start", start, 2)):
        if whole_number(name, number) < least:
            raise ValueError(f"{name} must be at least {least}; found {number}")
    shifted = risk - risk[0]  # so that sums of squares keep their digits
    sums, squares = (torch.cat([part.new_zeros(1), part.cumsum(0)]) for part in (shifted, shifted.square()))
    time = torch.arange(len(risk), device=risk.device)
    since = (time + 1 - short).clamp_min(0)
    latest = (sums[time + 1] - sums[since]) / (time + 1 - since)
    begin = torch.zeros_like(time) if long is None else (time - long).clamp_min(0)
    count = (time - begin).clamp_min(1)
    mean = (sums[time] - sums[begin]) / count
    floor = 1e-12 * squares[time] / time.clamp_min(1)  # what is lost in the difference of sums
    deviation = ((squares[time] - squares[begin]) / count - mean.square()).clamp_min(0).maximum(floor).sqrt()
    z = torch.where(latest > mean, (latest - mean) / deviation, 0)
    likelihood = -torch.special.log_ndtr(-z) / math.log(10)
    return torch.where((time >= start) & (latest > mean), likelihood, 0)


def first_alarms(risk: Any, rest: int) -> Tensor:
    """Risks that are higher than each of the `rest` before; minus infinity in place of the others.

    An anomaly that lasts is told once, and again only if it gets worse. Whatever threshold is chosen afterwards, no alarm follows a higher
    one within `rest` values.

    Args:
        risk: risks [time] in the order of time; infinity is allowed.
        rest: how many values before each are looked at.

    Returns:
        [time], float64. Later risks change none of them.

    Raises:
        TypeError: rest is no whole number.
        ValueError: risk is not [time] or has NaN, or rest is less than 1.

    Example:
        >>> first_alarms([1.0, 3.0, 2.0, 3.0, 4.0, 1.0, 2.0], rest=2)
        tensor([1., 3., -inf, -inf, 4., -inf, -inf], dtype=torch.float64)
    """
    risk = _series("risk", risk, finite=False)
    if whole_number("rest", rest) < 1:
        raise ValueError(f"rest must be at least 1; found {rest}")
    before = torch.cat([risk.new_full((rest,), -math.inf), risk[:-1]])
    return torch.where(risk > before.unfold(0, rest, 1).amax(1), risk, -math.inf)


def _series(name: str, values: Any, finite: bool = True) -> Tensor:
    array = numbers(name, values, finite=finite)
    if array.dim() != 1:
        raise ValueError(f"{name} must have shape [time], found {list(array.shape)}")
    return array


__all__ = ["anomaly_likelihood", "first_alarms", "novelty"]
