"""Savepoints: a module as it is, to go back to where a change of it fails or is interrupted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...engine.clone import is_scripted
from ...engine.surroundings import Surroundings
from ..ownership import EXTRAS


class Savepoint:
    """All that a load or a fit may change in a module: values, dtypes and flags of its tensors, what its modules hold, and what methods know.

    Copies of the tensors lie beside them, those of a GPU in the memory of the host, for as long as the savepoint lives.

    Args:
        root: the module, wrapped or with wrapped parts or neither.
        values: whether the values of the model's parameters may change; without, only those of buffers and of what belongs to no layer are kept.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> savepoint = Savepoint(model)
        >>> weight = model.weight.item()
        >>> _ = nn.init.zeros_(model.weight)
        >>> savepoint.restore(KeyboardInterrupt())
        >>> model.weight.item() == weight
        True
    """

    def __init__(self, root: nn.Module, values: bool = True) -> None:
        self._surroundings = Surroundings()
        self._contents: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._flags: list[tuple[Tensor, Tensor, bool]] = []
        self._values: list[tuple[Tensor, Tensor]] = []
        tensors: dict[int, tuple[Tensor, bool]] = {}
        for path, module in root.named_modules():
            if is_scripted(module):
                continue
            for contents in (module.__dict__, module._parameters, module._buffers, module._modules):
                self._contents.append((contents, dict(contents)))
            if (record := module.__dict__.get("_workbench")) is not None:
                views = module.__dict__["_engine"].table.views
                for contents in (vars(record), record.rules, views, *map(vars, record.methods)):
                    self._contents.append((contents, dict(contents)))
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    tensors[id(tensor)] = tensor, values or EXTRAS in path or not isinstance(tensor, nn.Parameter)
        for tensor, changes in tensors.values():
            memory = tensor.data
            self._flags.append((tensor, memory, tensor.requires_grad))
            if changes and not memory.is_meta:
                self._values.append((memory, memory.cpu() if memory.is_cuda else memory.clone()))

    def restore(self, error: BaseException) -> None:
        """Go back; doing so twice is the same as once.

        Args:
            error: what ended the change.
        """
        self._surroundings.restore(error)
        with torch.no_grad():
            for container, contents in self._contents:
                container.clear()
                container.update(contents)
            for tensor, memory, learns in self._flags:
                tensor.data = memory
                if tensor.requires_grad is not learns:
                    tensor.requires_grad_(learns)
            for memory, value in self._values:
                memory.copy_(value)


__all__ = ["Savepoint"]
