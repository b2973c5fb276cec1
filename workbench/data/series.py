"""Windows of series: what was known before each origin, and what came after it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.core.batches.arrays import is_frame, numbers_of
from workbench.data.split_drawing import whole_number
from workbench.errors import WorkbenchWarning

REGULAR = 0.9  # of the steps of a series are the same, where others are gaps; months and working days are not


class Windows(NamedTuple):
    """Rows of a task of forecasting.

    Args:
        x: the values before each origin [n, window, ...].
        y: the values from it on [n, horizon, ...].
        origin: int64 [n], how many values of the series come before y.
    """

    x: Tensor
    y: Tensor
    origin: Tensor


def windows(series: Any, window: int, horizon: int = 1, *, every: int = 1, target: Any = None) -> Windows:
    """All windows of a series, in the order of time.

    Args:
        series: values [time], or of k series at the same times [time, k]; tensor, array or frame of numbers.
        window: how many values are looked back at.
        horizon: how many values are forecast.
        every: how many times lie between two origins.
        target: the number of the one of k series that is forecast, or several numbers; None: all of them.

    Returns:
        x [n, window] or [n, window, k], y [n, horizon], or [n, horizon, k] where several are forecast, and the origins [n].

    Raises:
        TypeError: a number is not whole, or series holds no numbers.
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
    seen = chosen(values, target)
    x = values[: len(values) - horizon].unfold(0, window, every).movedim(-1, 1)
    y = seen[window:].unfold(0, horizon, every).movedim(-1, 1)
    return Windows(x.contiguous(), y.contiguous(), window + every * torch.arange(len(x)))


def as_series(series: Any) -> Tensor:
    """Values [time] or [time, k] as floating-point numbers.

    Raises:
        TypeError: they are no numbers.
        ValueError: the shape is another one, or the times of a series of pandas do not ascend.
    """
    if is_frame(series):
        _check_times(series.index)
    if isinstance(series, list | tuple) and any(getattr(one, "shape", ()) for one in series):
        raise TypeError(
            f"series must hold numbers [time] or [time, k], found {type(series).__name__} of {len(series)} series: torch.stack(series, 1) makes "
            "columns of those that begin and end together; of others make windows one by one, and join them by torch.cat"
        )
    try:
        values = series if isinstance(series, Tensor) else torch.tensor(numbers_of(series))
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"series must hold numbers [time] or [time, k], found {type(series).__name__} ({error})"
        ) from error
    if values.dim() not in (1, 2) or not values.numel() or values.is_complex():
        raise ValueError(
            f"series must be real numbers [time] or [time, k], found {values.dtype} {list(values.shape)}; "
            "of several series that do not begin and end together make windows one by one, and join them by torch.cat"
        )
    return values if values.is_floating_point() else values.to(torch.get_default_dtype())


def _check_times(index: Any) -> None:
    """Raise where the rows of a series are in another order than its times, and warn of gaps, over which windows would go."""
    if index.dtype.kind not in "iufM" and not hasattr(index, "asfreq"):
        return  # texts and the like
    if not (index.is_monotonic_increasing and index.is_unique):
        twice = int(index.duplicated().sum())
        raise ValueError(
            "series: the times in its index "
            + (
                f"stand there twice in {twice} rows; keep one of each"
                if twice
                else "do not ascend; give series.sort_index()"
            )
            + ". Windows are cut in the order of the rows: if that is meant, series.to_numpy()"
        )
    times = np.asarray(index.asi8 if hasattr(index, "asi8") else index)
    steps, counts = np.unique(np.diff(times), return_counts=True)
    if len(steps) > 1 and counts.max() >= REGULAR * counts.sum():
        warnings.warn(
            f"series: {counts.sum() - counts.max()} steps between its times differ from all others, and windows go over them all the same. "
            "series.asfreq(...) shows the gaps, .interpolate() fills them; or make windows of each part, and join them by torch.cat",
            WorkbenchWarning,
            stacklevel=4,
        )


def chosen(series: Tensor, target: Any) -> Tensor:
    """The values that are forecast, [time] or [time, k].

    Raises:
        TypeError, ValueError: target names none of the series.
    """
    if target is None:
        return series
    count = series.shape[1] if series.dim() == 2 else 0
    numbers = list(target) if isinstance(target, Sequence) and not isinstance(target, str) else [target]
    if not numbers or any(not -count <= whole_number("target", number) < count for number in numbers):
        raise ValueError(f"target: found {target!r:.100}; series of shape {list(series.shape)} have {count} columns")
    return series[:, numbers if isinstance(target, Sequence) else target]
