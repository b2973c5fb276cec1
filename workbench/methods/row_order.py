"""Check that features have the rows of a model's inputs in the same order, since shapes do not tell whether a model reorders them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..engine.tree import tree_map


def misplaced(
    features_of: Callable[[Any], tuple[dict[str, Tensor], Tensor | None]],
    inputs: Any,
    rows: int,
    dim: int,
    exactly: set[str],
) -> set[str]:
    """Return the names of features in which a row is not that of the inputs: those that stay as they are if their row of the inputs changes.

    Features that change in the same rows as the output are in place whichever these are: in a graph without self-loops, those of the neighbors.

    Args:
        features_of: function of the inputs that returns features [rows, d] by name, and the output [rows, ...] if it has rows.
        inputs: tree of inputs.
        rows: number of rows.
        dim: dimension of the rows in the inputs.
        exactly: names of features in which, moreover, no other row may change; it may in others, as where a model compares rows.
    """

    def with_other(row: int) -> tuple[dict[str, Tensor], Tensor | None]:
        def replaced(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() <= dim or leaf.shape[dim] != rows:
                return leaf
            order = torch.arange(rows, device=leaf.device)
            order[row] = (row + rows // 2) % rows
            return leaf.index_select(dim, order)

        return features_of(tree_map(replaced, inputs))

    if rows < 2:
        return set()
    changed_rows = sorted({rows // 3, rows // 2, rows - 1})
    others = [with_other(row) for row in changed_rows]
    features, output = features_of(inputs)  # last, so that what forward leaves behind is of these inputs
    names: set[str] = set()
    for row, (other, other_output) in zip(changed_rows, others, strict=True):
        in_output = None if output is None or other_output is None else _changed(output, other_output)
        for name in features.keys() & other.keys():
            changed = _changed(features[name], other[name])
            if changed is None or (in_output is not None and torch.equal(changed, in_output.to(changed.device))):
                continue
            if not changed[row] or (name in exactly and int(changed.sum()) > 1):
                names.add(name)
    return names


def _changed(values: Tensor, others: Tensor) -> Tensor | None:
    """Return which rows [rows] differ; None if none does."""
    distances = (others - values).reshape(len(values), -1).norm(dim=1)
    if not bool(distances.max() > 1e-5 * values.reshape(len(values), -1).norm(dim=1).max()):
        return None
    # where nothing changed, results of another batch may still differ by rounding
    return distances > 0.05 * distances.max()


__all__ = ["misplaced"]
