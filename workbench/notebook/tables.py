"""Tables of an index: all runs with all recorded numbers, and a summary over seeds and splits."""

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
    """Cell of a table.

    Attributes:
        text: displayed text.
        value: sort key.
        best: whether the value is the best of its column.
        spread: smaller text shown after it.
        bad: whether the cell reports a failure.
    """

    text: str = "–"
    value: Any = ""
    best: bool = False
    spread: str = ""
    bad: bool = False


@dataclass
class IndexColumn:
    """Column of a table: name, cells, arrow and hint for the better direction, and whether it holds text."""

    name: str
    cells: list[IndexCell]
    arrow: str = ""
    hint: str = ""
    is_text: bool = False


@dataclass
class IndexTable:
    """Table: columns of the same length, and the object that each row is about."""

    columns: list[IndexColumn]
    rows: list[Any] = field(default_factory=list)


def varied(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names whose values differ between the mappings.

    Example:
        >>> varied([{"a": 1, "b": [2]}, {"a": 1, "b": [3]}])
        ['b']
    """
    mappings = list(mappings)
    names = dict.fromkeys(name for mapping in mappings for name in mapping)
    return [name for name in names if len({repr(mapping.get(name)) for mapping in mappings}) > 1]


def runs_table(entries: Sequence[Entry]) -> IndexTable:
    """Return a table of all runs: the parameters that differ, all recorded numbers, and costs."""
    data = data_parameters([entry.run.parameters for entry in entries])
    groups = [(data_key(entry.run, data), split_key(entry.run.parameters)) for entry in entries]
    columns = [_checks_column(entries)] if any(entry.checks for entry in entries) else []
    for name in varied([entry.run.parameters for entry in entries]):
        columns.append(_plain_column(name, [entry.run.parameters.get(name) for entry in entries]))
    for name in dict.fromkeys(name for entry in entries for name in entry.scalars):
        values = [entry.scalars.get(name) for entry in entries]
        eligible = [
            value if entry.run.status == "ok" and may_be_best(name, entry.scalars) else None
            for value, entry in zip(values, entries, strict=True)
        ]
        columns.append(_metric_column(name, values, eligible, groups))
    for name in varied([entry.run.environment for entry in entries if entry.run.environment]):
        columns.append(_plain_column(name, [entry.run.environment.get(name) for entry in entries]))
    started = [entry.run if entry.run.status != "waiting" else None for entry in entries]
    columns.append(_plain_column("seconds", [run and round(run.seconds, 1) for run in started]))
    columns.append(_plain_column("peak MiB", [run and run.peak_memory and round(run.peak_memory) for run in started]))
    if any(run and run.peak_device_memory for run in started):
        columns.append(_plain_column("GPU MiB", [run and run.peak_device_memory for run in started]))
    return IndexTable(columns, list(entries))


def summary_table(entries: Sequence[Entry]) -> IndexTable | None:
    """Return a table of the known metrics, averaged over seeds and splits, with a row per subject and combination of other parameters.

    The best value is marked among rows of the same data, seeds and splits. The subject of a metric is, for example, "vote" of "vote_rmse".

    Returns:
        The table, or None if it would add nothing to the table of all runs.
    """
    parameters = [entry.run.parameters for entry in entries]
    differing = varied(parameters)
    settings = [name for name in differing if name not in REPEATS]
    data = data_parameters(parameters)
    values_of: dict[tuple[str, str], dict[str, list[float]]] = {}
    repeats_of: dict[tuple[str, str], dict[str, list[str]]] = {}
    data_of: dict[tuple[str, str], set[str]] = {}
    head_of: dict[tuple[str, str], list[Any]] = {}
    for entry in entries:
        values = [entry.run.parameters.get(name) for name in settings]
        for name, value in entry.scalars.items():
            if (parts := metric_of(name)) is not None and math.isfinite(value):
                row = (repr(values), parts[0])
                head_of[row] = [*values, parts[0]]
                values_of.setdefault(row, {}).setdefault(parts[1], []).append(float(value))
                repeat = repr([entry.run.parameters.get(name) for name in REPEATS])
                repeats_of.setdefault(row, {}).setdefault(parts[1], []).append(repeat)
                data_of.setdefault(row, set()).add(data_key(entry.run, data))
    has_subjects = len({subject for _, subject in values_of}) > 1
    if len(values_of) < 2 or not (has_subjects or len(settings) < len(differing)):
        return None
    rows = list(values_of)
    names = [*settings, "of"]
    columns = [
        _plain_column(name, [head_of[row][i] for row in rows])
        for i, name in enumerate(names)
        if name != "of" or has_subjects
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
        eligible = [m if may_be_best(metric, a) else None for m, a in zip(means, averages, strict=True)]
        groups = [(sorted(data_of[row]), rows_of(row[1]), sorted(repeats_of[row].get(metric, []))) for row in rows]
        _mark_groups(metric, column.cells, eligible, groups)
        for row, shown in zip(rows, column.cells, strict=True):
            shown.best &= (row[1], metric) not in noise
        columns.append(column)
    columns.append(_plain_column("runs", [max(map(len, values_of[row].values())) for row in rows]))
    return IndexTable(columns, rows)


def _within_noise(entries: Sequence[Entry]) -> set[tuple[str, str]]:
    """Return the (model, metric) pairs that were tested over several splits and are not significantly better than the reference.

    Models are spelled as in the names of recorded numbers.
    """
    ties = set()
    for comparison in (comparison for entry in entries for comparison in entry.comparisons.values()):
        compared = differences(comparison) if len(comparison.splits) > 1 else {}
        better = {pair for pair, difference in compared.items() if difference.better}
        tested = dict.fromkeys(metric for _, metric in compared)
        ties |= {(m, metric) for m in comparison.scores for metric in tested if (m, metric) not in better}
    return {(re.sub(r"\W+", "_", model), metric) for model, metric in ties}


def _labels(entries: Sequence[Entry]) -> dict[str, str]:
    """Return the display names of metrics, with units, from the comparisons."""
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
    """Return a column of the number of checks that hold, sorted by the number of those that do not."""
    column = IndexColumn("checks", [], hint="how many of the recorded checks hold")
    for entry in entries:
        failed, total = len(entry.failed_checks), len(entry.checks)
        column.cells.append(
            IndexCell(f"{total - failed} of {total}", -failed, bad=failed > 0) if total else IndexCell()
        )
    return column


def _metric_column(
    name: str, values: Sequence[float | None], eligible: Sequence[float | None], groups: Sequence[Any]
) -> IndexColumn:
    cells = [IndexCell() if value is None else IndexCell(as_text(value), repr(value)) for value in values]
    _mark_groups(name, cells, eligible, groups)
    higher = higher_is_better(name)
    return IndexColumn(name, cells, _ARROWS[higher], _WORDS[higher])


def _mark_groups(
    name: str, cells: Sequence[IndexCell], eligible: Sequence[float | None], groups: Sequence[Any]
) -> None:
    """Mark the best of each group."""
    for key in dict.fromkeys(map(repr, groups)):
        _mark_best(name, cells, [v if repr(g) == key else None for v, g in zip(eligible, groups, strict=True)])


def _mark_best(name: str, cells: Sequence[IndexCell], eligible: Sequence[float | None]) -> None:
    """Mark the best value, and all values with the same text."""
    higher = higher_is_better(name)
    present = [value for value in eligible if value is not None and math.isfinite(value)]
    if higher is None or len(set(map(as_text, present))) < 2:
        return
    best = as_text(max(present) if higher else min(present))
    for cell, value in zip(cells, eligible, strict=True):
        cell.best |= value is not None and as_text(value) == best
