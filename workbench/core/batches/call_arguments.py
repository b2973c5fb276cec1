"""Conversion of the inputs of a batch to positional and keyword arguments of a model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn.utils.rnn import PackedSequence

from ...engine.clone import eager
from ..function import Function


def as_arguments(wrapped: Any, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) for the inputs of a batch.

    A tuple holds positional arguments, but a packed sequence is one argument. A dict holds keyword arguments if the model accepts its keys,
    otherwise it is a single argument.
    """
    if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence):
        return inputs, {}
    if (
        isinstance(inputs, Mapping)
        and all(isinstance(key, str) for key in inputs)
        and takes(_called(wrapped), **inputs)
    ):
        return (), dict(inputs)
    return (inputs,), {}


def _called(wrapped: Any) -> Callable[..., Any]:
    """Return what a call runs: the user's function, or a method of the model."""
    wrapped = eager(wrapped)
    if isinstance(wrapped, Function):
        return wrapped._held.function
    if not hasattr(type(wrapped), "_plain_class"):
        return wrapped.forward
    return functools.partial(getattr(type(wrapped)._plain_class, wrapped._workbench.method), wrapped)


def answering(model: Any) -> Callable[..., Any]:
    """Return what answers for a model: the method that was wrapped, if it is not forward, or the model itself."""
    record = getattr(model, "__dict__", {}).get("_workbench")
    return model if record is None or record.method == "forward" else getattr(model, record.method)


def check_arguments(wrapped: Any, inputs: Any) -> None:
    """Raise TypeError, with how to give them, if the inputs of a batch are too few or too many for the model."""
    called = _called(wrapped)
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):
        return
    args, kwargs = as_arguments(wrapped, inputs)
    if takes(called, *args, **kwargs):
        return
    passed = "one input" if not isinstance(inputs, tuple) else f"a tuple of {len(inputs) or 'no'} inputs"
    raise TypeError(
        f"x: found {passed}, but the model takes ({', '.join(parameters)}); give one tensor [rows, ...] for one input, or a tuple of tensors "
        "for several, in this order"
    )


def needs_both(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> bool:
    """Return whether what looks like a target is the last input of a model, which cannot be called without it."""
    called = _called(wrapped)
    return not takes(called, *args, **kwargs) and takes(called, *args, y, **kwargs)


def positional_names(wrapped: Any) -> tuple[str, ...]:
    """Return the names of the model's parameters that can be passed by position."""
    try:
        parameters = inspect.signature(_called(wrapped)).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def takes(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Return whether a function can be called with these arguments."""
    try:
        inspect.signature(forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True
