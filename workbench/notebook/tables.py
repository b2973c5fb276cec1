"""The tables of an index: all runs with all that they recorded, and a summary over seeds and splits."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..experiments.directions import higher_is_better, may_be_best, metric_of
from ..experiments.paired import differences
from .comparable import data_key, data_parameters, rows_of, split_key
from .entries import Entry
from .values import as_text

REPEATS = ("seed", "split", "fold", "repeat")  # parameters over which results are averaged
_ARROWS = {True: "↑", False: "↓", None: ""}
_WORDS = {True: "higher is better", False: "lower is better", None: ""}


@dataclass
class IndexCell:
    """What stands in one place of a table.

    Attributes:
        text: what is shown.
        value: what is sorted by.
        best: whether it is the best of its column.
        spread: shown smaller, after the text.
        bad: whether something is wrong there.
    """

    text: str = "–"
    value: Any = ""
    best: bool = False
    spread: str = ""
    bad: bool = False


@dataclass
class IndexColumn:
    """A column: its name, an arrow and a word for the direction that is better, and whether it holds text."""

    name: str
    cells: list[IndexCell]
    arrow: str = ""
    hint: str = ""
    is_text: bool = False


@dataclass
class IndexTable:
    """Columns of the same length, and for each row what it is of."""

    columns: list[IndexColumn]
    rows: list[Any] = field(default_factory=list)


def varied(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names whose values are not the same everywhere.

    Example:
        >>> varied([{"a": 1, "b": [2]}, {"a": 1, "b": [3]}])
        ['b']
    """
    mappings = list(mappings)
    names = dict.fromkeys(name for mapping in mappings for name in mapping)
    return [name for name in names if len({repr(mapping.get(name)) for mapping in mappings}) > 1]


def runs_table(entries: Sequence[Entry]) -> IndexTable:
    """Every run, what is different about it, and all that it recorded."""
    data = data_parameters([entry.run.parameters for entry in entries])
    groups = [(data_key(entry.run, data), split_key(entry.run.parameters)) for entry in entries]
    columns = [_checks_column(entries)] if any(entry.checks for entry in entries) else []
    for name in varied([entry.run.parameters for entry in entries]):
        columns.append(_plain_column(name, [entry.run.parameters.get(name) for entry in entries]))
    for name in dict.fromkeys(name for entry in entries for name in entry.scalars):
        values = [entry.scalars.get(name) for entry in entries]
        judged = [
            value if entry.run.status == "ok" and may_be_best(name, entry.scalars) else None
            for value, entry in zip(values, entries, strict=True)
        ]
        columns.append(_metric_column(name, values, judged, groups))
    for name in varied([entry.run.environment for entry in entries if entry.run.environment]):
        columns.append(_plain_column(name, [entry.run.environment.get(name) for entry in entries]))
    begun = [entry.run if entry.run.status != "waiting" else None for entry in entries]
    columns.append(_plain_column("seconds", [run and round(run.seconds, 1) for run in begun]))
    columns.append(_plain_column("peak MiB", [run and run.peak_memory and round(run.peak_memory) for run in begun]))
    if any(run and run.peak_device_memory for run in begun):
        columns.append(_plain_column("GPU MiB", [run and run.peak_device_memory for run in begun]))
    return IndexTable(columns, list(entries))


