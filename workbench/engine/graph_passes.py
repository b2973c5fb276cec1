"""Passes over recorded graphs whose results stay the same to the last bit, and what is known of the operations in them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

_aten: Any = torch.ops.aten
_OpOverload = torch._ops.OpOverload
# return an equal tensor if sizes and strides of the result are those of the input
_RESHAPES = (
    _aten.view.default,
    _aten.expand.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten._unsafe_view.default,
    _aten.permute.default,
    _aten.transpose.int,
)
# always return a view of their first argument
_VIEWS = frozenset(
    (
        _aten.transpose.int,
        _aten.t.default,
        _aten.permute.default,
        _aten.view.default,
        _aten.expand.default,
        _aten.unsqueeze.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.detach.default,
        _aten.diagonal.default,
    )
)
# return views that their schemas do not declare
_UNDECLARED_VIEWS = (_aten._unsafe_view.default, _aten._reshape_alias.default)
# write into arguments that their schemas do not declare as written
_UNDECLARED_WRITES = dict.fromkeys(
    (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default),
    ("running_mean", "running_var"),
)

MAX_CONSTANT = 2**16  # elements of a constant that a graph holds instead of computing it in each run


def undeclared_writes(node: fx.Node) -> tuple[str, ...]:
    """Return the arguments that an operation writes without declaring it in its schema; batch norm in evaluation mode writes none."""
    if node.target not in _UNDECLARED_WRITES or node.args[5:6] == (False,):
        return ()
    return _UNDECLARED_WRITES[node.target]


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that an operation writes into."""
    if not isinstance(node.target, _OpOverload):
        return []
    undeclared = undeclared_writes(node)
    if not node.target._schema.is_mutable and not undeclared:
        return []
    written = []
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name in undeclared or (argument.alias_info is not None and argument.alias_info.is_write):
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            written += [
                item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, fx.Node)
            ]
    return written


def root_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory a view shares, as far as schemas declare it."""
    while node.op == "call_function" and node.args:
        target: Any = node.target
        is_view = target is operator.getitem or target in _UNDECLARED_VIEWS
        if not is_view:
            is_view = any(value.alias_info is not None for value in target._schema.returns)
        i = node.args[0]
        if not is_view or not isinstance(i, fx.Node):
            break
        node = i
    return node


def is_random(node: fx.Node) -> bool:
    return isinstance(node.target, _OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def drop_unused(graph: fx.Graph) -> None:
    """Remove unused nodes, except writes and random draws, which advance the generator."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not written_nodes(node) and not is_random(node):
            graph.erase_node(node)


def simplify(graph: fx.Graph, values: Mapping[fx.Node, Any]) -> None:
    """Remove views and copies that change nothing, and repeated computations, from a graph without writes."""
    for node in list(graph.nodes):
        if (node.target in _RESHAPES or _is_times_one(node) or _is_copy(node)) and values[node] == values[node.args[0]]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_random(node) or "empty" in str(node.target):
            continue
        key = (node.target, _hashable(node.args), _hashable(node.kwargs))
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    drop_unused(graph)


def _is_times_one(node: fx.Node) -> bool:
    """Return whether a node multiplies by one."""
    return node.target in (_aten.mul.Tensor, _aten.mul.Scalar) and type(node.args[1]) is int and node.args[1] == 1


def _is_copy(node: fx.Node) -> bool:
    """Return whether a node copies a tensor that is no output."""
    return node.target is _aten.clone.default and all(user.op != "output" for user in node.users)


def lift_constants(graph: fx.Graph) -> list[Tensor]:
    """Turn what depends on no input into inputs: TorchScript cannot write some constants, such as NaN, and a copy to a device would wait for it.

    Scalars always; other tensors if they are small, since they take memory as long as the graph exists.
    """
    constants = []
    batch = next(node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("batch_"))
    known: dict[fx.Node, Tensor] = {}
    for node in list(graph.nodes):
        if (
            not isinstance(node.target, _OpOverload)
            or not known.keys() >= {*node.all_input_nodes}
            or not _is_repeatable(node)
        ):
            continue
        value = node.target(*fx.map_arg(node.args, known.__getitem__), **fx.map_arg(node.kwargs, known.__getitem__))
        if isinstance(value, Tensor) and value.numel() <= MAX_CONSTANT:
            known[node] = value
    for node in [*known]:
        if all(user in known for user in node.users):
            continue
        constants.append(known[node])
        with graph.inserting_before(batch):
            node.replace_all_uses_with(
                graph.placeholder(f"constant_{len(constants)}"), delete_user_cb=lambda user: user not in known
            )
    drop_unused(graph)
    return constants


def _is_repeatable(node: fx.Node) -> bool:
    """Return whether an operation gives the same numbers each time, in memory of its own or that of its input."""
    return not is_random(node) and not written_nodes(node) and "empty" not in str(node.target)


def lift_views(graph: fx.Graph) -> Callable[..., list[Tensor]] | None:
    """Turn views of held tensors into inputs after these; return the function that computes the views, None if there are none."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    constants = [node for node in inputs if not node.name.startswith("batch_")]
    # operation, index of its source among held tensors and views, other arguments
    steps: list[tuple[Any, int, tuple[Any, ...], dict[str, Any]]] = []
    known = {node: i for i, node in enumerate(constants)}
    lifted = []
    for node in graph.nodes:
        if node.target in _VIEWS and node.args[0] in known and not any(isinstance(a, fx.Node) for a in node.args[1:]):
            steps.append((node.target, known[node.args[0]], node.args[1:], dict(node.kwargs)))
            known[node] = len(known)
            lifted.append(node)
    for i, node in enumerate(lifted):
        with graph.inserting_before(inputs[len(constants)]):
            node.replace_all_uses_with(graph.placeholder(f"shown_{i}"))
    for node in reversed(lifted):
        graph.erase_node(node)

    def make(*tensors: Tensor) -> list[Tensor]:
        sources = [tensor.detach() for tensor in tensors]
        for operation, i, others, options in steps:
            sources.append(operation(sources[i], *others, **options))
        return sources[len(tensors) :]

    return make if steps else None


def clone_shared_outputs(graph: fx.Graph) -> None:
    """Clone outputs that share memory with an input or another output."""
    end = next(node for node in graph.nodes if node.op == "output")
    roots: set[fx.Node] = set()
    outputs = []
    for node in end.args[0]:
        root = root_of(node)
        if root in roots or root.op == "placeholder":
            with graph.inserting_before(end):
                node = graph.call_function(_aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        roots.add(root)
        outputs.append(node)
    end.args = (outputs,)


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return type(value), repr(value) if isinstance(value, float) else value  # tells -0.0 from 0.0, and 1 from True


__all__ = [
    "clone_shared_outputs",
    "drop_unused",
    "is_random",
    "lift_constants",
    "lift_views",
    "root_of",
    "simplify",
    "undeclared_writes",
    "written_nodes",
]
