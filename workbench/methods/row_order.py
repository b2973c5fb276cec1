"""Check that features have the rows of a model's inputs in the same order, since shapes do not tell whether a model reorders them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..engine.tree import tree_map


def misplaced(
    features_of: Callable[[Any], dict[str, Tensor]], inputs: Any, rows: int, dim: int, exactly: set[str]
) -> set[str]:
    """Return the names of features in which a row is not that of the inputs: those that stay as they are if their row of the inputs changes.

    Args:
        features_of: function of the inputs that returns features [rows, d] by name.
        inputs: tree of inputs.
        rows: number of rows.
        dim: dimension of the rows in the inputs.
        exactly: names of features in which, moreover, no other row may change; it may in others, as where a model compares rows.
    """

    def with_other(row: int) -> Any:
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
    features = features_of(inputs)  # last, so that what forward leaves behind is of these inputs
    found: set[str] = set()
    for row, other in zip(changed_rows, others, strict=True):
        for name in features.keys() & other.keys():
            distances = (other[name] - features[name]).flatten(1).norm(dim=1)
            if not bool(distances.max() > 1e-5 * features[name].norm(dim=-1).max()):
                continue
            # where nothing changed, results of another batch may still differ by rounding
            changed = distances > 0.05 * distances.max()
            if not changed[row] or (name in exactly and int(changed.sum()) > 1):
                found.add(name)
    return found


__all__ = ["misplaced"]
