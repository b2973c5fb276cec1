"""What is known to keep an executor from running a model, before it is tried."""

from __future__ import annotations

import functools
from itertools import chain
from typing import Any

from torch import nn

from ..introspect.bytecode import globals_assigned, methods_of
from ..introspect.source_lines import line_name
from .effects.attributes import HOOKS
from .plan import Plan


def obstacle_to_vmap(root: nn.Module, plan: Plan) -> str:
    """Return what would keep tensors of `torch.vmap` after the pass, "" if nothing is known to."""
    return _writes_globals(root) or _hooked(root)


def obstacle_to_replay(root: nn.Module, plan: Plan) -> str:
    """Return why the branches share no trunk that could be recorded, "" if they may."""
    if plan.interventions or plan.dealt:
        return "noise reaches all layers, so that the branches share no trunk"
    return ""


def _hooked(root: nn.Module) -> str:
    """Return which module has hooks, which could keep vmap's tensors after the pass, when they are invalid; "" if none has."""
    for path, module in root.named_modules():
        for hook in chain.from_iterable(vars(module)[kind].values() for kind in HOOKS) if path else ():
            if not str(getattr(hook, "__module__", "")).startswith(("torch.nn.utils", "workbench.")):
                return f"{path} has hooks, which would get tensors that stand for all branches at once"
    return ""


def _writes_globals(root: nn.Module) -> str:
    """Return which method assigns global variables, which would keep vmap's tensors after the pass, when they are invalid; "" if none does."""
    classes: list[Any] = [type(module) for module in root.modules()]
    return next(filter(None, map(_global_write, classes)), "")


@functools.cache
def _global_write(cls: Any) -> str:
    """Return where a method of the class assigns to a global variable, "" if none does."""
    for _, function in methods_of(cls):
        code = function.__code__
        if globals_assigned(code):
            line = line_name(code.co_filename, code.co_firstlineno)
            return f"{function.__qualname__} writes global variables, where vmap would leave invalid tensors; at {line}"
    return ""


__all__ = ["obstacle_to_replay", "obstacle_to_vmap"]
