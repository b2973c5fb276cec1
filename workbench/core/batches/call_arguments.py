"""Open the inputs of a batch into positional and keyword arguments of a model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...engine.clone import eager
from ..function import Function
from .rows import in_batches, split_batch


def opened(wrapped: Any, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs: a tuple holds positional ones, a dict keyword ones where the model takes its items, else it is one."""
    if isinstance(inputs, tuple):
        return inputs, {}
    if (
        isinstance(inputs, Mapping)
        and all(isinstance(key, str) for key in inputs)
        and takes(_called(wrapped), **inputs)
    ):
        return (), dict(inputs)
    return (inputs,), {}


def _called(wrapped: Any) -> Callable[..., Any]:
    """What a call is of: the user's function, or a method of the model."""
    wrapped = eager(wrapped)
    if isinstance(wrapped, Function):
        return wrapped._held.function
    if not hasattr(type(wrapped), "_plain_class"):
        return wrapped.forward
    return functools.partial(getattr(type(wrapped)._plain_class, wrapped._workbench.method), wrapped)


def positional_names(wrapped: Any) -> tuple[str, ...]:
    """The names of the parameters of a model that can be given by position."""
    try:
        parameters = inspect.signature(_called(wrapped)).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def takes(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a function can be called with these arguments."""
    try:
        inspect.signature(forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def batches_of(data: Any, wrapped: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """Positional and keyword inputs and the targets of every batch, None where there are none.

    Args:
        data: inputs, or rows (x, y), in any form that `rows.in_batches` takes.
        wrapped: the model that they are for.
    """
    for batch in in_batches(data, wrapped):
        x, y = split_batch(batch)
        yield (*opened(wrapped, x), y)
