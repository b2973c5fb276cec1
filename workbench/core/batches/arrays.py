"""Conversion of lists, numpy arrays and pandas frames to numbers, and checks that rows of two frames belong together."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

_FRAME = "workbench.data.Data.from_dataframe(frame, target) encodes texts, categories, dates and missing values"
_CLASSES = "for class names, workbench.data.Data.from_arrays(x, y) or numpy.unique(y, return_inverse=True)[1] gives class numbers"


def numbers_of(value: Any) -> np.ndarray:
    """Convert a value to an array of numbers, with NaN for missing values.

    Supported are also nullable pandas columns, columns with several numeric types, objects that are numbers, non-native byte order, and
    reversed views (copied, since torch has no negative strides); masked values of masked arrays become NaN.

    Args:
        value: anything that numpy can convert to an array.

    Raises:
        TypeError: if it holds anything but numbers; the message is phrased to continue "found ...: ".
        ValueError: if its rows differ in shape.

    Example:
        >>> numbers_of([1, None, 3]), numbers_of(np.ma.masked_equal([1.0, -999.0], -999.0))
        (array([ 1., nan,  3.]), array([ 1., nan]))
    """
    if hasattr(value, "toarray") and hasattr(value, "tocsr"):
        raise TypeError("it is a sparse matrix; give x.toarray(), or its rows in a torch Dataset if that is too large")
    array = _unmasked(value) if isinstance(value, np.ma.MaskedArray) else np.asarray(value)
    if array.dtype.kind == "O":
        array = _of_objects(value, array)
    if array.dtype.kind in "UST":
        raise TypeError(f"it holds texts, such as {str(array.flat[0])!r:.60}; give numbers: {_CLASSES}")
    if array.dtype.kind in "mM":
        unit = "numpy.timedelta64(1, 'D')"
        days = f"(x - x.min()) / {unit}" if array.dtype.kind == "M" else f"x / {unit}"
        raise TypeError(f"it holds dates or spans of time ({array.dtype}); give numbers, such as days: {days}")
    if array.dtype.kind not in "biufc":
        raise TypeError(f"it holds {array.dtype}; give numbers")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if any(stride < 0 for stride in array.strides):
        array = array.copy(order="C")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def is_frame(value: Any) -> bool:
    """Return whether a value is a pandas frame or series, or has the same interface."""
    return hasattr(value, "iloc") and hasattr(value, "index")


def check_index(first: Any, second: Any, name: str, labels: tuple[str, str] = ("x", "y")) -> None:
    """Raise ValueError if two pandas frames or series of equal length have different indices.

    Rows are paired by position. A default index (0, 1, ...) matches any other index, except the same numbers in another order.

    Args:
        first, second: values of any type; only frames and series are checked.
        name: name of the argument that contains them, for errors.
        labels: their names, for errors.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"x": [1.0, 2.0], "y": [3.0, 4.0]})
        >>> check_index(frame[["x"]], frame["y"], "data")
        >>> check_index(frame[["x"]], frame["y"][::-1], "data")
        Traceback (most recent call last):
        ValueError: data: row 0 has index 0 in x and 1 in y, ...
    """
    first_index, second_index = (value.index if is_frame(value) else None for value in (first, second))
    if (
        first_index is None
        or second_index is None
        or len(first_index) != len(second_index)
        or first_index.equals(second_index)
    ):
        return
    default = np.arange(len(first_index))
    has_default = any(
        index.nlevels == 1 and np.array_equal(index.to_numpy(), default) for index in (first_index, second_index)
    )
    if has_default and not (bool(first_index.isin(second_index).all()) and bool(second_index.isin(first_index).all())):
        return
    row = next(i for i, (a, b) in enumerate(itertools.zip_longest(first_index, second_index)) if a != b)
    raise ValueError(
        f"{name}: row {row} has index {first_index[row]} in {labels[0]} and {second_index[row]} in {labels[1]}, so that unrelated "
        f"rows would be paired: give {labels[1]}.loc[{labels[0]}.index]; or, if rows belong together by position, {labels[1]}.to_numpy()"
    )


def check_columns(expected: Any, value: Any, name: str, label: str) -> None:
    """Raise ValueError if frames, alone or in dicts and tuples, have the same columns in another order.

    Args:
        expected: what gives the order.
        value: what is checked; only frames of as many columns with the same names are.
        name: name of the argument that contains them, for errors.
        label: name of the value, for errors.
    """
    if isinstance(expected, Mapping) and isinstance(value, Mapping):
        for key in expected.keys() & value.keys():
            check_columns(expected[key], value[key], name, f"{label}[{key!r}]")
    elif isinstance(expected, tuple) and isinstance(value, tuple):
        for i, pair in enumerate(zip(expected, value, strict=False)):
            check_columns(*pair, name, f"{label}[{i}]")
    elif all(is_frame(frame) and hasattr(frame, "columns") for frame in (expected, value)):
        order, columns = list(expected.columns), list(value.columns)
        if columns != order and len(columns) == len(order) and set(columns) == set(order):
            raise ValueError(
                f"{name}: {label}: its columns are {', '.join(map(str, columns))}, but must be {', '.join(map(str, order))}; give them in "
                f"that order: {label}[{order!r}]"
            )


def _unmasked(value: np.ma.MaskedArray) -> np.ndarray:
    if not np.ma.getmaskarray(value).any():
        return np.asarray(value.data)
    numbers_kept = value.data.astype(np.float64 if value.dtype.kind in "biu" else value.dtype)
    return np.where(np.ma.getmaskarray(value), np.nan, numbers_kept)


def _of_objects(value: Any, array: np.ndarray) -> np.ndarray:
    """Convert an object array to numbers, such as columns of several types or with missing values."""
    if hasattr(value, "columns") and hasattr(value, "dtypes"):
        columns = []
        for column, name in enumerate(value.columns):
            try:
                columns.append(numbers_of(value.iloc[:, column]))
            except TypeError as error:
                raise TypeError(f"of its column {name!r}: {str(error).partition('; give')[0]}; {_FRAME}") from None
        return np.stack(columns, 1) if columns else array
    missing = np.array([is_missing(item) for item in array.flat], dtype=bool).reshape(array.shape)
    known = array[~missing]
    if known.size and all(isinstance(item, str) for item in known.flat):
        raise TypeError(f"it holds texts, such as {known.flat[0]!r:.60}; give numbers: {_CLASSES}")
    for item in known.flat:
        if not isinstance(item, numbers.Real | np.number | np.bool_):
            raise TypeError(f"it holds objects, such as {item!r:.60} of type {type(item).__name__}; give numbers")
    if missing.any() or not known.size:
        new = np.full(array.shape, np.nan)
        new[~missing] = known.astype(np.float64)
        return new
    kinds = {np.asarray(item).dtype.kind for item in known.flat}
    return array.astype(np.bool_ if kinds == {"b"} else np.int64 if kinds <= set("biu") else np.float64)


def is_missing(item: Any) -> bool:
    """Return whether an element of an object array stands for a missing value."""
    return item is None or type(item).__name__ in ("NAType", "NaTType") or (isinstance(item, float) and item != item)


__all__ = ["check_columns", "check_index", "is_frame", "is_missing", "numbers_of"]
