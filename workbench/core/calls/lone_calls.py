"""Warnings for code that uses layers or parameters of a wrapped object outside its call, and so computes with one of its models only."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import WorkbenchWarning
from ...introspect.bytecode import attributes_of_self
from ...introspect.source_lines import is_installed, is_user_code, line_name
from .call import Call

if TYPE_CHECKING:
    from types import FrameType

# attributes of a tensor that do not depend on its values
_METADATA = {"shape", "device", "dtype", "ndim", "size", "dim", "numel", "requires_grad", "is_cuda", "layout"}
_METADATA |= {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}

_FIRST_VOTER_USED = "parameters of the first voter"


class Alone:
    """Pre-forward hook of a layer that differs between models: warns once if the layer is called directly, not through the wrapped object.

    Args:
        by_methods: whether to warn only if a method of the wrapped object calls the layer.
    """

    warned = False
    by_methods = False

    def __init__(self, by_methods: bool = False) -> None:
        self.by_methods = by_methods

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.warned or torch.compiler.is_compiling():
            return
        frame = _calling_method()
        root: Any = None if frame is None else frame.f_locals[frame.f_code.co_varnames[0]]
        if self.by_methods and (root is None or not _count_models(root)):
            return
        self.warned = True
        where, remedy = "", "wrap that method (wrapper(model, method=...))"
        if frame is not None:
            name = frame.f_code.co_name
            where = f" in {type(root).__name__}.{name} ({line_name(frame.f_code.co_filename, frame.f_lineno)})"
            remedy = f"wrap that method (wrapper(model, method={name!r})), return its result together with that of {root._workbench.method}"
        who = (
            f"one model, not as the {_count_models(root)} whose mean the wrapped model gives"
            if self.by_methods
            else "the first voter only"
        )
        warnings.warn(
            f"a {type(module).__name__} inside a wrapped model is called directly{where}, and answers as {who} (methods that call layers do "
            f"this, such as get_encoder and feature extraction). Call the wrapped model as a whole, {remedy}, or call each of wrapped.voters()",
            WorkbenchWarning,
            stacklevel=4,
        )


def _calling_method() -> FrameType | None:
    """Return the innermost frame that runs a method of a wrapped object in the user's code."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and is_user_code(code.co_filename):
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, nn.Module) and "_workbench" in first.__dict__:
                return frame
        frame = frame.f_back
    return None


def _count_models(root: Any) -> int:
    """Return the number of models whose mean a call of a wrapped object returns, 0 if it is a single model."""
    call = Call(training=root.training, return_risk=False)
    n = 1
    for axis in (method.axis(call) for method in root._workbench.methods):
        n *= 1 if axis is None or axis.own_first else axis.size
    return n if n > 1 else 0


def watch_layers(table: Any) -> None:
    """Register the hook on all layers that differ between the models whose mean a call returns, unless they have it."""
    call, hook = Call(training=False, return_risk=False), Alone(by_methods=True)
    for method in table.record.methods:
        axis = method.axis(call)
        if axis is None or axis.own_first or axis.size < 2:
            continue
        slots = table.record.slots
        stems = {name.partition("@")[0] for name, rule in table.record.rules.items() if method.name in rule.axes()}
        for name in slots.keys() & stems or slots.keys():
            for path, _ in slots[name].owners:
                hooks = table.module(path)._forward_pre_hooks.values() if path else ()
                if path and not any(isinstance(other, Alone) for other in hooks):
                    table.module(path).register_forward_pre_hook(hook)


# ---- parameters used without their layers
class TakenByLoss:
    """Tensor hook of the first voter's parameter, which stands in for all voters': warns once if a loss uses it outside the model's call.

    Args:
        slot: name of the parameter.
        record: the record of the wrapping.
    """

    def __init__(self, slot: str, record: Any) -> None:
        self.slot, self.record = slot, record

    def __call__(self, gradient: torch.Tensor) -> None:
        if self.record.alone.warned or _FIRST_VOTER_USED in self.record.warned or torch.compiler.is_compiling():
            return
        self.record.warned.add(_FIRST_VOTER_USED)
        warnings.warn(
            f"a loss uses {self.slot!r} of a wrapped model outside the model's call; each voter has its own, and the gradient reaches the "
            "first voter's only. Use all voters' from wrapped.named_parameters(), which has one more dimension, or compute the term in "
            f"{self.record.method} and return it with the prediction (a scalar is averaged, as "
            'output={..., "penalty": "mean"} says)',
            WorkbenchWarning,
            stacklevel=2,
        )


def watched_methods(cls: type[nn.Module]) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield (name, method) for the methods that the user wrote, wrapped to warn once if they use parameters that each voter has of its own.

    Methods that override those of `nn.Module` are left out.
    """
    names: set[str] = set()
    for base in cls.__mro__:
        for name, item in vars(base).items():
            written = isinstance(item, types.FunctionType) and not is_installed(item.__code__.co_filename)
            if written and name not in names and not hasattr(nn.Module, name) and item.__code__.co_argcount:
                yield name, _warning_method(item)
            names.add(name)


def _warning_method(function: types.FunctionType) -> Any:
    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_workbench" in self.__dict__ and not torch.compiler.is_compiling():
            _warn_of_parameters(self, function)
        return function(self, *args, **kwargs)

    return method


def _warn_of_parameters(root: Any, function: types.FunctionType) -> None:
    record = root._workbench
    key = f"method {function.__qualname__}"
    if key in record.warned:
        return
    record.warned.add(key)
    views = root.__dict__["_engine"].table.views
    places = {owner: name for name in views for owner in record.slots[name].owners}
    for names in attributes_of_self(function.__code__):
        for i, attribute in enumerate(names):
            slot = places.get((".".join(names[:i]), attribute))
            if slot is None or (names[i + 1 : i + 2] and names[i + 1] in _METADATA):
                continue
            line = line_name(function.__code__.co_filename, function.__code__.co_firstlineno)
            record.warned.add(_FIRST_VOTER_USED)
            warnings.warn(
                f"{type(root).__name__}.{function.__name__} ({line}) computes with {slot!r}, which each voter has of its own: it sees that of "
                f"the first voter only, and no gradient reaches the others. Compute it in {record.method} and return it with the prediction (a "
                'scalar is averaged, as output={..., "penalty": "mean"} says), wrap that method '
                f"(wrapper(model, method={function.__name__!r})), or ask each of wrapped.voters()",
                WorkbenchWarning,
                stacklevel=3,
            )
            return


__all__ = ["Alone", "TakenByLoss", "watch_layers", "watched_methods"]
