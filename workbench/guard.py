"""Optimizers that were made too early: they hold parameters of the given model that a method has replaced in the wrapped one."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .errors import WorkbenchWarning

_replaced: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # id of a replaced parameter -> itself, and how it is called
_registered = False


def watch(name: str, parameter: Tensor) -> None:
    """Report an optimizer that steps with this replaced parameter without a gradient for it: it trains nothing.

    Args:
        name: of the parameter in its model.
        parameter: of the model that was given.
    """
    global _registered
    key = id(parameter)
    _replaced[key] = (weakref.ref(parameter, lambda _: _replaced.pop(key, None)), name)
    if not _registered:
        register_optimizer_step_pre_hook(_look)
        _registered = True


def _look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Once an optimizer: one look-up for every parameter at its first step."""
    if optimizer.__dict__.get("_workbench_seen"):
        return
    optimizer.__dict__["_workbench_seen"] = True
    held = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [_replaced[id(p)][1] for p in held if id(p) in _replaced and _replaced[id(p)][0]() is p]
    if stale and all(
        p.grad is None for p in held if id(p) in _replaced
    ):  # with a gradient the given model is trained itself
        warnings.warn(
            f"this optimizer was made from the parameters of a model before it was wrapped: {', '.join(stale[:3])} have no gradient, since the "
            f"wrapped model uses others in their place. Make it of the wrapped one: {type(optimizer).__name__}(wrapped.parameters())",
            WorkbenchWarning,
            stacklevel=4,
        )
