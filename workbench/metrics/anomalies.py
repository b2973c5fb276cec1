"""Scores of anomaly detection in series, where anomalies last for a while and early detection is worth more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from workbench.metrics._inputs import numbers

PROFILES = {  # weights of a detected window, a false alarm and a missed window
    "standard": (1.0, 0.11, 1.0),
    "low_fp": (1.0, 0.22, 1.0),
    "low_fn": (1.0, 0.11, 2.0),
}
PROBATION, MAX_PROBATION_LENGTH = 0.15, 5000  # the first 15 % of a series, of at most 5000 values, do not count
FAR = 3.0  # window lengths after a window from which on a false alarm has full cost


class NABScore(NamedTuple):
    """A score of the Numenta Anomaly Benchmark.

    Args:
        score: 100 for a perfect detector, 0 for a silent one; negative if false alarms outweigh detections.
        threshold: values whose risk is at least this are alarms; infinity if raising no alarm is best.
    """

    score: Tensor
    threshold: Tensor


def nab_score(
    risks: Sequence[Any],
    windows: Sequence[Sequence[Sequence[int]]],
    profile: Literal["standard", "low_fp", "low_fn"] = "standard",
    threshold: float | None = None,
) -> NABScore:
    """Score of the Numenta Anomaly Benchmark, NAB (Lavin & Ahmad 2015, arXiv:1510.03336), over all series of a corpus together.

    Alarms are the values with a risk of at least the threshold. Only the first alarm in each window counts, and earlier ones count more:
    s(y) = 2 / (1 + exp(5 y)) - 1 with y = -(last - i + 1) / length, from -1 at its first value to almost 0 at its last, divided by s(-1). A
    window without an alarm costs `fn`. Each alarm outside costs -s(y) fp with y = (i - last) / (length - 1) of the window before, and fp if
    y is 3 or more, or if there is no window before; the first 15 % of a series, of at most 5000 values, do not count. The score is

        100 (sum + fn n) / (tp n + fn n)

    for n windows: a detector that never raises an alarm scores 0, one that raises alarms exactly at the first value of every window 100.
    Weights (tp, fp, fn) are (1, 0.11, 1) for "standard", (1, 0.22, 1) for "low_fp", (1, 0.11, 2) for "low_fn".

    The benchmark chooses the threshold with the best score on these very series, one for all of them; so does None. Even random numbers get
    a positive score that way. Compare with `auroc` and `aupr` over the values, which need no threshold.

    Args:
        risks: list of risks, [time] for each series.
        windows: for each series, the positions (first, last) of its anomaly windows, in order, with last inclusive. A window with no value that
            counts is ignored.
        profile: the costs of errors.
        threshold: threshold of an alarm; None: the best one.

    Returns:
        `score` and `threshold`, float64 without dimensions.

    Raises:
        TypeError: positions are not integers.
        ValueError: a risk is NaN, windows overlap or lie outside of their series, or there is no window.

    Example:
        >>> risk = torch.zeros(100)
        >>> risk[[30, 60]] = torch.tensor([1.0, 2.0])
        >>> nab_score([risk], [[(60, 69)]])
        NABScore(score=tensor(100., dtype=torch.float64), threshold=tensor(2., dtype=torch.float64))
        >>> nab_score([risk], [[(60, 69)]], threshold=1.0).score  # the alarm at 30 costs 0.11 of 2
        tensor(94.5000, dtype=torch.float64)
    """
    if not isinstance(profile, str) or profile not in PROFILES:
        raise ValueError(f"profile must be one of {', '.join(map(repr, PROFILES))}; found {profile!r:.100}")
    if threshold is not None and not _is_number(threshold):
        raise ValueError(f"threshold must be a number or None; found {threshold!r:.100}")
    tp, fp, fn = PROFILES[profile]
    series = list(_checked_series(risks, windows))
    count = sum(len(series_windows) for _, series_windows, _ in series)
    if not count:
        raise ValueError("no series has an anomaly window after its first 15 %: there is nothing to score")
    thresholds = torch.cat([risk[start:] for risk, _, start in series])
    gains = torch.cat([_gains(risk, series_windows, start, (tp, fp, fn)) for risk, series_windows, start in series])
    order = thresholds.argsort(descending=True, stable=True)
    thresholds, sums = thresholds[order], gains[order].cumsum(0)
    is_last_equal = torch.ones_like(thresholds, dtype=torch.bool)  # values of equal risk become alarms together
    is_last_equal[:-1] = thresholds[1:] != thresholds[:-1]
    silence = torch.tensor([math.inf], dtype=torch.float64)
    thresholds, sums = torch.cat([silence, thresholds[is_last_equal]]), torch.cat([0 * sums[:1], sums[is_last_equal]])
    if threshold is None:
        at = int(sums.argmax())
        return NABScore(100 * sums[at] / (count * (tp + fn)), thresholds[at])
    at = int((thresholds[1:] >= threshold).sum())
    return NABScore(100 * sums[at] / (count * (tp + fn)), torch.tensor(float(threshold), dtype=torch.float64))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _checked_series(risks: Any, windows: Any) -> Iterator[tuple[Tensor, list[tuple[int, int]], int]]:
    """Yield, for each series, its risks, the windows with values that count, and the first position that counts."""
    if not isinstance(risks, Sequence) or not isinstance(windows, Sequence) or len(risks) != len(windows):
        lengths = " and ".join(f"{len(x)}" if isinstance(x, Sequence) else type(x).__name__ for x in (risks, windows))
        raise ValueError(
            f"risks and windows must be lists with one entry per series, found {lengths}; for a single series pass [risk] and [windows]"
        )
    for number, (risk, series_windows) in enumerate(zip(risks, windows, strict=True)):
        risk = numbers(f"risks[{number}]", risk, finite=False).cpu()
        if risk.ndim != 1:
            raise ValueError(f"risks[{number}] must have shape [time], found {tuple(risk.shape)}")
        start, previous_end = int(PROBATION * min(len(risk), MAX_PROBATION_LENGTH)), -1
        pairs = []
        for window in series_windows:
            first, last = _pair(window, f"windows[{number}]")
            if not previous_end < first <= last < len(risk):
                raise ValueError(
                    f"windows[{number}]: ({first}, {last}) must start after position {previous_end} and end by {len(risk) - 1}; windows are "
                    "positions (first, last) in order, which do not overlap"
                )
            previous_end = last
            pairs.append((first, last))
        yield risk, [(first, last) for first, last in pairs if last >= start], start


def _pair(window: Any, name: str) -> tuple[int, int]:
    try:
        first, last = (number.__index__() for number in window)
    except (TypeError, ValueError, AttributeError) as error:
        raise TypeError(
            f"{name} must hold pairs of positions (first, last), whole numbers; found {window!r:.100}"
        ) from error
    return first, last


def _gains(risk: Tensor, windows: list[tuple[int, int]], start: int, weights: tuple[float, float, float]) -> Tensor:
    """Return how much each value that counts adds to the score when the threshold falls to its risk."""
    tp, fp, fn = weights
    gains = torch.full_like(risk, -fp)
    for first, last in windows:
        after = torch.arange(1, len(risk) - last, dtype=torch.float64)
        gains[last + 1 :] = fp * _sigmoid(after / (last - first))  # the next window overwrites its part
        positions = torch.arange(max(first, start), last + 1)
        worth = (
            tp * _sigmoid(-(last - positions + 1).double() / (last - first + 1)) / _sigmoid(torch.tensor(-1.0).double())
        )
        order = risk[positions].argsort(descending=True, stable=True)
        best = torch.cat([torch.tensor([-fn]).double(), worth[order]]).cummax(0).values
        gains[positions[order]] = best.diff()
    return gains[start:]


def _sigmoid(y: Tensor) -> Tensor:
    return torch.where(y < FAR, 2 / (1 + (5 * y).exp()) - 1, -1.0)
