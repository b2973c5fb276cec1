"""Ownership of the tensors of a wrapped module: shared with the given model, or taken over by a method."""

from __future__ import annotations

import functools
import secrets
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ..engine.clone import is_scripted, places, structural_copy
from ..engine.plan import Bank, Index, RankOne, Rule, Shared
from ..engine.tree import is_float, version
from ..introspect.references import used_by
from .calls.lone_calls import Alone, TakenByLoss

if TYPE_CHECKING:
    from ..engine.execution import Execution
    from ..engine.run import Engine

MARK = "@"  # in the name of everything that wrapping adds: fc.weight@vote; no name of a user's attribute can hold it
EXTRAS = f"extras{MARK}workbench"  # the sub-module that holds what belongs to no single layer


def table_of(wrapped: Any) -> Table:
    """The table of tensors of a wrapped object."""
    return wrapped.__dict__["_engine"].table


def engine_of(wrapped: Any) -> Engine:
    """The engine of a wrapped object."""
    return wrapped.__dict__["_engine"].engine


def marks_of(wrapped: Any) -> Any:
    """The marks of what a wrapped object has averaged."""
    return wrapped.__dict__["_engine"].marks


def extra(root: nn.Module, name: str) -> Any:
    """What wrapping holds beside the layers under a name ("scaling", "density"), None if there is none."""
    container: Any = root._modules.get(EXTRAS)
    return None if container is None else container._modules.get(name)


def add_extra(root: nn.Module, name: str, module: nn.Module) -> None:
    """Let wrapping hold a module beside the layers, in the mode that the model is in."""
    if root._modules.get(EXTRAS) is None:
        root._modules[EXTRAS] = nn.Module().train(root.training)
    container: Any = root._modules[EXTRAS]
    container._modules[name] = module.train(root.training)


def remove_extra(root: nn.Module, name: str) -> Any:
    """Take away what wrapping holds beside the layers under a name, and return it; None if there is none."""
    container: Any = root._modules.get(EXTRAS)
    return None if container is None else container._modules.pop(name, None)


def _name(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute


@dataclass
class Slot:
    """One parameter or buffer of the model under all its names.

    Args:
        name: the first of them, `fc.weight`.
        owners: (path of the module, attribute) of each.
        buffer: whether it is a buffer.
    """

    name: str
    owners: list[tuple[str, str]]
    buffer: bool


@dataclass
class Record:
    """All that a wrapped object knows about its wrapping; it is pickled and copied with it."""

    slots: dict[str, Slot]
    # by module path: names of its parameters and buffers, as first registered
    order: dict[str, tuple[list[str], list[str]]]
    method: str = "forward"  # of the user's class: the one that answers with risk
    methods: list[Any] = field(default_factory=list)  # each a `Method`, in canonical order
    rules: dict[str, Rule] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)  # slots that a method has taken over altogether
    output: Any = None  # what the outputs mean, as `outputs.read` gives it; None, values, if nobody said
    state: Any = None  # paths of the outputs that are state, as `state.state_paths` gives them; None if nobody said
    strategy: str = "auto"
    purity: str = "once"  # what is made of attributes that forward changes
    chunk: int | None = None  # how many branches run at once under vmap
    verbose: int = 0
    rows: int | None = None  # number of training rows, which the regularising terms need
    trainings: tuple[dict[str, Any], ...] = ()  # what is known of the rows of each, see `saving.training_data`
    data: str | None = None  # what the user says of them
    dealable: bool | None = None  # whether rows answer by themselves; unknown before the first dealt call
    dealt: bool = False  # whether a call with dealt rows has gone well
    told: set[str] = field(default_factory=set)  # warnings that were given
    alone: Alone = field(default_factory=Alone)
    execution: Execution | None = None  # what an example has shown
    # by argument: how many layers were taken for the last, by the order of registration
    tails: dict[str, int] | None = None
    ordered: bool = False  # whether a call has shown these to be the last
    # while changed rows are trained on: inputs and targets as they were, which tell the rows apart in every epoch
    source: tuple[Any, Any] | None = None
    # while a validation asks for them: the number of models along each axis, and the loss of each, one pair for each call
    losses: list[tuple[dict[str, int], Tensor]] | None = None
    says_distributions: bool = False  # whether a call has shown that the model gives distributions of torch
    token: str = ""  # says which object it is, copies included; none in those pickled by an earlier version

    @classmethod
    def of(cls, root: nn.Module, method: str = "forward") -> Record:
        """Of a plain module; slots are the tensors that the method uses."""
        slots: dict[int, Slot] = {}
        order: dict[str, tuple[list[str], list[str]]] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            order[path] = (list(module._parameters), list(module._buffers))
            if is_scripted(module):
                continue
            for buffer, registry in ((False, module._parameters), (True, module._buffers)):
                for attribute, tensor in registry.items():
                    if tensor is None:
                        continue
                    slots.setdefault(id(tensor), Slot(_name(path, attribute), [], buffer)).owners.append(
                        (path, attribute)
                    )
        used = None if method == "forward" else used_by(root, method)
        return cls(
            {s.name: s for s in slots.values() if used is None or any(_name(*owner) in used for owner in s.owners)},
            order,
            method,
            token=secrets.token_hex(8),
        )


