"""Loading of states, both of wrapped and of plain models."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..additions import EXTRAS, MARK, add_extra, remove_extra
from ..batches.call_arguments import positional_names
from ..crossfit import NAME as COMMITTEE
from ..crossfit import Committee, members_axis, seat
from ..ownership import Slot, Table, table_of
from ..quantized import Scales
from ..standardize import Scaling
from .extraction import extract
from .saved_settings import SETTINGS, check_output, check_settings, stored_settings


def saves_itself(module: nn.Module) -> bool:
    """Return whether a layer overrides how its state is saved, as layers of torch_geometric do, and so does not know of voters."""
    return type(module)._save_to_state_dict is not nn.Module._save_to_state_dict


def add_registered(wrapped: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Hook for state_dict that adds the tensors registered by methods to the state of layers that save themselves, and removes replaced ones."""
    keep_vars = any(isinstance(value, nn.Parameter) for value in state.values())
    for path, module in wrapped.named_modules():
        if not saves_itself(module):
            continue
        stem = f"{prefix}{path}." if path else prefix
        registered = {**module._parameters, **module._buffers}
        for name, tensor in registered.items():
            if tensor is not None and MARK in name:
                state.setdefault(stem + name, tensor if keep_vars else tensor.detach())
                if (single := name.partition(MARK)[0]) not in registered:
                    state.pop(stem + single, None)


def adapt(wrapped: Any, names: Iterable[str], prefix: str = "") -> None:
    """Let methods register the tensors that a state has; `names` are all names in the state, those of this object begin with `prefix`."""
    stored = {name[len(prefix) :] for name in names if name.startswith(prefix)}
    for method in wrapped._workbench.methods:
        method.adapt(table_of(wrapped), stored)


