"""What a batch of training inputs may be: tensors, tuples of positional and dicts of keyword inputs, with or without targets."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..engine.clone import eager
from .function import Function


def opened(wrapped: Any, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs: a tuple holds positional ones, a dict keyword ones where the model takes its items, else it is one."""
    if isinstance(given, tuple):
        return given, {}
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given) and takes(_called(wrapped), **given):
        return (), dict(given)
    return (given,), {}


def _called(wrapped: Any) -> Callable[..., Any]:
    """What a call is of: the user's function, or a method of the model."""
    wrapped = eager(wrapped)
    if isinstance(wrapped, Function):
        return wrapped._held.function
    if not hasattr(type(wrapped), "_plain_class"):
        return wrapped.forward
    return functools.partial(getattr(type(wrapped)._plain_class, wrapped._workbench.method), wrapped)


def takes(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether it can be called so."""
    try:
        inspect.signature(forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def batches_of(batches: Any, wrapped: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """Positional and keyword inputs and the targets of every batch, None where there are none.

    Args:
        batches: a tensor; or an iterable of inputs or of (input, target) pairs, where an input is a tensor, a tuple of positional inputs, or
            a dict of keyword inputs.
        wrapped: the model that they are for.
    """
    if isinstance(batches, Tensor):
        yield from (((rows,), {}, None) for rows in batches.split(1024))
        return
    for batch in batches:
        given, *rest = batch if isinstance(batch, list | tuple) else (batch,)
        yield (*opened(wrapped, tuple(given) if isinstance(given, list) else given), rest[0] if rest else None)
