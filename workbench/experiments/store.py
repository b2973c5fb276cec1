"""Results on disk: NAME.jsonl, the store, keeps them; NAME.csv (or .parquet), NAME.json and NAME.failed.txt are exported from it for people."""

from __future__ import annotations

import hashlib
import json
import re
import time
import warnings
import zlib
from collections.abc import Collection, Mapping
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
HEAD = b'{"workbench": "results", '  # beginning of every store
CHECKSUM_LENGTH = len(', "crc": "00000000"}')  # at the end of every line
SHORT = 0.1  # seconds that exporting may take after each cell; longer exports are made less often
EXPORT_SHARE = 0.05  # share of the time that those may take
FAILURE = re.compile(r"^=== ([0-9a-f]{12}) ", re.MULTILINE)
RECORD = b'{\n "runs": ['  # beginning of every NAME.json
RUN = {"command", "started", "ended", "cells", "seconds", "jobs", "threads", "environment"}  # keys of each run in it


def key(cell: Mapping[str, Any]) -> str:
    """Return the key of a cell: the first 12 hexadecimal digits of the SHA-256 of its arguments as JSON.

    Example:
        >>> key({"seed": 0, "method": "vote"}) == key({"method": "vote", "seed": 0})
        True
    """
    return hashlib.sha256(json.dumps(plain(cell), sort_keys=True).encode()).hexdigest()[:12]


def read(path: Path) -> pd.DataFrame:
    """Read a table of results, with the original type of each value.

    Args:
        path: CSV or Parquet file. Without the .jsonl file beside it, as in versions before 0.4, the type of each CSV column is inferred from
            its texts.

    Returns:
        Table with the cells' arguments, results, and `RESERVED`; a value that a row lacks is NaN.

    Raises:
        ValueError: one of the files is damaged, or was not written by this package.
    """
    require("pandas")
    if path.with_suffix(".jsonl").exists():
        return Store(path).frame()
    if path.suffix == ".parquet":
        import pandas as pd

        return pd.read_parquet(path)
    return frame_of(read_table(path)[0], columns(path.read_bytes(), path.suffix))


def check_path(path: Path) -> None:
    """Check that results can be saved to a path.

    Raises:
        ValueError: the suffix is neither .csv nor .parquet.
        ModuleNotFoundError: the suffix is .parquet and pyarrow is not installed.
    """
    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(f"results are kept in a .csv or .parquet file, not {path.name!r}")
    if path.suffix == ".parquet":
        require("pyarrow", "parquet")


class _CellRows:
    """The rows of one cell, and their line in the store, which is computed once.

    Args:
        rows: rows of the cell; each ends with `RESERVED`.
    """

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    @cached_property
    def line(self) -> bytes:
        tail = {name: self.rows[0][name] for name in RESERVED}
        rows = [{name: value for name, value in row.items() if name not in RESERVED} for row in self.rows]
        return _line({**tail, "rows": rows})


