"""Base class of swag and snapshot, whose branches predict with whole sets of weights stored next to the trained ones."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.method import Call, Method
from ..core.ownership import table_of
from ..core.sharded import WHOLE, refuse_sharded
from ..engine.plan import Axis, Index, Intervention, Shared, Split, Stacked
from ..errors import NotFittedError, WorkbenchWarning

if TYPE_CHECKING:
    from ..core.ownership import Table
    from ..engine.plan import Rule


class WeightSets(Method):
    """Method whose branches have their own weights and buffers, stored as buffers [size, ...] that no optimizer updates.

    The model's own weights are trained as usual, and are used in training mode and as long as no sets are ready.

    Args:
        wrapper: settings.
        size: number of branches.
    """

    kind, members, collects = "epistemic", True, True
    remedy: str  # what to do after further training

    def __init__(self, wrapper: Any, size: int) -> None:
        super().__init__(wrapper)
        self.size = size
        self._parameters: list[str] = []
        self._buffers: list[str] = []

    # ---- registration
    def attach(self, table: Table) -> None:
        self._check(table)
        learns = {name for name in table.parameters() if table.value(name).requires_grad}
        if not learns:
            raise ValueError(
                f"{self.name} collects weights during training, but all weights of this model are frozen: unfreeze some before wrapping, "
                "parameter.requires_grad_(True)"
            )
        self._parameters = [name for name in table.record.slots if name in learns]
        self._buffers = [name for name, slot in table.record.slots.items() if slot.buffer and not table.is_cache(name)]
        for name, value in (
            ("count", torch.zeros((), dtype=torch.int64)),
            ("ready", torch.zeros((), dtype=torch.bool)),
        ):
            table.register(self._flag(name), value.to(table.value(self._parameters[0]).device), buffer=True)
        self._register_sets(table)

    def extend(self, table: Table, slots: list[str]) -> None:
        self._check(table)
        self._register_sets(table)

    def adapt(self, table: Table, names: set[str]) -> None:
        """Register sets of caches as well if a state has them, as those of earlier versions do."""
        stored = [name for name in table.record.slots if table.is_cache(name) and f"{name}@{self.name}" in names]
        if stored:
            self._buffers += [name for name in stored if name not in self._buffers]
            self._register_sets(table)

    def check(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self.check_collecting(table_of(wrapped))

    def check_collecting(self, table: Table) -> None:
        """Raise an error if weights cannot be collected.

        Raises:
            TypeError: the model is sharded.
            ValueError: weights are trained that were frozen when the model was wrapped, for which there is no place.
        """
        refuse_sharded(table.root, WHOLE)
        registered = dict.fromkeys(name for slot in table.parameters() for name in _registered(table, slot))
        trained = [name for name in registered if table.get(name).requires_grad and not self._has_set(table, name)]
        if trained:
            raise ValueError(
                f"{self.name} collects only weights that could be trained when the model was wrapped, and {', '.join(trained[:3])} "
                f"{'was' if len(trained) == 1 else 'were'} frozen then, but not now: unfreeze them before wrapping, or freeze them again"
            )

    def _check(self, table: Table) -> None:
        for other in table.record.methods:
            if other is not self and (other.members or other.name == "laplace"):
                raise ValueError(
                    f"{self.name} and {other.name} both model the distribution of the weights; use one of them (sculpt, sample and neo "
                    "compose with each)"
                )

    def _register_sets(self, table: Table) -> None:
        rules = table.record.rules
        # heads of other methods learn also where the model's own weights are frozen
        self._parameters += [
            slot
            for slot in table.parameters()
            if slot not in self._parameters and any(table.get(name).requires_grad for name in _registered(table, slot))
        ]
        for name in self._parameters:
            rules.setdefault(name, Shared(name))
        for name in (*self._parameters, *self._buffers):
            rules[f"{name}@{self.name}"] = self._register_set(table, rules.get(name, Shared(name)))

    def _register_set(self, table: Table, rule: Rule) -> Rule:
        """Register [size, ...] copies of each tensor of a rule that is not frozen, and return the rule that stacks them."""
        if isinstance(rule, Split):
            return Split(rule.axis, tuple(self._register_set(table, option) for option in rule.options))
        if not self._has_set(table, rule.name) and self._is_frozen(table, rule.name):
            return rule
        name = f"{rule.name}@{self.name}"
        if not self._has_set(table, rule.name):
            value = table.get(rule.name).detach()
            table.register(name, torch.stack([value] * self.size), buffer=True)
            self.register_statistics(table, rule.name, value, buffer=rule.name.partition("@")[0] in self._buffers)
        return Stacked(self.name, name)

    def _has_set(self, table: Table, name: str) -> bool:
        path, _, attribute = f"{name}@{self.name}".rpartition(".")
        return attribute in table.module(path)._buffers

    def _is_frozen(self, table: Table, name: str) -> bool:
        return name.partition("@")[0] not in self._buffers and not table.get(name).requires_grad

    def register_statistics(self, table: Table, name: str, value: Tensor, buffer: bool) -> None:
        """Register further tensors that the method needs for a tensor of the model; none by default."""

    def names(self, table: Table, slots: list[str]) -> list[str]:
        """Return the names of the collected tensors of some slots, including those of other heads."""
        registered = dict.fromkeys(name for slot in slots for name in _registered(table, slot))
        return [name for name in registered if self._has_set(table, name)]

    def _flag(self, name: str) -> str:
        return f"{self._parameters[0]}@{self.name}_{name}"

    def flag(self, table: Table, name: str) -> Tensor:
        """Return the number of sets collected ("count"), or whether the branches predict with their own sets ("ready")."""
        return table.get(self._flag(name))

    # ---- branches
    def axis(self, call: Call) -> Axis | None:
        runs_branches = (call.return_risk or not call.training) and not call.loss and not call.dealt
        return Axis(self.name, self.size, apart=True) if runs_branches else None

    def intervention(self, table: Table, call: Call) -> Intervention | None:
        return None if self.axis(call) is None else Swap(self, table, buffers=not call.training)

    # ---- collecting
    def forget(self, table: Table) -> None:
        for name in ("count", "ready"):
            self.flag(table, name).zero_()

    def check_ready(self, wrapped: Any) -> None:
        table = table_of(wrapped)
        if wrapped.training or torch.compiler.is_compiling():
            return
        if not table.holds(self._flag("ready")):
            raise NotFittedError(self.missing(int(self.flag(table, "count"))))
        # of the weights only the first and the last, since each new comparison synchronizes with a GPU
        names = self.names(table, [self._parameters[0], self._parameters[-1]])
        if [name for name in names if table.is_new(name) and self._is_ahead(table, name)]:
            warnings.warn(
                f"{self.name} predicts with the weights that were collected, and the model was trained after that: {self.remedy}",
                WorkbenchWarning,
                stacklevel=2,
            )

    def _is_ahead(self, table: Table, name: str) -> bool:
        weight = table.get(name).detach()
        return not weight.is_meta and not torch.equal(weight, self.latest(table, name).to(weight.dtype))

    def latest(self, table: Table, name: str) -> Tensor:
        """Return what the weight of a name was when the latest set was complete."""
        raise NotImplementedError

    def missing(self, count: int) -> str:
        """Return the error message for a model with too few collected sets."""
        raise NotImplementedError


def _registered(table: Table, slot: str) -> list[str]:
    return table.record.rules.get(slot, Shared(slot)).registered()


class Swap(Intervention):
    """Replaces the trained weights by those of a branch."""

    def __init__(self, method: WeightSets, table: Table, buffers: bool) -> None:
        self.method, self.ready, self.taps = method, method.flag(table, "ready"), {}
        self.slots = [*method._parameters, *(method._buffers if buffers else [])]

    def tensors(self, installed: dict[str, Tensor], index: Index) -> dict[str, Tensor]:
        stored = {slot: installed[f"{slot}@{self.method.name}"] for slot in self.slots}
        current = {slot: value for slot, value in installed.items() if f"@{self.method.name}" not in slot}
        return {**current, **{slot: torch.where(self.ready, value, current[slot]) for slot, value in stored.items()}}


def collect_from(wrapped: Any, name: str) -> int:
    """Collect the current weights of a wrapped object by the method of this name, and return the number of sets so far.

    Raises:
        TypeError: if the object is not wrapped by that method.
        ValueError: if a weight is NaN or infinite, which would spoil what was collected before.
    """
    method = method_of(wrapped, name)
    for slot, parameter in wrapped.named_parameters():
        if parameter.is_floating_point() and not parameter.isfinite().all():
            raise ValueError(
                f"{slot} has NaN or infinite numbers, so that its weights are not collected; those collected before stay. Load the weights of "
                "an earlier epoch, and train with a smaller learning rate"
            )
    return int(method.gather(wrapped))


def method_of(wrapped: Any, name: str) -> Any:
    """Return the method of a wrapped object by its name.

    Raises:
        TypeError: if the object is not wrapped by that method.
    """
    from ..core.wrapped import is_wrapped

    method = next((m for m in wrapped._workbench.methods if m.name == name), None) if is_wrapped(wrapped) else None
    if method is None:
        raise TypeError(f"this takes a model wrapped by {name}.Wrapper, not {type(wrapped).__name__} without it")
    return method


__all__ = ["Swap", "WeightSets", "collect_from", "method_of"]
