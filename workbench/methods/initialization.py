"""Initial values of branches, drawn by each layer's own initialization."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ..core.additions import MARK
from ..core.ownership import Table
from ..core.plain_copies import plain_module
from ..engine.effects.attributes import modules
from ..engine.effects.branch_values import copy_values, set_values, tensors_in
from .computed_weights import assign, assign_by_hooks, is_learned, owner_of, unparametrize, value_of, vectors_of_hooks
from .drawn_weights import looks_drawn, matching

_RESETS = ("reset_parameters", "_reset_parameters")


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias, by its name."""
    return name.rpartition(".")[2].rpartition("_")[2] == "bias"


class Draws:
    """Initial values of voters, drawn by each layer's own initialization, separately for each voter.

    Args:
        table: the tensors of the model.
        n: number of voters.
        fresh: whether to draw new values; False gives every voter the current value.
        zeros: slots of weights that are zero, which stay zero if that is on purpose: if their layer's own initialization draws other values (a
            zero-initialized residual scale or convolution), or if the model has frozen weights (the second factor of a LoRA).
    """

    def __init__(self, table: Table, n: int, fresh: bool, zeros: frozenset[str] = frozenset()) -> None:
        self._table, self._n, self._fresh, self._zeros = table, n, fresh, zeros
        self._frozen = bool(zeros) and not all(table.value(name).requires_grad for name in table.parameters())
        self._modules: dict[str, list[nn.Module] | None] = {}
        self._assigned: dict[str, list[nn.Module] | None] = {}
        self._handed_out: set[str] = set()
        self._is_drawn = fresh and self._looks_drawn()

    def _looks_drawn(self) -> bool:
        """Return whether all weights of layers with an initialization of their own look newly drawn, by it or by the model's constructor."""
        for slot, entry in self._table.record.slots.items():
            value, path = self._table.value(slot), entry.owners[0][0]
            if entry.buffer:
                continue
            if type(value.data) is not Tensor or value.is_meta or value.layout is not torch.strided:
                return False
            is_weight = value.requires_grad and value.is_floating_point() and value.dim() > 1
            is_drawn_by_layer = _reset_of(self._table.module(path)) is not None and self._initializer(path) is None
            if is_weight and is_drawn_by_layer and not looks_drawn(value):
                return False
        return True

    def stacked(self, slot: str, current: Tensor, alpha: float) -> Tensor:
        """Return initial values [n, *shape] for a slot; a buffer keeps its value, unless it is computed from a drawn weight."""
        if self._table.record.slots[slot].buffer:
            return self._stacked_buffer(slot, current.detach(), functools.partial(self._near, alpha=alpha))
        drawn = self._stacked(slot, current.detach(), alpha)  # also if it stays zero, so that later draws are the same
        return torch.zeros_like(drawn) if self._stays_zero(slot) and not bool(current.any()) else drawn

    def _stacked_buffer(self, slot: str, current: Tensor, otherwise: Callable[[Tensor], Tensor]) -> Tensor:
        path, attribute = self._table.record.slots[slot].owners[0]
        copies: list[nn.Module] | None = None
        if self._fresh and attribute in vectors_of_hooks(self._table.module(path)):
            copies = self.copies(path, otherwise)
        elif self._fresh:
            copies = self.parametrized(path, otherwise)
        return torch.stack([copied.get_buffer(attribute) for copied in copies or ()] or [current] * self._n)

    def _stays_zero(self, slot: str) -> bool:
        """Whether a zero weight is zero on purpose; for a bias, whether all weights of its layer are."""
        path, attribute = self._table.record.slots[slot].owners[0]
        if self._zeros and is_bias(slot):
            slots = self._table.record.slots.items()
            weights = [name for name, other in slots if other.owners[0][0] == path and not other.buffer]
            weights = [name for name in weights if not is_bias(name)]
            return bool(weights) and all(map(self._stays_zero, weights))
        if slot not in self._zeros:
            return False
        fresh = next(iter(self._modules.get(path) or ()), None)
        initial = None if fresh is None else fresh._parameters.get(attribute)
        return self._frozen or (initial is not None and bool(initial.any()))

    def _stacked(self, slot: str, current: Tensor, alpha: float) -> Tensor:
        if not self._fresh:
            return torch.stack([current] * self._n)
        path, attribute = self._table.record.slots[slot].owners[0]
        modules = self.copies(path, functools.partial(self._near, alpha=alpha))
        if modules is not None:
            rows = [module._parameters[attribute] for module in modules]
            if all(row is not None and row.shape == current.shape for row in rows):
                values = [row.detach() for row in rows if row is not None]
                # a single draw can be handed out once without a copy
                reuses_memory = self._n == 1 and slot not in self._handed_out
                self._handed_out.add(slot)
                stacked = (values[0][None] if reuses_memory else torch.stack(values)).to(current)
                for row, view in zip(rows, stacked, strict=True):
                    # share memory with the copies, so that values are not kept twice
                    if (
                        row is not None
                        and type(view) is Tensor
                        and (row.dtype, row.device) == (view.dtype, view.device)
                    ):
                        row.data = view
                # equal originals of a parametrization may still belong to different weights
                if (
                    self._n == 1
                    or isinstance(modules[0], ParametrizationList)
                    or current.numel() == 0
                    or current.is_meta
                    or any(not torch.equal(row, stacked[0]) for row in stacked[1:])
                ):
                    return stacked
                return self._jittered(stacked, alpha)
        return self._near(current, alpha)

    def _near(self, current: Tensor, alpha: float) -> Tensor:
        return self._jittered(torch.stack([current] * self._n), alpha)

    def _jittered(self, stacked: Tensor, alpha: float) -> Tensor:
        """Add noise of a tenth of the root mean square (0.01 for zeros), for layers with a constant initialization or none."""
        if self._n == 1 or stacked.is_meta:
            return stacked
        size = stacked[0].abs().square().mean().sqrt()
        return stacked + alpha * torch.where(size > 0, 0.1 * size, 0.01) * torch.randn_like(stacked)

    def copies(self, path: str, otherwise: Callable[[Tensor], Tensor]) -> list[nn.Module] | None:
        """Return newly initialized copies of the module at a path, cached; None if it has no initialization of its own.

        Args:
            path: path of the module.
            otherwise: function from a parametrized tensor to values [n, *shape], for a layer without an initialization of its own.
        """
        if isinstance(self._table.module(path), ParametrizationList):
            return self.parametrized(path, otherwise)
        if path not in self._modules:
            self._modules[path] = self.reset(path)
        return self._modules[path]

    def parametrized(self, path: str, otherwise: Callable[[Tensor], Tensor]) -> list[nn.Module] | None:
        """Return copies of a parametrization or its list, as if newly drawn values had been assigned to the parametrized tensor.

        None for other modules, and if the values cannot be assigned.
        """
        owner = owner_of(self._table, path)
        if owner is None:
            return None
        if owner not in self._assigned:
            self._assigned[owner] = None
            # the parametrization may have no inverse, or not for these values
            with contextlib.suppress(Exception):
                self._assigned[owner] = self._with_assigned(owner, otherwise)
        copies, inner = self._assigned[owner], path.removeprefix(f"{owner}.") if owner else path
        return None if copies is None else [copied.get_submodule(inner) for copied in copies]

    @torch.no_grad()
    def _with_assigned(self, owner: str, otherwise: Callable[[Tensor], Tensor]) -> list[nn.Module]:
        drawn = self.copies(owner, otherwise) or []
        copies = [plain_module(self._table, owner) for _ in range(self._n)]
        for name in copies[0].get_submodule("parametrizations")._modules:
            if not is_learned(copies[0], name):
                continue
            rows = [module.get_parameter(name).detach() for module in drawn]
            if not rows or (self._n > 1 and all(torch.equal(row, rows[0]) for row in rows[1:])):
                rows = list(otherwise(value_of(self._table, owner, name)))
            for copied, row in zip(copies, rows, strict=True):
                assign(copied, name, row)
        return copies

    def reset(self, path: str) -> list[nn.Module] | None:
        """Return copies of the module at a path, each newly initialized as the model does it; None if it has no initialization of its own."""
        module = self._table.module(path)
        name = _reset_of(module)
        initialize = self._initializer(path)
        if name is None and initialize is None:
            return None
        # for a parent, only its direct parameters are needed
        without_children = name is None and any(True for _ in module.children())
        copies = [
            _without_children(module) if without_children else plain_module(self._table, path) for _ in range(self._n)
        ]
        try:
            for copied in copies:
                unparametrize(copied)
                _copy_unregistered(copied)
                parameters = copied.named_parameters(recurse=False) if initialize is None and self._is_drawn else ()
                matches = {key: matching(value) for key, value in parameters if value.is_floating_point()}
                if name is not None:
                    getattr(copied, name)()
                for key, match in matches.items():
                    match(copied.get_parameter(key))
                if initialize is not None:
                    with contextlib.suppress(*[Exception] * without_children):  # it may access the missing children
                        self._initialize(initialize, path, copied)
                assign_by_hooks(copied)
        # an initialization that needs arguments or other state: the caller adds noise to the values instead
        except Exception:
            return None
        return copies

    def _initializer(self, path: str) -> Callable[[nn.Module], Any] | None:
        """Return `_init_weights` of the nearest enclosing module, by which transformers, timm and many others initialize weights."""
        while True:
            module = self._table.module(path)
            method = getattr(type(module), "_init_weights", None)
            if callable(method) and len(inspect.signature(method).parameters) == 2:
                return functools.partial(method, module)
            if not path:
                return None
            path = path.rpartition(".")[0]

    @torch.no_grad()
    def _initialize(self, initialize: Callable[[nn.Module], Any], path: str, copied: nn.Module) -> None:
        """Initialize a copy as the model does: on its own, then as a child of its parent, which may rescale some projections."""
        initialize(copied)
        parent_path, _, leaf = path.rpartition(".")
        if not leaf:
            return
        parent = _without_children(self._table.module(parent_path))
        parent._modules[leaf] = copied
        _copy_unregistered(parent)
        with contextlib.suppress(Exception):  # it may access the missing children
            initialize(parent)


