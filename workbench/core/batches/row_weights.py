"""Weights of rows by which members that start alike learn different things: a Bayesian bootstrap of the gradients."""

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
from .dealing import tell

MOST = 1024  # numbers of a row that tell it from others


def alike(wrapped: Any) -> Method | None:
    """The method whose members were alike when training began, so that on the same rows they would learn the same; None if there is none."""
    axis = members_axis(wrapped._workbench.methods)
    method = next((method for method in wrapped._workbench.methods if method.name == axis), None)
    if method is None:
        return None
    if method.alike is None and not values_unavailable():
        method.alike = _equal(wrapped, axis)
    return method if method.alike else None


@torch.no_grad()
def _equal(wrapped: Any, axis: str) -> bool:
    """Whether all members have the same values of everything that is trained; the first difference ends the look."""
    table = table_of(wrapped)
    trained = [p for p in map(table.get, stacked_names(wrapped._workbench.rules.values(), axis)) if p.requires_grad]
    return bool(trained) and all(map(rows_equal, trained))


def rows_equal(tensor: Tensor) -> bool:
    """Whether a tensor [members, ...] holds the same for two members or more; one that is sharded or has no values is taken for different."""
    plain = type(tensor.data) is Tensor and not tensor.is_meta
    return plain and len(tensor) > 1 and bool((tensor == tensor[:1]).all())


def weighed(wrapped: Any, axes: tuple[str, ...], leaves: Sequence[Any], inputs: Any, targets: Any) -> list[Any]:
    """The outputs of all branches as they are, whose gradients are weighed anew for each member if members started alike.

    Each member weighs each row by a number drawn from the exponential distribution of mean one (Rubin 1981, the Bayesian bootstrap), which
    only depends on the row and the member: the same row has the same weight in every epoch, whatever batch it is in. The loss is unchanged.

    Args:
        wrapped: in training.
        axes: of the branches.
        leaves: of the output, each tensor [*axes, rows, ...].
        inputs, targets: of the batch, which tell the rows apart.
    """
    if not wrapped.training or not torch.is_grad_enabled() or (method := alike(wrapped)) is None:
        return list(leaves)
    at = axes.index(method.name)
    size = next(leaf.shape[at] for leaf in leaves if isinstance(leaf, Tensor))
    inputs, targets = wrapped._workbench.source or (inputs, targets)
    weights = row_weights(inputs, targets, size)
    whole = weights.mean(1)  # for what has no rows: the losses that a model computes
    out, by_row = [], False
    for leaf in leaves:
        if is_float(leaf) and leaf.requires_grad:
            rows = leaf.dim() > len(axes) and leaf.shape[len(axes)] == weights.shape[1]
            by_row = by_row or rows
            shape = [1] * leaf.dim()
            shape[at] = size
            if rows:
                shape[len(axes)] = weights.shape[1]
            leaf = _Weighed.apply(leaf, (weights if rows else whole).reshape(shape).to(leaf.device))
        out.append(leaf)
    if not by_row:
        tell(
            wrapped,
            "rows",
            f"{method.name}: all voters start at the same weights, and the output has no row for each target, so each voter weighs whole "
            "batches: they differ only if there are many of them. Return a row for each target, or leave finetune out",
        )
    return out


def row_weights(inputs: Any, targets: Any, members: int) -> Tensor:
    """The weight that each member gives to each row, float32 [members, rows]; exponential, of mean one.

    Args:
        inputs, targets: of a batch; the rows are those of the targets, or of the inputs where targets have no common number. Rows that are
            equal count by themselves. Of graphs of torch_geometric each node, or each graph, is a row. Where there are no rows at all, the
            whole batch is one.
        members: how many.

    Example:
        >>> x, y = torch.randn(100, 3), torch.randn(100, 1)
        >>> weights = row_weights(x, y, 5)
        >>> again = row_weights(x.flip(0), y.flip(0), 5)
        >>> weights.shape, torch.equal(weights, again.flip(1))
        (torch.Size([5, 100]), True)
    """
    leaves = [t for t in tensors((inputs, targets)) if t.layout == torch.strided and not t.is_meta]
    leaves += [numbers for leaf in flatten(inputs)[0] if is_graph(leaf) for numbers in _of_graphs(leaf)]
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
    who = torch.arange(1, members + 1, device=device)[:, None] * -7046029254386353131
    uniform = ((_mixed(numbers + who) >> 20) & 0xFFFFFF).float().add(0.5) / 2**24
    return -uniform.log()


def _fingerprint(leaf: Tensor) -> Tensor:
    """A number for each row, int64 [rows], of the bits of up to `MOST` of its values."""
    leaf = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
    flat = leaf.detach().reshape(len(leaf), -1) if leaf.numel() else leaf.new_zeros(len(leaf), 1)
    flat = flat[:, :: max(1, flat.shape[1] // MOST)].contiguous()
    if flat.is_floating_point():
        flat = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    factors = _mixed(torch.arange(1, flat.shape[1] + 1, device=flat.device))
    return (flat.long() * factors).sum(1)


def _of_graphs(batch: Any) -> list[Tensor]:
    """A number for each node and, of several graphs, for each graph, by what nodes hold and what their neighbours do."""
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
            # of whole numbers, whose sum is the same in any order; 0 would stay 0
            several.append(nodes.new_zeros(int(batch.num_graphs)).index_add(0, owner, _mixed(nodes + 1)))
    return several


def _ranks(numbers: Tensor) -> Tensor:
    """How many equal ones stand before each."""
    order = numbers.argsort(stable=True)
    ordered = numbers[order]
    ranks = torch.empty_like(numbers)
    ranks[order] = torch.arange(len(numbers), device=numbers.device) - torch.searchsorted(ordered, ordered)
    return ranks


def _mixed(numbers: Tensor) -> Tensor:
    """Whole numbers whose bits look random (the end of SplitMix64, Steele et al. 2014)."""
    numbers = (numbers ^ (numbers >> 30)) * -4658895280553007687
    numbers = (numbers ^ (numbers >> 27)) * -7723592293110705685
    return numbers ^ (numbers >> 31)


class _Weighed(torch.autograd.Function):
    """A tensor as it is, whose gradient is multiplied by weights."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        return gradient * weights.to(gradient.dtype), None


__all__ = ["alike", "row_weights", "rows_equal", "weighed"]
