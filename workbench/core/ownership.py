"""Ownership of the tensors of a wrapped module: shared with the given model, or taken over by a method.

A *slot* is one parameter or buffer of the given model under all its names. A method that takes over a slot releases it: its tensors are
registered under marked names such as `fc.weight@vote`, and a *rule* says which of them each branch uses in place of the slot.
"""

from __future__ import annotations

import functools
import secrets
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..engine.clone import is_scripted, own_attributes, places
from ..engine.plan import Bank, Index, RankOne, Rule
from ..engine.tree import is_float, version
from ..errors import as_count
from ..introspect.bytecode import walks_parameters
from ..introspect.references import used_by
from .additions import MARK
from .calls.lone_calls import Alone, TakenByLoss
from .peft_layers import refuse_injected

if TYPE_CHECKING:
    from ..engine.execution import Execution
    from ..engine.run import Engine
    from .fitted_weights import FittedWeights


def table_of(wrapped: Any) -> Table:
    """Return the ownership table of a wrapped object."""
    return wrapped.__dict__["_engine"].table


def engine_of(wrapped: Any) -> Engine:
    """Return the engine of a wrapped object."""
    return wrapped.__dict__["_engine"].engine


def marks_of(wrapped: Any) -> Any:
    """Return the marks of outputs that a wrapped object has averaged over branches."""
    return wrapped.__dict__["_engine"].marks


