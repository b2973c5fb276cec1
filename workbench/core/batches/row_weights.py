"""Random row weights (a Bayesian bootstrap of the gradients), so that members that start equal learn different functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...engine.effects.random import values_unavailable
from ...engine.tree import flatten, is_float, tensors
from ...introspect.objects import is_graph
from ..crossfit import members_axis
from ..method import Method
from ..ownership import table_of
from ..parameters import stacked_names
from ..single_warnings import warn_once

MAX_VALUES = 1024  # number of values of a row that enter its fingerprint


def alike(wrapped: Any) -> Method | None:
    """Return the method whose members were equal when training began, and so would stay equal on the same rows; None if there is none."""
    axis = members_axis(wrapped._workbench.methods)
    method = next((method for method in wrapped._workbench.methods if method.name == axis), None)
    if method is None:
        return None
    if method.alike is None and not values_unavailable():
        method.alike = _equal(wrapped, axis)
    return method if method.alike else None


@torch.no_grad()
def _equal(wrapped: Any, axis: str) -> bool:
    """Return whether all trained parameters are equal in all members."""
    table = table_of(wrapped)
    trained = [p for p in map(table.get, stacked_names(wrapped._workbench.rules.values(), axis)) if p.requires_grad]
    return bool(trained) and all(map(rows_equal, trained))


def rows_equal(tensor: Tensor) -> bool:
    """Return whether a tensor [members, ...] is equal for all of two or more members; False for sharded and meta tensors."""
    plain = type(tensor.data) is Tensor and not tensor.is_meta
    return plain and len(tensor) > 1 and all(torch.equal(row, tensor[0]) for row in tensor[1:])


def weighed(
    wrapped: Any, axes: tuple[str, ...], leaves: Sequence[Any], inputs: Any, targets: Any, first: int = 0
) -> list[Any]:
    """Return the outputs of all branches, with gradients weighted per row and member if the members started equal.

    Each member weights each row by an Exponential(1) number (the Bayesian bootstrap, Rubin 1981) that only depends on the row and the member:
    a row has the same weight in every epoch, whatever batch it is in. The value of the loss does not change.

    Args:
        wrapped: the wrapped object in training mode.
        axes: axes of the branches.
        leaves: output leaves, each tensor [*axes, rows, ...].
        inputs, targets: the batch, whose contents identify the rows.
        first: number of the first of these members.
    """
    if not wrapped.training or not torch.is_grad_enabled() or (method := alike(wrapped)) is None:
        return list(leaves)
    dim = axes.index(method.name)
    size = next(leaf.shape[dim] for leaf in leaves if isinstance(leaf, Tensor))
    inputs, targets = wrapped._workbench.source or (inputs, targets)
    weights = row_weights(inputs, targets, first + size)[first:]
    mean_weights = weights.mean(1)  # for outputs without rows, such as a loss computed by the model
    out, by_row = [], False
    for leaf in leaves:
        if is_float(leaf) and leaf.requires_grad:
            rows = leaf.dim() > len(axes) and leaf.shape[len(axes)] == weights.shape[1]
            by_row = by_row or rows
            shape = [1] * leaf.dim()
            shape[dim] = size
            if rows:
                shape[len(axes)] = weights.shape[1]
            leaf = _Weighed.apply(leaf, (weights if rows else mean_weights).reshape(shape).to(leaf.device))
        out.append(leaf)
    if not by_row:
        warn_once(
            wrapped,
            "rows",
            f"{method.name}: all voters start at the same weights, and the output has no row for each target, so each voter weights whole "
            "batches: they differ only if there are many of them. Return a row for each target, or leave finetune out",
        )
    return out


def row_weights(inputs: Any, targets: Any, members: int) -> Tensor:
    """Return the weight of each row for each member, float32 [members, rows], exponentially distributed with mean one.

    Args:
        inputs, targets: the batch; rows are those of the targets, or of the inputs if targets have no common number of rows. Equal rows get
            different weights. In torch_geometric graphs each node, or each graph, is a row. Without any rows, the whole batch is one.
        members: number of members.

    Example:
        >>> x, y = torch.randn(100, 3), torch.randn(100, 1)
        >>> weights = row_weights(x, y, 5)
        >>> again = row_weights(x.flip(0), y.flip(0), 5)
        >>> weights.shape, torch.equal(weights, again.flip(1))
        (torch.Size([5, 100]), True)
    """
    leaves = [t for t in tensors((inputs, targets)) if t.layout == torch.strided and not t.is_meta]
    leaves += [numbers for leaf in flatten(inputs)[0] if is_graph(leaf) for numbers in _graph_fingerprints(leaf)]
    for tree in (targets, inputs):
        lengths = {len(leaf) for leaf in tensors(tree) if leaf.dim()}
        if len(lengths) == 1:
            count = lengths.pop()
            leaves = [leaf for leaf in leaves if leaf.dim() and len(leaf) == count]
            break
    else:
        leaves = [leaf[None] for leaf in leaves]
        count = 1
    device = leaves[0].device if leaves else torch.device("cpu")
    numbers = torch.zeros(count, dtype=torch.int64, device=device)
    for leaf in leaves:
        numbers = _mixed(numbers) + _fingerprint(leaf).to(device)
    numbers = _mixed(numbers) + _ranks(numbers)
    salt = torch.arange(1, members + 1, device=device)[:, None] * -7046029254386353131
    uniform = ((_mixed(numbers + salt) >> 20) & 0xFFFFFF).float().add(0.5) / 2**24
    return -uniform.log()


def _fingerprint(leaf: Tensor) -> Tensor:
    """Hash the bits of up to `MAX_VALUES` values of each row: int64 [rows]."""
    leaf = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
    flat = leaf.detach().reshape(len(leaf), -1) if leaf.numel() else leaf.new_zeros(len(leaf), 1)
    flat = flat[:, :: max(1, flat.shape[1] // MAX_VALUES)].contiguous()
    if flat.is_floating_point():
        flat = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    factors = _mixed(torch.arange(1, flat.shape[1] + 1, device=flat.device))
    return (flat.long() * factors).sum(1)


def _graph_fingerprints(batch: Any) -> list[Tensor]:
    """Hash each node, and each graph of a batch, by the features of nodes and their neighbours."""
    several: list[Tensor] = []
    for store in batch.node_stores:
        x, owner, edges = (store.get(name) for name in ("x", "batch", "edge_index"))
        present = [tensor for tensor in (x, owner, edges) if tensor is not None]
        if not present:
            continue
        nodes = present[0].new_zeros(store.num_nodes, dtype=torch.int64) if x is None else _fingerprint(x)
        if edges is not None:
            nodes = _mixed(nodes).index_add(0, edges[1], _mixed(nodes[edges[0]] + 1))
        several.append(nodes)
        if owner is not None:
            # integer sums do not depend on the order; + 1, since 0 would be mixed to 0
            several.append(nodes.new_zeros(int(batch.num_graphs)).index_add(0, owner, _mixed(nodes + 1)))
    return several


def _ranks(numbers: Tensor) -> Tensor:
    """Return for each number how many equal ones precede it."""
    order = numbers.argsort(stable=True)
    ordered = numbers[order]
    ranks = torch.empty_like(numbers)
    ranks[order] = torch.arange(len(numbers), device=numbers.device) - torch.searchsorted(ordered, ordered)
    return ranks


def _mixed(numbers: Tensor) -> Tensor:
    """Scramble the bits of integers (the finalizer of SplitMix64, Steele et al. 2014)."""
    numbers = (numbers ^ (numbers >> 30)) * -4658895280553007687
    numbers = (numbers ^ (numbers >> 27)) * -7723592293110705685
    return numbers ^ (numbers >> 31)


class _Weighed(torch.autograd.Function):
    """Identity whose gradient is multiplied by weights."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        return gradient * weights.to(gradient.dtype), None


__all__ = ["alike", "row_weights", "rows_equal", "weighed"]
