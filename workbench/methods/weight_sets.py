"""What swag and snapshot have in common: whole sets of weights, kept beside those that are trained, answer one after another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.method import Call, Method
from ..core.ownership import table_of
from ..engine.plan import Axis, Index, Intervention, Shared, Split, Stacked
from ..errors import NotFittedError

if TYPE_CHECKING:
    from ..core.ownership import Table
    from ..engine.plan import Rule


class Kept(Method):
    """Branches with weights and buffers of their own, [size, ...] beside each, as buffers that no optimizer moves.

    The model's own weights are trained as ever, and answer in training mode and as long as nothing is kept.

    Args:
        wrapper: its settings.
        size: number of branches.
    """

    kind, members, collects = "epistemic", True, True

    def __init__(self, wrapper: Any, size: int) -> None:
        super().__init__(wrapper)
        self.size = size
        self._parameters: list[str] = []
        self._buffers: list[str] = []

    # ---- what is registered
    def attach(self, table: Table) -> None:
        self._check(table)
        learns = {name for name in table.parameters() if table.value(name).requires_grad}
        if not learns:
            raise ValueError(f"{self.name} gathers weights as training moves them, and all of this model are frozen")
        self._parameters = [name for name in table.record.slots if name in learns]
        self._buffers = [name for name, slot in table.record.slots.items() if slot.buffer]
        for name, value in (
            ("count", torch.zeros((), dtype=torch.int64)),
            ("ready", torch.zeros((), dtype=torch.bool)),
        ):
            table.register(self._flag(name), value.to(table.value(self._parameters[0]).device), buffer=True)
        self._settle(table)

    def extend(self, table: Table, slots: list[str]) -> None:
        self._check(table)
        self._settle(table)

    def _check(self, table: Table) -> None:
        for other in table.record.methods:
            if other is not self and (other.members or other.name == "laplace"):
                raise ValueError(
                    f"{self.name} and {other.name} both say which weights the model could have; use one of them (sculpt, sample and neo "
                    "compose with each)"
                )

    def _settle(self, table: Table) -> None:
        rules = table.record.rules
        for name in self._parameters:
            rules.setdefault(name, Shared(name))
        for name in (*self._parameters, *self._buffers):
            rules[f"{name}@{self.name}"] = self._beside(table, rules.get(name, Shared(name)))

    def _beside(self, table: Table, rule: Rule) -> Rule:
        if isinstance(rule, Split):
            return Split(rule.axis, tuple(self._beside(table, option) for option in rule.options))
        name = f"{rule.name}@{self.name}"
        path, _, attribute = name.rpartition(".")
        if attribute not in table.module(path)._buffers:
            value = table.get(rule.name).detach()
            table.register(name, torch.stack([value] * self.size), buffer=True)
            self.beside(table, rule.name, value, buffer=rule.name.partition("@")[0] in self._buffers)
        return Stacked(self.name, name)

    def beside(self, table: Table, name: str, value: Tensor, buffer: bool) -> None:
        """Register what else belongs to a tensor of the model."""

    def names(self, table: Table, slots: list[str]) -> list[str]:
        """The registered tensors of some slots, those of other heads included."""
        registered = [name for slot in slots for name in table.record.rules.get(slot, Shared(slot)).registered()]
        return list(dict.fromkeys(registered))

    def _flag(self, name: str) -> str:
        return f"{self._parameters[0]}@{self.name}_{name}"

    def flag(self, table: Table, name: str) -> Tensor:
        """How many sets were gathered ("count"), and whether the branches answer with theirs ("ready")."""
        return table.get(self._flag(name))

    # ---- branches
    def axis(self, call: Call) -> Axis | None:
        asked = (call.return_risk or not call.training) and not call.loss and not call.dealt
        return Axis(self.name, self.size, apart=True) if asked else None

    def intervention(self, table: Table, call: Call) -> Intervention | None:
        return None if self.axis(call) is None else Swap(self, table, buffers=not call.training)

    # ---- gathering
    def forget(self, table: Table) -> None:
        for name in ("count", "ready"):
            self.flag(table, name).zero_()

    def check_ready(self, wrapped: Any) -> None:
        if (
            not wrapped.training
            and not torch.compiler.is_compiling()
            and not table_of(wrapped).holds(self._flag("ready"))
        ):
            raise NotFittedError(self.missing(int(self.flag(table_of(wrapped), "count"))))

    def missing(self, count: int) -> str:
        """What to do before there is a risk."""
        raise NotImplementedError


class Swap(Intervention):
    """Puts the weights of a branch into the place of those that are trained."""

    def __init__(self, method: Kept, table: Table, buffers: bool) -> None:
        self.method, self.ready, self.taps = method, method.flag(table, "ready"), {}
        self.slots = [*method._parameters, *(method._buffers if buffers else [])]

    def tensors(self, installed: dict[str, Tensor], index: Index) -> dict[str, Tensor]:
        kept = {slot: installed[f"{slot}@{self.method.name}"] for slot in self.slots}
        current = {slot: value for slot, value in installed.items() if f"@{self.method.name}" not in slot}
        return {**current, **{slot: torch.where(self.ready, value, current[slot]) for slot, value in kept.items()}}


def method_of(wrapped: Any, name: str) -> Any:
    """The method of a wrapped object by its name.

    Raises:
        TypeError: if the object is not wrapped so.
    """
    from ..core.wrapped import is_wrapped

    method = next((m for m in wrapped._workbench.methods if m.name == name), None) if is_wrapped(wrapped) else None
    if method is None:
        raise TypeError(f"this takes a model wrapped by {name}.Wrapper, not {type(wrapped).__name__} without it")
    return method


__all__ = ["Kept", "Swap", "method_of"]