def _reset_of(module: nn.Module) -> str | None:
    """Return the name of the method by which a layer initializes itself."""
    return next((name for name in _RESETS if callable(getattr(type(module), name, None))), None)


def _without_children(module: nn.Module) -> nn.Module:
    """Return a copy of a module with its own parameters and buffers, and without children."""
    cls = getattr(type(module), "_plain_class", type(module))
    new: nn.Module = cls.__new__(cls)
    new.__dict__.update(module.__dict__)
    new.__dict__["_modules"] = {}
    for kind in ("_parameters", "_buffers"):
        tensors = {name: tensor for name, tensor in module.__dict__[kind].items() if MARK not in name}
        new.__dict__[kind] = {
            name: tensor if tensor is None else type(tensor)(tensor.detach().clone())
            for name, tensor in tensors.items()
        }
    return new


def _copy_unregistered(copied: nn.Module) -> None:
    """Copy the unregistered tensors of a module, such as the weight computed by an old spectral_norm or pruning.

    An initialization writes into them, and they would share memory with the parameters of the given model.
    """
    tree = modules(copied)
    set_values(copy_values(tensors_in(tree), tree, tree), tree)


def untrained(table: Table, n: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of n untrained models, drawn by each layer's own initialization.

    The values of a layer without an initialization are shuffled, which keeps their distribution and leaves constant tensors unchanged. Frozen
    parameters keep their values.

    Args:
        table: the tensors of the model.
        n: number of models.

    Returns:
        By slot, the tensors [n, *shape] that differ between the models, and those that are the same in all.
    """
    draws = Draws(table, n, fresh=True)

    def shuffled(value: Tensor) -> Tensor:
        return torch.stack([_shuffle(value) for _ in range(n)])

    drawn: dict[str, Tensor] = {}
    shared: dict[str, Tensor] = {}
    for name, slot in table.record.slots.items():
        path, attribute = slot.owners[0]
        current = table.value(name).detach()
        if table.is_cache(name):
            continue  # a constant, which all models share
        if not slot.buffer and not table.value(name).requires_grad:
            shared[name] = current.clone()
            continue
        modules = draws.parametrized(path, shuffled) if slot.buffer else None
        if modules is None:
            modules = draws.copies(path, shuffled)
        copies = [(module._buffers if slot.buffer else module._parameters).get(attribute) for module in modules or ()]
        rows = [copied.detach() for copied in copies if copied is not None and copied.shape == current.shape]
        if slot.buffer:
            stacked = torch.stack(rows or [current] * n).to(current)
        else:
            stacked = torch.stack(rows).to(current) if len(rows) == n else shuffled(current)
        is_comparable = n > 1 and not stacked.is_meta
        differs = any(not torch.equal(row, stacked[0]) for row in stacked[1:]) if is_comparable else not slot.buffer
        if differs:
            drawn[name] = stacked
        else:
            shared[name] = stacked[0].clone()
    return drawn, shared


def _shuffle(value: Tensor) -> Tensor:
    if value.is_meta:
        return value
    return value.flatten()[torch.randperm(value.numel(), device=value.device)].reshape(value.shape)
