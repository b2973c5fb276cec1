"""Check that features have the rows of a model's inputs in the same order, since shapes do not tell whether a model reorders them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..engine.tree import tensors, tree_map


def misplaced(
    features_of: Callable[[Any], tuple[dict[str, Tensor], Tensor | None]],
    inputs: Any,
    rows: int,
    dim: int,
    exactly: set[str],
) -> set[str]:
    """Return the names of features in which a row is not that of the inputs: those that stay as they are if their row of the inputs changes.

    Features that do not change at all stay in place if their rows are alike, or if some inputs have no rows, such as the edges of a graph.
    Features that change in the same rows as the output are in place whichever these are: in a graph without self-loops, those of the neighbors.

    Args:
        features_of: function of the inputs that returns features [rows, d] by name, and the output [rows, ...] if it has rows.
        inputs: tree of inputs.
        rows: number of rows.
        dim: dimension of the rows in the inputs.
        exactly: names of features in which, moreover, no other row may change; it may in others, as where a model compares rows.
    """

    if rows < 2:
        return set()
    changed_rows = sorted({rows // 3, rows // 2, rows - 1})
    others = [features_of(_with_other(inputs, rows, dim, row)) for row in changed_rows]
    all_have_rows = all(_has_rows(leaf, rows, dim) for leaf in tensors(inputs))
    features, output = features_of(inputs)  # last, so that what forward leaves behind is of these inputs
    names: set[str] = set()
    for row, (other, other_output) in zip(changed_rows, others, strict=True):
        in_output = None if output is None or other_output is None else _changed(output, other_output)
        for name in features.keys() & other.keys():
            changed = _changed(features[name], other[name])
            if changed is None and all_have_rows and in_output is not None and in_output[row]:
                other_row = features[name][_order(rows, row, features[name].device)]
                if _changed(features[name], other_row) is not None:
                    names.add(name)
            if changed is None or (in_output is not None and torch.equal(changed, in_output.to(changed.device))):
                continue
            if not changed[row] or (name in exactly and int(changed.sum()) > 1):
                names.add(name)
    return names


def dim_of_rows(output_of: Callable[[Any], Tensor | None], inputs: Any, rows: int, dims: list[int]) -> int:
    """Return which of several dimensions of as many entries as rows has the rows of the inputs.

    It is the first one in which another row of the inputs changes that row of the output alone; the first of all if there is none.

    Args:
        output_of: function of the inputs that returns the output [rows, ...], None if it has no rows.
        inputs: tree of inputs.
        rows: number of rows.
        dims: the dimensions.
    """
    row = rows // 3
    others = [output_of(_with_other(inputs, rows, dim, row)) for dim in dims]
    output = output_of(inputs)
    for dim, other in zip(dims, others, strict=True):
        changed = None if output is None or other is None else _changed(output, other)
        if changed is not None and changed.nonzero().flatten().tolist() == [row]:
            return dim
    return dims[0]


def _has_rows(leaf: Any, rows: int, dim: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == rows


def _order(rows: int, row: int, device: torch.device) -> Tensor:
    """Return the numbers of all rows, with that of another in place of one of them."""
    order = torch.arange(rows, device=device)
    order[row] = (row + rows // 2) % rows
    return order


def _with_other(inputs: Any, rows: int, dim: int, row: int) -> Any:
    """Return the inputs with another row in place of one of them."""

    def replaced(leaf: Any) -> Any:
        return leaf.index_select(dim, _order(rows, row, leaf.device)) if _has_rows(leaf, rows, dim) else leaf

    return tree_map(replaced, inputs)


def _changed(values: Tensor, others: Tensor) -> Tensor | None:
    """Return which rows [rows] differ; None if none does."""
    distances = (others - values).reshape(len(values), -1).norm(dim=1)
    if not bool(distances.max() > 1e-5 * values.reshape(len(values), -1).norm(dim=1).max()):
        return None
    # where nothing changed, results of another batch may still differ by rounding
    return distances > 0.05 * distances.max()


__all__ = ["dim_of_rows", "misplaced"]