@dataclass
class Loading:
    """One call of load_state_dict, from the inspection of the state to the report.

    Args:
        wrapped: the object that loads.
        table: its ownership table.
        build: function that returns a plain structural copy of the object.
        state: the state_dict, in which keys of this object begin with `prefix`; torch copied it for this load, so that it may be modified.
        prefix: prefix of the object's keys.
        strict: whether missing and unexpected keys are errors; None if a larger model loads, which does not pass it on.
        missing, unexpected, errors: lists from which torch makes its report.
    """

    wrapped: Any
    table: Table
    build: Callable[[], nn.Module]
    state: dict[str, Any]
    prefix: str
    strict: bool | None
    missing: list[str]
    unexpected: list[str]
    errors: list[str]
    keys: set[str] = field(default_factory=set)
    missed: set[str] = field(default_factory=set)  # missing keys of a state of the plain model
    scales: Scales = field(default_factory=Scales)
    hint: str = "strict=False loads what fits, and leaves the rest unchanged."

    def prepare(self) -> None:
        """Compare settings, then convert the state to the form of this object, in place.

        Raises:
            ValueError: if the state was saved with other settings; nothing has been loaded then.
        """
        self._unprefix()
        self.scales = Scales.taken(self.wrapped, self.state, self.prefix)
        self.missing.extend(self.scales.missing)
        self.errors.extend(self.scales.errors)
        saved, notes = stored_settings(self.state, self.prefix)
        for key in self._own(self.state):
            if MARK in key and not isinstance(self.state[key], Tensor):
                raise ValueError(f"{key} in the state is a {type(self.state[key]).__name__}, and should be a tensor")
        check_settings(saved, self.wrapped, self.strict)
        if self.strict is not False:
            check_output(notes, self.wrapped)
        self.state.pop(self.prefix + SETTINGS, None)
        marked = any(MARK in key and EXTRAS not in key for key in self._own(self.state))
        if saved or marked:
            if self.strict is not False:
                adapt(self.wrapped, self.state, self.prefix)
            self._fill()
            self._widen()
            complete(self.state, self.wrapped, self.prefix)
            current = self._current()
            lacking = [key for key in current if EXTRAS not in key and self.prefix + key not in self.state]
            for method in self.table.record.methods if saved else ():
                if method.name in saved:
                    notes = {
                        **{f"{key}{MARK}{method.name}": value for key, value in method.earlier_notes.items()},
                        **notes,
                    }
            self._extras(notes, {key: self.state.get(self.prefix + key) for key in current}, bool(lacking))
        else:
            self._plain()
        self.keys, self.missed = {*self._own(self.state), *self.unexpected}, {*self.missing}

    def finish(self, incompatible: Any) -> None:
        """Complete the report after all parts have loaded: only keys of the state can be unexpected, and none missing that this object lacks.

        BatchNorm adds a missing counter to states without version (such as from safetensors), but voters have it under another name. So it is
        with layers that read their tensors themselves, such as observers of `torch.ao.quantization`, and report those that they do not find.
        """
        replaced = self._replaced()
        known = replaced if self.strict is False else set()
        incompatible.unexpected_keys[:] = [
            key
            for key in incompatible.unexpected_keys
            if not key.startswith(self.prefix) or (key in self.keys and key not in known)
        ]
        incompatible.missing_keys[:] = [
            key for key in incompatible.missing_keys if key in self.missed or key not in replaced
        ]
        self._tie()
        if self.prefix + SETTINGS != SETTINGS and SETTINGS in incompatible.unexpected_keys:
            self.errors.append(
                f"{SETTINGS} lacks the prefix {self.prefix!r}, since torch.distributed.checkpoint leaves out names of DistributedDataParallel: "
                "load the state into the wrapped model, set_model_state_dict(parallel.module, state)."
            )
        wrong = self._own([*incompatible.missing_keys, *incompatible.unexpected_keys])
        if self.strict and wrong:
            self.errors.append(self.hint)
        self.table.record.fitted_weights = None
        if not self.errors:
            self.scales.write()

    def _replaced(self) -> set[str]:
        """Return the keys of weights in whose place the state has others; `save_pretrained` adds the first branch's for the plain class."""
        record = self.table.record
        return {
            self.prefix + name
            for slot in record.released
            if all(self.prefix + used in self.keys for used in record.rules[slot].registered())
            for name in _names(record.slots[slot])
        }

    def _tie(self) -> None:
        """Restore tied tensors, since a load with assign=True sets a different tensor under each name."""
        for slot in self.table.record.slots.values():
            for path, attribute in slot.owners[1:] if slot.name not in self.table.views else ():
                module, tied = self.table.module(path), self.table.get(slot.name)
                registry: dict[str, Any] = module._buffers if slot.buffer else module._parameters
                if registry.get(attribute) is not tied:
                    registry[attribute] = tied

    def _own(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key.startswith(self.prefix)]

    def _current(self) -> dict[str, Any]:
        state = nn.Module.state_dict(self.wrapped)
        return {key: value for key, value in state.items() if key != SETTINGS}

    def _unprefix(self) -> None:
        """Remove the prefixes that torch.compile, DataParallel and DistributedDataParallel add to names."""
        state, start = self.state, len(self.prefix)
        for key in self._own(state):
            if "_orig_mod." in key[start:]:
                state[self.prefix + key[start:].replace("_orig_mod.", "")] = state.pop(key)
        keys, stem = self._own(state), f"{self.prefix}module."
        if keys and all(key.startswith(stem) for key in keys) and "module" not in self.wrapped._modules:
            for key in keys:
                state[self.prefix + key[len(stem) :]] = state.pop(key)

    def _fill(self) -> None:
        """Add the empty tensors that a file lacks: accelerate takes all of them for one with many names, and writes only the first."""
        stem = self.prefix + EXTRAS
        if sum(key.startswith(stem) and not self.state[key].numel() for key in self._own(self.state)) == 1:
            for key, current in self._current().items():
                if key.startswith(EXTRAS) and not current.numel():
                    self.state.setdefault(self.prefix + key, current)

    # ---- a state of fewer methods
    def _widen(self) -> None:
        """With strict=False, expand single tensors of a state without voters to all voters."""
        axis = members_axis(self.table.record.methods)
        for key, current in self._current().items() if self.strict is False and axis else ():
            single = key.removesuffix(f"{MARK}{axis}")
            names = _names(self.table.record.slots[single]) if single in self.table.record.slots else [single]
            in_state = [self.prefix + name for name in names if self.prefix + name in self.state]
            if single != key and in_state and self.prefix + key not in self.state:
                value = self.state[in_state[0]]
                for name in in_state:
                    del self.state[name]
                fits = value.shape == current.shape[1:]
                self.state[self.prefix + key] = value.expand(current.shape).clone() if fits else value

    # ---- a state of the plain model
    def _plain(self) -> None:
        """Load a state of the plain model through the plain class, with its hooks and versions, then expand the result to all voters."""
        plain: Any = OrderedDict()
        for key in self._own(self.state):
            if MARK not in key:
                plain[key[len(self.prefix) :]] = self.state.pop(key)
        if not self.prefix and hasattr(self.state, "_metadata"):
            plain._metadata = copy.deepcopy(self.state._metadata)  # copied, since a load with assign=True modifies it
        trial = extract(self.build(), self.table, {}, independent=False)
        self.hint = _hint(plain, trial) or self.hint
        complete(plain, trial)
        missing, unexpected, errors = [], [], []
        try:
            # assigned, not copied, since the clone may share tensors with the wrapped object
            missing, unexpected = nn.Module.load_state_dict(trial, plain, strict=False, assign=True)
        except RuntimeError as error:
            errors.append(str(error).partition("\n\t")[2] or str(error))
        self.missing.extend(self.prefix + key for key in missing)
        self.unexpected.extend(self.prefix + key for key in unexpected)
        self.errors.extend(errors)
        new: dict[str, Any] = {}
        if not errors and not (self.strict and (missing or unexpected)):
            new = self._spread({key: value for key, value in nn.Module.state_dict(trial).items() if key not in missing})
            self._extras({}, new, bool(missing))
            for method in self.table.record.methods:
                method.forget(self.table)
        for key, value in {**self._current(), **new}.items():
            self.state.setdefault(self.prefix + key, value)

    def _spread(self, values: dict[str, Any]) -> dict[str, Any]:
        """Convert tensors of the plain model to keys and shapes of the wrapped one, expanded to all members."""
        record = self.table.record
        slots = {name: slot.name for slot in record.slots.values() for name in _names(slot)}
        aliases = _aliases(self.wrapped)
        new: dict[str, Any] = {}
        for key, value in values.items():
            if slots.get(key) not in self.table.views:
                new[key] = value
                continue
            current = self.table.get(f"{slots[key]}{MARK}{members_axis(record.methods)}")
            if value.shape != current.shape[1:]:
                self.errors.append(
                    f"size mismatch for {key}: the state has {tuple(value.shape)}, the model {tuple(current.shape[1:])}."
                )
                continue
            new.update(dict.fromkeys(aliases[id(current)], value.expand(current.shape).clone()))
        return new

    # ---- what belongs to no single layer
    def _extras(self, notes: dict[str, Any], new: dict[str, Any], partial: bool) -> None:
        """Load the scaling, the cross-fitting weights and what methods have learned; what a complete state lacks is removed.

        Args:
            notes: notes of methods by "name@method".
            new: key -> new value of the state.
            partial: whether weights are missing in the state.
        """
        stem = f"{self.prefix}{EXTRAS}."
        stored = {key[len(stem) :]: value for key, value in self.state.items() if key.startswith(stem)}
        scaling = {key.removeprefix("scaling."): value for key, value in stored.items() if key.startswith("scaling.")}
        if scaling:
            device = next((p.device for p in nn.Module.parameters(self.wrapped)), None)
            new_scaling = Scaling.of_state(scaling, positional_names(self.wrapped))
            add_extra(self.wrapped, "scaling", new_scaling.to(device))
        elif not partial:
            remove_extra(self.wrapped, "scaling")
        committee = {name: stored[f"{COMMITTEE}.{name}"] for name in Committee.NAMES if f"{COMMITTEE}.{name}" in stored}
        if len(committee) == len(Committee.NAMES):
            seat(self.wrapped, Committee(**committee))
        elif not partial:
            seat(self.wrapped, None)
        for method in self.table.record.methods:
            method_notes = {
                key.partition(MARK)[0]: value for key, value in notes.items() if key.endswith(MARK + method.name)
            }
            method.recall(self.wrapped, method_notes, stored, functools.partial(self._moved, new))

    def _moved(self, new: dict[str, Any]) -> bool:
        """Return whether the state changes any weights."""
        for key, old in self._current().items():
            value = new.get(key)
            if EXTRAS in key or not isinstance(value, Tensor) or old.is_meta:
                continue
            if value.shape != old.shape or not torch.equal(value.to(old), old):
                return True
        return False


