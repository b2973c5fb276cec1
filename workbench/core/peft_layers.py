"""Layers of peft in a wrapped model: they are merged for each voter, and refused where they came in past the voters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..engine.plan import Stacked


class Merging:
    """`merge` or `unmerge` of a layer of peft in a wrapped model: peft's own, for one voter after another.

    Set on the layer, where it hides that of its class; plain copies of the layer are without it.

    Args:
        name: of the method.
        path: of the layer.
        root: the wrapped model; copies are told theirs.
    """

    def __init__(self, name: str, path: str, root: nn.Module | None = None) -> None:
        self.name, self.path = name, path
        self._root: Callable[[], Any] = (lambda: None) if root is None else weakref.ref(root)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        table = self._root().__dict__["_engine"].table
        layer, record = table.module(self.path), table.record
        below = [
            (slot, rule)
            for slot, rule in record.rules.items()
            if any(path == self.path or path.startswith(f"{self.path}.") for path, _ in record.slots[slot].owners)
        ]
        written = ("weight", "bias") if any(getattr(layer, "lora_bias", {}).values()) else ("weight",)
        if any(name in layer.get_base_layer()._parameters for name in written):
            raise TypeError(
                f"{self.name} of {self.path!r} in this wrapped {type(table.root)._plain_class.__name__} would work on weights that all voters "
                "share, with adapters that each has of its own. Do that to each of wrapped.voters(), or to the plain model before wrapping it"
            )
        stacks = {slot: table.get(rule.name) for slot, rule in below if isinstance(rule, Stacked)}
        values = {slot: stack.detach().clone() for slot, stack in stacks.items()}
        merged = [*layer.merged_adapters]
        try:
            for i in range(len(next(iter(stacks.values())))):
                layer.merged_adapters[:] = merged
                table.show({rule.axis: i for _, rule in below if isinstance(rule, Stacked)})
                getattr(type(layer), self.name)(layer, *args, **kwargs)
                with torch.no_grad():  # peft may have put other memory into what stands for the voter's
                    for slot, stack in stacks.items():
                        stack[i].copy_(table.views[slot])
        except BaseException:
            layer.merged_adapters[:] = merged
            with torch.no_grad():
                for slot, stack in stacks.items():
                    stack.copy_(values[slot])
            raise
        finally:
            table.show()

    def __deepcopy__(self, memo: Any) -> Merging:
        return Merging(self.name, self.path)

    def __reduce__(self) -> Any:
        return Merging, (self.name, self.path)


def merge_for_voters(root: Any) -> None:
    """Let layers of peft in a wrapped model, whose adapters each voter has of its own, merge and unmerge them for each."""
    slots = root._workbench.slots
    owners = [path for name in root._workbench.rules if name in slots for path, _ in slots[name].owners]
    for path, layer in root.named_modules() if owners else ():
        mergeable = hasattr(layer, "merged_adapters") and hasattr(layer, "get_base_layer")
        if mergeable and any(owner.startswith(f"{path}.") for owner in owners):
            layer.__dict__.update({name: Merging(name, path, root) for name in ("merge", "unmerge")})


def refuse_injected(root: nn.Module, record: Any) -> None:
    """Raise if peft has put parameters into a model with voters that `injected_layers.follow` has not taken up: all would share them."""
    if not any(method.member_marks for method in record.methods):
        return
    for path, layer in root.named_modules():
        of_peft = any(base.__module__.startswith("peft.") for base in type(layer).__mro__)
        if "@" in path or not of_peft or not layer._modules.keys() & {"base_layer", "original_module"}:
            continue
        for below, module in layer.named_modules(prefix=path):
            known = record.order.get(below, ([], []))[0]
            new = [name for name in module._parameters if "@" not in name and name not in known]
            if new and "@" not in below:
                model = getattr(type(root), "_plain_class", type(root)).__name__
                raise RuntimeError(
                    f"'{below}.{new[0]}' was put into this wrapped {model} by peft after wrapping, and its voters would share it: put all "
                    "adapters into the plain model (wrapped.unwrap()), and wrap that"
                )
        _refuse_resting(root, path, layer)


def _refuse_resting(root: nn.Module, path: str, layer: Any) -> None:
    """Raise if an adapter is active that was not when the model was wrapped, and so was frozen, beside others that each voter has of its own."""
    owned: dict[str, bool] = {}
    for below, module in layer.named_modules(prefix=path):
        container, *rest = below.removeprefix(f"{path}.").split(".") if below != path else [""]
        names = [name for name in module._parameters if module._parameters[name] is not None]
        if container in layer.adapter_layer_names and (rest or names):
            for adapter in [rest[0]] if rest else [name.partition("@")[0] for name in names]:
                owned[adapter] = owned.get(adapter, False) or any("@" in name for name in names)
    resting = [adapter for adapter in layer.active_adapters if owned.get(adapter) is False]
    if resting and any(owned.values()):
        model = getattr(type(root), "_plain_class", type(root)).__name__
        raise RuntimeError(
            f"the adapter {resting[0]!r} was not active when this {model} was wrapped, and so was frozen: its voters share it. "
            f"model.set_adapter({resting[0]!r}) before you wrap the plain model, or set_adapter back to one that voters have"
        )


__all__ = ["Merging", "merge_for_voters", "refuse_injected"]
