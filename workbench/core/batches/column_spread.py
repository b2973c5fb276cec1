"""Columns whose numbers differ by less than their type can say, or whose outliers squeeze all others together."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

COARSE = 0.1  # of a standard deviation, between two neighbouring numbers of a type
SQUEEZED = 1e-3  # of a standard deviation, between the quartiles
PIECE = 2**22  # numbers that are looked at at once
SOME = 10_000  # rows that quartiles are taken of


def coarse_columns(table: Tensor, name: str, dtype: torch.dtype) -> str | None:
    """In words, which columns of a table [n, d] or [n] lose their differences in a type; None if none does, as in half precision.

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
    for start, piece in _pieces(table):
        spread, largest = piece.std(0, correction=0), piece.abs().amax(0)
        # a column that is constant but for the rounding of what made it differs by some steps of its own type
        step = torch.finfo(table.dtype).eps
        varies = spread > largest * (4 * step if step >= precision.eps else 1e4 * step)
        coarse = varies & (largest * precision.eps > COARSE * spread)
        affected += [(start + i, float(largest[i]), float(spread[i])) for i in coarse.nonzero()[:, 0].tolist()]
    if not affected:
        return None
    number, most, spread_ = affected[0]
    return (
        f"{_named(name, table, number, len(affected))} has numbers up to {most:.6g} that differ by {spread_:.3g} (standard deviation), and the "
        f"steps of {str(dtype).removeprefix('torch.')} are {most * precision.eps:.3g} there"
    )


def squeezed_columns(table: Tensor, name: str) -> str | None:
    """In words, which columns of a table [n, d] or [n] have outliers beside which the middle half of the rows is as good as equal; or None.

    Example:
        >>> squeezed_columns(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 1e9]), "y")
        'y goes from 1 to 1e+09, and half of its numbers lie between 2 and 5'
        >>> squeezed_columns(torch.arange(100.0), "y")
    """
    affected = []
    for start, piece in _pieces(table):
        ordered = piece[:: -(-len(piece) // SOME)].sort(0).values
        lower, upper = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
        squeezed = (lower < upper) & (upper - lower < SQUEEZED * piece.std(0, correction=0))
        for i in squeezed.nonzero()[:, 0].tolist():
            affected.append((start + i, *(float(t[i]) for t in (piece.amin(0), piece.amax(0), lower, upper))))
    if not affected:
        return None
    number, least, most, low, high = affected[0]
    column = _named(name, table, number, len(affected))
    return f"{column} goes from {least:.4g} to {most:.4g}, and half of its numbers lie between {low:.4g} and {high:.4g}"


def _pieces(table: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Some columns at a time, float64 [n, columns], and the number of the first; none of what is no table of two rows or more."""
    if table.dim() not in (1, 2) or len(table) < 2 or not table.is_floating_point():
        return
    table = table.detach().reshape(len(table), -1)
    width = max(1, PIECE // len(table))
    for start in range(0, table.shape[1], width):
        yield start, table[:, start : start + width].double()


def _named(name: str, table: Tensor, number: int, count: int) -> str:
    others = f" (and {count - 1} more columns)" if count > 1 else ""
    return f"{name}[:, {number}]{others}" if table.dim() == 2 else name


__all__ = ["coarse_columns", "squeezed_columns"]
