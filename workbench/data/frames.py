"""Encoding of the columns of a pandas DataFrame as numbers."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from workbench.core.batches.arrays import is_frame
from workbench.data.columns import Column
from workbench.data.targets import check_finite, finite_float
from workbench.errors import WorkbenchWarning, require

MAX_CATEGORIES = 100  # distinct texts in a column; a column with more holds names or sentences rather than categories
# number of rows from which on a column of texts that are all different counts as names, not categories
MIN_DISTINCT = 10


@dataclass(frozen=True)
class FrameColumn:
    """Encoding of one column of a frame.

    Args:
        name: name of the column.
        kind: "number", "date" (days since `origin`), or "category" (one-hot encoded).
        fill: value that replaces missing numbers: the median of the training rows.
        categories: categories in the training rows.
        origin: first date in the training rows.
        missing: whether values are missing in training rows, in which case a column marks missing values.
    """

    name: str
    kind: Literal["number", "date", "category"]
    fill: float = 0.0
    categories: tuple[Any, ...] = ()
    origin: Any = None
    missing: bool = False

    @property
    def columns(self) -> tuple[Column, ...]:
        """Encoded columns."""
        missing_column = (Column(f"{self.name} is missing"),) if self.missing else ()
        if self.kind == "category":
            return (*(Column(f"{self.name} = {category}") for category in self.categories), *missing_column)
        unit = f"days since {self.origin:%Y-%m-%d}" if self.kind == "date" else ""
        return (Column(self.name, unit), *missing_column)

    def check_types(self, series: Any) -> None:
        """Raise ValueError if a category differs from one of the training rows only by its type, such as the text "1" from the number 1."""
        if self.kind != "category":
            return
        known, texts = set(self.categories), {str(category): category for category in self.categories}
        for value in series.dropna().unique().tolist():
            if value not in known and str(value) in texts:
                category = texts[str(value)]
                raise ValueError(
                    f"frame: {self.name!r} holds {value!r} ({type(value).__name__}) here, and {category!r} ({type(category).__name__}) in the "
                    f"training rows, which are different categories: convert one, frame[{self.name!r}].astype({type(category).__name__})"
                )

    def encode(self, series: Any) -> np.ndarray:
        """Encode values [n] as [n, columns]: categories as float32, which holds 0 and 1, others as float64."""
        missing = series.isna().to_numpy()
        if self.kind == "category":
            # a column at a time, as all of them may need most of the memory
            values = np.empty((len(series), len(self.columns)), np.float32, order="F")
            for i, category in enumerate(self.categories):
                values[:, i] = (series == category).fillna(False).to_numpy(bool)
            if self.missing:
                values[:, -1] = missing
            return values
        missing_column = [missing.astype(np.float64)] if self.missing else []
        return np.stack([np.where(missing, self.fill, _numbers(series, self.origin)), *missing_column], 1)


@dataclass(frozen=True)
class FrameEncoding:
    """Encoding of a frame; call it with a new frame to get inputs float32 [n, features].

    Args:
        parts: encodings of the columns.

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
        """Fit the encoding to a frame of training rows.

        Raises:
            TypeError, ValueError: a column can't be converted to numbers.
        """
        if not len(frame.columns):
            raise ValueError("frame: there is no column besides the target")
        if len(set(map(str, frame.columns))) < len(frame.columns):
            raise ValueError(f"frame: several columns have the same name; found {', '.join(map(str, frame.columns))}")
        return cls(tuple(_column(name, series) for name, series in _by_name(frame).items()))

    @property
    def columns(self) -> tuple[Column, ...]:
        """Names and units of the features."""
        return tuple(column for part in self.parts for column in part.columns)

    def __call__(self, frame: Any) -> Tensor:
        """Encode a frame with the same columns as float32 [n, features]. A category without training rows is encoded as all zeros.

        Missing numbers and dates become the median of the training rows. A column marks them if training rows lack some, too; otherwise a
        WorkbenchWarning names them.

        Raises:
            TypeError: frame is no frame.
            ValueError: a column is missing, or of another kind than in the training rows.
        """
        if not (is_frame(frame) and hasattr(frame, "columns")):
            raise TypeError(
                f"frame: found {type(frame).__name__}; give a pandas.DataFrame: frame.iloc[[0]] is one of a single row, and "
                "pandas.DataFrame([row]) makes one of a dict"
            )
        by_name = _by_name(frame)
        if missing_columns := [part.name for part in self.parts if part.name not in by_name]:
            raise ValueError(
                f"frame: the columns {', '.join(missing_columns)} are missing; there are {', '.join(by_name)}"
            )
        for part in self.parts:
            series = by_name[part.name]
            if not series.isna().all() and (kind := _kind(part.name, series)) != part.kind:
                raise ValueError(f"frame: {part.name!r} is a {kind} here, and a {part.kind} in the training rows")
            part.check_types(series)
        if unmarked := [
            part.name
            for part in self.parts
            if part.kind != "category" and not part.missing and by_name[part.name].isna().any()
        ]:
            warnings.warn(
                f"frame: values of {', '.join(map(repr, unmarked))} are missing here and in no training row: the median of the training rows "
                "takes their place, and neither prediction nor risk shows it; drop these rows, or fill them with what is known",
                WorkbenchWarning,
                stacklevel=2,
            )
        size, memory = 4 * len(frame) * len(self.columns), _memory()
        if size > memory:
            widest = max(self.parts, key=lambda part: len(part.columns))
            raise ValueError(
                f"frame: {len(frame):,} rows with {len(self.columns):,} columns take up {size / 2**30:,.0f} GiB, and this machine has "
                f"{memory / 2**30:,.0f}; {widest.name!r} alone makes {len(widest.columns):,} columns"
                f"{', one for each category: put rare ones together, or give their codes to an nn.Embedding' if widest.categories else ''}"
            )
        values = []
        for part in self.parts:
            encoded = torch.from_numpy(part.encode(by_name[part.name]))
            for column, column_values in zip(part.columns, encoded.T, strict=True):
                check_finite(column_values, f"frame: {column.name!r}", index=frame.index)
            values.append(encoded.float())
        return finite_float(torch.cat(values, 1), "frame")

    def notes(self, train: Any, test: Any) -> list[str]:
        """Describe the conversion of each column in words."""
        descriptions = []
        train, test = _by_name(train), _by_name(test)
        for part in self.parts:
            gaps = [int(frame[part.name].isna().sum()) for frame in (train, test)]
            if part.kind == "category":
                n = len(part.categories)
                descriptions.append(
                    f"{part.name}: {n} {'category' if n == 1 else 'categories'}, a column of 0 and 1 for each"
                )
                if all(map(_is_number, part.categories)) and isinstance(part.categories[0], str):
                    descriptions[-1] += (
                        f"; if these texts are amounts, pandas.to_numeric(frame[{part.name!r}]) makes numbers of them"
                    )
                new = ~test[part.name].isin(part.categories) & test[part.name].notna()
                if new.any():
                    descriptions.append(
                        f"{part.name}: {int(new.sum())} test rows have a category of no training row: 0 in all"
                    )
            elif part.kind == "date":
                descriptions.append(f"{part.name}: dates, as {part.columns[0].unit}, the first in the training rows")
            if any(gaps):
                treatment = (
                    "a column says where" if part.kind == "category" else f"filled with the median {_median(part)}"
                )
                flag = ", and a column says where" if part.missing and part.kind != "category" else ""
                descriptions.append(
                    f"{part.name}: missing in {gaps[0]} training and {gaps[1]} test rows; {treatment}{flag}"
                )
                if part.kind == "category" and not part.missing:
                    descriptions[-1] = f"{part.name}: missing in {gaps[1]} test rows and in no training row: 0 in all"
        return descriptions


