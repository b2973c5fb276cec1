"""Plain copies of a wrapped module and of its parts, without what wrapping added."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import Tensor, nn

from ..engine.clone import is_scripted, own_attributes, structural_copy
from .additions import MARK
from .calls.lone_calls import Alone
from .ownership import Record, Table
from .peft_layers import Merging


def plain_module(table: Table, path: str) -> nn.Module:
    """Return an independent plain copy of the module at `path` of a wrapped object, with its own tensors and without what wrapping added."""
    new = plain(table.module(path), table.record, path, table.views)
    for module in new.modules():
        if is_scripted(module):
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                vars(module._parameters[name]).update(own_attributes(parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.detach().clone()
    return new


def plain(
    module: nn.Module, record: Record, path: str, views: dict[str, Tensor], shared_attributes: Set[str] = frozenset()
) -> nn.Module:
    """Return a structural copy of (a part of) a wrapped module without what wrapping added, with all slots registered again.

    Args:
        module: the module at `path` below the wrapped root.
        record: record of the root.
        path: dotted path of the module; "" for the root.
        views: tensors to register in released slots.
        shared_attributes: names of attributes of `module` that are not copied.
    """
    new = structural_copy(module, lambda name: MARK not in name, shared_attributes)
    for part in new.modules():
        for key in [
            key for key, hook in part.__dict__.get("_forward_pre_hooks", {}).items() if isinstance(hook, Alone)
        ]:
            del part._forward_pre_hooks[key]
        for key in [key for key, value in part.__dict__.items() if isinstance(value, Merging)]:
            del part.__dict__[key]
    registries: dict[tuple[str, bool], dict[str, Any]] = {}
    for slot in (record.slots[name] for name in record.released):
        for owner, attribute in slot.owners:
            if owner != path and path and not owner.startswith(f"{path}."):
                continue
            part = new.get_submodule(owner[len(path) :].lstrip("."))
            part.__dict__.pop(attribute, None)
            registry: dict[str, Any] = part._buffers if slot.buffer else part._parameters
            registry[attribute] = views[slot.name]
            registries[owner, slot.buffer] = registry
    # once for each module rather than for each slot: a ParameterList may have thousands
    for (owner, is_buffer), registry in registries.items():
        names = record.order[owner][1 if is_buffer else 0]
        ordered = {name: registry[name] for name in names if name in registry}
        ordered.update(registry)
        registry.clear()
        registry.update(ordered)
    return new
