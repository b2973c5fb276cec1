"""Where the inputs of layers have the rows of the batch, found out by changing rows, since shapes do not always tell."""

from __future__ import annotations

import functools
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from ..engine.effects.private_random import own_random
from ..engine.effects.random import values_unavailable
from ..engine.tree import is_float, tensors
from .feature_tap import FeatureTap
from .row_order import dim_of_rows, misplaced


def settle_axes(method: Any, wrapped: Any, args: tuple, kwargs: dict[str, Any], rows: int, tap: FeatureTap) -> bool:
    """Find the axes of rows where a batch has as many steps as rows; return whether one is not the first of its layer's input.

    Args:
        method: the method of neo, which keeps the axes.
        wrapped: the wrapped model.
        args, kwargs: inputs of the model.
        rows: number of rows.
        tap: the tap of a pass on these inputs.
    """
    if values_unavailable() or rows < 2 or not tap.taps:
        return False
    leaves = tensors((args, kwargs))
    dims = sorted({dim for leaf in leaves for dim, size in enumerate(leaf.shape) if size == rows})
    if len(dims) > 1:
        features_of = functools.partial(_features_of, method, wrapped, rows, tap)
        dim = dim_of_rows(lambda inputs: features_of(inputs)[1], (args, kwargs), rows, dims)
        method._rows_at = next((i, dim) for i, t in enumerate(leaves) if t.dim() > dim and t.shape[dim] == rows)
    if not tap.square:
        return False
    turned = tap.square & misplaced_layers(method, wrapped, args, kwargs, rows, tap, tap.square)
    method._time_first |= dict.fromkeys(turned, True)
    for name in turned & misplaced_layers(method, wrapped, args, kwargs, rows, tap, turned) if turned else ():
        del method._time_first[name]  # no axis has the rows
    return bool(turned)


def check_order(method: Any, wrapped: Any, args: tuple, kwargs: dict[str, Any], rows: int) -> None:
    """Raise RuntimeError, and forget what was learned, if layers chosen in a batch of one row have other rows than the inputs."""
    tap = method.run(wrapped, args, kwargs, rows, None)[1]
    wrong = misplaced_layers(method, wrapped, args, kwargs, rows, tap)
    wrong |= {name for name, turn in tap.turns.items() if turn != method._turns.get(name, 0)}
    if wrong := wrong.intersection(method.sites):
        method.forget_sites()
        method.model(wrapped).forget()
        raise RuntimeError(
            f"neo: the input of {min(wrong)} is not one vector per row, in the order of the rows, which the first batch could not show, as "
            "it had a single row; what was learned is discarded. Fit again, and begin with a batch of several rows, so that such layers are "
            "left out, or name other layers="
        )
    method._is_order_known = True


def misplaced_layers(
    method: Any,
    wrapped: Any,
    args: tuple,
    kwargs: dict[str, Any],
    rows: int,
    tap: FeatureTap,
    exactly: Set[str] = frozenset(),
) -> set[str]:
    """Return the names of the features whose rows are not those of the inputs; none under torch.compile, where values are unknown.

    Args:
        method, wrapped, args, kwargs, rows, tap: see `settle_axes`.
        exactly: names of features in which no other row may change, beside those that were flattened.
    """
    if values_unavailable() or not tap.taps:
        return set()
    features_of = functools.partial(_features_of, method, wrapped, rows, tap)
    return misplaced(features_of, (args, kwargs), rows, method._rows_at[1], tap.flattened | exactly)


@torch.no_grad()
def _features_of(
    method: Any, wrapped: Any, rows: int, tap: FeatureTap, inputs: tuple[tuple, dict[str, Any]]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Run the model, always with the same random numbers, and return the features and the output, None if it has no rows."""
    with own_random(0, next(iter(tap.taps.values())).device):
        output, changed = method.run(wrapped, *inputs, rows, None)
    with_rows = (leaf for leaf in tensors(output) if is_float(leaf) and leaf.dim() and len(leaf) == rows)
    return changed.taps, next(with_rows, None)


__all__ = ["check_order", "misplaced_layers", "settle_axes"]
