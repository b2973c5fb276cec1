"""Facts about tensors, by identity: what a function mode has learned of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_functorch = torch._C._functorch


class TensorFacts:
    """Mapping from tensors, by identity, to values.

    Args:
        items: pairs (tensor, value).
    """

    def __init__(self, items: Iterable[tuple[Tensor, Any]] = ()) -> None:
        self._items = list(items)  # strong references, so that ids stay unique
        self._tracing = torch.compiler.is_dynamo_compiling()
        self._by_id = {} if self._tracing else {id(tensor): value for tensor, value in self._items}

    def set(self, tensor: Tensor, value: Any) -> None:
        self._items.append((tensor, value))
        if not self._tracing:
            self._by_id[id(tensor)] = value

    def forget(self, tensor: Tensor) -> None:
        self._items = [(known, value) for known, value in self._items if known is not tensor]
        self._by_id.pop(id(tensor), None)

    def __len__(self) -> int:
        return len(self._items)

    def get(self, tensor: Any) -> Any:
        if not self._tracing:
            fact = self._by_id.get(id(tensor))
            while fact is None and isinstance(tensor, Tensor) and _functorch.is_functorch_wrapped_tensor(tensor):
                tensor = _functorch.get_unwrapped(tensor)  # the model uses a function transform, which wraps its inputs
                fact = self._by_id.get(id(tensor))
            return fact
        for known, value in self._items:  # Dynamo can compare tensors by `is`, but not by id
            if known is tensor:
                return value
        return None


__all__ = ["TensorFacts"]
