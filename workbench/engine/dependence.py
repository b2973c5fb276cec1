"""Dependence of outputs on tensors, found by the autograd graph, or by tracking the operations of a pass if there is no graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .effects.private_random import call_in_mode


def reached(outputs: list[Tensor]) -> set[int]:
    """Return the ids of the leaf tensors that gradients from the outputs would reach."""
    variables = (getattr(node, "variable", None) for node in _nodes(outputs))
    ids = {id(variable) for variable in variables if isinstance(variable, Tensor)}
    return ids | {id(tensor) for tensor in outputs if tensor.is_leaf}


def nodes_behind(outputs: list[Tensor], is_end: Callable[[Any], bool]) -> tuple[list[Tensor], list[Any]]:
    """Return what gradients from the outputs would reach, but for what lies only behind ends.

    Args:
        outputs: tensors with their graph.
        is_end: function of a node of autograd: whether it is an end.

    Returns:
        The leaf tensors, and the other nodes, with the ends among them.
    """
    leaves: list[Tensor] = []
    inner: list[Any] = []
    for node in _nodes(outputs, is_end):
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            leaves.append(variable)
        else:
            inner.append(node)
    return leaves, inner


def next_node_number() -> int:
    """Return the number from which on autograd counts the nodes that are made after this call."""
    return get_gradient_edge(torch.ones((), requires_grad=True).view(())).node._sequence_nr()


def passed(outputs: list[Tensor], tensors: dict[str, Tensor]) -> set[str]:
    """Return the names of those tensors, themselves computed, that the outputs were computed from."""
    nodes = set(_nodes(outputs))
    return {name for name, tensor in tensors.items() if tensor.grad_fn in nodes}


def has_reentrant_checkpoint(outputs: list[Tensor]) -> bool:
    """Return whether a node behind the outputs is such a checkpoint; see `is_reentrant_checkpoint`."""
    return any(map(is_reentrant_checkpoint, _nodes(outputs)))


def is_reentrant_checkpoint(node: Any) -> bool:
    """Return whether a node stands for a part of the graph that is only made in the backward pass, by a checkpoint with use_reentrant=True."""
    return type(node).__name__ == "CheckpointFunctionBackward"


def _nodes(outputs: list[Tensor], is_end: Callable[[Any], bool] = lambda node: False) -> Iterator[Any]:
    """Iterate over the autograd graph behind the outputs, but not behind ends."""
    pending: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen: set[Any] = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for next_node, _ in () if is_end(node) else node.next_functions:
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                pending.append(next_node)


class DependenceTracker(TorchDispatchMode):
    """Dispatch mode that tracks which tensors are computed from given ones in a pass, with or without gradients.

    Computations outside torch (`numpy()`, custom extensions) are not tracked.

    Args:
        sources: ids of the tensors to track.
        known: ids of tensors that are not computed in the pass; they do not depend on a source, even if they share its storage.
    """

    def __init__(self, sources: Iterable[int], known: Iterable[int]) -> None:
        super().__init__()
        self._known = dict.fromkeys(known, frozenset[int]()) | {key: frozenset([key]) for key in sources}
        self._by_storage: dict[StorageWeakRef, frozenset[int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True makes torch import its compiler, which takes a second and has no effect under a mode

    def behind(self, tensor: Tensor) -> frozenset[int]:
        """Return the ids of the sources that a tensor was computed from."""
        if id(tensor) in self._known:
            return self._known[id(tensor)]
        memory = _memory(tensor)
        return frozenset() if memory is None else self._by_storage.get(memory, frozenset())

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = call_in_mode(function, args, kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sources = frozenset[int]().union(*map(self.behind, inputs))
        if sources:
            # tensors that the operation writes into are among its arguments
            schema = getattr(function, "_schema", None)
            written = inputs if schema is None or schema.is_mutable else []
            for tensor in (*tree_leaves(result), *written):
                if (
                    isinstance(tensor, Tensor)
                    and id(tensor) not in self._known
                    and (memory := _memory(tensor)) is not None
                ):
                    self._by_storage[memory] = self._by_storage.get(memory, frozenset()) | sources
        return result


def _memory(tensor: Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have no storage
        return None