def _name(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute


@dataclass
class Slot:
    """One parameter or buffer of the model, with all its names.

    Args:
        name: the first of its names, such as `fc.weight`.
        owners: (path of the module, attribute) of each name.
        buffer: whether it is a buffer.
    """

    name: str
    owners: list[tuple[str, str]]
    buffer: bool


@dataclass
class Record:
    """Metadata of a wrapped object, pickled and copied along with it."""

    slots: dict[str, Slot]
    # module path -> names of its parameters and of its buffers, in the original order of registration
    order: dict[str, tuple[list[str], list[str]]]
    method: str = "forward"  # method of the user's class that answers with risk
    methods: list[Any] = field(default_factory=list)  # attached `Method`s, in canonical order
    rules: dict[str, Rule] = field(default_factory=dict)  # slot -> which tensor each branch uses in its place
    released: list[str] = field(default_factory=list)  # slots taken over completely by a method
    # meaning of the outputs, as returned by `outputs.options.read`; None (not given) stands for values
    output: Any = None
    state: Any = None  # paths of outputs that are state, as returned by `outputs.state_paths`; None if not given
    strategy: str = "auto"
    purity: str = "once"  # how attributes that forward changes are treated
    chunk: int | None = None  # maximum number of branches run at once under vmap
    verbose: int = 0
    rows: int | None = None  # number of training rows, needed by regularization terms
    trainings: tuple[dict[str, Any], ...] = ()  # facts about the rows of each training, see `saving.training_data`
    data: str | None = None  # the user's description of these rows
    fitted_weights: FittedWeights | None = None  # those at the last fit in closed form; None if unknown
    # whether rows are independent, so that they can be dealt; None before the first dealt call
    dealable: bool | None = None
    dealt: bool = False  # whether a call with dealt rows has succeeded
    warned: set[str] = field(default_factory=set)  # keys of the warnings that were issued
    alone: Alone = field(default_factory=Alone)
    execution: Execution | None = None  # the order of layers, as traced with an example
    # argument name -> number of layers assumed to be the last ones by order of registration
    tails: dict[str, int] | None = None
    ordered: bool = False  # whether a call has confirmed `tails`
    # set while training on augmented rows: the original inputs and targets, which identify the rows in every epoch
    source: tuple[Any, Any] | None = None
    # set while validation collects losses: for each call the number of models along each axis, and the loss of each model
    losses: list[tuple[dict[str, int], Tensor]] | None = None
    says_distributions: bool = False  # whether a call has returned torch distributions
    # whether forward goes through the parameters of a module, of which Dynamo knows only those from before the call
    walks_parameters: bool = False
    # name of a registered tensor -> what is added to its initial values, also if they are drawn anew for each voter
    raised: dict[str, float] | None = None
    token: str = ""  # identifies the object and its copies; empty in objects pickled by an earlier version

    @classmethod
    def of(cls, root: nn.Module, method: str = "forward") -> Record:
        """Create the record of a plain module; its slots are the tensors that the method uses, other than sparse buffers, which are constant."""
        slots: dict[int, Slot] = {}
        order: dict[str, tuple[list[str], list[str]]] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            order[path] = (list(module._parameters), list(module._buffers))
            if is_scripted(module):
                continue
            for buffer, registry in ((False, module._parameters), (True, module._buffers)):
                for attribute, tensor in registry.items():
                    if tensor is None or (buffer and tensor.layout is not torch.strided):
                        continue
                    slots.setdefault(id(tensor), Slot(_name(path, attribute), [], buffer)).owners.append(
                        (path, attribute)
                    )
        used = None if method == "forward" else used_by(root, method)
        forwards = (getattr(type(root), method, None), *(type(module).forward for module in root.modules()))
        return cls(
            {s.name: s for s in slots.values() if used is None or any(_name(*owner) in used for owner in s.owners)},
            order,
            method,
            walks_parameters=any(map(walks_parameters, forwards)),
            token=secrets.token_hex(8),
        )


class Table:
    """Table that reads and changes the ownership of tensors in a wrapped module.

    Args:
        root: the wrapped module.
        record: record of the module.
        views: released slot -> tensor shown in its place in the module tree, that of the first branch.
        originals: slot -> weak reference to the tensor of the given model.
    """

    def __init__(
        self, root: nn.Module, record: Record, views: dict[str, Tensor], originals: dict[str, weakref.ref[Tensor]]
    ) -> None:
        self.root, self.record, self.views, self.originals = root, record, views, originals
        # the modules by path as they are now, by which those that peft moves are found again
        self.modules = weakref.WeakValueDictionary(
            {path: module for path, module in root.named_modules(remove_duplicate=False) if MARK not in path}
        )
        self._homes: dict[str, tuple[dict[str, Any], str]] = {}
        self._trunks: dict[tuple[str, ...], bool] = {}
        self._held: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # tensors known to be nonzero, with their versions
        self._seen: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # tensors that `is_new` was asked about

    # ---- looking
    def module(self, path: str) -> nn.Module:
        """Return the sub-module at a path; "" for the root."""
        return self.root.get_submodule(path)

    def get(self, name: str) -> Tensor:
        """Return the registered tensor of a name such as `fc.weight` or `fc.weight@vote`."""
        tracing = torch.compiler.is_dynamo_compiling()  # filling the cache while tracing would trigger recompilation
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
        """Return whether a registered tensor has nonzero entries; cached until it is written to, since each check synchronizes with a GPU."""
        tensor = self.get(name)
        cached = self._held.get(name)
        if cached is None or cached[0]() is not tensor or cached[1] != version(tensor):
            if not tensor.is_meta and not bool(tensor.any()):
                return False
            self._held[name] = weakref.ref(tensor), version(tensor)
        return True

    def is_new(self, name: str) -> bool:
        """Return whether a registered tensor was written to, or replaced, since the last call with its name."""
        tensor, seen = self.get(name), self._seen.get(name)
        self._seen[name] = weakref.ref(tensor), version(tensor)
        return seen is None or seen[0]() is not tensor or seen[1] != version(tensor)

    def is_cache(self, slot: str) -> bool:
        """Return whether a slot is a buffer that no file holds (`persistent=False`): a constant, or one that forward computes."""
        path, attribute = self.record.slots[slot].owners[0]
        return self.record.slots[slot].buffer and attribute in self.module(path)._non_persistent_buffers_set

    def homes(self) -> dict[str, list[tuple[dict[str, Any], str]]]:
        """Return for each slot the (dict, key) entries that hold its tensor in the module tree."""
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
        """Raise RuntimeError if a layer or parameter that a method has taken over was replaced after wrapping."""
        self._homes.clear()
        self._trunks.clear()
        refuse_injected(self.root, self.record)
        for name, rule in self.record.rules.items():
            intact = all(self._is_registered(other) for other in rule.registered())
            for path, attribute in self.record.slots[name].owners if name in self.views else ():
                module = self._find(path)
                intact = intact and module is not None and module.__dict__.get(attribute) is self.views[name]
            if not intact:
                raise RuntimeError(
                    f"{name} was replaced after wrapping, where {rule.axes()[0] if rule.axes() else 'a method'} works with it: make the change "
                    "in the plain model (workbench.unwrap, or wrapped.voters()), and wrap it again"
                )

    def _find(self, path: str) -> nn.Module | None:
        module: Any = self.root
        for part in path.split(".") if path else ():
            module = None if module is None else module._modules.get(part)
        return module

    def _is_registered(self, name: str) -> bool:
        path, _, attribute = name.rpartition(".")
        module = self._find(path)
        return module is not None and (attribute in module._parameters or attribute in module._buffers)

    def parameters(self) -> list[str]:
        """Return the slots of floating-point parameters, in order of registration."""
        return list(self._floating())

    def _floating(self) -> Iterator[str]:
        for name, slot in self.record.slots.items():
            if not slot.buffer and (name in self.views or is_float(self.get(name))):
                yield name

    def has_matrices(self) -> bool:
        """Return whether any parameter has two or more dimensions, so that layers multiply by matrices."""
        return any(self.value(name).dim() >= 2 for name in self._floating())

    def has_trunk(self, axes: tuple[str, ...]) -> bool:
        """Return whether branches along these axes share a trunk: they differ only in some parameters, and layers before these are shared."""
        tracing = torch.compiler.is_dynamo_compiling()  # filling the cache while tracing would trigger recompilation
        shared = None if tracing else self._trunks.get(axes)
        if shared is None:
            rules = self.record.rules
            varying = [slot for slot, rule in rules.items() if any(name in axes for name in rule.axes())]
            factored = any(isinstance(rules[slot], RankOne) for slot in varying)
            shared = bool(varying) and not factored and any(slot not in varying for slot in self.parameters())
            if not tracing:
                self._trunks[axes] = shared
        return shared

    def value(self, name: str) -> Tensor:
        """Return the current tensor of a slot; for a released slot its view."""
        return self.views[name] if name in self.views else self.get(name)

    def replaced(self) -> Iterator[tuple[str, Tensor, list[str]]]:
        """Yield (slot, parameter, names of the tensors used instead) for each parameter of the given model that this one does not use."""
        for name, ref in self.originals.items():
            original = ref()
            if original is None or self.record.slots[name].buffer:
                continue
            if name in self.views:
                yield name, original, self.record.rules[name].registered()
            elif self._is_registered(name) and self.get(name) is not original:  # after a deep copy
                yield name, original, [name]

    def layers(self) -> list[str]:
        """Return the paths of modules that own a weight, in order of registration.

        A weight has two or more dimensions; if there is none, any parameter counts.
        """
        names = self.parameters()
        weights = [name for name in names if self.value(name).dim() >= 2] or names
        return list(dict.fromkeys(self.record.slots[name].owners[0][0] for name in weights))

    def orders(self) -> list[list[str]]:
        """Return the layers that lead to each main output in order of execution, as traced with the example; without it all, as registered."""
        layers, execution = self.layers(), self.record.execution
        ordered = [[path for path in output if path in layers] for output in execution.outputs] if execution else []
        return [paths for paths in ordered if paths] or [layers]

    def last_layers(self) -> set[str]:
        """Return the last layer before each main output."""
        return {paths[-1] for paths in self.orders() if paths}

    def tail(self, n: int | None, argument: str, default: int | None = None) -> list[str]:
        """Return the slots of the last n layers before each output, and of everything between and after them (norms, buffers).

        The order is that of execution if it was traced with an example, otherwise that of registration, which `check_tails` verifies at the
        first call.

        Args:
            n: number of layers; None for `default`, or all if there are fewer.
            argument: name of the user's argument for n, for error messages.
            default: number of layers if n is None; None for all.

        Raises:
            ValueError: if n is not a whole number from 1 to the number of layers.
        """
        layers = self.layers()
        if n is None:
            n = min(default or len(layers), len(layers))
        n = as_count(argument, n)
        if n > len(layers):
            raise ValueError(
                f"{argument}={n}, but {type(self.root).__name__} has {len(layers)} layers with weights "
                f"({', '.join(path or 'its own' for path in layers)})"
            )
        paths = list(self.record.order)
        if self.record.execution is None or not set(self.record.execution.modules()) & set(layers):
            if n < len(layers):
                self.record.tails = {**(self.record.tails or {}), argument: n}
            chosen = set(paths[paths.index(layers[-n]) :])
        else:
            chosen = self._ran_last(n, layers)
        # the bias of a parametrized layer is owned by the layer itself, its weight by a sub-module
        chosen |= {f".{path}".partition(".parametrizations.")[0][1:] for path in chosen}
        return [name for name, slot in self.record.slots.items() if slot.owners[0][0] in chosen]

    def _ran_last(self, n: int, layers: list[str]) -> set[str]:
        """Return the paths of the modules that ran last, starting from the n-th last layer before each output."""
        chosen: set[str] = set()
        for output in self.record.execution.outputs if self.record.execution else ():
            places = [i for i, path in enumerate(output) if path in layers]
            chosen.update(output[places[-n:][0] :] if places else ())
        owners = {slot.owners[0][0] for slot in self.record.slots.values() if not slot.buffer}
        previous = False
        for path in self.record.order:  # a module with only buffers goes with the module before it
            previous = path in chosen if path in owners else previous
            if previous:
                chosen.add(path)
        return chosen

    # ---- changing
    def register(self, name: str, tensor: Tensor, like: Tensor | None = None, buffer: bool = False) -> str:
        """Register a new tensor under a marked name, in the same module as the tensor that it belongs to.

        Args:
            name: marked name, such as `fc.weight@vote`.
            tensor: value of the tensor.
            like: tensor from which a parameter takes `requires_grad` and attributes of the user; None for True and none.
            buffer: whether to register a buffer instead of a parameter.

        Returns:
            The name.
        """
        path, _, attribute = name.rpartition(".")
        module = self.module(path)
        if buffer:
            module._buffers[attribute] = tensor.detach()
        else:
            module._parameters[attribute] = nn.Parameter(
                tensor.detach(), requires_grad=True if like is None else like.requires_grad
            )
            vars(module._parameters[attribute]).update({} if like is None else own_attributes(like))
        return name

    def drop(self, name: str) -> None:
        """Unregister a tensor."""
        path, _, attribute = name.rpartition(".")
        module = self.module(path)
        (module._parameters if attribute in module._parameters else module._buffers).pop(attribute)
        self._homes.pop(name, None)

    def release(self, name: str) -> None:
        """Unregister the tensor of a slot, which a method now owns under another name."""
        slot, old = self.record.slots[name], self.get(name)
        self.record.released.append(name)
        for path, _ in slot.owners:
            if path and not any(isinstance(hook, Alone) for hook in self.module(path)._forward_pre_hooks.values()):
                self.module(path).register_forward_pre_hook(self.record.alone)
        for path, attribute in slot.owners:
            module = self.module(path)
            (module._buffers if slot.buffer else module._parameters).pop(attribute, None)
            # `show` replaces it by a view, here and in lists such as the flat weights of an LSTM
            module.__dict__[attribute] = old
        self.views[name] = old
        self._homes.pop(name, None)

    def show(self, index: Index | None = None) -> None:
        """Make every released slot show the tensors of one branch, so that sub-modules can still be called directly.

        Args:
            index: branch to show, by axis; None for the first.
        """
        old_views = {id(view): name for name, view in self.views.items()}
        attributes = {name: own_attributes(view) for name, view in self.views.items()}
        references = places(self.root, old_views)
        bank = Lookup(self.get)
        with torch.enable_grad():
            self.views.update({name: self.record.rules[name].pick(bank, index or {}) for name in self.record.released})
        model = getattr(type(self.root), "_plain_class", type(self.root)).__name__
        for name, view in self.views.items():
            vars(view).update(attributes[name])
            if view.grad_fn is not None:  # torch refuses to deep-copy it with an error that does not name the layer
                view.__dict__["__deepcopy__"] = functools.partial(_refuse_copy, name, model)
                if view._base is None or len(view._base) > 1:
                    view.register_hook(TakenByLoss(name, self.record))
        for container, key, name in references:
            container[key] = self.views[name]


def _refuse_copy(name: str, model: str, memo: Any) -> Tensor:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "copy":
        frame = frame.f_back
    if frame.f_globals.get("__name__") == "peft.utils.other":
        return torch.empty(0)  # of a layer that it puts beside the first to train it: `follow` takes up the whole
    raise TypeError(
        f"a single layer of a wrapped {model} is being copied, but each voter has its own {name!r}, and the copy would only have that of the "
        "first. Copy the whole wrapped model or one of wrapped.voters(); apply functions that change layers to the plain model "
        "before wrapping it"
    )


class Lookup(Bank):
    """Bank that reads a single row of a stacked tensor instead of unbinding all rows."""

    def row(self, name: str, i: int) -> Tensor:
        return self.get(name)[i]
