"""Columns of a pandas DataFrame as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from workbench.data.columns import Column
from workbench.data.targets import check_finite, finite_float
from workbench.errors import require

MOST = 100  # different texts of a column; with more it is a name or a sentence rather than a category
FEWEST_NAMES = 10  # rows with a text each of their own from which on these are names: categories that no other row has


@dataclass(frozen=True)
class FrameColumn:
    """How one column of a frame becomes numbers.

    Args:
        name: of the column.
        kind: "number", "date" (days since `origin`), or "category" (one column of 0 and 1 for each).
        fill: what stands for a missing number: the median of the training rows.
        categories: of the training rows.
        origin: the first date of the training rows.
        missing: whether values are missing in training rows, so that there is a column that says so.
    """

    name: str
    kind: Literal["number", "date", "category"]
    fill: float = 0.0
    categories: tuple[Any, ...] = ()
    origin: Any = None
    missing: bool = False

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of numbers."""
        gap = (Column(f"{self.name} is missing"),) if self.missing else ()
        if self.kind == "category":
            return (*(Column(f"{self.name} = {category}") for category in self.categories), *gap)
        unit = f"days since {self.origin:%Y-%m-%d}" if self.kind == "date" else ""
        return (Column(self.name, unit), *gap)

    def encode(self, series: Any) -> np.ndarray:
        """Float64 [n, columns]."""
        missing = series.isna().to_numpy()
        gap = [missing.astype(np.float64)] if self.missing else []
        if self.kind == "category":
            return np.stack([*((series == c).fillna(False).to_numpy(np.float64) for c in self.categories), *gap], 1)
        return np.stack([np.where(missing, self.fill, _numbers(series, self.origin)), *gap], 1)


@dataclass(frozen=True)
class FrameEncoding:
    """How the columns of a frame become inputs; called with a new frame, it gives its inputs float32 [n, features].

    Args:
        parts: one for each column.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"size": [1.0, None, 3.0], "colour": ["red", "blue", "red"]})
        >>> encoding = FrameEncoding.of(frame)
        >>> [str(column) for column in encoding.columns]
        ['size', 'size is missing', 'colour = blue', 'colour = red']
        >>> encoding(frame)[1].tolist()
        [2.0, 1.0, 1.0, 0.0]
    """

    parts: tuple[FrameColumn, ...]

    @classmethod
    def of(cls, frame: Any) -> FrameEncoding:
        """The encoding of the columns of a frame of training rows.

        Raises:
            TypeError, ValueError: a column can't be made numbers.
        """
        if not len(frame.columns):
            raise ValueError("frame: there is no column besides the target")
        if len(set(map(str, frame.columns))) < len(frame.columns):
            raise ValueError(f"frame: several columns have one name; found {', '.join(map(str, frame.columns))}")
        return cls(tuple(_column(str(name), frame[name]) for name in frame.columns))

    @property
    def columns(self) -> tuple[Column, ...]:
        """Names and units of the features."""
        return tuple(column for part in self.parts for column in part.columns)

    def __call__(self, frame: Any) -> Tensor:
        """Inputs float32 [n, features] of a frame with the same columns; a category that is in no training row is 0 everywhere.

        Raises:
            ValueError: a column is missing, or holds what its training rows do not.
        """
        by_name = {str(name): frame[name] for name in frame.columns}
        if lacking := [part.name for part in self.parts if part.name not in by_name]:
            raise ValueError(f"frame: the columns {', '.join(lacking)} are missing; there are {', '.join(by_name)}")
        for part in self.parts:
            series = by_name[part.name]
            if not series.isna().all() and (kind := _kind(part.name, series)) != part.kind:
                raise ValueError(f"frame: {part.name!r} is a {kind} here, and a {part.kind} in the training rows")
        values = torch.from_numpy(np.concatenate([part.encode(by_name[part.name]) for part in self.parts], 1))
        for column, column_values in zip(self.columns, values.T, strict=True):
            check_finite(column_values, f"frame: {column.name!r}")
        return finite_float(values, "frame")

    def notes(self, train: Any, test: Any) -> list[str]:
        """What was done to which columns, in words."""
        said = []
        for part in self.parts:
            gaps = [int(frame[part.name].isna().sum()) for frame in (train, test)]
            if part.kind == "category":
                said.append(f"{part.name}: {len(part.categories)} categories, a column of 0 and 1 for each")
                new = ~test[part.name].isin(part.categories) & test[part.name].notna()
                if new.any():
                    said.append(f"{part.name}: {int(new.sum())} test rows have a category of no training row: 0 in all")
            elif part.kind == "date":
                said.append(f"{part.name}: dates, as {part.columns[0].unit}, the first in the training rows")
            if any(gaps):
                with_ = "a column says where" if part.kind == "category" else f"filled with the median {_median(part)}"
                flag = ", and a column says where" if part.missing and part.kind != "category" else ""
                said.append(f"{part.name}: missing in {gaps[0]} training and {gaps[1]} test rows; {with_}{flag}")
                if part.kind == "category" and not part.missing:
                    said[-1] = f"{part.name}: missing in {gaps[1]} test rows and in no training row: 0 in all"
        return said


