"""Top of a report page: the verdict of a comparison, and a figure of its headline metric in plain HTML.

The figure needs neither images nor scripts: dots and bars are positioned in percent and use the colours of the page, so that
it fits any width, dark mode and print.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from ..experiments.paired import Comparison, differences, standard_error, stated_test
from .verdict import number, verdict


def first_screen(comparison: Comparison, of: str) -> str:
    """Return the verdict and the headline figure as HTML.

    Args:
        comparison: scores of models over splits.
        of: subject of the comparison, shown before the verdict.
    """
    subject = f"<b>{escape(of)}:</b> " if of else ""
    return (
        f'<div class="verdict"><p>{subject}{escape(verdict(comparison))}</p>{figure(comparison)}'
        f"<p><small>{escape(stated_test(comparison))}</small></p></div>"
    )


def figure(comparison: Comparison) -> str:
    """Return a figure of every model's headline metric: a dot per split, the mean, and its standard error."""
    metric = comparison.headline
    values = {m: [v for v in comparison.values(m, metric) if math.isfinite(v)] for m in comparison.scores}
    all_values = [v for numbers in values.values() for v in numbers]
    if not all_values:
        return ""
    low, high = min(all_values), max(all_values)
    compared, span = differences(comparison), (high - low) or 1.0
    direction = {True: ", higher is better", False: ", lower is better", None: ""}[comparison.higher.get(metric)]
    unit = f" ({u})" if (u := comparison.units.get(metric)) else ""
    lines, words = [], []
    for model, numbers in values.items():
        if not numbers:
            continue
        mean, error = statistics.fmean(numbers), standard_error(numbers)
        text = f"{number(mean, error)}{f' ± {number(error, error)}' if math.isfinite(error) else ''}"
        difference = compared.get((model, metric))
        mark = {True: "better", False: "worse", None: ""}[difference.better if difference else None]
        name = f"{escape(model)}{_cost(comparison, model)}"
        track = _track(numbers, mean, error, low, span)
        lines.append(_row(mark, name, track, text))
        words.append(f"{model} {text}{f', {mark}' if mark else ''}")
    spread = "a dot for each split; the mark is the mean, the bar its standard error"
    if len(comparison.splits) < 2:
        spread = "one split"
    title = f"{comparison.label(metric)}{unit}{direction}"
    ends = f"<span>{number(low, span)}</span><span>{number(high, span)}</span>"
    alt = escape(f"{title}: {'; '.join(words)}")
    return (
        f'<figure class="headline" role="img" aria-label="{alt}">'
        f"<figcaption><b>{escape(title)}</b> <small>{spread}</small></figcaption>"
        f"{''.join(lines)}{_row('scale', '', ends, '')}</figure>"
    )


def _row(kind: str, who: str, track: str, text: str) -> str:
    cells = f'<span class="who">{who}</span><span class="track">{track}</span><span class="number">{text}</span>'
    return f'<div class="strip-row {kind}">{cells}</div>'


def _track(values: Sequence[float], mean: float, error: float, low: float, span: float) -> str:
    def percent(value: Any) -> float:
        return 2 + 96 * min(1.0, max(0.0, (value - low) / span))

    dots = "".join(f'<i style="left:{percent(v):.2f}%"></i>' for v in values)
    bar = ""
    if math.isfinite(error):
        start, end = percent(mean - error), percent(mean + error)
        bar = f'<u style="left:{start:.2f}%;width:{end - start:.2f}%"></u>'
    return f'{dots}{bar}<b style="left:{percent(mean):.2f}%"></b>'


def _cost(comparison: Comparison, model: str) -> str:
    count = comparison.passes.get(model)
    return "" if count is None else f" <small>{count:g} pass{'' if count == 1 else 'es'}</small>"
