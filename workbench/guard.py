"""Optimizers that miss what they should train: made before wrapping, or from parts of a wrapped model."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .errors import WorkbenchWarning

_replaced: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # id of a replaced parameter -> itself, and its name
_stepped: dict[int, weakref.ref[Tensor]] = {}  # id of a parameter that some optimizer holds -> itself
_wrapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_registered = False


def _watching() -> None:
    global _registered
    if not _registered:
        register_optimizer_step_pre_hook(_look)
        _registered = True


def watch_replaced(name: str, parameter: Tensor) -> None:
    """Report an optimizer that steps with this parameter of the given model, which the wrapped one has replaced, and trains nothing."""
    key = id(parameter)
    _replaced[key] = (weakref.ref(parameter, lambda _: _replaced.pop(key, None)), name)
    _watching()


def watch(wrapped: nn.Module) -> None:
    """Report an optimizer that holds some parameters of a wrapped model and leaves others, which have gradients, to nobody."""
    _wrapped.add(wrapped)
    _watching()


def _look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """At the first two steps of an optimizer: at the second, others that share the work have stepped, too."""
    count = optimizer.__dict__.get("_workbench_steps", 0)
    if count >= 2:
        return
    optimizer.__dict__["_workbench_steps"] = count + 1
    held: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in held:
        key = id(parameter)
        _stepped[key] = weakref.ref(parameter, lambda _, key=key: _stepped.pop(key, None))  # type: ignore[misc]
    name = type(optimizer).__name__
    if count == 0:
        stale = [p for p in held if id(p) in _replaced and _replaced[id(p)][0]() is p]
        if stale and all(p.grad is None for p in stale):  # with a gradient the given model is trained itself
            optimizer.__dict__["_workbench_steps"] = 2  # this says it all
            _warn(
                f"this optimizer was made from the parameters of a model before it was wrapped: {_replaced[id(stale[0])][1]} and others have no "
                f"gradient, since the wrapped model uses others in their place. Make it of the wrapped one: {name}(wrapped.parameters())"
            )
        return
    ids = {id(p) for p in held}
    for wrapped in list(_wrapped):
        parameters = dict(nn.Module.named_parameters(wrapped))
        if not ids.isdisjoint(map(id, parameters.values())):
            missed = [
                n for n, p in parameters.items() if p.grad is not None and p.requires_grad and id(p) not in _stepped
            ]
            if missed:
                _warn(
                    f"this optimizer trains a part of a wrapped model only: {', '.join(missed[:3])} have gradients and no optimizer. Make it of "
                    f"all, {name}(wrapped.parameters()), or freeze them with requires_grad_(False)"
                )


def _warn(message: str) -> None:
    warnings.warn(message, WorkbenchWarning, stacklevel=5)
