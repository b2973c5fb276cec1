"""Dependence of outputs on leaf tensors, by the autograd graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor


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
