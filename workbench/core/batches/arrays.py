"""Numbers of what users hold them in: lists, arrays of numpy, frames of pandas; and whether the rows of two frames belong together."""

from __future__ import annotations

import itertools
import numbers
from typing import Any

import numpy as np

_FRAME = "workbench.data.Data.from_dataframe(frame, target) makes numbers of texts, categories, dates and gaps"
_CLASSES = "of names of classes workbench.data.Data.from_arrays(x, y) makes class numbers, and so does numpy.unique(y, return_inverse=True)[1]"


def numbers_of(value: Any) -> np.ndarray:
    """An array of numbers; what is missing is NaN.

    Nullable columns of pandas, columns of several types of numbers, objects that are numbers, and bytes in another order than that of the
    machine are read; values that a masked array leaves out are NaN.

    Args:
        value: anything that numpy makes an array of.

    Raises:
        TypeError: it holds something else; the message, which goes on after "found ...: ", says what and what to do.
        ValueError: its rows differ in shape.

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
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def is_frame(value: Any) -> bool:
    """Whether it is a frame or a series of pandas, or of a library that does as pandas does."""
    return hasattr(value, "iloc") and hasattr(value, "index")


def check_index(first: Any, second: Any, name: str, labels: tuple[str, str] = ("x", "y")) -> None:
    """Raise ValueError if two frames or series of pandas have as many rows, but of other index or in another order.

    Rows are told by their place. One without an index of its own (0, 1, ...) goes with any other, but for the same numbers in another order.

    Args:
        first, second: what was given, of any type.
        name: of the argument that they are parts of, for errors.
        labels: their names.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"x": [1.0, 2.0], "y": [3.0, 4.0]})
        >>> check_index(frame[["x"]], frame["y"], "data")
        >>> check_index(frame[["x"]], frame["y"][::-1], "data")
        Traceback (most recent call last):
        ValueError: data: row 0 is that of index 0 in x and of 1 in y, ...
    """
    one, other = (value.index if is_frame(value) else None for value in (first, second))
    if one is None or other is None or len(one) != len(other) or one.equals(other):
        return
    whole = np.arange(len(one))
    plain = any(index.nlevels == 1 and np.array_equal(index.to_numpy(), whole) for index in (one, other))
    if plain and not (bool(one.isin(other).all()) and bool(other.isin(one).all())):
        return
    row = next(i for i, (a, b) in enumerate(itertools.zip_longest(one, other)) if a != b)
    raise ValueError(
        f"{name}: row {row} is that of index {one[row]} in {labels[0]} and of {other[row]} in {labels[1]}, so that rows that do not belong "
        f"together would be paired: give {labels[1]}.loc[{labels[0]}.index]; or, if they belong together as they stand, {labels[1]}.to_numpy()"
    )


def _unmasked(value: np.ma.MaskedArray) -> np.ndarray:
    if not np.ma.getmaskarray(value).any():
        return np.asarray(value.data)
    numbers_kept = value.data.astype(np.float64 if value.dtype.kind in "biu" else value.dtype)
    return np.where(np.ma.getmaskarray(value), np.nan, numbers_kept)


def _of_objects(value: Any, array: np.ndarray) -> np.ndarray:
    """Numbers that numpy keeps as objects, such as columns of several types and numbers with gaps."""
    if hasattr(value, "columns") and hasattr(value, "dtypes"):
        columns = []
        for column, name in enumerate(value.columns):
            try:
                columns.append(numbers_of(value.iloc[:, column]))
            except TypeError as error:
                raise TypeError(f"of its column {name!r}: {str(error).partition('; give')[0]}; {_FRAME}") from None
        return np.stack(columns, 1) if columns else array
    missing = np.array([_is_missing(item) for item in array.flat], dtype=bool).reshape(array.shape)
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


def _is_missing(item: Any) -> bool:
    return item is None or type(item).__name__ in ("NAType", "NaTType") or (isinstance(item, float) and item != item)


__all__ = ["check_index", "is_frame", "numbers_of"]
