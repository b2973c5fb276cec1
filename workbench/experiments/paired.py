"""Paired tests of models on the same splits: which differences are statistically significant ("beyond noise")."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import require
from .directions import may_be_best

LEVEL = 0.95
_ROUNDING = 1e-9  # differences up to this fraction of the values count as zero


@dataclass(frozen=True)
class Comparison:
    """Scores of several models on the same splits.

    Attributes:
        scores: model -> metric -> one value per split; NaN for missing values.
        splits: identifiers of the splits, in the order of the values.
        higher: metric -> whether higher is better; other metrics are shown but not tested.
        reference: model that all others are compared with.
        headline: metric that the verdict is about.
        passes: model -> forward passes of one prediction with its risk; empty: not known.
        labels: metric -> display name.
        units: metric -> unit.
        test_share: ratio of test rows to training rows if the splits are drawn from the same rows; 0: the splits share no rows.
        over: what the values of a metric vary over: "splits", or "seeds" of one split.
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
        """All metrics, in order of appearance."""
        return list(dict.fromkeys(metric for scores in self.scores.values() for metric in scores))

    def values(self, model: str, metric: str) -> list[float]:
        """Return the scores of a model on all splits; NaN for missing ones."""
        return [float(v) for v in self.scores[model].get(metric, [math.nan] * len(self.splits))]

    def label(self, metric: str) -> str:
        """Return the display name of a metric."""
        return self.labels.get(metric, metric.replace("_", " "))


class Difference(NamedTuple):
    """Difference between a model's metric and that of the reference, over the splits.

    Attributes:
        mean: mean paired difference, in the metric's unit; NaN if not tested.
        low, high: its 95 % confidence interval, not corrected for multiple comparisons; NaN for one split.
        p: two-sided p-value, corrected for multiple comparisons by Holm's method.
        better: True or False if the difference is significant, else None.
        why_not: reason why it is not tested; empty if it is.
    """

    mean: float
    low: float
    high: float
    p: float
    better: bool | None
    why_not: str = ""


def differences(comparison: Comparison) -> dict[tuple[str, str], Difference]:
    """Return (model, metric) -> the paired difference from the reference, for every metric with a direction.

    Paired t-test over the splits. If the splits are drawn from the same rows, their scores are not independent, and the variance of the mean
    is s^2 (1 / n + test_share) instead of s^2 / n (Nadeau and Bengio, 2003). The p-values are corrected by Holm's method: those of the headline
    over the models, those of all other metrics over models and metrics together. A model without a finite value on some split is not tested,
    since the remaining splits could be the easier ones.
    """
    uncorrected = {
        (model, metric): _difference(comparison, model, metric)
        for model in comparison.scores
        for metric in comparison.metrics
        if model != comparison.reference and metric in comparison.higher
    }
    corrected: dict[tuple[str, str], Difference] = {}
    for family in (True, False):
        tested = {k: d for k, d in uncorrected.items() if (k[1] == comparison.headline) is family and not d.why_not}
        running = 0.0
        for rank, (key, d) in enumerate(sorted(tested.items(), key=lambda item: item[1].p)):
            running = max(running, min(1.0, d.p * (len(tested) - rank)))
            significant = running < 1 - LEVEL
            corrected[key] = d._replace(
                p=running, better=(d.mean > 0) is comparison.higher[key[1]] if significant else None
            )
    return {key: corrected.get(key, d) for key, d in uncorrected.items()}


def _difference(comparison: Comparison, model: str, metric: str) -> Difference:
    values, reference_values = comparison.values(model, metric), comparison.values(comparison.reference, metric)
    pairs = [a - b for a, b in zip(values, reference_values, strict=True)]
    for name, numbers in ((comparison.reference, reference_values), (model, values)):
        if missing := [str(s) for s, v in zip(comparison.splits, numbers, strict=True) if not math.isfinite(v)]:
            everywhere = len(missing) == len(numbers)
            where = "any split" if everywhere else f"split{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            return _unjudged(f"{name} has no {comparison.label(metric)} on {where}")
    means = {name: statistics.fmean(comparison.values(model, name)) for name in comparison.scores[model]}
    if not may_be_best(metric, means):
        return _unjudged(f"the intervals of {model} hold too few targets here")
    count, mean = len(pairs), statistics.fmean(pairs)
    if count < 2:
        return _unjudged("one split", mean)
    deviation, scale = statistics.stdev(pairs), max(map(abs, (*values, *reference_values)))
    if max(map(abs, pairs)) <= _ROUNDING * scale:
        return Difference(mean, mean, mean, 1.0, None)
    # Student's t distribution without scipy.stats, which takes half a second to import
    special = require("scipy.special", "lab")
    error = max(deviation, _ROUNDING * scale) * math.sqrt(1 / count + comparison.test_share)
    half_width = float(special.stdtrit(count - 1, (1 + LEVEL) / 2)) * error
    return Difference(
        mean, mean - half_width, mean + half_width, 2 * float(special.stdtr(count - 1, -abs(mean) / error)), None
    )


def _unjudged(reason: str, mean: float = math.nan) -> Difference:
    return Difference(mean, math.nan, math.nan, math.nan, None, reason)


def stated_test(comparison: Comparison) -> str:
    """Describe the test in a sentence."""
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
    families = [f"for {models} models"] if models > 1 else []
    if len(comparison.higher.keys() & set(comparison.metrics) - {comparison.headline}) > 1 - (models > 1):
        families.append(f"for all metrics other than {comparison.label(comparison.headline)} together")
    corrected = f", corrected by Holm's method {' and '.join(families)}" if families else ""
    return (
        f"Beyond noise: paired t-test against {comparison.reference} over {len(comparison.splits)} {comparison.over} at {LEVEL:.0%}"
        f"{corrected}{shared}."
    ).replace("95%", "95 %")


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean over splits; NaN for fewer than two."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
