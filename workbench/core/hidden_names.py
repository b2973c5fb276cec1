"""Public names of `Wrapped` that the user's model has itself: the model's win, and errors say how to reach the others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from .batches.call_arguments import takes


def noting_hidden(ours: Any, name: str, of_model: FunctionType) -> Callable[..., Any]:
    """Return a method of the user's class, whose errors name the method of `Wrapped` that it hides if the call would suit that one."""
    hidden = getattr(ours, name)

    @functools.wraps(of_model)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_workbench" not in self.__dict__ or torch.compiler.is_compiling() or not callable(hidden):
            return of_model(self, *args, **kwargs)
        try:
            return of_model(self, *args, **kwargs)
        except Exception as error:
            if takes(hidden, self, *args, **kwargs):
                error.add_note(_words(type(self), name))
            raise

    return method


def note_hidden(wrapped: Any, error: BaseException) -> None:
    """Add to an error that asks to call methods of a wrapped object how to call those that the model hides."""
    cls = type(wrapped)
    text = str(error)
    for name in cls._hidden:
        if f"wrapped.{name}(" in text:
            error.add_note(_words(cls, name))


def _words(cls: Any, name: str) -> str:
    of_model = inspect.getattr_static(cls._plain_class, name, None)
    kind = f"method {name}{inspect.signature(of_model)}" if isinstance(of_model, FunctionType) else f"attribute {name}"
    parameters = inspect.signature(getattr(super(cls, cls), name)).parameters.values()
    arguments = ["wrapped", *(str(parameter).partition(":")[0] for parameter in [*parameters][1:])]
    return (
        f"{name} of this wrapped {cls.__name__} is its own {kind}; that of workbench is called by "
        f"workbench.Wrapped.{name}({', '.join(arguments)})"
    )


__all__ = ["note_hidden", "noting_hidden"]
