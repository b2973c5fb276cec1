"""The numbers that a model can predict at all, judged by the graph of a prediction, so that standardization moves no target out of reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from torch import Tensor

from workbench.core.calls.bounded_ends import BOUNDED, KEEPING, along_graph, bounded_end
from workbench.core.single_warnings import warn_once
from workbench.core.wrapped import Wrapped
from workbench.engine.tree import is_float, tree_map

_HALF = frozenset(["Softplus", "Relu", "Exp", "Abs", "LogSigmoid", "Sqrt"])
_SHIFTING = frozenset(["Add", "Sub", "Rsub", "Reciprocal"])
_RESCALING = _SHIFTING | {"Mul", "Div", "Neg", "Sum"}
_SIDE_BY_SIDE = frozenset(["Cat", "Stack"])
_MINUS_ONE = 2**64 - 1  # as nodes store it
_MAX_DEPTH = 20  # of columns within columns
_RANGES = {
    "softplus": (0.0, math.inf),
    "relu": (0.0, math.inf),
    "exp": (0.0, math.inf),
    "abs": (0.0, math.inf),
    "elu": (-1.0, math.inf),
    "sigmoid": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
}


class Range(IntEnum):
    """Range of a prediction: all numbers, those on one side of 0, which a positive factor leaves as it is, or another."""

    FREE = 0
    HALF = 1
    FIXED = 2


class Limits(NamedTuple):
    """What a model can predict: of targets [n, k] an entry for each column, otherwise one.

    Attributes:
        ranges: the narrowest range among the outputs of the shape of the targets.
        ends: name of the function of limited range that all of them are results of, None if there is none, or if arithmetic follows it.
    """

    ranges: tuple[Range, ...]
    ends: tuple[str | None, ...]


def limits_of(prediction: Sequence[Any], target: Any) -> Limits:
    """Return what a model can predict.

    Args:
        prediction: leaves of a prediction, computed with gradients; those of the inputs too, otherwise data are taken for constants.
        target: the targets of the same rows.
    """
    shape = target.shape if isinstance(target, Tensor) else None
    roots = [leaf.grad_fn for leaf in prediction if isinstance(leaf, Tensor) and leaf.shape == shape and leaf.grad_fn]
    if shape is not None and len(shape) == 2:
        outputs = [_columns(root, shape[1]) for root in roots]
        columns = [set().union(*nodes) for nodes in zip(*outputs, strict=True)] or [set()] * shape[1]
    else:
        columns = [set(roots)]
    nodes = set().union(*columns)  # looked at once each: many columns may come from one node
    ranges = {node: _range(node) for node in nodes}
    ends = {node: bounded_end(node, KEEPING - _RESCALING) for node in nodes}
    names = [{ends[node] for node in column} for column in columns]
    return Limits(
        tuple(max((ranges[node] for node in column), default=Range.FREE) for column in columns),
        tuple(distinct.pop() if len(distinct) == 1 else None for distinct in names),
    )


def _columns(node: Any, width: int, depth: int = 0) -> list[set[Any]]:
    """Return, for each column of a result [..., width], the nodes of autograd that it comes from, before means over branches."""
    name, dim = node.name().split("Backward")[0], getattr(node, "_saved_dim", None)
    parts = node.next_functions
    if depth < _MAX_DEPTH and all(part is not None for part, _ in parts):
        is_last = dim in (len(node._input_metadata[0].shape) - 1, _MINUS_ONE)
        if name == "Stack" and is_last:
            return [{part} for part, _ in parts]
        if name == "Cat" and is_last:
            widths = [part._input_metadata[index].shape[-1] for part, index in parts]
            return [nodes for (part, _), n in zip(parts, widths, strict=True) for nodes in _columns(part, n, depth + 1)]
        if name in _SIDE_BY_SIDE or (name == "Mean" and dim == (0,)):
            return [
                set().union(*nodes)
                for nodes in zip(*(_columns(part, width, depth + 1) for part, _ in parts), strict=True)
            ]
    return [{node} for _ in range(width)]


def _range(node: Any) -> Range:
    return along_graph(node, KEEPING - _HALF - BOUNDED.keys(), _range_after)


def _range_after(name: str, node: Any, before: list[Range]) -> Range:
    if name in _HALF or (name == "Pow" and node._saved_exponent == 2):
        return Range.HALF
    if name in BOUNDED:
        return Range.FIXED
    if not before:
        return Range.FREE
    if name in _SIDE_BY_SIDE:
        return max(before)
    if min(before) == Range.FREE:
        return Range.FREE
    return Range.FIXED if name in _SHIFTING else max(before)


def with_graph(inputs: Any) -> Any:
    """Return copies of inputs whose floating-point tensors have a graph."""
    return tree_map(
        lambda leaf: leaf.detach().requires_grad_() * 1 if isinstance(leaf, Tensor) and is_float(leaf) else leaf,
        inputs,
    )


def warn_out_of_range(wrapped: Wrapped, ends: Sequence[str | None], y: Tensor) -> None:
    """Warn once of targets that a model cannot predict since it ends in a function of limited range.

    Args:
        wrapped: the model.
        ends: names of the functions, None where there is none, one for each column of targets [n, k], otherwise one.
        y: the targets.
    """
    for i, (end, column) in enumerate(zip(ends, y.unbind(1) if y.dim() == 2 else [y], strict=True)):
        if end not in _RANGES:
            continue
        low, high = _RANGES[end]
        smallest, largest = (float(bound) for bound in column.aminmax())
        if smallest < low or largest > high:
            bounds = f"below {low:g}" if high == math.inf else f"below {low:g} or above {high:g}"
            of = f" of y[:, {i}]" if len(set(ends)) > 1 else ""
            warn_once(
                wrapped,
                "out of range",
                f"fit: the model ends in {end}, so that no prediction{of} is {bounds}, but the targets go from {smallest:.3g} to {largest:.3g}. "
                "Let it end in its last linear layer, or bring the targets into that range",
            )


__all__ = ["Limits", "Range", "limits_of", "warn_out_of_range", "with_graph"]