class Store:
    """The files of one experiment. The caller must hold the lock in order to write.

    The constructor reads what is on disk; nothing is written before `write`. Of truncated files (say, after a disk failure) the complete cells
    are used.

    Args:
        path: CSV or Parquet file; the other files have the same name with other suffixes.

    Raises:
        ValueError: one of the files is damaged, was changed by hand, or is not of this package; the message names it, and it is left as it is.
        OSError: one of them can't be read.

    Warns:
        WorkbenchWarning: a file was truncated; the missing cells run again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: dict[str, _CellRows] = {}
        self.failures: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []
        # digests of the exported files by suffix: as written last, and the time before
        self._digests: dict[str, list[str]] = {}
        self._behind = False  # whether the exported files lack results of the store
        self._next_exports = 0.0
        files = [self._file(suffix) for suffix in (".jsonl", path.suffix, ".json", ".failed.txt")]
        for file in files:
            if file.is_symlink():
                raise ValueError(
                    f"{file} is a link to {file.readlink()}: give the path of the file itself, or remove the link"
                )
        # read as bytes, since a file of another program need not be text
        store, table, record, failed = (file.read_bytes() if file.exists() else b"" for file in files)
        self._disk = {
            suffix: _digest(data)
            for suffix, data in ((path.suffix, table), (".json", record), (".failed.txt", failed))
            if data
        }
        if self._read_store(store):
            self._check_exports(table, record, failed)
        else:
            self._read_exports(table, record, failed)

    def keys(self) -> set[str]:
        """Return the keys of the cells that have results."""
        return set(self.cells)

    def frame(self) -> pd.DataFrame:
        """Return all rows with their original types; see `tables.frame_of`."""
        return frame_of([row for cell in self.cells.values() for row in cell.rows])

    def versions(self, keys: Collection[str]) -> dict[str, str]:
        """Return the versions of the code that computed these cells, by key."""
        return {cell_key: cell.rows[0]["version"] for cell_key, cell in self.cells.items() if cell_key in keys}

    def drop(self, keys: Collection[str]) -> None:
        """Delete the results of these cells, and the record of runs if no cell is left."""
        self.cells = {cell_key: cell for cell_key, cell in self.cells.items() if cell_key not in keys}
        if not self.cells:
            self.runs = []

    def add(self, outcome: CellOutcome, stamp: Mapping[str, str], order: Mapping[str, int]) -> None:
        """Add the outcome of a cell, and write it to the store; large tables are not exported each time, but at the latest by `finish`.

        Args:
            outcome: outcome of the cell.
            stamp: values of the columns "version" and "device".
            order: position of each cell's rows by its key, which does not depend on which cell ends first.
        """
        cell_key = key(outcome.cell)
        if outcome.status != "ok":
            heading = f"{outcome.status} after {outcome.seconds:.1f} s: {json.dumps(outcome.cell)}"
            # a line of a traceback may look like the heading of the next failure
            message = FAILURE.sub(r" \g<0>", outcome.error.strip())
            self.failures[cell_key] = f"=== {cell_key} {heading}\n{message}\n\n"
        else:
            tail = {"cell": cell_key, "seconds": round(outcome.seconds, 3), **stamp}
            tail |= {"device": outcome.device} if outcome.device else {}
            self.cells[cell_key] = _CellRows([{**outcome.cell, **row, **tail} for row in outcome.rows])
            self.cells = dict(sorted(self.cells.items(), key=lambda item: order.get(item[0], -1)))
            self.failures.pop(cell_key, None)
        if time.monotonic() < self._next_exports:
            self._behind = True
            self._write_store()
        else:
            self.write()

    def finish(self) -> None:
        """Export the results that were only written to the store so far."""
        if self._behind:
            self.write()

    def other_functions(self, function: str) -> set[str]:
        """Return the functions of all runs if this one is not among them; runs of earlier versions did not record theirs."""
        functions = {run.get("function", function) for run in self.runs}
        return set() if function in functions else functions

    def made_by(
        self, command: str, function: str, environment: dict[str, str], jobs: int, threads: int
    ) -> dict[str, Any]:
        """Return the record of a run; a resumed run (of the same arguments) continues its earlier record."""
        setting = {
            "command": command,
            "function": function,
            "jobs": jobs,
            "threads": threads,
            "environment": environment,
        }
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        for run in self.runs:
            if setting.items() <= run.items():
                return run
        run = {"command": command, "started": now, "ended": now, "cells": 0, "seconds": 0.0, **setting}
        self.runs.append(run)
        return run

    def write(self) -> None:
        """Write all files atomically, the store first."""
        began = time.monotonic()
        exports = self._exports(self._finished_runs())
        # the store lists the digests of the new exports and of those on disk, so that it recognizes both if we are killed in between
        self._digests = {
            suffix: [_digest(data), *([self._disk[suffix]] if suffix in self._disk else [])]
            for suffix, data in exports.items()
        }
        self._behind = False
        self._write_store()
        for suffix, data in exports.items():
            if data:
                atomic.write(self._file(suffix), data)
                self._disk[suffix] = _digest(data)
            else:
                self._file(suffix).unlink(missing_ok=True)
                self._disk.pop(suffix, None)
        ended = time.monotonic()
        self._next_exports = 0.0 if ended - began < SHORT else ended + (ended - began) / EXPORT_SHARE

    def _write_store(self) -> None:
        head = {
            "workbench": "results",
            "format": FORMAT,
            "table": self.path.suffix,
            "made": self._digests,
            "runs": self._finished_runs(),
            **({"behind": True} if self._behind else {}),
        }
        failures = (_line({"failed": cell_key, "told": reason}) for cell_key, reason in self.failures.items())
        lines = [_line(head), *(cell.line for cell in self.cells.values()), *failures]
        atomic.write(self._file(".jsonl"), b"\n".join([*lines, b""]))

    def _finished_runs(self) -> list[dict[str, Any]]:
        return [run for run in self.runs if run["cells"]]

    def sweep(self) -> None:
        """Remove temporary files of earlier runs that were killed while they wrote."""
        for suffix in (".jsonl", self.path.suffix, ".json", ".failed.txt"):
            atomic.remove_unfinished(self._file(suffix))

    def _exports(self, runs: list[dict[str, Any]]) -> dict[str, bytes]:
        """Return the contents of the exported files by suffix."""
        rows = [row for cell in self.cells.values() for row in cell.rows]
        return {
            self.path.suffix: content(rows, self.path.suffix),
            ".json": (json.dumps({"runs": runs}, indent=1) + "\n").encode(),
            ".failed.txt": "".join(self.failures.values()).encode("utf-8", "backslashreplace"),
        }

    def _file(self, suffix: str) -> Path:
        return self.path.with_suffix(suffix)

    # ---- reading
    def _read_store(self, data: bytes) -> bool:
        """Load the lines of the store. Return False if there is no store or no complete line."""
        file = self._file(".jsonl")
        if not data:
            return False
        if not (data.startswith(HEAD) or HEAD.startswith(data)):
            raise ValueError(_foreign(file, "it does not begin as a store of results does"))
        *lines, remainder = data.split(b"\n")
        if not lines:
            _warn(
                f"{file} was truncated in its first line: results are read from {self.path.name}, with types inferred from their texts"
            )
        elif remainder.strip(b"\0"):
            _warn(f"{file} was truncated: the cells that are missing at its end run again")
        for number, line in enumerate(lines, 1):
            body, checksum = line[:-CHECKSUM_LENGTH] + b"}", line[-CHECKSUM_LENGTH:]
            try:
                if checksum != _checksum(body):
                    raise ValueError("its checksum does not match")
                entry = json.loads(body.decode("utf-8", "surrogatepass"))
            except ValueError as error:
                remedy = (
                    f"restore the file from a backup, or move it away to continue from {self.path.name}"
                    if number == 1
                    else "restore the file from a backup, or delete this line, so that its cell runs again"
                )
                raise ValueError(f"{file} is damaged in line {number} ({error}): {remedy}") from error
            self._load_entry(entry, number == 1)
        return bool(lines)

    def _load_entry(self, entry: dict[str, Any], is_head: bool) -> None:
        if is_head:
            if entry["format"] != FORMAT:
                raise ValueError(
                    f"{self._file('.jsonl')} has format {entry['format']}, and this version of workbench reads format {FORMAT}: update workbench"
                )
            if entry["table"] != self.path.suffix:
                other = self.path.with_suffix(entry["table"]).name
                raise ValueError(
                    f"{self._file('.jsonl')} keeps the results of {other}: continue with {other}, or choose another name than {self.path.name}"
                )
            self.runs, self._digests, self._behind = entry["runs"], entry["made"], entry.get("behind", False)
        elif "failed" in entry:
            self.failures[entry["failed"]] = entry["told"]
        else:
            tail = {name: entry[name] for name in RESERVED}
            self.cells[entry["cell"]] = _CellRows([{**row, **tail} for row in entry["rows"]])

    def _check_exports(self, table: bytes, record: bytes, failed: bytes) -> None:
        """Raise unless the files beside the store were exported from it; truncated ones are accepted, since `write` replaces them."""
        on_disk = {self.path.suffix: table, ".json": record, ".failed.txt": failed}
        changed = [suffix for suffix, digest in self._disk.items() if digest not in self._digests.get(suffix, ())]
        exports = self._exports(self.runs) if changed else {}
        for suffix in changed:
            if not exports[suffix].startswith(on_disk[suffix]) and not _is_truncated(on_disk[suffix], suffix):
                file = self._file(suffix)
                raise ValueError(
                    f"{file} is not the file that was made from {self._file('.jsonl').name}: it was changed or replaced; "
                    f"move it away to have it written again, or move {self._file('.jsonl').name} away to continue from it"
                )

    def _read_exports(self, table: bytes, record: bytes, failed: bytes) -> None:
        """Load the results from the exported files, as versions without a store wrote them."""
        if table and not set(RESERVED) <= set(columns(table, self.path.suffix)):
            raise ValueError(_foreign(self.path, f"it lacks the columns {', '.join(RESERVED)}"))
        if record:
            self.runs = _runs(record, self._file(".json"))
        if failed:
            if not _is_failure_log(failed):
                raise ValueError(_foreign(self._file(".failed.txt"), "it does not begin with the traceback of a cell"))
            _, *pieces = FAILURE.split(failed.decode("utf-8", "backslashreplace"))
            self.failures = {name: f"=== {name} {text}" for name, text in zip(pieces[::2], pieces[1::2], strict=True)}
        if table:
            rows, truncated = read_table(self.path)
            if truncated:
                _warn(f"{self.path} was truncated: the cells that are missing at its end run again")
            cells: dict[str, list[dict[str, Any]]] = {}
            for row in rows:
                cells.setdefault(row["cell"], []).append({**row, **{name: row.get(name, "") for name in RESERVED}})
            self.cells = {cell_key: _CellRows(cell_rows) for cell_key, cell_rows in cells.items()}


def _foreign(file: Path, reason: str) -> str:
    return f"{file} is not a results file of workbench: {reason}; move it away, or choose another file"


def _warn(message: str) -> None:
    warnings.warn(message, WorkbenchWarning, stacklevel=5)


def _line(entry: dict[str, Any]) -> bytes:
    """Return the line of an entry, which ends with its checksum, so that a damaged digit does not pass for a result."""
    # no ASCII escapes: two lone halves of a surrogate pair would be read back as one character
    body = json.dumps(entry, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return body[:-1] + _checksum(body)


def _checksum(body: bytes) -> bytes:
    return b', "crc": "%08x"}' % zlib.crc32(body)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _runs(data: bytes, file: Path) -> list[dict[str, Any]]:
    """Return the runs in a record; none if it was truncated."""
    if _is_truncated(data, ".json"):
        return []
    try:
        runs = json.loads(data)["runs"]
        if all(run.keys() >= RUN for run in runs):
            return list(runs)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(_foreign(file, "it is not a record of runs"))


def _is_failure_log(data: bytes) -> bool:
    return FAILURE.match(data[:20].decode("utf-8", "replace")) is not None


def _is_truncated(data: bytes, suffix: str) -> bool:
    """Return whether a file begins like one of ours and lacks its end."""
    if suffix == ".json":
        return (data.startswith(RECORD) or RECORD.startswith(data)) and not data.rstrip().endswith(b"}")
    if suffix == ".parquet":
        return data.startswith(b"PAR1") and not data.endswith(b"PAR1")
    if data.endswith(b"\n"):
        return False
    return _is_failure_log(data) if suffix == ".failed.txt" else set(RESERVED) <= set(columns(data, suffix))
