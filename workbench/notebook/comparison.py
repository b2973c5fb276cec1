"""Recording of scores of several models over several splits, with a verdict that opens a report."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..experiments.directions import higher_is_better
from ..experiments.paired import Comparison, Difference, differences, standard_error, stated_test
from .record import _display
from .values import to_json
from .verdict import number, verdict


def record_comparison(
    scores: Mapping[str, Mapping[str, Any]],
    *,
    name: str = "comparison",
    reference: str | None = None,
    headline: str | None = None,
    splits: Sequence[Any] | None = None,
    higher: Mapping[str, bool] | None = None,
    passes: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    units: Mapping[str, str] | None = None,
    rows: tuple[int, int] | None = None,
) -> str:
    """Show a table of models by metrics over several splits, and store the scores; a report opens with their verdict.

    The table has means and standard errors over the splits, and marks only significant differences ("beyond noise"): a paired t-test of each
    model against the reference at 95 %, corrected by Holm's method for the number of models. With one split nothing is tested, and a model
    without a finite value on some split is not tested either.

    Args:
        scores: model -> metric -> one number per split, in the same order for all. A model may lack a metric; NaN: missing value.
        name: name of the table returned by `read_records`, with a row per model and split.
        reference: model that the others are compared with; default: the first.
        headline: metric that the verdict is about; default: the first.
        splits: identifiers of the splits; default: 0, 1, 2, ...
        higher: metric -> whether higher is better, for metrics that `workbench.metrics` does not have. Metrics without a direction are
            shown but not tested.
        passes: model -> cost of one prediction with its risk in forward passes.
        labels: metric -> display name.
        units: metric -> unit.
        rows: (training rows, test rows) of a split if the splits are drawn repeatedly from the same rows. The variance of the mean difference
            is then s^2 (1 / n + test / train), since the splits are not independent (Nadeau and Bengio, 2003).

    Returns:
        The verdict, in two sentences.

    Raises:
        ValueError: the numbers of values differ, a name is unknown, or the direction of the headline metric is unknown.
        TypeError: a score is not a number.

    Example:
        >>> scores = {"plain": {"rmse": [5.0, 5.2, 5.1]}, "vote": {"rmse": [4.0, 4.1, 4.1]}}
        >>> print(record_comparison(scores, passes={"plain": 1, "vote": 5}, units={"rmse": "MPa"}))
        Beyond noise over 3 splits, vote (by 1.03 ± 0.14 MPa, 5 passes) has a smaller rmse than plain (1 pass). No other metric was recorded.
    """
    comparison = _checked(scores, reference, headline, splits, higher, passes, labels, units, rows)
    columns: list[list[Any]] = [
        ["model", [model for model in comparison.scores for _ in comparison.splits]],
        ["split", [to_json(split, "splits") for _ in comparison.scores for split in comparison.splits]],
    ]
    columns += [
        [metric, to_json([v for model in comparison.scores for v in comparison.values(model, metric)], metric)]
        for metric in comparison.metrics
    ]
    # lists of pairs, since notebook files sort the keys of dicts
    stamp = {
        "table": {"name": name, "columns": columns},
        "comparison": {
            "reference": comparison.reference,
            "headline": comparison.headline,
            "test_share": comparison.test_share,
            **{key: list(getattr(comparison, key).items()) for key in ("higher", "passes", "labels", "units")},
        },
    }
    text = verdict(comparison)
    shown = {
        "text/html": f'<p class="said">{html.escape(text)}</p>{as_html(comparison)}',
        "text/plain": f"{text}\n{stated_test(comparison)}",
    }
    _display("record_table", [name], shown, stamp)
    return text


def as_html(comparison: Comparison) -> str:
    """Return an HTML table of means and standard errors, with significant differences marked."""
    compared = differences(comparison)
    units = {m: f" ({html.escape(u)})" if (u := comparison.units.get(m)) else "" for m in comparison.metrics}
    arrows = {True: "\N{NO-BREAK SPACE}↑", False: "\N{NO-BREAK SPACE}↓", None: ""}
    left = '<th style="text-align:left">'
    heads = "".join(
        f"<th>{html.escape(comparison.label(m))}{units[m]}{arrows[comparison.higher.get(m)]}</th>"
        for m in comparison.metrics
    )
    cost = bool(comparison.passes)
    lines = []
    for model in comparison.scores:
        cells = "".join(_cell(comparison, model, m, compared.get((model, m))) for m in comparison.metrics)
        costs = f"<td>{comparison.passes[model]:g}</td>" if model in comparison.passes else "<td>–</td>" if cost else ""
        lines.append(f"<tr>{left}{html.escape(model)}</th>{costs}{cells}</tr>")
    count = len(comparison.splits)
    spread = f"Mean ± standard error over {count} splits." if count > 1 else ""
    words = f"{spread} ★ better, ▽ worse than {comparison.reference} beyond noise." if count > 1 else ""
    return (
        f"<table><thead><tr>{left}model</th>{'<th>passes</th>' if cost else ''}{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        f"<p><small>{html.escape(f'{words} {stated_test(comparison)}'.strip())}</small></p>"
    )


def _cell(comparison: Comparison, model: str, metric: str, d: Difference | None) -> str:
    values = [v for v in comparison.values(model, metric) if math.isfinite(v)]
    if not values:
        return "<td>–</td>"
    error = standard_error(values)
    spread = f" ±\N{NO-BREAK SPACE}{number(error, error)}" if math.isfinite(error) else ""
    gaps = len(comparison.splits) - len(values)
    missing = f" ({gaps} missing)" if gaps else ""
    mark = {True: "★\N{NO-BREAK SPACE}", False: "▽\N{NO-BREAK SPACE}", None: ""}[d.better if d else None]
    text = f"{mark}{number(statistics.fmean(values), error)}{spread}{missing}"
    title = f' title="{html.escape(d.why_not or f"p = {d.p:.2g} after correction")}"' if d else ""
    return f"<td{title}>{f'<b>{text}</b>' if mark.startswith('★') else text}</td>"


def _checked(
    scores: Mapping[str, Mapping[str, Any]],
    reference: str | None,
    headline: str | None,
    splits: Sequence[Any] | None,
    higher: Mapping[str, bool] | None,
    passes: Mapping[str, float] | None,
    labels: Mapping[str, str] | None,
    units: Mapping[str, str] | None,
    rows: tuple[int, int] | None,
) -> Comparison:
    function = "record_comparison"
    if len(scores) < 2 or not all(scores.values()):
        raise ValueError(f"{function} compares at least two models with at least one metric each; found {list(scores)}")
    numbers = {
        model: {m: _numbers(v, f"{model}[{m}]") for m, v in by_metric.items()} for model, by_metric in scores.items()
    }
    lengths = {f"{model}[{m}]": len(v) for model, by_metric in numbers.items() for m, v in by_metric.items()}
    if len(set(lengths.values())) > 1 or not min(lengths.values()):
        raise ValueError(f"{function} takes one number per split, with the same splits for all scores; found {lengths}")
    count = next(iter(lengths.values()))
    splits = list(range(count)) if splits is None else list(splits)
    if len(splits) != count or len(set(map(repr, splits))) != count:
        raise ValueError(f"{function}: splits={splits} does not name the {count} splits of the scores, each once")
    metrics = list(dict.fromkeys(m for by_metric in numbers.values() for m in by_metric))
    if reserved := {"model", "split"} & set(metrics):
        raise ValueError(f"{function}: a metric cannot be called {', '.join(sorted(reserved))}: rename it")
    reference = next(iter(numbers)) if reference is None else reference
    headline = metrics[0] if headline is None else headline
    named = [("reference", [reference], numbers), ("passes", passes or {}, numbers), ("headline", [headline], metrics)]
    named += [(key, m or {}, metrics) for key, m in (("higher", higher), ("labels", labels), ("units", units))]
    for key, names, allowed in named:
        if unknown := [n for n in names if n not in allowed]:
            raise ValueError(f"{function}: {key} names {', '.join(map(repr, unknown))}; there are {', '.join(allowed)}")
    known_directions = {m: d for m in metrics if (d := higher_is_better(m)) is not None} | dict(higher or {})
    if headline not in known_directions:
        raise ValueError(
            f"{function}: the direction of {headline!r} is unknown: pass higher={{{headline!r}: True}} if higher is better, else False"
        )
    share = 0.0
    if rows is not None:
        if len(rows) != 2 or min(rows) < 1:
            raise ValueError(f"{function}: rows must be (training rows, test rows), not {rows!r}")
        share = rows[1] / rows[0]
    costs = {model: float(to_json(v, f"passes[{model}]")) for model, v in (passes or {}).items()}
    return Comparison(
        numbers, splits, known_directions, reference, headline, costs, dict(labels or {}), dict(units or {}), share
    )


def _numbers(values: Any, name: str) -> list[float]:
    numbers = [math.nan if v is None else v for v in (values.tolist() if hasattr(values, "tolist") else list(values))]
    numbers = [v.item() if hasattr(v, "item") else v for v in numbers]
    if wrong := [v for v in numbers if isinstance(v, bool) or not isinstance(v, int | float)]:
        raise TypeError(f"record_comparison takes numbers, but {name} has {wrong[0]!r}")
    return [float(v) for v in numbers]