def summary_table(entries: Sequence[Entry]) -> IndexTable | None:
    """The known metrics, averaged over seeds and splits; a row for each thing they are of and each other parameter.

    The best is marked among rows of the same data, the same seeds and the same splits.

    Returns:
        None where that says no more than the table of all runs does.
    """
    parameters = [entry.run.parameters for entry in entries]
    differing = varied(parameters)
    kept = [name for name in differing if name not in REPEATS]
    data = data_parameters(parameters)
    values_of: dict[tuple[str, str], dict[str, list[float]]] = {}
    repeats_of: dict[tuple[str, str], dict[str, list[str]]] = {}
    data_of: dict[tuple[str, str], set[str]] = {}
    known: dict[tuple[str, str], list[Any]] = {}
    for entry in entries:
        values = [entry.run.parameters.get(name) for name in kept]
        for name, value in entry.scalars.items():
            if (parts := metric_of(name)) is not None and math.isfinite(value):
                row = (repr(values), parts[0])
                known[row] = [*values, parts[0]]
                values_of.setdefault(row, {}).setdefault(parts[1], []).append(float(value))
                repeat = repr([entry.run.parameters.get(name) for name in REPEATS])
                repeats_of.setdefault(row, {}).setdefault(parts[1], []).append(repeat)
                data_of.setdefault(row, set()).add(data_key(entry.run, data))
    several = len({of for _, of in values_of}) > 1
    if len(values_of) < 2 or not (several or len(kept) < len(differing)):
        return None
    rows = list(values_of)
    heads = [*kept, "of"]
    columns = [
        _plain_column(name, [known[row][place] for row in rows])
        for place, name in enumerate(heads)
        if name != "of" or several
    ]
    noise, labels = _within_noise(entries), _labels(entries)
    for metric in dict.fromkeys(metric for row in rows for metric in values_of[row]):
        column = IndexColumn(
            labels.get(metric, metric), [], _ARROWS[higher_is_better(metric)], _WORDS[higher_is_better(metric)]
        )
        means = [statistics.fmean(v) if (v := values_of[row].get(metric)) else None for row in rows]
        for row, mean in zip(rows, means, strict=True):
            several_runs = values_of[row].get(metric, [])
            deviation = statistics.stdev(several_runs) if len(several_runs) > 1 else None
            spread = "" if deviation is None else f" ± {deviation:{'.2g' if deviation < 100 else ',.0f'}}"
            column.cells.append(IndexCell() if mean is None else IndexCell(as_text(mean), mean, spread=spread))
        averages = [{name: statistics.fmean(v) for name, v in values_of[row].items()} for row in rows]
        judged = [m if may_be_best(metric, a) else None for m, a in zip(means, averages, strict=True)]
        groups = [(sorted(data_of[row]), rows_of(row[1]), sorted(repeats_of[row].get(metric, []))) for row in rows]
        _mark_groups(metric, column.cells, judged, groups)
        for row, shown in zip(rows, column.cells, strict=True):
            shown.best &= (row[1], metric) not in noise
        columns.append(column)
    columns.append(_plain_column("runs", [max(map(len, values_of[row].values())) for row in rows]))
    return IndexTable(columns, rows)


def _within_noise(entries: Sequence[Entry]) -> set[tuple[str, str]]:
    """What was compared over several splits and is not better than the reference beyond noise: model, as numbers are named, and metric."""
    ties = set()
    for comparison in (comparison for entry in entries for comparison in entry.comparisons.values()):
        compared = differences(comparison) if len(comparison.splits) > 1 else {}
        better = {pair for pair, difference in compared.items() if difference.better}
        tested = dict.fromkeys(metric for _, metric in compared)
        ties |= {(m, metric) for m in comparison.scores for metric in tested if (m, metric) not in better}
    return {(re.sub(r"\W+", "_", model), metric) for model, metric in ties}


def _labels(entries: Sequence[Entry]) -> dict[str, str]:
    """Names of metrics for people, with units, as far as comparisons have them."""
    labels = {}
    for comparison in (comparison for entry in entries for comparison in entry.comparisons.values()):
        for metric in comparison.metrics:
            unit = f" ({comparison.units[metric]})" if comparison.units.get(metric) else ""
            labels[metric] = f"{comparison.label(metric)}{unit}"
    return labels


def _plain_column(name: str, values: Sequence[Any]) -> IndexColumn:
    cells = [
        IndexCell()
        if value is None
        else IndexCell(as_text(value), as_text(value) if isinstance(value, list) else value)
        for value in values
    ]
    return IndexColumn(name, cells, is_text=not all(isinstance(value, int | float | None) for value in values))


def _checks_column(entries: Sequence[Entry]) -> IndexColumn:
    """How many checks hold; sorted by the number of those that do not."""
    column = IndexColumn("checks", [], hint="how many of the recorded checks hold")
    for entry in entries:
        failed, every = len(entry.failed_checks), len(entry.checks)
        column.cells.append(
            IndexCell(f"{every - failed} of {every}", -failed, bad=failed > 0) if every else IndexCell()
        )
    return column


def _metric_column(
    name: str, values: Sequence[float | None], judged: Sequence[float | None], groups: Sequence[Any]
) -> IndexColumn:
    cells = [IndexCell() if value is None else IndexCell(as_text(value), repr(value)) for value in values]
    _mark_groups(name, cells, judged, groups)
    higher = higher_is_better(name)
    return IndexColumn(name, cells, _ARROWS[higher], _WORDS[higher])


def _mark_groups(name: str, cells: Sequence[IndexCell], judged: Sequence[float | None], groups: Sequence[Any]) -> None:
    """Mark the best of each group by itself."""
    for key in dict.fromkeys(map(repr, groups)):
        _mark_best(name, cells, [v if repr(g) == key else None for v, g in zip(judged, groups, strict=True)])


def _mark_best(name: str, cells: Sequence[IndexCell], judged: Sequence[float | None]) -> None:
    """Mark the best of several, all of them where they can't be told apart in print."""
    higher = higher_is_better(name)
    present = [value for value in judged if value is not None and math.isfinite(value)]
    if higher is None or len(set(map(as_text, present))) < 2:
        return
    best = as_text(max(present) if higher else min(present))
    for cell, value in zip(cells, judged, strict=True):
        cell.best |= value is not None and as_text(value) == best
