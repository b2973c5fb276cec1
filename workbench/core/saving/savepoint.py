"""Savepoints: snapshots of a module, to be restored if a change fails or is interrupted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...engine.clone import is_scripted
from ...engine.surroundings import Surroundings
from ..additions import EXTRAS
from ..quantized import scales_of


class Savepoint:
    """Snapshot of everything that a load or a fit may change in a module: values, dtypes and flags of tensors, and attributes.

    As a context manager it restores the snapshot if its block raises. Copies of the tensors are kept for the lifetime of the savepoint, those
    of GPU tensors in host memory.

    Args:
        root: the module, wrapped or not.
        values: whether the values of the model's parameters may change; otherwise only those of buffers and of extra modules are copied.

    Example:
        >>> import contextlib
        >>> model = nn.Linear(1, 1)
        >>> weight = model.weight.item()
        >>> with contextlib.suppress(KeyboardInterrupt), Savepoint(model):
        ...     _ = nn.init.zeros_(model.weight)
        ...     raise KeyboardInterrupt
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
                for part in (memory, *scales_of(tensor)):
                    self._values.append((part, part.cpu() if part.is_cuda else part.clone()))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.restore(error)

    def restore(self, error: BaseException) -> None:
        """Restore the snapshot; idempotent.

        Args:
            error: the exception that ended the change.
        """
        self._surroundings.restore(error)
        with torch.no_grad():
            for container, contents in self._contents:
                container.clear()
                container.update(contents)
            for tensor, memory, requires_grad in self._flags:
                tensor.data = memory
                if tensor.requires_grad is not requires_grad:
                    tensor.requires_grad_(requires_grad)
            for memory, value in self._values:
                memory.copy_(value)


__all__ = ["Savepoint"]
