"""What a comparison of models over splits says beyond noise, in two sentences, and the numbers of its figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import require
from ..experiments.directions import may_be_best

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


def from_stamp(table: Mapping[str, Sequence[Any]], stamp: Mapping[str, Any]) -> Comparison:
    """The comparison in an output of a notebook: its table, and what was said of it."""
    pairs = {key: dict(stamp[key]) for key in ("higher", "passes", "labels", "units")}
    models = list(dict.fromkeys(table["model"]))
    count = len(table["model"]) // len(models)
    scores = {
        model: {m: list(v[i * count : (i + 1) * count]) for m, v in table.items() if m not in ("model", "split")}
        for i, model in enumerate(models)
    }
    return Comparison(
        scores, table["split"][:count], reference=stamp["reference"], headline=stamp["headline"],
        test_share=stamp["test_share"], **pairs,
    )  # fmt: skip


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
    t = require("scipy.stats", "lab").t
    error = max(deviation, _ROUNDING * scale) * math.sqrt(1 / count + comparison.test_share)
    half = float(t.ppf((1 + LEVEL) / 2, count - 1)) * error
    return Difference(mean, mean - half, mean + half, 2 * float(t.sf(abs(mean) / error, count - 1)), None)


def _unjudged(why: str, mean: float = math.nan) -> Difference:
    return Difference(mean, math.nan, math.nan, math.nan, None, why)


def verdict(comparison: Comparison) -> str:
    """Two sentences: what is beyond noise in the headline metric and what it costs, and what is beyond noise in the others."""
    metric, plain = comparison.headline, comparison.reference
    name, several = comparison.label(metric), len(comparison.splits) > 1
    if not several:
        ranked = _ranked(comparison, metric)
        first = f", where {ranked[0]} has the {_best(comparison, metric)} {name}" if len(ranked) > 1 else ""
        return f"One split: no statement about noise{first}. Which differences are more than noise takes several splits, best five or more."
    found = differences(comparison)
    judged = {model: d for (model, key), d in found.items() if key == metric}
    better = [model for model in _ranked(comparison, metric) if model in judged and judged[model].better]
    worse = [model for model, d in judged.items() if d.better is False]
    over = f"over {len(comparison.splits)} splits"
    if better:
        first = (
            f"Beyond noise {over}, {_and([_told(comparison, model, judged[model]) for model in better[:3]])}"
            f"{f' and {len(better) - 3} more' if len(better) > 3 else ''} {'has a' if len(better) == 1 else 'have a'} "
            f"{_best(comparison, metric, 'er')} {name} than {plain}{_cost(comparison, plain)}"
        )
        paid = [model for model in better if model in comparison.passes]
        if 1 < len(better) == len(paid):
            cheapest = min(paid, key=lambda model: comparison.passes[model])
            first += f"; the cheapest of them is {cheapest}"
    elif all(d.why_not for d in judged.values()):
        first = f"Nothing can be said of {name}" + (f": {next(iter(judged.values())).why_not}" if judged else "")
    else:
        counted = _cost(comparison, plain)
        known = [comparison.passes[m] for m in comparison.scores if m in comparison.passes]
        cheap = bool(counted) and comparison.passes[plain] <= min(known)
        first = f"No {'model is better' if worse else 'difference'} in {name} beyond noise {over}" + (
            f", and {plain} is cheapest{counted}" if cheap else f": nothing there speaks against {plain}"
        )
    return f"{first}. {_second(comparison, found, worse)}"


def _second(comparison: Comparison, found: Mapping[tuple[str, str], Difference], worse: Sequence[str]) -> str:
    """The sentence on all else: other metrics, what is worse, what was not judged."""
    metric, said = comparison.headline, []
    others = [key for key in comparison.metrics if key in comparison.higher and key != metric]
    gains = {key: [m for m in _ranked(comparison, key) if (d := found.get((m, key))) and d.better] for key in others}
    told = [f"{comparison.label(key)} ({_and(models)})" for key, models in gains.items() if models]
    if told:
        said.append(f"Better beyond noise in other metrics: {_and(told)}")
    elif others:
        said.append("In none of the other metrics is any model better beyond noise")
    losses = {key: [m for (m, k), d in found.items() if k == key and d.better is False] for key in others}
    lost = [f"{comparison.label(key)} ({_and(models)})" for key, models in losses.items() if models]
    lost = [*([f"{comparison.label(metric)} ({_and(worse)})"] if worse else []), *lost]
    if lost:
        said.append(f"{'worse' if said else 'Worse beyond noise'}: {_and(lost)}")
    gaps = [d.why_not for (m, key), d in found.items() if key == metric and d.why_not]
    if gaps:
        said.append(f"{'not judged' if said else 'Not judged'}: {_and(list(dict.fromkeys(gaps)))}")
    return f"{'; '.join(said)}." if said else "No other metric was recorded."


def stated_test(comparison: Comparison) -> str:
    """How it was tested, in words."""
    if len(comparison.splits) < 2:
        return "One split: nothing was tested."
    models = len(comparison.scores) - 1
    shared = (
        "; the splits share rows, so their variance is raised by Nadeau and Bengio's correction"
        if comparison.test_share
        else "; the splits are taken as independent"
    )
    corrected = (
        f", corrected by Holm's method for {models} models (and, for metrics other than {comparison.label(comparison.headline)}, "
        "for all of these together)"
    )
    return (
        f"Beyond noise: paired t-test against {comparison.reference} over {len(comparison.splits)} splits at {LEVEL:.0%}"
        f"{corrected}{shared}."
    ).replace("95%", "95 %")


def number(value: float, spread: float = math.nan) -> str:
    """A value with the digits that its spread leaves it: two of the spread.

    Example:
        >>> number(5.01234, 0.1234), number(1234.5, 30.0), number(0.5)
        ('5.01', '1234', '0.5')
    """
    if not math.isfinite(value):
        return "–"
    if not math.isfinite(spread) or spread <= 1e-4 * abs(value):
        return f"{value:.4g}"
    digits = max(0, 1 - math.floor(math.log10(spread)))
    return f"{value:.{min(digits, 6)}f}"


def standard_error(values: Sequence[float]) -> float:
    """Of the mean over splits; NaN for fewer than two."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _told(comparison: Comparison, model: str, d: Difference) -> str:
    """A model, its difference in the headline metric with the interval, and its cost."""
    unit = f" {u}" if (u := comparison.units.get(comparison.headline)) else ""
    half = (d.high - d.low) / 2
    interval = f" ± {number(half, half)}" if half > 1e-4 * abs(d.mean) else ""
    return f"{model} (by {number(abs(d.mean), half)}{interval}{unit}{_passes(comparison, model, ', ')})"


def _passes(comparison: Comparison, model: str, before: str = "") -> str:
    count = comparison.passes.get(model)
    return "" if count is None else f"{before}{count:g} pass{'' if count == 1 else 'es'}"


def _cost(comparison: Comparison, model: str) -> str:
    return f" ({said})" if (said := _passes(comparison, model)) else ""


def _ranked(comparison: Comparison, metric: str) -> list[str]:
    """The models with a finite mean, the best first."""
    means = {model: statistics.fmean(comparison.values(model, metric)) for model in comparison.scores}
    finite = [model for model, mean in means.items() if math.isfinite(mean)]
    return sorted(finite, key=means.__getitem__, reverse=comparison.higher[metric])


def _best(comparison: Comparison, metric: str, ending: str = "est") -> str:
    return f"{'high' if comparison.higher[metric] else 'small'}{ending}"


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
