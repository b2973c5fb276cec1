"""Windows of series: the values before and after each forecast origin."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.core.batches.arrays import is_frame, numbers_of
from workbench.data.split_drawing import whole_number
from workbench.errors import WorkbenchWarning, require

# if at least this share of the time steps are equal, the others are gaps; with less (months, working days) the series is irregular
REGULAR_SHARE = 0.9


class Windows(NamedTuple):
    """Rows of a forecasting task.

    Args:
        x: values before each origin [n, window, ...].
        y: values from the origin on [n, horizon, ...].
        origin: number of values of the series before y, int64 [n].
    """

    x: Tensor
    y: Tensor
    origin: Tensor


def windows(series: Any, window: int, horizon: int = 1, *, every: int = 1, target: Any = None) -> Windows:
    """Return all windows of a series, in time order.

    Args:
        series: values [time], or of k series at the same times [time, k]; tensor, array or frame of numbers.
        window: number of past values in x.
        horizon: number of values to forecast, in y.
        every: distance between two origins in time steps.
        target: index of the series to forecast, or several indices; for a frame also names of columns. None: all series.

    Returns:
        x [n, window] or [n, window, k], y [n, horizon] or, for several targets, [n, horizon, k], and the origins [n].

    Raises:
        TypeError: a number is not an integer, or series holds no numbers.
        ValueError: a number is out of range, or the series is shorter than one window and its horizon.

    Example:
        >>> x, y, origin = windows(torch.arange(6.0), window=3, horizon=2)
        >>> x.tolist(), y.tolist(), origin.tolist()
        ([[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]], [[3.0, 4.0], [4.0, 5.0]], [3, 4])
    """
    values = as_series(series)
    for name, number in (("window", window), ("horizon", horizon), ("every", every)):
        if whole_number(name, number) < 1:
            raise ValueError(f"{name} must be at least 1; found {number}")
    if len(values) < window + horizon:
        raise ValueError(f"series: {len(values)} values are fewer than window + horizon = {window} + {horizon}")
    target_series = chosen(values, column_numbers(series, target))
    x = values[: len(values) - horizon].unfold(0, window, every).movedim(-1, 1)
    y = target_series[window:].unfold(0, horizon, every).movedim(-1, 1)
    return Windows(x.contiguous(), y.contiguous(), window + every * torch.arange(len(x)))


def as_series(series: Any) -> Tensor:
    """Convert a series to a floating-point tensor [time] or [time, k].

    Raises:
        TypeError: the values are not numbers.
        ValueError: the shape is different, or the times in a pandas index are not increasing, or it has several levels.
    """
    if is_frame(series):
        _check_times(series.index)
    if isinstance(series, list | tuple) and any(getattr(element, "shape", ()) for element in series):
        raise TypeError(
            f"series must hold numbers [time] or [time, k], found {type(series).__name__} of {len(series)} series: join series at the same "
            "times by torch.stack(series, 1); for others make windows one by one, and join these by torch.cat"
        )
    try:
        values = series if isinstance(series, Tensor) else torch.tensor(numbers_of(series))
    except (TypeError, ValueError, RuntimeError) as error:
        hint = "; times belong in the index of a frame, frame.set_index('date')" if hasattr(series, "set_index") else ""
        raise TypeError(
            f"series must hold numbers [time] or [time, k], found {type(series).__name__} ({error}){hint}"
        ) from error
    if values.dim() not in (1, 2) or not values.numel() or values.is_complex():
        raise ValueError(
            f"series must be real numbers [time] or [time, k], found {values.dtype} {list(values.shape)}; "
            "for several series at different times make windows one by one, and join these by torch.cat"
        )
    return values if values.is_floating_point() else values.to(torch.get_default_dtype())


def _check_times(index: Any) -> None:
    """Raise if the times of a series are not increasing, and warn of gaps, which windows would span."""
    if index.nlevels > 1:
        names = [number if name is None else name for number, name in enumerate(index.names)]
        no_times = [name for name, level in zip(names, index.levels, strict=True) if level.dtype.kind != "M"]
        raise ValueError(
            f"series: its index has {len(names)} levels ({', '.join(map(str, names))}), so that windows could begin in one series and end in "
            f"the next: put the series side by side, series.unstack({(no_times or names)[0]!r}), or make windows of each, and join these by "
            "torch.cat. To make windows in the order of the rows regardless of the index, give series.to_numpy()"
        )
    if index.dtype.kind == "O" and len(index) and isinstance(index[0], str):  # read from a file
        index = require("pandas").to_datetime(index, format="ISO8601", errors="coerce", utc=True)
        if index.isna().any():
            return
    if index.dtype.kind not in "iufM" and not hasattr(index, "asfreq"):
        return  # texts and the like
    if not (index.is_monotonic_increasing and index.is_unique):
        n_repeated = int(index.duplicated().sum())
        raise ValueError(
            "series: the times in its index "
            + (
                f"are repeated in {n_repeated} rows; keep one row per time"
                if n_repeated
                else "are not increasing; sort them by series.sort_index()"
            )
            + ". To make windows in the order of the rows regardless of times, give series.to_numpy()"
        )
    times = np.asarray(index.asi8 if hasattr(index, "asi8") else index)
    steps, counts = np.unique(np.diff(times), return_counts=True)
    if len(steps) > 1 and counts.max() >= REGULAR_SHARE * counts.sum():
        warnings.warn(
            f"series: {counts.sum() - counts.max()} steps between its times differ from the others, and windows span these gaps. "
            "series.asfreq(...) shows the gaps, .interpolate() fills them; or make windows of each part, and join these by torch.cat",
            WorkbenchWarning,
            stacklevel=4,
        )


def column_numbers(series: Any, target: Any) -> Any:
    """Return the target with names of columns of a frame replaced by their numbers.

    Raises:
        ValueError: not exactly one column has a name.
    """
    if not hasattr(series, "columns"):
        return target
    columns = list(series.columns)

    def number(name: Any) -> Any:
        if isinstance(name, str) and columns.count(name) != 1:
            raise ValueError(
                f"target: {columns.count(name)} columns are named {name!r}; the columns are {columns!r:.200}"
            )
        return columns.index(name) if isinstance(name, str) else name

    return [number(name) for name in target] if isinstance(target, list | tuple) else number(target)


def chosen(series: Tensor, target: Any) -> Tensor:
    """Return the series to forecast, [time] or [time, k].

    Raises:
        TypeError, ValueError: target is not the index of a series, or a list of such indices.
    """
    if target is None:
        return series
    count = series.shape[1] if series.dim() == 2 else 0
    numbers = list(target) if isinstance(target, Sequence) and not isinstance(target, str) else [target]
    if not numbers or any(not -count <= whole_number("target", number) < count for number in numbers):
        raise ValueError(f"target: found {target!r:.100}; series of shape {list(series.shape)} have {count} columns")
    return series[:, numbers if isinstance(target, Sequence) else target]
