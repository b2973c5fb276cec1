"""The verdict of a comparison of models over splits: significant differences ("beyond noise") in two sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..experiments.paired import Comparison, Difference, differences


def from_stamp(table: Mapping[str, Sequence[Any]], stamp: Mapping[str, Any]) -> Comparison:
    """Restore a comparison from its recorded table and metadata."""
    pairs: dict[str, Any] = {key: dict(stamp[key]) for key in ("higher", "passes", "labels", "units")}
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


def verdict(comparison: Comparison) -> str:
    """Return two sentences: the significant differences in the headline metric with their costs, and those in the other metrics."""
    metric, plain = comparison.headline, comparison.reference
    name, has_several = comparison.label(metric), len(comparison.splits) > 1
    if not has_several:
        ranked = _ranked(comparison, metric)
        first = f", where {ranked[0]} has the {_best(comparison, metric)} {name}" if len(ranked) > 1 else ""
        return f"One split: no statement about noise{first}. Which differences are more than noise takes several splits, best five or more."
    compared = differences(comparison)
    judged = {model: d for (model, key), d in compared.items() if key == metric}
    better = [model for model in _ranked(comparison, metric) if model in judged and judged[model].better]
    worse = [model for model, d in judged.items() if d.better is False]
    over = f"over {len(comparison.splits)} splits"
    if better:
        first = (
            f"Beyond noise {over}, {_and([_gain(comparison, model, judged[model]) for model in better[:3]])}"
            f"{f' and {len(better) - 3} more' if len(better) > 3 else ''} {'has a' if len(better) == 1 else 'have a'} "
            f"{_best(comparison, metric, 'er')} {name} than {plain}{_cost(comparison, plain)}"
        )
        costed = [model for model in better if model in comparison.passes]
        if 1 < len(better) == len(costed):
            cheapest = min(costed, key=lambda model: comparison.passes[model])
            first += f"; the cheapest of them is {cheapest}"
    elif all(d.why_not for d in judged.values()):
        first = f"Nothing can be said of {name}" + (f": {next(iter(judged.values())).why_not}" if judged else "")
    else:
        counted = _cost(comparison, plain)
        costs = [comparison.passes[m] for m in comparison.scores if m in comparison.passes]
        cheap = bool(counted) and comparison.passes[plain] <= min(costs)
        first = f"No {'model is better' if worse else 'difference'} in {name} beyond noise {over}" + (
            f", and {plain} is cheapest{counted}" if cheap else f": nothing there speaks against {plain}"
        )
    return f"{first}. {_second(comparison, compared, worse)}"


def _second(comparison: Comparison, compared: Mapping[tuple[str, str], Difference], worse: Sequence[str]) -> str:
    """Return the second sentence: gains in other metrics, losses, and what was not tested."""
    metric, clauses = comparison.headline, []
    other_metrics = [key for key in comparison.metrics if key in comparison.higher and key != metric]
    gains = {
        key: [m for m in _ranked(comparison, key) if (d := compared.get((m, key))) and d.better]
        for key in other_metrics
    }
    gained = [f"{comparison.label(key)} ({_and(models)})" for key, models in gains.items() if models]
    if gained:
        clauses.append(f"Better beyond noise in other metrics: {_and(gained)}")
    elif other_metrics:
        clauses.append("In none of the other metrics is any model better beyond noise")
    losses = {key: [m for (m, k), d in compared.items() if k == key and d.better is False] for key in other_metrics}
    lost = [f"{comparison.label(key)} ({_and(models)})" for key, models in losses.items() if models]
    lost = [*([f"{comparison.label(metric)} ({_and(worse)})"] if worse else []), *lost]
    if lost:
        clauses.append(f"{'worse' if clauses else 'Worse beyond noise'}: {_and(lost)}")
    gaps = [d.why_not for (m, key), d in compared.items() if key == metric and d.why_not]
    if gaps:
        clauses.append(f"{'not judged' if clauses else 'Not judged'}: {_and(list(dict.fromkeys(gaps)))}")
    return f"{'; '.join(clauses)}." if clauses else "No other metric was recorded."


def number(value: float, spread: float = math.nan) -> str:
    """Format a value with the precision of its spread, of which two digits are significant.

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


def _gain(comparison: Comparison, model: str, d: Difference) -> str:
    """Describe a model: its difference in the headline metric with the confidence interval, and its cost."""
    unit = f" {u}" if (u := comparison.units.get(comparison.headline)) else ""
    half_width = (d.high - d.low) / 2
    interval = f" ± {number(half_width, half_width)}" if half_width > 1e-4 * abs(d.mean) else ""
    return f"{model} (by {number(abs(d.mean), half_width)}{interval}{unit}{_passes(comparison, model, ', ')})"


def _passes(comparison: Comparison, model: str, separator: str = "") -> str:
    count = comparison.passes.get(model)
    return "" if count is None else f"{separator}{count:g} pass{'' if count == 1 else 'es'}"


def _cost(comparison: Comparison, model: str) -> str:
    return f" ({clauses})" if (clauses := _passes(comparison, model)) else ""


def _ranked(comparison: Comparison, metric: str) -> list[str]:
    """Return the models with a finite mean, the best first."""
    means = {model: statistics.fmean(comparison.values(model, metric)) for model in comparison.scores}
    finite = [model for model, mean in means.items() if math.isfinite(mean)]
    return sorted(finite, key=means.__getitem__, reverse=comparison.higher[metric])


def _best(comparison: Comparison, metric: str, ending: str = "est") -> str:
    return f"{'high' if comparison.higher[metric] else 'small'}{ending}"


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
