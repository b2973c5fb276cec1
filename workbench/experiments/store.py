"""Results on disk: NAME.csv (or .parquet), NAME.json and NAME.failed.txt beside each other, each replaced in one step."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import atomic
from ..errors import require
from .pool import CellOutcome
from .worker import RESERVED, plain

if TYPE_CHECKING:
    import pandas as pd

FAILURE = re.compile(r"^=== ([0-9a-f]{12}) ", re.MULTILINE)


def key(cell: Mapping[str, Any]) -> str:
    """What a cell is known by: 12 hexadecimal digits of the SHA-256 of its arguments as JSON.

    Example:
        >>> key({"seed": 0, "method": "vote"}) == key({"method": "vote", "seed": 0})
        True
    """
    return hashlib.sha256(json.dumps(plain(cell), sort_keys=True).encode()).hexdigest()[:12]


def text(value: Any) -> str:
    """A value as it stands in the file; floats keep every digit.

    Example:
        >>> text(0.1), text(None), text([1, 2])
        ('0.1', '', '[1, 2]')
    """
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def read(path: Path) -> pd.DataFrame:
    """The rows of a file of results, with the types that their texts have; every digit of a number is kept.

    Args:
        path: the CSV or Parquet file.

    Returns:
        Table with the cells' arguments, results, and `RESERVED`; a value that a row does not have is NaN.
    """
    require("pandas")
    import pandas as pd

    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    # pandas takes words such as "none" and "NA" for missing values, and a key or version of digits for a number
    return _frame(pd.read_csv(path, dtype=str, keep_default_na=False))


def check_path(path: Path) -> None:
    """Raise unless results can be kept in such a file.

    Raises:
        ValueError: for another ending than .csv and .parquet.
        ModuleNotFoundError: for Parquet without pyarrow.
    """
    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(f"results are kept in a .csv or .parquet file, not {path.name!r}")
    if path.suffix == ".parquet":
        require("pyarrow", "parquet")


def _frame(texts: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    words = ("cell", "version", "device")
    return pd.DataFrame({name: texts[name] if name in words else _typed(texts[name].tolist()) for name in texts})


def _typed(texts: list[str]) -> list[Any]:
    if set(texts) <= {"True", "False"}:
        return [value == "True" for value in texts]
    for kind in (int, float):
        try:
            return [kind(value) if value else math.nan for value in texts]
        except ValueError:
            continue
    return [value or math.nan for value in texts]


class Store:
    """The files of one experiment; whoever writes holds the lock.

    Args:
        path: the CSV or Parquet file; the others have its name and another ending.

    Raises:
        ValueError: the file is there and holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, str]] = []
        self.failures: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []
        if path.exists():
            self.rows, columns = _rows(path)
            if not set(RESERVED) <= set(columns):
                raise ValueError(
                    f"{path} is no file of results: it lacks the columns {', '.join(RESERVED)}; move it, or write elsewhere"
                )
        if self._failed.exists():
            _, *pieces = FAILURE.split(self._failed.read_text(encoding="utf-8"))
            self.failures = {name: f"=== {name} {rest}" for name, rest in zip(pieces[::2], pieces[1::2], strict=True)}
        if self._record.exists():
            self.runs = json.loads(self._record.read_text(encoding="utf-8"))["runs"]

    @property
    def _failed(self) -> Path:
        return self.path.with_suffix(".failed.txt")

    @property
    def _record(self) -> Path:
        return self.path.with_suffix(".json")

    def keys(self) -> set[str]:
        """The cells whose results are there."""
        return {row["cell"] for row in self.rows}

    def drop(self, keys: Collection[str]) -> None:
        """Forget the results of these cells; if none are left, also who made them."""
        self.rows = [row for row in self.rows if row["cell"] not in keys]
        if not self.rows:
            self.runs = []

    def add(self, outcome: CellOutcome, stamp: Mapping[str, str], order: Iterable[str]) -> None:
        """Keep what a cell gave, and write it.

        Args:
            outcome: how the cell ended.
            stamp: the columns "version" and "device".
            order: keys of cells in the order that their rows shall have, whichever ends first.
        """
        known = key(outcome.cell)
        if outcome.status != "ok":
            what = f"{outcome.status} after {outcome.seconds:.1f} s: {json.dumps(outcome.cell)}"
            self.failures[known] = f"=== {known} {what}\n{outcome.error.strip()}\n\n"
        else:
            tail = {"cell": known, "seconds": f"{outcome.seconds:.3f}", **stamp}
            tail |= {"device": outcome.device} if outcome.device else {}
            places = {name: place for place, name in enumerate(order)}
            self.rows += [
                {name: text(value) for name, value in {**outcome.cell, **row, **tail}.items()} for row in outcome.rows
            ]
            self.rows.sort(key=lambda row: places.get(row["cell"], -1))
            self.failures.pop(known, None)
        self.write()

    def made_by(self, command: str, environment: dict[str, str], jobs: int, threads: int) -> dict[str, Any]:
        """The record of a run: an earlier one of the same command, environment and size goes on."""
        same = {"command": command, "jobs": jobs, "threads": threads, "environment": environment}
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        for run in self.runs:
            if same.items() <= run.items():
                return run
        run = {"command": command, "started": now, "ended": now, "cells": 0, "seconds": 0.0, **same}
        self.runs.append(run)
        return run

    def write(self) -> None:
        """Write all files; each is the old one or the new one at any moment."""
        names = dict.fromkeys(name for row in self.rows for name in row if name not in RESERVED)
        atomic.write(self.path, _content(self.rows, [*names, *RESERVED], self.path.suffix))
        atomic.write(self._record, json.dumps({"runs": [run for run in self.runs if run["cells"]]}, indent=1) + "\n")
        if self.failures:
            atomic.write(self._failed, "".join(self.failures.values()))
        else:
            self._failed.unlink(missing_ok=True)


def _rows(path: Path) -> tuple[list[dict[str, str]], list[str]]:
    """The rows of a file as texts, and the names of its columns."""
    if path.suffix == ".parquet":
        frame = read(path)
        there = frame.astype(object).where(frame.notna(), None)
        rows = [{str(name): text(value) for name, value in row.items()} for row in there.to_dict("records")]
        return rows, list(map(str, frame.columns))
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows = [{name: value for name, value in row.items() if name is not None} for row in reader]
        return rows, list(reader.fieldnames or ())


def _content(rows: list[dict[str, str]], names: list[str], suffix: str) -> str | bytes:
    """The file of these rows: CSV keeps texts as they are, Parquet has typed columns."""
    if suffix == ".parquet":
        import pandas as pd

        return _frame(pd.DataFrame(rows, columns=names, dtype=object).fillna("")).to_parquet(index=False)
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