class Table:
    """Reads and changes the ownership of tensors in a wrapped module.

    Args:
        root: the wrapped module.
        record: its record.
        views: slot -> what stands in its place in the wrapped tree: the first branch's row.
        originals: slot -> the tensor of the given model, for as long as that lives.
    """

    def __init__(
        self, root: nn.Module, record: Record, views: dict[str, Tensor], originals: dict[str, weakref.ref[Tensor]]
    ) -> None:
        self.root, self.record, self.views, self.given = root, record, views, originals
        self._homes: dict[str, tuple[dict[str, Any], str]] = {}
        self._trunks: dict[tuple[str, ...], bool] = {}
        self._held: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # those that were seen to hold numbers, and when

    # ---- looking
    def module(self, path: str) -> nn.Module:
        """The sub-module at a path, "" for the root."""
        return self.root.get_submodule(path) if path else self.root

    def get(self, name: str) -> Tensor:
        """The registered tensor of a name such as `fc.weight` or `fc.weight@vote`."""
        tracing = torch.compiler.is_dynamo_compiling()  # what is kept here would make it trace again
        home = None if tracing else self._homes.get(name)
        if home is None or home[1] not in home[0]:
            path, _, attribute = name.rpartition(".")
            module = self.module(path)
            registry = module._parameters if attribute in module._parameters else module._buffers
            if attribute not in registry:
                raise RuntimeError(
                    f"{name!r} is not registered in {type(self.root).__name__} any more: a layer was replaced after wrapping. Make the change "
                    "in the plain model (workbench.unwrap), and wrap it again"
                )
            home = (registry, attribute)
            if not tracing:
                self._homes[name] = home
        return home[0][home[1]]  # type: ignore[return-value]

    def holds(self, name: str) -> bool:
        """Whether a registered tensor holds anything but zeros; looked at once until it is written into, for a GPU makes each look wait."""
        tensor = self.get(name)
        seen = self._held.get(name)
        if seen is None or seen[0]() is not tensor or seen[1] != version(tensor):
            if not tensor.is_meta and not bool(tensor.any()):
                return False
            self._held[name] = weakref.ref(tensor), version(tensor)
        return True

    def homes(self) -> dict[str, list[tuple[dict[str, Any], str]]]:
        """The dict entries that hold each slot."""
        out: dict[str, list[tuple[dict[str, Any], str]]] = {}
        for name, slot in self.record.slots.items():
            out[name] = []
            for path, attribute in slot.owners:
                module = self.module(path)
                registry = (
                    module.__dict__ if name in self.views else module._buffers if slot.buffer else module._parameters
                )
                out[name].append((registry, attribute))
        return out

    def verify(self) -> None:
        """Raise if somebody has replaced a layer or a parameter that a method has taken over."""
        self._homes.clear()
        self._trunks.clear()
        for name, rule in self.record.rules.items():
            whole = all(self._holds(other) for other in rule.registered())
            for path, attribute in self.record.slots[name].owners if name in self.views else ():
                module = self._find(path)
                whole = whole and module is not None and module.__dict__.get(attribute) is self.views[name]
            if not whole:
                raise RuntimeError(
                    f"{name} was replaced after wrapping, where {rule.axes()[0] if rule.axes() else 'a method'} works with it: make the change "
                    "in the plain model (workbench.unwrap, or wrapped.voters()), and wrap it again"
                )

    def _find(self, path: str) -> nn.Module | None:
        module: Any = self.root
        for part in path.split(".") if path else ():
            module = None if module is None else module._modules.get(part)
        return module

    def _holds(self, name: str) -> bool:
        path, _, attribute = name.rpartition(".")
        module = self._find(path)
        return module is not None and (attribute in module._parameters or attribute in module._buffers)

    def parameters(self) -> list[str]:
        """Slots of floating parameters, in the order of registration."""
        return list(self._floating())

    def _floating(self) -> Iterator[str]:
        for name, slot in self.record.slots.items():
            if not slot.buffer and (name in self.views or is_float(self.get(name))):
                yield name

    def has_matrices(self) -> bool:
        """Whether a parameter has two or more dimensions, so that the layers multiply by it."""
        return any(self.value(name).dim() >= 2 for name in self._floating())

    def has_trunk(self, axes: tuple[str, ...]) -> bool:
        """Whether branches along these axes differ in some parameters only, so that what comes before these is the same for all."""
        tracing = torch.compiler.is_dynamo_compiling()  # what is kept here would make it trace again
        shared = None if tracing else self._trunks.get(axes)
        if shared is None:
            rules = self.record.rules
            moving = [slot for slot, rule in rules.items() if any(name in axes for name in rule.axes())]
            factored = any(isinstance(rules[slot], RankOne) for slot in moving)
            shared = bool(moving) and not factored and any(slot not in moving for slot in self.parameters())
            if not tracing:
                self._trunks[axes] = shared
        return shared

    def value(self, name: str) -> Tensor:
        """The present value of a slot: its own, or what stands in its place."""
        return self.views[name] if name in self.views else self.get(name)

    def replaced(self) -> Iterator[tuple[str, Tensor, list[str]]]:
        """Every parameter of the given model that this one does not use: (slot, parameter, names of those used instead)."""
        for name, ref in self.given.items():
            original = ref()
            if original is None or self.record.slots[name].buffer:
                continue
            if name in self.views:
                yield name, original, self.record.rules[name].registered()
            elif self._holds(name) and self.get(name) is not original:  # of a deep copy
                yield name, original, [name]

    def layers(self) -> list[str]:
        """Paths of the modules that own a weight (of two or more dimensions; of any if there is none), in the order of registration."""
        names = self.parameters()
        weights = [name for name in names if self.value(name).dim() >= 2] or names
        return list(dict.fromkeys(self.record.slots[name].owners[0][0] for name in weights))

    def orders(self) -> list[list[str]]:
        """The layers on the way to each main output as an example has shown them, in order of execution; without one all, as registered."""
        layers, execution = self.layers(), self.record.execution
        ordered = [[path for path in output if path in layers] for output in execution.outputs] if execution else []
        return [paths for paths in ordered if paths] or [layers]

    def last_layers(self) -> set[str]:
        """The last layer on the way to each main output; none if there are no layers."""
        return {paths[-1] for paths in self.orders() if paths}

    def tail(self, n: int | None, argument: str, default: int | None = None) -> list[str]:
        """Slots of the last n layers on the way to each output, and of all that lies between and after them (norms, buffers).

        In the order of execution, if an example has shown it; else in that of registration, and `check_tails` looks at the first call.

        Args:
            n: how many; None takes `default`, or as many as there are.
            argument: what the user calls n, for the message.
        """
        layers = self.layers()
        if n is None:
            n = min(default or len(layers), len(layers))
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"{argument} must be a whole number of at least 1, not {n!r}")
        if n > len(layers):
            raise ValueError(
                f"{argument}={n}, but {type(self.root).__name__} has {len(layers)} layers with weights "
                f"({', '.join(path or 'its own' for path in layers)})"
            )
        if not layers:
            return list(self.record.slots)
        paths = list(self.record.order)
        if self.record.execution is None or not set(self.record.execution.modules()) & set(layers):
            if n < len(layers):
                self.record.tails = {**(self.record.tails or {}), argument: n}
            chosen = set(paths[paths.index(layers[-n]) :])
        else:
            chosen = self._ran_last(n, layers)
        # the bias of a parametrised layer
        chosen |= {f".{path}".partition(".parametrizations.")[0][1:] for path in chosen}
        return [name for name, slot in self.record.slots.items() if slot.owners[0][0] in chosen]

    def _ran_last(self, n: int, layers: list[str]) -> set[str]:
        """Paths of the modules that ran last, from the n-th last layer on the way to each output on."""
        chosen: set[str] = set()
        for output in self.record.execution.outputs if self.record.execution else ():
            places = [i for i, path in enumerate(output) if path in layers]
            chosen.update(output[places[-n:][0] :] if places else ())
        owners = {slot.owners[0][0] for slot in self.record.slots.values() if not slot.buffer}
        before = False
        for path in self.record.order:  # modules with buffers alone go with the one before them
            before = path in chosen if path in owners else before
            if before:
                chosen.add(path)
        return chosen

    def plain_module(self, path: str) -> nn.Module:
        """A module of its own, equal to the one at `path` but for what wrapping added, with tensors of its own."""
        new = plain(self.module(path), self.record, path, self.views)
        for module in new.modules():
            if is_scripted(module):
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.detach().clone()
        return new

    # ---- changing
    def register(self, name: str, tensor: Tensor, like: Tensor | None = None, buffer: bool = False) -> str:
        """Register a new tensor under a marked name, beside the tensor that it belongs to.

        Args:
            name: such as `fc.weight@vote`.
            tensor: its value; it becomes a Parameter unless `buffer`.
            like: whose `requires_grad` it takes.
        """
        path, _, attribute = name.rpartition(".")
        module = self.module(path)
        if buffer:
            module._buffers[attribute] = tensor.detach()
        else:
            module._parameters[attribute] = nn.Parameter(
                tensor.detach(), requires_grad=True if like is None else like.requires_grad
            )
        return name

    def drop(self, name: str) -> None:
        """Forget a registered tensor."""
        path, _, attribute = name.rpartition(".")
        module = self.module(path)
        (module._parameters if attribute in module._parameters else module._buffers).pop(attribute)
        self._homes.pop(name, None)

    def release(self, name: str) -> None:
        """Take a slot out of the registered tensors: a method owns it now, under another name."""
        slot, old = self.record.slots[name], self.get(name)
        self.record.released.append(name)
        for path, _ in slot.owners:
            if path and not any(isinstance(hook, Alone) for hook in self.module(path)._forward_pre_hooks.values()):
                self.module(path).register_forward_pre_hook(self.record.alone)
        for path, attribute in slot.owners:
            module = self.module(path)
            (module._buffers if slot.buffer else module._parameters).pop(attribute, None)
            module.__dict__[attribute] = old  # `show` puts the view here, and into lists such as an LSTM's flat weights
        self.views[name] = old
        self._homes.pop(name, None)

    def show(self, index: Index | None = None) -> None:
        """Let every released slot show one branch, the first without an index, so that sub-modules can still be called by themselves."""
        wanted = {id(view): name for name, view in self.views.items()}
        references = places(self.root, wanted)
        bank = _Lookup(self.get)
        with torch.enable_grad():
            self.views.update({name: self.record.rules[name].pick(bank, index or {}) for name in self.record.released})
        model = getattr(type(self.root), "_plain_class", type(self.root)).__name__
        for name, view in self.views.items():
            if view.grad_fn is not None:  # torch refuses to copy it, and would not say which layer this is
                view.__dict__["__deepcopy__"] = functools.partial(_refuse_copy, name, model)
                if view._base is None or len(view._base) > 1:
                    view.register_hook(TakenByLoss(name, self.record))
        for container, key, name in references:
            container[key] = self.views[name]


