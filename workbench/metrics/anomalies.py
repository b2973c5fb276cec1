"""Scores of anomalies in series, which last for a while and are worth more the earlier they are told."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from workbench.metrics._inputs import numbers

PROFILES = {  # weights of a detected window, of a false alarm and of a missed window
    "standard": (1.0, 0.11, 1.0),
    "low_fp": (1.0, 0.22, 1.0),
    "low_fn": (1.0, 0.11, 2.0),
}
PROBATION, LONGEST = 0.15, 5000  # the share of a series, and of so many values at most, in which nothing counts
FAR = 3.0  # window lengths after a window, from which on a false alarm costs all


class NABScore(NamedTuple):
    """A score of the Numenta Anomaly Benchmark.

    Args:
        score: 100 for a perfect detector, 0 for one that is silent; less than 0 where false alarms outweigh what is found.
        threshold: alarms are the values whose risk is at least this; infinity: silence was best.
    """

    score: Tensor
    threshold: Tensor


def nab_score(
    risks: Sequence[Any],
    windows: Sequence[Sequence[Sequence[int]]],
    profile: Literal["standard", "low_fp", "low_fn"] = "standard",
    threshold: float | None = None,
) -> NABScore:
    """The score of the Numenta Anomaly Benchmark, NAB (Lavin & Ahmad 2015, arXiv:1510.03336), of all series of a corpus together.

    Alarms are the values with a risk of at least the threshold. Of each window only the first alarm counts, and the more the earlier:
    s(y) = 2 / (1 + exp(5 y)) - 1 with y = -(last - i + 1) / length, from -1 at its first value to almost 0 at its last, divided by s(-1). A
    window without one costs `fn`. Each alarm outside costs -s(y) fp with y = (i - last) / (length - 1) of the window before, and fp where that
    is 3 or more, or none is before; the first 15 % of a series, and of 5000 values at most, do not count. The score is

        100 (sum + fn n) / (tp n + fn n)

    for n windows: 0 is a detector that never raises an alarm, 100 one that does at the first value of every window and nowhere else.
    Weights (tp, fp, fn) are (1, 0.11, 1) for "standard", (1, 0.22, 1) for "low_fp", (1, 0.11, 2) for "low_fn".

    The benchmark chooses the threshold that gives the best score on these very series, one for all of them; so does None. Random numbers have
    a positive score by that. Compare with `auroc` and `aupr` over the values, which ask for no threshold.

    Args:
        risks: one risk for each value of each series, a list of [time].
        windows: of each series the positions (first, last) of the windows of its anomalies, in order, the last one included. A window of which
            no value counts is left out.
        profile: what errors cost.
        threshold: of an alarm; None: the best one.

    Returns:
        `score` and `threshold`, float64 without dimensions.

    Raises:
        TypeError: positions are no whole numbers.
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
    series = list(_checked(risks, windows))
    count = sum(len(of) for _, of, _ in series)
    if not count:
        raise ValueError("there is no window of an anomaly behind the first 15 % of any series: nothing can be scored")
    levels = torch.cat([risk[start:] for risk, _, start in series])
    gains = torch.cat([_gains(risk, of, start, (tp, fp, fn)) for risk, of, start in series])
    order = levels.argsort(descending=True, stable=True)
    levels, sums = levels[order], gains[order].cumsum(0)
    whole = torch.ones_like(levels, dtype=torch.bool)  # values of equal risk are alarms together
    whole[:-1] = levels[1:] != levels[:-1]
    silence = torch.tensor([math.inf], dtype=torch.float64)
    levels, sums = torch.cat([silence, levels[whole]]), torch.cat([0 * sums[:1], sums[whole]])
    if threshold is None:
        at = int(sums.argmax())
        return NABScore(100 * sums[at] / (count * (tp + fn)), levels[at])
    at = int((levels[1:] >= threshold).sum())
    return NABScore(100 * sums[at] / (count * (tp + fn)), torch.tensor(float(threshold), dtype=torch.float64))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _checked(risks: Any, windows: Any) -> Iterator[tuple[Tensor, list[tuple[int, int]], int]]:
    """Of each series its risks, the windows of which some value counts, and the first position that counts."""
    if not isinstance(risks, Sequence) or not isinstance(windows, Sequence) or len(risks) != len(windows):
        lengths = " and ".join(f"{len(x)}" if isinstance(x, Sequence) else type(x).__name__ for x in (risks, windows))
        raise ValueError(
            f"risks and windows must be lists with one entry for each series, found {lengths}; of one series give [risk] and [windows]"
        )
    for number, (risk, of) in enumerate(zip(risks, windows, strict=True)):
        risk = numbers(f"risks[{number}]", risk, finite=False).cpu()
        if risk.ndim != 1:
            raise ValueError(f"risks[{number}] must have shape [time], found {tuple(risk.shape)}")
        start, before = int(PROBATION * min(len(risk), LONGEST)), -1
        pairs = []
        for window in of:
            first, last = _pair(window, f"windows[{number}]")
            if not before < first <= last < len(risk):
                raise ValueError(
                    f"windows[{number}]: ({first}, {last}) must lie behind position {before} and end by {len(risk) - 1}; windows are positions "
                    "(first, last) in order, which do not overlap"
                )
            before = last
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
    """What each value that counts adds to the score when the threshold falls to its risk."""
    tp, fp, fn = weights
    gains = torch.full_like(risk, -fp)
    for first, last in windows:
        after = torch.arange(1, len(risk) - last, dtype=torch.float64)
        gains[last + 1 :] = fp * _sigmoid(after / (last - first))  # up to the next window, which overwrites the rest
        at = torch.arange(max(first, start), last + 1)
        worth = tp * _sigmoid(-(last - at + 1).double() / (last - first + 1)) / _sigmoid(torch.tensor(-1.0).double())
        order = risk[at].argsort(descending=True, stable=True)
        best = torch.cat([torch.tensor([-fn]).double(), worth[order]]).cummax(0).values
        gains[at[order]] = best.diff()
    return gains[start:]


def _sigmoid(y: Tensor) -> Tensor:
    return torch.where(y < FAR, 2 / (1 + (5 * y).exp()) - 1, -1.0)
