"""Detection of columns with too large an offset for the precision of a dtype, or with outliers that dwarf all other values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

MAX_STEP = 0.1  # rounding step of a dtype, in standard deviations of the column, above which it is too coarse
MIN_IQR = 1e-3  # interquartile range, in standard deviations, below which outliers dominate a column
CHUNK_SIZE = 2**22  # number of elements processed at once
QUARTILE_ROWS = 10_000  # number of rows used to compute quartiles


def coarse_columns(table: Tensor, name: str, dtype: torch.dtype) -> str | None:
    """Describe the columns of a table [n, d] or [n] whose values cannot be resolved in a dtype; None if there are none, or for half precision.

    Example:
        >>> seconds = torch.tensor([1.7e9, 1.7e9 + 1, 1.7e9 + 2], dtype=torch.float64)
        >>> coarse_columns(seconds, "t", torch.float32)
        't has numbers up to 1.7e+09 that differ by 0.816 (standard deviation), and the steps of float32 are 203 there'
        >>> coarse_columns(seconds, "t", torch.float64)
    """
    precision = torch.finfo(dtype)
    if precision.bits < 32:
        return None
    affected = []
    for start, chunk in _chunks(table):
        largest = chunk.double().abs().amax(0)
        # whole numbers may differ by less than the steps of float64, but not their distances from the first
        spread = (chunk if chunk.is_floating_point() else chunk - chunk[:1]).double().std(0, correction=0)
        # rounding errors alone make a constant column vary by a few steps of its own dtype
        step = torch.finfo(table.dtype).eps if table.is_floating_point() else 0.0
        varies = spread > largest * (4 * step if step >= precision.eps else 1e4 * step)
        coarse = varies & (largest * precision.eps > MAX_STEP * spread)
        affected += [(start + i, float(largest[i]), float(spread[i])) for i in coarse.nonzero()[:, 0].tolist()]
    if not affected:
        return None
    number, largest_value, std = affected[0]
    return (
        f"{_named(name, table, number, len(affected))} has numbers up to {largest_value:.6g} that differ by {std:.3g} "
        f"(standard deviation), and the steps of {str(dtype).removeprefix('torch.')} are {largest_value * precision.eps:.3g} there"
    )


def squeezed_columns(table: Tensor, name: str) -> str | None:
    """Describe the columns of a table [n, d] or [n] with outliers so large that the middle half of the rows is nearly equal; None without any.

    Example:
        >>> squeezed_columns(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 1e9]), "y")
        'y goes from 1 to 1e+09, and half of its numbers lie between 2 and 5'
        >>> squeezed_columns(torch.arange(100.0), "y")
    """
    affected = []
    for start, chunk in _chunks(table):
        chunk = chunk.double()
        ordered = chunk[:: -(-len(chunk) // QUARTILE_ROWS)].sort(0).values
        lower, upper = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
        squeezed = (lower < upper) & (upper - lower < MIN_IQR * chunk.std(0, correction=0))
        for i in squeezed.nonzero()[:, 0].tolist():
            affected.append((start + i, *(float(t[i]) for t in (chunk.amin(0), chunk.amax(0), lower, upper))))
    if not affected:
        return None
    number, least, largest_value, low, high = affected[0]
    column = _named(name, table, number, len(affected))
    return f"{column} goes from {least:.4g} to {largest_value:.4g}, and half of its numbers lie between {low:.4g} and {high:.4g}"


def _chunks(table: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (number of the first column, [n, columns]) for chunks of columns; nothing for anything but tables of >= 2 rows."""
    if table.dim() not in (1, 2) or len(table) < 2 or table.is_complex():
        return
    table = (table if table.is_floating_point() else table.long()).detach().reshape(len(table), -1)
    width = max(1, CHUNK_SIZE // len(table))
    for start in range(0, table.shape[1], width):
        yield start, table[:, start : start + width]


def _named(name: str, table: Tensor, number: int, count: int) -> str:
    others = f" (and {count - 1} more columns)" if count > 1 else ""
    return f"{name}[:, {number}]{others}" if table.dim() == 2 else name


__all__ = ["coarse_columns", "squeezed_columns"]