def _refuse_copy(name: str, model: str, memo: Any) -> NoReturn:
    raise TypeError(
        f"a layer of a wrapped {model} is copied by itself, and {name!r} in it is one that each voter has of its own, so that the copy would be "
        "that of the first. Copy the wrapped model as a whole or one of wrapped.voters(); what changes layers, such as get_peft_model of peft, "
        "is for the plain model, before it is wrapped"
    )


class _Lookup(Bank):
    """A bank for single looks: one row, not all."""

    def row(self, name: str, i: int) -> Tensor:
        return self.get(name)[i]


def plain(module: nn.Module, record: Record, path: str, views: dict[str, Tensor]) -> nn.Module:
    """A structural copy of (a part of) a wrapped module as the user's class had it: nothing that wrapping added, all slots registered.

    Args:
        module: the module, `path` below the wrapped root.
        record: the record of the root.
        views: what stands in the places of released slots.
    """
    new = structural_copy(module, keep=lambda name: MARK not in name)
    for part in new.modules():
        for key in [
            key for key, hook in part.__dict__.get("_forward_pre_hooks", {}).items() if isinstance(hook, Alone)
        ]:
            del part._forward_pre_hooks[key]
    for slot in (record.slots[name] for name in record.released):
        for owner, attribute in slot.owners:
            if owner != path and path and not owner.startswith(f"{path}."):
                continue
            below = owner[len(path) :].lstrip(".") if path else owner
            at = new.get_submodule(below) if below else new
            at.__dict__.pop(attribute, None)
            names = record.order[owner][1 if slot.buffer else 0]
            registry: dict[str, Any] = at._buffers if slot.buffer else at._parameters
            registry[attribute] = views[slot.name]
            ordered = {name: registry[name] for name in names if name in registry}
            ordered.update(registry)
            registry.clear()
            registry.update(ordered)
    return new


__all__ = ["EXTRAS", "MARK", "Record", "Rule", "Shared", "Slot", "Table", "plain"]
