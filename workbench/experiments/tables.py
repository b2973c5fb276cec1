"""Conversion of result rows to DataFrames and to CSV or Parquet files, and reading of tables written by versions without a store."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import require
from .worker import RESERVED

if TYPE_CHECKING:
    import pandas as pd

TEXT_COLUMNS = ("cell", "version", "device")  # never parsed as numbers, though a key or a version may be all digits
MAX_EXACT_INT = 2**53  # floats represent all integers up to here exactly


def text(value: Any) -> str:
    """Return the text of a value in a CSV file; floats keep all their digits.

    Example:
        >>> text(0.1), text(None), text([1, 2])
        ('0.1', '', '[1, 2]')
    """
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def frame_of(rows: Sequence[dict[str, Any]], columns: Iterable[str] = ()) -> pd.DataFrame:
    """Return the rows as a DataFrame that preserves the type of each value.

    Args:
        rows: dicts of JSON types.
        columns: column names; empty: those of all rows, and `RESERVED`.

    Returns:
        Table; a value that a row lacks is NaN. Columns are bool or int64 if all their values are and none is missing, float64 if they hold
        numbers that floats represent exactly, and object otherwise.

    Example:
        >>> frame = frame_of([{"a": 2**53 + 1, "b": 1}, {"b": 0.5}])
        >>> frame["a"].tolist(), frame["b"].tolist()
        ([9007199254740993, nan], [1.0, 0.5])
    """
    require("pandas")
    import pandas as pd

    labels = [*columns] or names(rows)
    series = [_series([row[name] for row in rows if name in row], name, rows) for name in labels]
    frame = pd.DataFrame(dict(enumerate(series)))
    # pandas' string dtype can't hold lone surrogates
    frame.columns = pd.Index(labels, dtype=None if all(label == _encodable(label) for label in labels) else object)
    return frame


def names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the column names of a table of these rows, `RESERVED` last."""
    return [*dict.fromkeys(name for row in rows for name in row if name not in RESERVED), *RESERVED]


def _series(present: list[Any], name: str, rows: Sequence[dict[str, Any]]) -> pd.Series:
    import pandas as pd

    kinds, gaps = {type(value) for value in present}, len(present) < len(rows)
    kind: str = "object"
    if kinds == {bool} and not gaps:
        kind = "bool"
    elif kinds == {int} and not gaps and all(-(2**63) <= value < 2**63 for value in present):
        kind = "int64"
    elif kinds <= {int, float} and all(type(value) is float or abs(value) <= MAX_EXACT_INT for value in present):
        kind = "float64"
    return pd.Series([row.get(name, math.nan) for row in rows], dtype=kind)


def content(rows: Sequence[dict[str, Any]], suffix: str) -> bytes:
    """Return the contents of a file of these rows. Characters that can't be encoded, such as lone surrogates, are escaped by a backslash.

    Args:
        rows: dicts of JSON types.
        suffix: ".csv", with every value as its `text`, or ".parquet", with columns of one type each.
    """
    if suffix == ".parquet":
        frame = frame_of(rows)
        for name in frame.select_dtypes("object").columns:
            frame[name] = [
                None if value is None or value != value else _encodable(text(value)) for value in frame[name]
            ]
        return bytes(frame.rename(columns=_encodable).to_parquet(index=False))
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, names(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: text(value) for name, value in row.items()} for row in rows)
    return buffer.getvalue().encode("utf-8", "backslashreplace")


def _encodable(value: str) -> str:
    return value.encode("utf-8", "backslashreplace").decode()


def columns(data: bytes, suffix: str) -> list[str]:
    """Return the column names of a table, or an empty list if the bytes are no such table."""
    if suffix == ".parquet":
        parquet = require("pyarrow.parquet", "parquet")
        try:
            return list(map(str, parquet.read_schema(io.BytesIO(data)).names))
        except (ValueError, OSError):
            return []
    try:
        with _fields_of_any_length():
            return next(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True), [])
    except (ValueError, csv.Error):
        return []


def read_table(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Read the rows of a table without a store; the type of each CSV column is inferred from its texts.

    Returns:
        The rows, and whether the file was truncated. If so, the rows of its last cell are left out, since some of them may be missing.

    Raises:
        ValueError: the table can't be read.
    """
    if path.suffix == ".parquet":
        import pandas as pd

        frame = pd.read_parquet(path)
        rows = [
            {str(name): plain for name, value in row.items() if (plain := _python(value)) is not None}
            for row in frame.astype(object).to_dict("records")
        ]
        return rows, False
    try:
        data = path.read_bytes().decode("utf-8-sig")
        truncated = not data.endswith("\n")
        if not truncated:
            try:
                texts = _texts(data)
            except csv.Error:  # the file ends within a quoted text of several lines
                truncated = True
        if truncated:
            texts = _whole_cells(data)
    except (ValueError, csv.Error) as error:
        raise ValueError(
            f"{path} can't be read as a table of results ({error}): restore it from a backup, or move it away"
        ) from error
    typed = {
        name: [row[name] for row in texts] if name in TEXT_COLUMNS else _typed([row[name] for row in texts])
        for name in (texts[0] if texts else ())
    }
    return [{name: typed[name][i] for name, value in row.items() if value} for i, row in enumerate(texts)], truncated


def _texts(data: str) -> list[dict[str, str]]:
    rows = []
    with _fields_of_any_length():
        for number, row in enumerate(csv.DictReader(io.StringIO(data, newline=""), strict=True), 1):
            if None in row:
                raise ValueError(f"row {number} has more values than there are columns")
            if not row.get("cell"):
                raise ValueError(f"row {number} has no value in the column cell")
            rows.append({name: value or "" for name, value in row.items()})
    return rows


def _whole_cells(data: str) -> list[dict[str, str]]:
    """Return the rows of a truncated file without those of its last cell, some of which may be missing."""
    while data:
        data = data[: data.rfind("\n", 0, -1) + 1]
        with contextlib.suppress(csv.Error):  # this line end is within a quoted text
            rows = _texts(data)
            return [row for row in rows if row["cell"] != rows[-1]["cell"]]
    return []


@contextlib.contextmanager
def _fields_of_any_length() -> Iterator[None]:
    previous = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(previous)


def _typed(texts: list[str]) -> list[Any]:
    if set(texts) <= {"True", "False", ""}:
        return [value == "True" for value in texts]
    for kind in (int, float):
        try:
            return [kind(value) if value else None for value in texts]
        except ValueError:
            continue
    return list(texts)


def _python(value: Any) -> Any:
    """Return a value of a table as a Python object; None if it is missing."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return None if value is None or value != value else value
