"""Results on disk: NAME.jsonl keeps them; NAME.csv (or .parquet), NAME.json and NAME.failed.txt are made from it, for people."""

from __future__ import annotations

import hashlib
import json
import re
import time
import warnings
import zlib
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import atomic
from ..errors import WorkbenchWarning, require
from .pool import CellOutcome
from .tables import columns, content, frame_of, read_table
from .worker import RESERVED, plain

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
HEAD = b'{"workbench": "results", '  # of every store
TAIL = len(', "crc": "00000000"}')  # of every line
FAILURE = re.compile(r"^=== ([0-9a-f]{12}) ", re.MULTILINE)
RECORD = b'{\n "runs": ['  # the head of every NAME.json
RUN = {"command", "started", "ended", "cells", "seconds", "jobs", "threads", "environment"}  # what each run in it has


def key(cell: Mapping[str, Any]) -> str:
    """What a cell is known by: 12 hexadecimal digits of the SHA-256 of its arguments as JSON.

    Example:
        >>> key({"seed": 0, "method": "vote"}) == key({"method": "vote", "seed": 0})
        True
    """
    return hashlib.sha256(json.dumps(plain(cell), sort_keys=True).encode()).hexdigest()[:12]


def read(path: Path) -> pd.DataFrame:
    """The rows that are kept with a table of results; every value has the type that it had.

    Args:
        path: the CSV or Parquet file. Without the .jsonl file beside it, as in versions before 0.4, each column of it has the type that all of
            its texts have.

    Returns:
        Table with the cells' arguments, results, and `RESERVED`; a value that a row does not have is NaN.

    Raises:
        ValueError: one of the files is damaged, or not of this package.
    """
    require("pandas")
    if path.with_suffix(".jsonl").exists():
        return Store(path).frame()
    if path.suffix == ".parquet":
        import pandas as pd

        return pd.read_parquet(path)
    return frame_of(read_table(path)[0], columns(path.read_bytes(), path.suffix))


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


class _Kept:
    """The rows of one cell, in the forms in which they are needed again and again.

    Args:
        rows: of the cell; each has `RESERVED` at its end.
    """

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    @cached_property
    def line(self) -> bytes:
        tail = {name: self.rows[0][name] for name in RESERVED}
        rows = [{name: value for name, value in row.items() if name not in RESERVED} for row in self.rows]
        return _line({**tail, "rows": rows})


