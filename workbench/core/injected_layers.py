"""Layers that peft adds to a wrapped model: each voter keeps its own weights and gets its own adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..engine.effects.private_random import private_stream
from ..engine.plan import RankOne, Rule, Shared, Split, Stacked
from .additions import MARK
from .calls.lone_calls import watch_layers
from .crossfit import members_axis
from .method import Call
from .optimizer_guard import watch
from .ownership import Record, Slot, Table, table_of
from .peft_calls import refuse, undo, within_from_pretrained
from .peft_layers import merge_for_voters
from .runtime import Runtime

if TYPE_CHECKING:
    from .peft_calls import Injection


def follow(root: Any) -> None:
    """Update a wrapped model after peft has added layers to it or removed them.

    Without voters or risk heads, all branches share the layers. Each voter keeps its own base weights. Its adapters are initialized as peft
    does; the first voter gets those that peft has made. Layers that peft copies to train them (`modules_to_save`) start at each voter's own
    weights.

    Args:
        root: the wrapped model.

    Raises:
        TypeError: if voters can't have such layers each; the model is as before.
    """
    record, before = root._workbench, table_of(root)
    axis = members_axis(record.methods)
    tree = {path: module for path, module in root.named_modules(remove_duplicate=False) if MARK not in path}
    known = {id(module) for module in before.modules.values()}
    # removed modules may have been garbage-collected, so compare the paths as well
    same = tree.keys() == record.order.keys() and {id(module) for module in tree.values()} == known
    if same:
        return
    moves = _Moves(before, tree)
    added = [slot for slot in Record.of(root, record.method).slots.values() if MARK not in slot.owners[0][0]]
    added = [slot for slot in added if id(tree[slot.owners[0][0]]) not in known]
    if record.rules:  # without them all branches share the layers
        try:
            _check(root, moves, added, axis)
        except TypeError as error:
            undo(root, error)
            raise
    slots, names = moves.slots()
    record.slots = slots
    record.rules = {names[slot]: moves.rule(rule) for slot, rule in record.rules.items() if slot in names}
    record.released = [names[slot] for slot in record.released if slot in names]
    record.order = {
        path: record.order[moves.before[path]] if path in moves.before else _order(module)
        for path, module in tree.items()
    }
    # these determine which layers vote, which is settled by now
    record.execution = record.tails = None
    views = {names[slot]: view for slot, view in before.views.items() if slot in names}
    originals = {names[slot]: original for slot, original in before.originals.items() if slot in names}
    injection = root.__dict__["_engine"].injection
    root.__dict__["_engine"] = runtime = Runtime(root, views, originals)
    runtime.injection = injection if within_from_pretrained() else None
    if record.rules:
        _give_each_its_own(runtime.table, added, axis, injection)
    else:
        slots.update({slot.name: slot for slot in added})
    for method in record.methods:
        method.move(names, [_owner(slot.name) for slot in added])
    watch_layers(runtime.table)
    merge_for_voters(root)
    runtime.table.show()
    watch(root)


def _owner(name: str) -> str:
    """Return the slot of a registered name."""
    return name.partition(MARK)[0]


def _order(module: nn.Module) -> tuple[list[str], list[str]]:
    return [*map(_owner, module._parameters)], [*map(_owner, module._buffers)]


# ---- what has moved
class _Moves:
    """Maps names from before a change of the module tree to names after it.

    Args:
        table: ownership table from before the change.
        tree: the modules by path now, each under all of its paths.
    """

    def __init__(self, table: Table, tree: Mapping[str, nn.Module]) -> None:
        self._table = table
        self._paths: dict[int, list[str]] = {}
        for path, module in tree.items():
            self._paths.setdefault(id(module), []).append(path)
        # path now -> path before
        self.before = {now: path for path, module in table.modules.items() for now in self._now(module)}

    def _now(self, module: nn.Module | None) -> list[str]:
        return self._paths.get(id(module), [])

    def slots(self) -> tuple[dict[str, Slot], dict[str, str]]:
        """Return the remaining slots by their new names, and the new names by the old ones."""
        slots: dict[str, Slot] = {}
        names: dict[str, str] = {}
        for name, slot in self._table.record.slots.items():
            holders = dict.fromkeys((id(self._table.modules.get(path)), attribute) for path, attribute in slot.owners)
            owners = [(path, attribute) for key, attribute in holders for path in self._paths.get(key, [])]
            if owners:
                names[name] = ".".join(filter(None, owners[0]))
                slots[names[name]] = Slot(names[name], owners, slot.buffer)
        return slots, names

    def name(self, name: str) -> str:
        """Return the new name of a registered tensor."""
        path, _, attribute = name.rpartition(".")
        return ".".join(filter(None, (self._now(self._table.modules[path])[0], attribute)))

    def rule(self, rule: Rule) -> Rule:
        """Return the same rule with the new names of its tensors."""
        if isinstance(rule, Split):
            return Split(rule.axis, tuple(map(self.rule, rule.options)))
        if isinstance(rule, RankOne):
            right = None if rule.right is None else self.name(rule.right)
            return RankOne(rule.axis, self.name(rule.name), self.name(rule.left), right)
        return Shared(self.name(rule.name)) if isinstance(rule, Shared) else Stacked(rule.axis, self.name(rule.name))

    def tied(self) -> set[str]:
        """Return the new names of slots that several modules hold."""
        slots = self._table.record.slots.values()
        several = [slot for slot in slots if len({id(self._table.modules.get(path)) for path, _ in slot.owners}) > 1]
        return {self.name(slot.name) for slot in several if self._now(self._table.modules.get(slot.owners[0][0]))}


# ---- what is new
def _give_each_its_own(table: Table, added: list[Slot], axis: str, injection: Injection) -> None:
    """Give each branch along an axis its own row of every new tensor; copies of stacked tensors have theirs already."""
    record = table.record
    new: list[tuple[str, Tensor]] = []
    for slot in added:
        name = _owner(slot.name)
        record.slots[name] = Slot(name, [(path, _owner(attribute)) for path, attribute in slot.owners], slot.buffer)
        path, attribute = record.slots[name].owners[0]
        module = table.module(path)
        if slot.name != name:
            record.rules[name] = Stacked(axis, slot.name)
            record.released.append(name)
            table.views[name] = module.__dict__[attribute]
        elif not table.is_cache(name):
            new.append((name, table.get(name)))
    if not new:
        return
    axes = (method.axis(Call(training=False, return_risk=True)) for method in record.methods)
    size = next(other.size for other in axes if other is not None and other.name == axis)
    rows = {name: [tensor.detach().clone()] for name, tensor in new}
    with private_stream({tensor.device for _, tensor in new}), torch.no_grad():
        for i in range(1, size):
            voter = injection.into({axis: i})
            for name in rows:
                rows[name].append(_tensor_at(voter, record.slots[name]).detach().clone())
    for name, tensor in new:
        buffer = record.slots[name].buffer
        registered = table.register(f"{name}{MARK}{axis}", torch.stack(rows[name]), like=tensor, buffer=buffer)
        record.rules[name] = Stacked(axis, registered)
        table.release(name)


def _tensor_at(model: nn.Module, slot: Slot) -> Tensor:
    path, attribute = slot.owners[0]
    module = model.get_submodule(path)
    tensor = module._buffers[attribute] if slot.buffer else module._parameters[attribute]
    assert tensor is not None
    return tensor


# ---- what cannot be followed
def _check(root: Any, moves: _Moves, added: list[Slot], axis: str) -> None:
    if added and root.__dict__["_engine"].injection is None:
        refuse(root, "its layers were replaced")
    for slot in added:
        if MARK in slot.name and slot.name.rpartition(MARK)[2] != axis:
            refuse(root, f"{_owner(slot.name)!r} is a copy of a weight with factors of each voter")
    for name, slot in moves.slots()[0].items():
        copied = [path for path, _ in slot.owners if "original_module" in path.split(".")]
        if copied and name in moves.tied():
            refuse(
                root,
                f"{name!r} is tied to another layer, and peft would train a copy of {copied[0].rpartition('.')[0]!r} alone",
            )


__all__ = ["follow"]
