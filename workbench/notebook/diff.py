"""Comparison of the recorded values of two report folders or two runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .record import read_records
from .run import read_run
from .values import as_text, from_json, to_json

TOLERANCE = 1e-6
_NOTHING: Any = type("Nothing", (), {"__repr__": lambda self: "–"})()


@dataclass
class Difference:
    """A value that differs between two reports.

    Attributes:
        run: name of the run.
        name: name of the value; elements of lists, dicts and tables as ``name[element]``.
        first, second: the values, "–" if missing.
        relative: |first - second| / max(|first|, |second|), None if they are not both numbers.
    """

    run: str
    name: str
    first: Any
    second: Any
    relative: float | None = None


@dataclass
class ReportComparison:
    """Result of `compare_reports`.

    Attributes:
        differences: values that differ.
        compared: number of compared values.
        context: other differences between the runs, such as parameters and versions, as lines of text.
    """

    differences: list[Difference] = field(default_factory=list)
    compared: int = 0
    context: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.compared - len(self.differences)} of {self.compared} values are the same"]
        if self.differences:
            rows = [("run", "value", "A", "B", "relative difference")]
            for difference in self.differences:
                share = "" if difference.relative is None else f"{difference.relative:.2g}"
                rows.append(
                    (
                        difference.run,
                        _one_line(difference.name),
                        _as_text(difference.first),
                        _as_text(difference.second),
                        share,
                    )
                )
            widths = [max(len(row[i]) for row in rows) for i in range(5)]
            lines.append("")
            for run, name, *numbers in rows:
                cells = [text.rjust(width) for text, width in zip(numbers, widths[2:], strict=True)]
                lines.append("  ".join([run.ljust(widths[0]), name.ljust(widths[1]), *cells]).rstrip())
        return "\n".join(
            [*lines, *(["", "made with:", *(f"  {line}" for line in self.context)] if self.context else [])]
        )


def compare_reports(first: Path | str, second: Path | str, tolerance: float = TOLERANCE) -> ReportComparison:
    """Compare the recorded values of two reports: numbers, text, lists, tables, and whether checks hold.

    Args:
        first: folder of reports, or an executed notebook.
        second: the same kind; runs of two folders are matched by name.
        tolerance: relative difference up to which two numbers count as equal; NaN equals NaN.

    Returns:
        The differences. ``print`` shows them as a table.

    Raises:
        FileNotFoundError: there is no such folder or notebook.
        ValueError: there are no results, a folder is compared with a notebook, or tolerance is not a number of at least 0.

    Example:
        >>> import tempfile
        >>> from workbench.notebook import run_grid
        >>> import nbformat
        >>> folder = Path(tempfile.mkdtemp())
        >>> cell = nbformat.v4.new_code_cell("from workbench import record; record(rmse=0.5)")
        >>> nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / "a.ipynb")
        >>> runs = run_grid(folder / "a.ipynb", folder / "reports", progress=False)
        >>> print(compare_reports(folder / "reports", folder / "reports"))
        1 of 1 values are the same
    """
    first, second = Path(first), Path(second)
    if not (isinstance(tolerance, int | float) and 0 <= tolerance < math.inf):
        raise ValueError(f"tolerance must be a number of at least 0, not {tolerance!r}")
    if first.is_dir() != second.is_dir() and first.exists() and second.exists():
        raise ValueError(f"compare two folders or two notebooks, not {first} with {second}")
    a, b = _runs(first), _runs(second)
    if not first.is_dir():  # two notebooks are compared whatever their names
        b = dict(zip(a, b.values(), strict=True))
    comparison = ReportComparison()
    for name in dict.fromkeys([*a, *b]):
        if name not in a or name not in b:
            comparison.compared += 1
            x, y = ("there" if name in runs else _NOTHING for runs in (a, b))
            comparison.differences.append(Difference(name, "(the run)", x, y))
            continue
        if (x := a[name]["status"]) != (y := b[name]["status"]):
            comparison.compared += 1
            comparison.differences.append(Difference(name, "status", x, y))
        first_values, second_values = _values(a[name]), _values(b[name])
        for value in dict.fromkeys([*first_values, *second_values]):
            x, y = first_values.get(value, _NOTHING), second_values.get(value, _NOTHING)
            if (x in ([], {}) and _has_elements(second_values, value)) or (
                y in ([], {}) and _has_elements(first_values, value)
            ):
                continue  # its elements are told one by one
            relative = _relative(x, y)
            comparison.compared += 1
            if relative is None or relative > tolerance:
                comparison.differences.append(Difference(name, value, x, y, relative))
    comparison.context = _context(a, b)
    return comparison


def _runs(path: Path) -> dict[str, dict[str, Any]]:
    """Return the runs in a folder or notebook: name -> entry as in index.json."""
    if path.is_dir():
        index = path / "index.json"
        if not index.is_file():
            raise FileNotFoundError(f"{path} holds no reports: it has no index.json, which workbench report writes")
        try:
            runs = json.loads(index.read_text(encoding="utf-8"))["runs"]
            started = {run["name"]: run for run in runs if run["status"] != "waiting"}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} was not written by workbench report") from error
        if not started:
            raise ValueError(f"no run in {path} has started yet: there is nothing to compare")
        return started
    if not path.exists():
        raise FileNotFoundError(f"there is neither a folder of reports nor an executed notebook {path}")
    run, records = read_run(path), read_records(path)
    values = {name: to_json(value, name) for name, value in records.items()}
    tables = {name: to_json(table, name) for name, table in records.tables.items()}
    checks = {claim: check._asdict() for claim, check in records.checks.items()}
    stamp = {"status": run.status, "parameters": run.parameters, "environment": run.environment, "data": run.data}
    return {run.name: {**stamp, "records": values, "tables": tables, "checks": checks}}


def _values(run: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(_flat(from_json(run.get("records", {}))))
    for name, columns in run.get("tables", {}).items():
        values.update(_flat({name: from_json(columns)}))
    for claim, check in run.get("checks", {}).items():
        values[f"check: {claim}"] = "holds" if check["holds"] else "does not hold"
    return values


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and (value or not name):
        for key, item in value.items():
            yield from _flat(item, f"{name}[{key}]" if name else key)
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _flat(item, f"{name}[{index}]")
    else:
        yield name, value


def _has_elements(values: Mapping[str, Any], name: str) -> bool:
    return any(other.startswith(f"{name}[") for other in values)


def _relative(x: Any, y: Any) -> float | None:
    """Return the relative difference of two values; None if they differ and are not both numbers."""
    numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in (x, y)]
    if not all(numbers):
        return 0.0 if type(x) is type(y) and x == y else None
    if x == y or (x != x and y != y):
        return 0.0
    if not (math.isfinite(x) and math.isfinite(y)):
        return math.inf
    return abs(x - y) / max(abs(x), abs(y))


def _context(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return the differences in parameters, environment and data of the runs, each once."""
    lines: dict[str, None] = {}
    for name in a:
        if name in b:
            for aspect in ("parameters", "environment", "data"):
                x, y = a[name].get(aspect, {}), b[name].get(aspect, {})
                for key in dict.fromkeys([*x, *y]):
                    if x.get(key) != y.get(key):
                        max_length = 12 if aspect == "data" else 200
                        lines[f"{key}: {str(x.get(key, '–'))[:max_length]} -> {str(y.get(key, '–'))[:max_length]}"] = (
                            None
                        )
    return list(lines)


def _as_text(value: Any) -> str:
    """Return a value as text in one line, numbers with enough digits to see a difference."""
    return f"{value:.7g}" if isinstance(value, float) else "–" if value is _NOTHING else _one_line(as_text(value))


def _one_line(text: str) -> str:
    """Return a text with line breaks and other characters that are not printable escaped."""
    return text if text.isprintable() else repr(text)[1:-1]
