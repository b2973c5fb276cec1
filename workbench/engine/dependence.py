"""Dependence of outputs on tensors: by the autograd graph, and where there is none by the operations of a pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def reached(outputs: list[Tensor]) -> set[int]:
    """ids of the leaf tensors that gradients from the outputs would reach."""
    ids = {id(tensor) for tensor in outputs if tensor.is_leaf}
    todo: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen: set[Any] = set(todo)
    while todo:
        node = todo.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            ids.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return ids


class Followed(TorchDispatchMode):
    """Follows tensors through the operations of a pass, with or without gradients: what was computed from them, in whatever memory it lies.

    What leaves torch on the way (`numpy()`, extensions of their own) is lost from sight.

    Args:
        sources: ids of the tensors to follow.
        known: ids of tensors that are not computed in the pass, and that share no numbers with a source even where they lie in one memory.
    """

    def __init__(self, sources: Iterable[int], known: Iterable[int]) -> None:
        super().__init__()
        self._known = dict.fromkeys(known, frozenset[int]()) | {key: frozenset([key]) for key in sources}
        self._in_memory: dict[StorageWeakRef, frozenset[int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler in the first call, for a second; while a mode is on, that compiles nothing

    def behind(self, tensor: Tensor) -> frozenset[int]:
        """ids of the sources that a tensor was computed from."""
        if id(tensor) in self._known:
            return self._known[id(tensor)]
        memory = _memory(tensor)
        return frozenset() if memory is None else self._in_memory.get(memory, frozenset())

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        entering = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sources = frozenset[int]().union(*map(self.behind, entering))
        if sources:
            # what the operation writes into stands among what enters it
            schema = getattr(function, "_schema", None)
            written = entering if schema is None or schema.is_mutable else []
            for tensor in (*tree_leaves(result), *written):
                if (
                    isinstance(tensor, Tensor)
                    and id(tensor) not in self._known
                    and (memory := _memory(tensor)) is not None
                ):
                    self._in_memory[memory] = self._in_memory.get(memory, frozenset()) | sources
        return result


def _memory(tensor: Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse tensors, and those of some subclasses, have none
        return None