class Store:
    """The files of one experiment; whoever writes holds the lock.

    What is on disk is read, and nothing is written before `write`. Of files that were cut off, as by a disk that failed, what is whole is taken.

    Args:
        path: the CSV or Parquet file; the others have its name and another ending.

    Raises:
        ValueError: one of the files is damaged, was changed by others, or holds something else; it is named, and left as it is.
        OSError: one of them can't be read.

    Warns:
        WorkbenchWarning: a file was cut off: what is missing runs again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: dict[str, _Kept] = {}
        self.failures: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []
        # of the files made from the store, by ending: as written last, and before
        self._digests: dict[str, list[str]] = {}
        files = [self._file(suffix) for suffix in (".jsonl", path.suffix, ".json", ".failed.txt")]
        for file in files:
            if file.is_symlink():
                raise ValueError(f"{file} is a link to {file.readlink()}: give the path itself, or remove the link")
        # read as bytes: what somebody else has put there may be no text at all
        store, table, record, failed = (file.read_bytes() if file.exists() else b"" for file in files)
        self._disk = {
            suffix: _digest(data)
            for suffix, data in ((path.suffix, table), (".json", record), (".failed.txt", failed))
            if data
        }
        if self._read_store(store):
            self._check_made(table, record, failed)
        else:
            self._read_made(table, record, failed)

    def keys(self) -> set[str]:
        """The cells whose results are there."""
        return set(self.cells)

    def frame(self) -> pd.DataFrame:
        """All rows, with the types that they had; see `tables.frame_of`."""
        return frame_of([row for kept in self.cells.values() for row in kept.rows])

    def versions(self, keys: Collection[str]) -> dict[str, str]:
        """The versions of the code that gave the results of these cells."""
        return {known: kept.rows[0]["version"] for known, kept in self.cells.items() if known in keys}

    def drop(self, keys: Collection[str]) -> None:
        """Forget the results of these cells; if none are left, also who made them."""
        self.cells = {known: kept for known, kept in self.cells.items() if known not in keys}
        if not self.cells:
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
            # a traceback may hold a line that looks like the head of the next one
            message = FAILURE.sub(r" \g<0>", outcome.error.strip())
            self.failures[known] = f"=== {known} {what}\n{message}\n\n"
        else:
            tail = {"cell": known, "seconds": round(outcome.seconds, 3), **stamp}
            tail |= {"device": outcome.device} if outcome.device else {}
            self.cells[known] = _Kept([{**outcome.cell, **row, **tail} for row in outcome.rows])
            places = {name: place for place, name in enumerate(order)}
            self.cells = dict(sorted(self.cells.items(), key=lambda item: places.get(item[0], -1)))
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
        """Write all files, the store first; each is the old one or the new one at any moment."""
        runs = [run for run in self.runs if run["cells"]]
        made = self._made(runs)
        # whatever ends this between two files, the store knows those that stand beside it
        self._digests = {
            suffix: [_digest(data), *([self._disk[suffix]] if suffix in self._disk else [])]
            for suffix, data in made.items()
        }
        head = {
            "workbench": "results",
            "format": FORMAT,
            "table": self.path.suffix,
            "made": self._digests,
            "runs": runs,
        }
        failures = (_line({"failed": known, "told": reason}) for known, reason in self.failures.items())
        lines = [_line(head), *(kept.line for kept in self.cells.values()), *failures]
        atomic.write(self._file(".jsonl"), b"\n".join([*lines, b""]))
        for suffix, data in made.items():
            if data:
                atomic.write(self._file(suffix), data)
                self._disk[suffix] = _digest(data)
            else:
                self._file(suffix).unlink(missing_ok=True)
                self._disk.pop(suffix, None)

    def sweep(self) -> None:
        """Remove what earlier runs were writing when they were killed."""
        for suffix in (".jsonl", self.path.suffix, ".json", ".failed.txt"):
            atomic.remove_unfinished(self._file(suffix))

    def _made(self, runs: list[dict[str, Any]]) -> dict[str, bytes]:
        """The files for people, by their endings."""
        rows = [row for kept in self.cells.values() for row in kept.rows]
        return {
            self.path.suffix: content(rows, self.path.suffix),
            ".json": (json.dumps({"runs": runs}, indent=1) + "\n").encode(),
            ".failed.txt": "".join(self.failures.values()).encode("utf-8", "backslashreplace"),
        }

    def _file(self, suffix: str) -> Path:
        return self.path.with_suffix(suffix)

    # ---- reading
    def _read_store(self, data: bytes) -> bool:
        """Take what the store has; False where there is none, or nothing is left of it."""
        file = self._file(".jsonl")
        if not data:
            return False
        if not (data.startswith(HEAD) or HEAD.startswith(data)):
            raise ValueError(_foreign(file, "it is no store of results"))
        *lines, rest = data.split(b"\n")
        if not lines:
            _warn(
                f"{file} was cut off at its beginning: results are taken from {self.path.name}, with types as their texts look"
            )
        elif rest.strip(b"\0"):
            _warn(f"{file} was cut off: the cells that are missing at its end run again")
        for number, line in enumerate(lines, 1):
            body, checksum = line[:-TAIL] + b"}", line[-TAIL:]
            try:
                if checksum != _checksum(body):
                    raise ValueError("its checksum is of another text")
                entry = json.loads(body.decode("utf-8", "surrogatepass"))
            except ValueError as error:
                what = (
                    "the results that it keeps can't be told"
                    if number == 1
                    else "without the line, its cell runs again"
                )
                raise ValueError(f"{file} is damaged in line {number}, {error}: restore the file; {what}") from error
            self._take(entry, number == 1)
        return bool(lines)

    def _take(self, entry: dict[str, Any], head: bool) -> None:
        if head:
            if entry["format"] != FORMAT:
                raise ValueError(
                    f"{self._file('.jsonl')} is of format {entry['format']}, and this version of workbench reads format {FORMAT}: update it"
                )
            if entry["table"] != self.path.suffix:
                other = self.path.with_suffix(entry["table"]).name
                raise ValueError(
                    f"{self._file('.jsonl')} keeps the results of {other}: go on with that, or write {self.path.name} elsewhere"
                )
            self.runs, self._digests = entry["runs"], entry["made"]
        elif "failed" in entry:
            self.failures[entry["failed"]] = entry["told"]
        else:
            tail = {name: entry[name] for name in RESERVED}
            self.cells[entry["cell"]] = _Kept([{**row, **tail} for row in entry["rows"]])

    def _check_made(self, table: bytes, record: bytes, failed: bytes) -> None:
        """Raise unless the files beside the store are those that were made from it; cut off, they are made anew."""
        there = {self.path.suffix: table, ".json": record, ".failed.txt": failed}
        changed = [suffix for suffix, digest in self._disk.items() if digest not in self._digests.get(suffix, ())]
        made = self._made(self.runs) if changed else {}
        for suffix in changed:
            if not made[suffix].startswith(there[suffix]) and not _is_torn(there[suffix], suffix):
                file = self._file(suffix)
                raise ValueError(
                    f"{file} is not the file that was made from {self._file('.jsonl').name}: somebody else has written or changed it; "
                    f"move it away to have it made anew, or {self._file('.jsonl').name} to go on from it"
                )

    def _read_made(self, table: bytes, record: bytes, failed: bytes) -> None:
        """Take what stands in the files themselves, as versions without a store wrote them."""
        if table and not set(RESERVED) <= set(columns(table, self.path.suffix)):
            raise ValueError(_foreign(self.path, f"it lacks the columns {', '.join(RESERVED)}"))
        if record:
            self.runs = _runs(record, self._file(".json"))
        if failed:
            if not _is_failed(failed):
                raise ValueError(_foreign(self._file(".failed.txt"), "it has no tracebacks of cells"))
            _, *pieces = FAILURE.split(failed.decode("utf-8", "backslashreplace"))
            self.failures = {name: f"=== {name} {rest}" for name, rest in zip(pieces[::2], pieces[1::2], strict=True)}
        if table:
            rows, torn = read_table(self.path)
            if torn:
                _warn(f"{self.path} was cut off: the cells that are missing at its end run again")
            cells: dict[str, list[dict[str, Any]]] = {}
            for row in rows:
                cells.setdefault(row["cell"], []).append({**row, **{name: row.get(name, "") for name in RESERVED}})
            self.cells = {known: _Kept(kept) for known, kept in cells.items()}


def _foreign(file: Path, why: str) -> str:
    return f"{file} is no file of results: {why}; move it, or write elsewhere"


def _warn(message: str) -> None:
    warnings.warn(message, WorkbenchWarning, stacklevel=5)


def _line(entry: dict[str, Any]) -> bytes:
    """An entry with its own checksum at the end: a damaged digit would be another result."""
    # two halves of a surrogate pair, as escapes, would come back as one character
    body = json.dumps(entry, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return body[:-1] + _checksum(body)


def _checksum(body: bytes) -> bytes:
    return b', "crc": "%08x"}' % zlib.crc32(body)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _runs(data: bytes, file: Path) -> list[dict[str, Any]]:
    """The runs in a record; none in one that was cut off."""
    if _is_torn(data, ".json"):
        return []
    try:
        runs = json.loads(data)["runs"]
        if all(run.keys() >= RUN for run in runs):
            return list(runs)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(_foreign(file, "it does not say which runs made a table"))


def _is_failed(data: bytes) -> bool:
    return FAILURE.match(data[:20].decode("utf-8", "replace")) is not None


def _is_torn(data: bytes, suffix: str) -> bool:
    """Whether a file has the beginning of one of ours, and not its end."""
    if suffix == ".json":
        return (data.startswith(RECORD) or RECORD.startswith(data)) and not data.rstrip().endswith(b"}")
    if suffix == ".parquet":
        return data.startswith(b"PAR1") and not data.endswith(b"PAR1")
    if data.endswith(b"\n"):
        return False
    return _is_failed(data) if suffix == ".failed.txt" else set(RESERVED) <= set(columns(data, suffix))
