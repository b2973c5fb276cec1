"""Paired tests of models over the same splits: which differences are beyond noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import require
from .directions import may_be_best

LEVEL = 0.95
_ROUNDING = 1e-9  # differences this small, beside the values themselves, are none


@dataclass(frozen=True)
class Comparison:
    """Scores of several models on the same splits.

    Attributes:
        scores: model -> metric -> one value for each split; NaN where there is none.
        splits: what tells the splits apart, in the order of the values.
        higher: metric -> whether more of it is better; other metrics are shown and not judged.
        reference: the model that all others are compared with.
        headline: the metric that the verdict is about.
        passes: model -> forward passes that one prediction with its risk takes; empty: not known.
        labels: metric -> its name for people.
        units: metric -> its unit.
        test_share: rows of a test split for each row trained on, where the splits are drawn from the same rows; 0: the splits share none.
        over: what the values of a metric are of: "splits", or "seeds" of one split.
    """

    scores: Mapping[str, Mapping[str, Sequence[float]]]
    splits: Sequence[Any]
    higher: Mapping[str, bool]
    reference: str
    headline: str
    passes: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    test_share: float = 0.0
    over: str = "splits"

    @property
    def metrics(self) -> list[str]:
        """All metrics, as they come."""
        return list(dict.fromkeys(metric for scores in self.scores.values() for metric in scores))

    def values(self, model: str, metric: str) -> list[float]:
        """The scores of a model, NaN where it has none."""
        return [float(v) for v in self.scores[model].get(metric, [math.nan] * len(self.splits))]

    def label(self, metric: str) -> str:
        """The name of a metric for people."""
        return self.labels.get(metric, metric.replace("_", " "))


class Difference(NamedTuple):
    """How far a model's metric is from the reference's, over the splits.

    Attributes:
        mean: the mean paired difference, in the metric's unit; NaN where it is not judged.
        low, high: its interval of 95 %, for this comparison alone; NaN over one split.
        p: two-sided p-value, corrected for all comparisons made beside it (Holm).
        better: True or False where the difference is beyond noise, None where it is not.
        why_not: why it is not judged; empty where it is.
    """

    mean: float
    low: float
    high: float
    p: float
    better: bool | None
    why_not: str = ""


def differences(comparison: Comparison) -> dict[tuple[str, str], Difference]:
    """(model, metric) -> the paired difference from the reference, for every metric with a direction.

    Paired t-test over the splits. Where the splits are drawn from the same rows, their scores are not independent, and the variance of the mean
    is s^2 (1 / n + test_share) instead of s^2 / n (Nadeau and Bengio, 2003). The p-values are corrected by Holm's method: those of the headline
    over the models, those of all other metrics over models and metrics together. A model without a finite value on some split is not judged:
    the splits that went well would flatter it.
    """
    single = {
        (model, metric): _difference(comparison, model, metric)
        for model in comparison.scores
        for metric in comparison.metrics
        if model != comparison.reference and metric in comparison.higher
    }
    corrected: dict[tuple[str, str], Difference] = {}
    for family in (True, False):
        tested = {k: d for k, d in single.items() if (k[1] == comparison.headline) is family and not d.why_not}
        running = 0.0
        for rank, (key, d) in enumerate(sorted(tested.items(), key=lambda item: item[1].p)):
            running = max(running, min(1.0, d.p * (len(tested) - rank)))
            beyond = running < 1 - LEVEL
            corrected[key] = d._replace(p=running, better=(d.mean > 0) is comparison.higher[key[1]] if beyond else None)
    return {key: corrected.get(key, d) for key, d in single.items()}


def _difference(comparison: Comparison, model: str, metric: str) -> Difference:
    values, plain = comparison.values(model, metric), comparison.values(comparison.reference, metric)
    pairs = [a - b for a, b in zip(values, plain, strict=True)]
    for name, numbers in ((comparison.reference, plain), (model, values)):
        if gaps := [str(s) for s, v in zip(comparison.splits, numbers, strict=True) if not math.isfinite(v)]:
            every = len(gaps) == len(numbers)
            where = "any split" if every else f"split{'s' if len(gaps) > 1 else ''} {', '.join(gaps)}"
            return _unjudged(f"{name} has no {comparison.label(metric)} on {where}")
    means = {name: statistics.fmean(comparison.values(model, name)) for name in comparison.scores[model]}
    if not may_be_best(metric, means):
        return _unjudged(f"the intervals of {model} do not cover")
    count, mean = len(pairs), statistics.fmean(pairs)
    if count < 2:
        return _unjudged("one split", mean)
    deviation, scale = statistics.stdev(pairs), max(map(abs, (*values, *plain)))
    if max(map(abs, pairs)) <= _ROUNDING * scale:
        return Difference(mean, mean, mean, 1.0, None)
    special = require("scipy.special", "lab")  # Student's t itself: scipy.stats takes half a second to import
    error = max(deviation, _ROUNDING * scale) * math.sqrt(1 / count + comparison.test_share)
    half = float(special.stdtrit(count - 1, (1 + LEVEL) / 2)) * error
    return Difference(mean, mean - half, mean + half, 2 * float(special.stdtr(count - 1, -abs(mean) / error)), None)


def _unjudged(why: str, mean: float = math.nan) -> Difference:
    return Difference(mean, math.nan, math.nan, math.nan, None, why)


def stated_test(comparison: Comparison) -> str:
    """How it was tested, in words."""
    if len(comparison.splits) < 2:
        return "One split: nothing was tested."
    models = len(comparison.scores) - 1
    shared = (
        "; the splits share rows, so their variance is raised by Nadeau and Bengio's correction"
        if comparison.test_share
        else "; the splits are taken as independent"
        if comparison.over == "splits"
        else f"; {comparison.over} of one split say nothing of other splits"
    )
    corrected = (
        f", corrected by Holm's method for {models} models (and, for metrics other than {comparison.label(comparison.headline)}, "
        "for all of these together)"
    )
    return (
        f"Beyond noise: paired t-test against {comparison.reference} over {len(comparison.splits)} {comparison.over} at {LEVEL:.0%}"
        f"{corrected}{shared}."
    ).replace("95%", "95 %")


def standard_error(values: Sequence[float]) -> float:
    """Of the mean over splits; NaN for fewer than two."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