def _names(slot: Slot) -> list[str]:
    return [f"{path}.{attribute}" if path else attribute for path, attribute in slot.owners]


def _aliases(module: nn.Module) -> dict[int, list[str]]:
    """Return id of a tensor -> its keys in the state_dict: several for tied tensors, and for modules with several names."""
    keys: dict[int, list[str]] = {}
    for key, tensor in nn.Module.state_dict(module, keep_vars=True).items():
        keys.setdefault(id(tensor), []).append(key)
    return keys


def complete(state: dict[str, Any], module: nn.Module, prefix: str = "") -> None:
    """Add all names of tied tensors that were stored once, as in safetensors files."""
    for keys in _aliases(module).values():
        in_state = [prefix + key for key in keys if prefix + key in state]
        for key in keys if in_state else ():
            state.setdefault(prefix + key, state[in_state[0]])


def _hint(entries: dict[str, Any], model: nn.Module) -> str:
    """Return advice for a state in which no name matches; "" otherwise."""
    names = set(nn.Module.state_dict(model))
    if not entries or names & entries.keys():
        return ""
    inner = [key for key, value in entries.items() if isinstance(value, dict)]
    if inner:
        return f"The state is a training checkpoint with several parts: load the one with the weights, such as state[{inner[0]!r}]."
    for key in entries:
        prefix = next((key[: -len(name)] for name in names if key.endswith(f".{name}")), "")
        if prefix and all(other.startswith(prefix) for other in entries):
            return f"All names begin with {prefix!r}: load {{name.removeprefix({prefix!r}): value for name, value in state.items()}}."
    return ""