def _memory() -> float:
    """Return the bytes of memory of this machine, infinite if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return math.inf


def rows_by_index(test: Any, index: Any) -> Any:
    """Convert test rows given by index labels of a frame to a mask or row numbers; other objects are returned unchanged.

    Args:
        test: mask as a Series, matched by its index; row labels as a pandas Index; or an object without index.
        index: index of the frame.

    Raises:
        ValueError: labels are not in the index, or are not unique, or a mask has missing values.
    """
    pandas = require("pandas")
    if isinstance(test, pandas.Series) and pandas.api.types.is_bool_dtype(test) and len(test) == len(index):
        if gaps := int(test.isna().sum()):
            raise ValueError(
                f"test: the mask is missing in {gaps} of {len(test)} rows; test.fillna(False) leaves them to training"
            )
        labels, form = test.index, "a mask"
        is_default_index = labels.nlevels == 1 and np.array_equal(labels.to_numpy(), np.arange(len(labels)))
        # a mask with the default index is matched by position
        if labels.equals(index) or (is_default_index and not labels.isin(index).all()):
            return np.array(test, dtype=bool)
    elif isinstance(test, pandas.Index) and test.dtype != bool:
        labels, form = test, "an index"
    else:
        return np.array(test) if isinstance(test, pandas.Series | pandas.Index) else test
    if not index.is_unique or not labels.is_unique or not labels.isin(index).all():
        reason = "has some labels twice" if not index.is_unique or not labels.is_unique else "has others"
        raise ValueError(
            f"test: {form} names rows by their labels, such as {labels[0]!r}, and the frame {reason}; give a mask as an array, "
            "test.to_numpy(), or row numbers, from 0"
            if len(labels)
            else f"test: {form} names no row"
        )
    if form == "a mask":
        return np.array(test.reindex(index), dtype=bool)
    return index.get_indexer(labels)


def _column(name: str, series: Any) -> FrameColumn:
    kind = _kind(name, series)
    present = series.dropna()
    if not len(present):
        raise ValueError(
            f"frame: {name!r} has no value in the training rows; leave it out: frame.drop(columns={name!r})"
        )
    missing = len(present) < len(series)
    if kind == "category":
        is_categorical = hasattr(series, "cat")
        categories = tuple(sorted(present.unique().tolist(), key=lambda value: (type(value).__name__, value)))
        if is_categorical and series.cat.ordered:
            categories = tuple(category for category in series.cat.categories.tolist() if category in categories)
        numbers = [category for category in categories if _is_number(category)]
        if not is_categorical and 2 * len(numbers) > len(categories) > MIN_DISTINCT:
            texts = [category for category in categories if not _is_number(category)]
            exceptions = f" besides {', '.join(map(repr, texts[:3]))}" if texts else ""
            gaps = ", errors='coerce'" if texts else ""
            raise ValueError(
                f"frame: {name!r} holds numbers as texts, such as {numbers[0]!r}{exceptions}: "
                f"pandas.to_numeric(frame[{name!r}]{gaps}) converts them to numbers"
                f"{' and the others to missing values' if texts else ''}; if they are categories, frame[{name!r}].astype('category')"
            )
        if len(categories) > MAX_CATEGORIES and not is_categorical:
            raise ValueError(
                f"frame: {name!r} has {len(categories)} different texts in {len(present)} training rows, such as {categories[0]!r}; leave it "
                f"out, frame.drop(columns={name!r}), or, if they are categories, frame[{name!r}].astype('category'), "
                "or dates, pandas.to_datetime"
            )
        if len(categories) == len(present) >= MIN_DISTINCT and not is_categorical:
            raise ValueError(
                f"frame: {name!r} has a different text in each of the {len(present)} training rows, such as {categories[0]!r}, from which "
                f"nothing can be learned; leave it out, frame.drop(columns={name!r}). For files write a torch Dataset that opens them, and use "
                "Data.from_dataset"
            )
        return FrameColumn(name, "category", categories=categories, missing=missing)
    origin = present.min() if kind == "date" else None
    values = _numbers(present, origin)
    if np.isfinite(values).all():
        is_signed = kind == "number" and require("pandas").api.types.is_signed_integer_dtype(present)
        exact = present.to_numpy(np.int64) if is_signed else values  # float64 does not hold all whole numbers
        finite_float(torch.tensor(exact), f"frame: {name!r}")  # raises or warns if float32 can't represent the values
    return FrameColumn(name, kind, float(np.median(values)), origin=origin, missing=missing)


def _kind(name: str, series: Any) -> Literal["number", "date", "category"]:
    types = require("pandas").api.types
    if hasattr(series, "cat"):
        return "category"
    if types.is_bool_dtype(series) or (types.is_numeric_dtype(series) and not types.is_complex_dtype(series)):
        return "number"
    if types.is_timedelta64_dtype(series):
        raise TypeError(
            f"frame: {name!r} holds time spans; convert them to numbers: frame[{name!r}].dt.total_seconds()"
        )
    if types.is_datetime64_any_dtype(series):
        return "date"
    inferred = types.infer_dtype(series, skipna=True)
    if inferred in ("string", "categorical"):
        return "category"
    if inferred in ("integer", "floating", "mixed-integer-float", "decimal", "boolean", "empty"):
        return "number"
    remedy = "give numbers, texts, dates or categories, or leave it out"
    if inferred in ("date", "datetime"):  # Python objects, perhaps of several time zones
        remedy = f"pandas.to_datetime(frame[{name!r}], utc=True) converts them to dates of pandas"
    raise TypeError(f"frame: {name!r} holds {inferred} ({series.dtype}); {remedy}")


def _numbers(series: Any, origin: Any) -> np.ndarray:
    """Return numbers as float64 [n], NaN where missing; for dates the days since the origin."""
    pandas = require("pandas")
    if origin is not None:
        if (series.dt.tz is None) != (origin.tzinfo is None):
            raise ValueError(f"frame: {series.name!r} has a time zone in some rows only")
        return ((series - origin) / pandas.Timedelta(days=1)).to_numpy(np.float64, na_value=np.nan)
    return pandas.to_numeric(series).astype("Float64").to_numpy(np.float64, na_value=np.nan)


def _by_name(frame: Any) -> dict[str, Any]:
    """Return the columns of a frame by name; names that are numbers or tuples become strings."""
    return {str(name): _with_times(frame.iloc[:, i]) for i, name in enumerate(frame.columns)}


def _with_times(series: Any) -> Any:
    """Convert the days of pyarrow to dates of pandas, since they have none of their methods; other columns are returned unchanged."""
    days = str(series.dtype) in ("date32[day][pyarrow]", "date64[ms][pyarrow]")
    return require("pandas").to_datetime(series) if days else series


def _is_number(text: Any) -> bool:
    """Return whether a value is a text that reads as a finite number."""
    try:
        return isinstance(text, str) and math.isfinite(float(text))
    except ValueError:
        return False


def _median(part: FrameColumn) -> str:
    return f"{part.fill:g}"
