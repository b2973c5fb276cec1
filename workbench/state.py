"""Plain models out of a wrapped one, and states into it: those of its kind, and those of the plain model."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor, nn

from .engine.clone import places
from .engine.plan import Bank
from .scaling import Scaling
from .table import EXTRAS, MARK, Record, Slot, Table, extras

SETTINGS = f"settings{MARK}workbench"  # in the state_dict: the wrappers' settings as the bytes of a JSON text


def extract(model: nn.Module, table: Table, index: dict[str, int], own: bool) -> nn.Module:
    """Give a plain clone the tensors of one branch.

    Args:
        model: a structural copy of the wrapped object without what wrapping added.
        table: the tensors of the wrapped object.
        index: axis -> position of the branch.
        own: whether all its tensors are its own; else those that no method took over are shared.
    """
    record, bank = table.record, Bank(table.get)
    for slot in record.slots.values():
        rule = record.rules.get(slot.name)
        if not own and (rule is None or "vote" not in rule.axes()):
            continue  # the clone holds the shared tensor already
        value = (table.get(slot.name) if rule is None else rule.pick(bank, index)).detach().clone()
        if not slot.buffer:
            names = [slot.name] if rule is None or slot.name not in record.released else rule.registered()
            learns = any(table.get(name).requires_grad for name in names)
            value = nn.Parameter(value, requires_grad=learns)
        _place(model, slot, value)
    return model


def _place(model: nn.Module, slot: Slot, value: Tensor) -> None:
    path, attribute = slot.owners[0]
    owner = model.get_submodule(path) if path else model
    old = (owner._buffers if slot.buffer else owner._parameters)[attribute]
    for container, key, _ in places(model, {id(old): slot.name}):
        container[key] = value


def prepare(
    wrapped: Any, table: Table, settings: dict[str, Any], state: dict[str, Any], prefix: str
) -> tuple[list[str], list[str]]:
    """Before a state is loaded: compare the settings, then translate what is not of this object's form, in place.

    Args:
        wrapped: the object that loads.
        table: its tensors.
        settings: of its methods, by name.
        state: the state_dict, whose keys of this object begin with `prefix`.

    Returns:
        Names of the plain model that are missing in its state, and messages about those of another shape.

    Raises:
        ValueError: if the state was saved with other settings; nothing has been loaded then.
    """
    stored = state.pop(prefix + SETTINGS, None)
    theirs = {} if stored is None else json.loads(bytes(stored.cpu().tolist()).decode())
    _compare(theirs, json.loads(json.dumps(settings)))
    for key in [key for key in state if key.startswith(prefix) and "_orig_mod." in key]:
        state[key.replace("_orig_mod.", "")] = state.pop(key)  # of a compiled model
    _scaling(wrapped, state, prefix)
    if theirs or any(MARK in key and key.startswith(prefix) and EXTRAS not in key for key in state):
        return [], []
    found = _spread(table, state, prefix)
    for key, value in nn.Module.state_dict(wrapped).items():
        if MARK in key and key != SETTINGS:  # a plain state says nothing about what wrapping adds beside the model
            state.setdefault(prefix + key, value)
    return found


def _compare(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    differing = [
        f"{name}: the state has {theirs.get(name, 'no such method')}, this object {ours.get(name, 'no such method')}"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
    if theirs and differing:
        raise ValueError(
            f"the state was saved with other wrapper settings; wrap the model alike before loading it. {'; '.join(differing)}"
        )


def _scaling(wrapped: Any, state: dict[str, Any], prefix: str) -> None:
    """The units travel with the weights that were trained in them."""
    stem = f"{prefix}{EXTRAS}.scaling."
    stored = {key[len(stem) :]: value for key, value in state.items() if key.startswith(stem)}
    if stored:
        device = next((p.device for p in nn.Module.parameters(wrapped)), None)
        extras(wrapped)._modules["scaling"] = Scaling(**stored).to(device)
        for name in stored:
            state[stem + name] = stored[name]
    elif EXTRAS in wrapped._modules:
        extras(wrapped)._modules.pop("scaling", None)


def _keys(slot: Slot, prefix: str) -> list[str]:
    return [f"{prefix}{path}.{attribute}" if path else prefix + attribute for path, attribute in slot.owners]


def _spread(table: Table, state: dict[str, Any], prefix: str) -> tuple[list[str], list[str]]:
    """A plain model's tensors for every branch that has them of its own; risk heads and factors stay as they are."""
    record: Record = table.record
    missing, errors = [], []
    for name in record.released:
        keys = _keys(record.slots[name], prefix)
        current = table.get(f"{name}{MARK}vote")
        source = next((state[key] for key in keys if key in state), None)
        if source is None:
            missing.append(keys[0])
        elif source.shape != current.shape[1:]:
            errors.append(
                f"size mismatch for {keys[0]}: the state has {tuple(source.shape)}, the model {tuple(current.shape[1:])}."
            )
        else:
            state[f"{prefix}{name}{MARK}vote"] = source.expand(current.shape).clone()
        for key in keys:
            state.pop(key, None)
    return missing, errors