def _column(name: str, series: Any) -> FrameColumn:
    kind = _kind(name, series)
    known = series.dropna()
    if not len(known):
        raise ValueError(
            f"frame: {name!r} has no value in the training rows; leave it out: frame.drop(columns={name!r})"
        )
    missing = len(known) < len(series)
    if kind == "category":
        categories = tuple(sorted(known.unique().tolist(), key=lambda value: (type(value).__name__, value)))
        explicit = hasattr(series, "cat")
        if len(categories) > MOST and not explicit:
            raise ValueError(
                f"frame: {name!r} has {len(categories)} different texts in {len(known)} training rows, such as {categories[0]!r}; leave it out, "
                f"frame.drop(columns={name!r}), or, if they are categories, frame[{name!r}].astype('category'), or dates, pandas.to_datetime"
            )
        if len(categories) == len(known) >= FEWEST_NAMES and not explicit:
            raise ValueError(
                f"frame: {name!r} has another text in each of the {len(known)} training rows, such as {categories[0]!r}, which says nothing "
                f"about other rows; leave it out, frame.drop(columns={name!r}). Of files make a torch Dataset that opens them, for "
                "Data.from_dataset"
            )
        return FrameColumn(name, "category", categories=categories, missing=missing)
    origin = known.min() if kind == "date" else None
    return FrameColumn(name, kind, float(np.median(_numbers(known, origin))), origin=origin, missing=missing)


def _kind(name: str, series: Any) -> Literal["number", "date", "category"]:
    types = require("pandas").api.types
    if hasattr(series, "cat"):
        return "category"
    if types.is_bool_dtype(series) or (types.is_numeric_dtype(series) and not types.is_complex_dtype(series)):
        return "number"
    if types.is_timedelta64_dtype(series):
        raise TypeError(
            f"frame: {name!r} holds spans of time; give a number of a unit: frame[{name!r}].dt.total_seconds()"
        )
    if types.is_datetime64_any_dtype(series):
        return "date"
    said = types.infer_dtype(series, skipna=True)
    if said in ("string", "categorical"):
        return "category"
    if said in ("integer", "floating", "mixed-integer-float", "decimal", "boolean", "empty"):
        return "number"
    raise TypeError(
        f"frame: {name!r} holds {said} ({series.dtype}); give numbers, texts, dates or categories, or leave it out"
    )


def _numbers(series: Any, origin: Any) -> np.ndarray:
    """Numbers float64 [n], NaN where missing; of dates the days since the origin."""
    pandas = require("pandas")
    if origin is not None:
        if (series.dt.tz is None) != (origin.tzinfo is None):
            raise ValueError(f"frame: {series.name!r} has a time zone in some rows only")
        return ((series - origin) / pandas.Timedelta(days=1)).to_numpy(np.float64, na_value=np.nan)
    return pandas.to_numeric(series).astype("Float64").to_numpy(np.float64, na_value=np.nan)


def _median(part: FrameColumn) -> str:
    return f"{part.fill:g}"
