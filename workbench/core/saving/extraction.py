"""Extraction of plain models from a wrapped one."""

from __future__ import annotations

from torch import Tensor, nn

from ...engine.clone import own_attributes, places, sparse_buffers
from ..additions import MARK
from ..ownership import Lookup, Slot, Table
from ..quantized import own_copy


def extract(model: nn.Module, table: Table, index: dict[str, int], independent: bool) -> nn.Module:
    """Install the tensors of one branch in a plain clone, and return the clone.

    Args:
        model: structural copy of the wrapped object without what wrapping added.
        table: ownership table of the wrapped object.
        index: axis -> position of the branch.
        independent: whether to copy all tensors; otherwise those that no method has taken over are shared.
    """
    record, bank = table.record, Lookup(table.get)
    new: dict[str, Tensor] = {}
    for slot in record.slots.values():
        # swag and snapshot register the weights that they collect under the slot's name and their axis
        collected = (record.rules.get(f"{slot.name}{MARK}{axis}") for axis in index)
        rule = next((other for other in collected if other is not None), record.rules.get(slot.name))
        shared = slot.name not in table.views
        tensor = None if rule is None else rule.pick(bank, index)
        if not independent and shared and (tensor is None or tensor is table.get(slot.name)):
            continue  # the clone already holds the shared tensor
        if not slot.buffer and shared and tensor is None:
            new[slot.name] = own_copy(table.get(slot.name))
            continue
        value = (table.get(slot.name) if tensor is None else tensor).detach().clone()
        if not slot.buffer:
            names = [slot.name] if rule is None or shared else rule.registered()
            requires_grad = any(table.get(name).requires_grad for name in names)
            value = nn.Parameter(value, requires_grad=requires_grad)
        new[slot.name] = value
    replaced = {}
    for name, value in new.items():
        old = _tensor_of(model, record.slots[name])
        replaced[id(old)] = name
        if isinstance(value, nn.Parameter) and old is not None:
            vars(value).update(own_attributes(old))
    for container, key, name in places(model, replaced):  # a single walk through the model for all tensors
        container[key] = new[name]
    for module in model.modules() if independent else ():
        for name, buffer in sparse_buffers(module):
            module._buffers[name] = buffer.detach().clone()
    return model


def _tensor_of(model: nn.Module, slot: Slot) -> Tensor | None:
    path, attribute = slot.owners[0]
    owner = model.get_submodule(path)
    return (owner._buffers if slot.buffer else owner._parameters)[attribute]
