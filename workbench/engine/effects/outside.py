"""Tensors outside a model's modules that forward replaces, such as a running mean in a global dict: failed and extra passes put them back."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...introspect.objects import is_atom, tensors_and_generators
from ..plan import Plan
from ..tree import flatten
from .attributes import Tree, attributes
from .parameters import undo_writes

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class OutsideTensors:
    """Context manager of a pass that puts back what the pass replaces outside the model's modules.

    What holds a tensor (a dict, a list, a class or another object) is looked up when the model reads it, and only then, since this takes a
    while: what a model replaces without reading it is no part of its answer.

    Args:
        keep: whether it stays replaced if the pass raises no error.
    """

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        # ids of tensors of the model, the call and the pass, and of those whose holders are known
        self._known: set[int] = set()
        self._older: set[int] | None = None  # ids of the tensors that were there when the first of them was looked up
        self._holders: list[tuple[Any, Any]] = []  # holder, its tensors by key or all its items

    def __enter__(self) -> OutsideTensors:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is not None or not self._keep:
            for holder, before in self._holders:
                _put_back(holder, before)
        self._holders.clear()

    def know(self, tensors: Iterable[Any]) -> None:
        """Note tensors that are not outside the model, or that the pass has created."""
        self._known.update(map(id, tensors))

    def know_model(self, tree: Tree) -> None:
        """Note the tensors that modules hold, registered or not."""
        for module in tree.values():
            self.know((*module._parameters.values(), *module._buffers.values()))
        for _, value in attributes(tree):
            if not is_atom(value):
                self.know(tensors_and_generators(value))

    def know_plan(self, plan: Plan) -> None:
        """Note the tensors that branches take."""
        for rule in plan.rules.values():
            self.know(map(plan.bank.get, rule.registered()))
        for rows in plan.bank.separated().values():
            self.know(rows)

    def read(self, leaves: list[Any]) -> None:
        """Look up what holds those of the arguments of an operation that are tensors from outside."""
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in self._known and not _is_wrapped(leaf):
                self.know([leaf])
                if self._older is None:
                    self._older = {id(each) for each in gc.get_objects() if issubclass(type(each), Tensor)}
                elif id(leaf) not in self._older:
                    continue  # made by the pass where no function mode sees it, as by a function with a backward of its own
                for holder in gc.get_referrers(leaf):
                    if holder is not leaves:
                        self._hold(holder)

    def _hold(self, holder: Any) -> None:
        if isinstance(holder, list):
            before: Any = holder.copy()
            self.know(item for item in before if isinstance(item, Tensor))
        else:
            contents = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
            if not isinstance(contents, dict):
                return  # a frame, a tuple: not changed
            before = {key: item for key, item in contents.items() if isinstance(item, Tensor)}
            self.know(before.values())
            if "__module__" in contents:  # of a class, whose attributes are assigned otherwise
                holder = next((cls for cls in gc.get_referrers(contents) if isinstance(cls, type)), holder)
        self._holders.append((holder, before))


class OutsideWatch(TorchFunctionMode):
    """Function mode that shows an `OutsideTensors` what the operations of a pass read and return."""

    def __init__(self, outside: OutsideTensors) -> None:
        super().__init__()
        self._outside = outside

    def __torch_function__(
        self, function: Any, kinds: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._outside.read(flatten((args, kwargs))[0])
        out = function(*args, **(kwargs or {}))
        self._outside.know(flatten(out)[0])
        return out


@contextmanager
def outside_undone(root: nn.Module, plan: Plan, inputs: Iterable[Any]) -> Iterator[OutsideWatch]:
    """Undo what extra passes of a model replace outside its modules, and what they write into its parameters.

    Args:
        root: the wrapped module.
        plan: the plan of the passes.
        inputs: leaves of the inputs of the passes.

    Yields:
        The function mode of at least one of the passes, which shows what the model reads there.
    """
    outside = OutsideTensors(keep=False)
    outside.know(inputs)
    outside.know_model(dict(root.named_modules()))
    outside.know_plan(plan)
    undo = undo_writes(root)
    try:
        with outside:
            yield OutsideWatch(outside)
    finally:
        undo()


def _put_back(holder: Any, before: Any) -> None:
    if isinstance(holder, list):
        holder[:] = before
        return
    for key, old in before.items():
        if isinstance(holder, type):
            setattr(holder, key, old)
        else:
            (holder if isinstance(holder, dict) else vars(holder))[key] = old


__all__ = ["OutsideTensors", "OutsideWatch", "outside_undone"]
