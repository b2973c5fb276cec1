"""Layers whose own `train` method merges weights when the mode changes, as in LoRA: they would write into tensors that branches share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..additions import MARK


@contextmanager
def merging_refused(wrapped: Any) -> Iterator[None]:
    """Context manager for a change of the mode.

    Raises:
        RuntimeError: if a layer of which branches have tensors of their own writes into its tensors; the change is undone.
    """
    layers = {path: module for path, module in wrapped.named_modules() if MARK not in path and _is_own(module)}
    owners = _owners(wrapped) if layers else set()
    before = {path: (dict(layer.__dict__), _tensors(layer)) for path, layer in layers.items()}
    modes = [(module, module.training) for module in wrapped.modules()] if layers else []
    yield
    for path, layer in layers.items():
        if path not in owners:
            continue  # all its tensors are the same in all branches, so merging is correct
        now = _tensors(layer)
        written = [
            name for name, (_, copied) in before[path][1].items() if name not in now or _differ(now[name], copied)
        ]
        if not written:
            continue
        for other, (attributes, tensors) in before.items():
            _restore(layers[other], attributes, tensors)
        for module, mode in modes:
            module.__dict__["training"] = mode
        raise RuntimeError(
            f"{type(layer).__name__}.train() of {path or 'the model'!r} writes the first branch's values into {written[0]!r}, which all "
            "branches would use (LoRA layers merge their weights in this way). Switch the merging off, for example by merge_weights=False in "
            "loralib, "
            "or merge in each of wrapped.voters()"
        )


def _owners(wrapped: Any) -> set[str]:
    """Return the paths of the layers that have tensors which differ between branches."""
    record = wrapped._workbench
    slots = [record.slots[name] for name, rule in record.rules.items() if rule.axes() and name in record.slots]
    return {path for slot in slots for path, _ in slot.owners}


def _is_own(module: nn.Module) -> bool:
    cls = getattr(type(module), "_plain_class", type(module))
    home = next(base for base in cls.__mro__ if "train" in base.__dict__)
    return not home.__module__.startswith("torch.")


def _tensors(layer: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the layer's own tensors and copies of them, by name."""
    attributes = {**layer._parameters, **layer._buffers, **layer.__dict__}
    return {name: (t, t.detach().clone()) for name, t in attributes.items() if isinstance(t, Tensor) and not t.is_meta}


def _differ(now: tuple[Tensor, Tensor], before: Tensor) -> bool:
    if now[1].shape != before.shape:
        return True
    same = torch.equal(now[1], before)
    return not same and not (before.is_floating_point() and torch.equal(now[1].nan_to_num(), before.nan_to_num()))


def _restore(layer: nn.Module, attributes: dict[str, Any], tensors: dict[str, tuple[Tensor, Tensor]]) -> None:
    for name in [name for name in layer.__dict__ if name not in attributes]:
        del layer.__dict__[name]
    layer.__dict__.update(attributes)
    for tensor, copied in tensors.values():
        tensor.data.copy_(copied)


__all__ = ["merging_refused"]
