"""Columns of a pandas DataFrame as numbers."""

from __future__ import annotations

import math
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

    def check_types(self, series: Any) -> None:
        """Raise ValueError if categories are those of the training rows but for their type, such as the text "1" for the number 1."""
        if self.kind != "category":
            return
        texts = {str(category): category for category in self.categories}
        for value in series.dropna().unique().tolist():
            if value not in self.categories and str(value) in texts:
                known = texts[str(value)]
                raise ValueError(
                    f"frame: {self.name!r} holds {value!r} ({type(value).__name__}) here, and {known!r} ({type(known).__name__}) in the "
                    f"training rows, which are two categories: frame[{self.name!r}].astype({type(known).__name__}) makes one of them"
                )

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
        return cls(tuple(_column(name, series) for name, series in _by_name(frame).items()))

    @property
    def columns(self) -> tuple[Column, ...]:
        """Names and units of the features."""
        return tuple(column for part in self.parts for column in part.columns)

    def __call__(self, frame: Any) -> Tensor:
        """Inputs float32 [n, features] of a frame with the same columns; a category that is in no training row is 0 everywhere.

        Raises:
            ValueError: a column is missing, or holds what its training rows do not.
        """
        by_name = _by_name(frame)
        if lacking := [part.name for part in self.parts if part.name not in by_name]:
            raise ValueError(f"frame: the columns {', '.join(lacking)} are missing; there are {', '.join(by_name)}")
        for part in self.parts:
            series = by_name[part.name]
            if not series.isna().all() and (kind := _kind(part.name, series)) != part.kind:
                raise ValueError(f"frame: {part.name!r} is a {kind} here, and a {part.kind} in the training rows")
            part.check_types(series)
        values = torch.from_numpy(np.concatenate([part.encode(by_name[part.name]) for part in self.parts], 1))
        for column, column_values in zip(self.columns, values.T, strict=True):
            check_finite(column_values, f"frame: {column.name!r}")
        return finite_float(values.float(), "frame")

    def notes(self, train: Any, test: Any) -> list[str]:
        """What was done to which columns, in words."""
        said = []
        train, test = _by_name(train), _by_name(test)
        for part in self.parts:
            gaps = [int(frame[part.name].isna().sum()) for frame in (train, test)]
            if part.kind == "category":
                said.append(f"{part.name}: {len(part.categories)} categories, a column of 0 and 1 for each")
                if all(map(_is_number, part.categories)) and isinstance(part.categories[0], str):
                    said[-1] += (
                        f"; if these texts are amounts, pandas.to_numeric(frame[{part.name!r}]) makes numbers of them"
                    )
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


def category_names(series: Any) -> tuple[str, ...] | None:
    """The names of the classes of a target of categories that have an order or are no texts, in their order; None of any other."""
    if not hasattr(series, "cat"):
        return None
    if not series.cat.ordered and all(isinstance(category, str) for category in series.cat.categories):
        return None
    return tuple(map(str, series.cat.remove_unused_categories().cat.categories))


def rows_by_index(test: Any, index: Any) -> Any:
    """Test rows that are told by the index of a frame, as a mask or row numbers in its order; anything else as it is.

    Args:
        test: a mask that is a Series, whose index tells its rows; labels of rows as a pandas Index; or what has no index.
        index: of the frame.

    Raises:
        ValueError: labels are not in the index, or stand there for several rows.
    """
    pandas = require("pandas")
    if isinstance(test, pandas.Series) and pandas.api.types.is_bool_dtype(test) and len(test) == len(index):
        labels, what = test.index, "a mask"
        whole = labels.nlevels == 1 and np.array_equal(labels.to_numpy(), np.arange(len(labels)))
        if labels.equals(index) or (whole and not labels.isin(index).all()):  # one without labels goes by place
            return np.array(test, dtype=bool)
    elif isinstance(test, pandas.Index) and test.dtype != bool:
        labels, what = test, "an index"
    else:
        return np.array(test) if isinstance(test, pandas.Series | pandas.Index) else test
    if not index.is_unique or not labels.is_unique or not labels.isin(index).all():
        why = "has some labels twice" if not index.is_unique or not labels.is_unique else "has others"
        raise ValueError(
            f"test: {what} names rows by their labels, such as {labels[0]!r}, and the frame {why}; give a mask as an array, test.to_numpy(), or "
            "row numbers, from 0"
            if len(labels)
            else f"test: {what} names no row"
        )
    if what == "a mask":
        return np.array(test.reindex(index), dtype=bool)
    return index.get_indexer(labels)


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
        numbers = [category for category in categories if _is_number(category)]
        if not explicit and 2 * len(numbers) > len(categories) > FEWEST_NAMES:
            others = [category for category in categories if not _is_number(category)]
            besides = f" besides {', '.join(map(repr, others[:3]))}" if others else ""
            gaps = ", errors='coerce'" if others else ""
            raise ValueError(
                f"frame: {name!r} holds numbers as texts, such as {numbers[0]!r}{besides}: "
                f"pandas.to_numeric(frame[{name!r}]{gaps}) makes numbers of them"
                f"{' and gaps of the others' if others else ''}; if they are categories, frame[{name!r}].astype('category')"
            )
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
    values = _numbers(known, origin)
    if np.isfinite(values).all():
        finite_float(torch.tensor(values), f"frame: {name!r}")  # says what float32 can't hold
    return FrameColumn(name, kind, float(np.median(values)), origin=origin, missing=missing)


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


def _by_name(frame: Any) -> dict[str, Any]:
    """The columns of a frame, whose names may be numbers or tuples."""
    return {str(name): frame.iloc[:, i] for i, name in enumerate(frame.columns)}


def _is_number(text: Any) -> bool:
    """Whether a text is a finite number."""
    try:
        return isinstance(text, str) and math.isfinite(float(text))
    except ValueError:
        return False


def _median(part: FrameColumn) -> str:
    return f"{part.fill:g}"
