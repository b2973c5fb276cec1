"""Layers of peft in a wrapped model: merging works for each voter, and adapters that voters would share are refused."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..engine.plan import Stacked

_VOTERS = "@voters"  # key for what the layer of each voter remembers


class Merging:
    """`merge` or `unmerge` of a layer of peft in a wrapped model: calls peft's method for one voter after another.

    It is set on the layer and hides the method of its class; plain copies of the layer don't have it.

    Args:
        name: name of the method.
        path: path of the layer.
        root: the wrapped model; None in a copy that is still being made.
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
        # a LoRA changes the bias only if it has one of its own
        unbiased = hasattr(layer, "lora_A") and not any(getattr(layer, "lora_bias", {}).values())
        written = ("weight",) if unbiased else ("weight", "bias")
        shared = any(layer.get_base_layer()._parameters.get(name) is not None for name in written)
        if shared or not all(isinstance(rule, Stacked) for _, rule in below):
            raise TypeError(
                f"{self.name} of {self.path!r} in this wrapped {type(table.root)._plain_class.__name__} would change weights that all voters "
                "share (or risk heads), but each voter has its own adapters. Do that in each of wrapped.voters(), or in the plain model before "
                "wrapping it"
            )
        stacks = {slot: table.get(rule.name) for slot, rule in below if isinstance(rule, Stacked)}
        values = {slot: stack.detach().clone() for slot, stack in stacks.items()}
        merged, size = [*layer.merged_adapters], len(next(iter(stacks.values())))
        # what DoRA remembers of a merged weight, to unmerge it
        caches = layer.__dict__.get("_caches", {})
        remembered = dict(caches)
        by_voter = remembered.get(_VOTERS, [{}] * size)
        new = []
        try:
            for i in range(size):
                layer.merged_adapters[:] = merged
                caches.clear()
                caches.update(by_voter[i])
                table.show({rule.axis: i for _, rule in below if isinstance(rule, Stacked)})
                getattr(type(layer), self.name)(layer, *args, **kwargs)
                # peft may have given the voter's view new memory
                with torch.no_grad():
                    for slot, stack in stacks.items():
                        stack[i].copy_(table.views[slot])
                new.append(dict(caches))
            caches.clear()
            if any(new):
                caches[_VOTERS] = new
        except BaseException:
            layer.merged_adapters[:] = merged
            caches.clear()
            caches.update(remembered)
            with torch.no_grad():
                for slot, stack in stacks.items():
                    stack.copy_(values[slot])
            raise
        finally:
            table.show()

    def __reduce__(self) -> Any:
        return type(self), (self.name, self.path)


class RefusedAllocation(Merging):
    """`update_and_allocate` of AdaLoRA in a wrapped model, which would rank the adapters of all voters together: raises."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(
            f"{self.name} of {self.path!r} in this wrapped {type(self._root())._plain_class.__name__} would rank the adapters of all voters "
            "together. Train without it, all voters at the initial rank, or train and allocate each of wrapped.voters() by itself"
        )


def merge_for_voters(root: Any) -> None:
    """Let layers of peft merge and unmerge the adapters of each voter, if each has its own; ranks are not allocated."""
    slots = root._workbench.slots
    owners = [path for name in root._workbench.rules if name in slots for path, _ in slots[name].owners]
    for path, layer in root.named_modules() if owners else ():
        mergeable = hasattr(layer, "merged_adapters") and hasattr(layer, "get_base_layer")
        if mergeable and any(owner.startswith(f"{path}.") for owner in owners):
            layer.__dict__.update({name: Merging(name, path, root) for name in ("merge", "unmerge")})
        if hasattr(type(layer), "update_and_allocate") and any("lora_" in name for name in root._workbench.rules):
            layer.__dict__["update_and_allocate"] = RefusedAllocation("update_and_allocate", path, root)


def refuse_rewritten(model: nn.Module) -> None:
    """Raise if adapters of peft are added to parameters (`target_parameters`), which each call then sets anew."""
    for path, layer in model.named_modules():
        if "peft" in sys.modules and type(layer).__name__ == "ParamWrapper" and hasattr(layer, "parameter_name"):
            raise TypeError(
                f"{path!r} adds an adapter of peft to the parameter {layer.parameter_name!r} (target_parameters), which each call sets anew, "
                "and branches cannot share. Add adapters to layers (target_modules), or merge these first, model.merge_and_unload()"
            )


def refuse_injected(root: nn.Module, record: Any) -> None:
    """Raise if peft has added parameters that `injected_layers.follow` has not given to each voter, so that all would share them."""
    if "peft" not in sys.modules or not any(method.member_marks for method in record.methods):
        return  # most calls, which this would slow down
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
                    f"peft has added '{below}.{new[0]}' to this wrapped {model} after wrapping, and its voters would share it: add all adapters "
                    "to the plain model (wrapped.unwrap()), and wrap that"
                )
        _refuse_resting(root, path, layer)


def _refuse_resting(root: nn.Module, path: str, layer: Any) -> None:
    """Raise if an adapter is active that was inactive, and so frozen and shared, when the model was wrapped."""
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
            f"the adapter {resting[0]!r} was not active when this {model} was wrapped, and so was frozen: its voters share it. Call "
            f"model.set_adapter({resting[0]!r}) before you wrap the plain model, or switch back to an adapter that each voter has"
        )


__all__ = ["Merging", "merge_for_voters", "refuse_injected", "refuse_rewritten"]
