"""Modules that a class lists, such as all of its instances: copies of a model are not among them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import WorkbenchWarning
from .bytecode import methods_of, names_in

_LISTS = (list, tuple, set, frozenset, weakref.WeakSet)
_MAPPINGS = (dict, weakref.WeakValueDictionary)


def warn_listed(model: nn.Module) -> None:
    """Warn if a class lists modules of a model and has methods that use the list: what they do to them does not reach the wrapped model.

    Args:
        model: the model that is about to be wrapped.
    """
    paths = {id(module): path or "the model itself" for path, module in model.named_modules()}
    for cls in dict.fromkeys(map(type, model.modules())):
        for base, name, items in _lists_of(cls):
            listed = [paths[id(item)] for item in items if id(item) in paths]
            if listed and _is_used(cls, name):
                first = ", ".join(listed[:3])
                warnings.warn(
                    f"{base.__name__}.{name} lists modules of {type(model).__name__} ({first}), and {cls.__name__} has methods that use it. "
                    "The wrapped model has modules of its own, which are not listed there: to reset or change them, go through "
                    "model.modules() instead",
                    WorkbenchWarning,
                    stacklevel=4,  # the line that calls a wrapper
                )
                return


def _lists_of(cls: type) -> Iterator[tuple[type, str, list[Any]]]:
    """Yield (class, name, items) for each collection in a class and its bases."""
    for base in cls.__mro__:
        for name, value in vars(base).items():
            if isinstance(value, (*_LISTS, *_MAPPINGS)):
                yield base, name, [*(value.values() if isinstance(value, _MAPPINGS) else value)]


def _is_used(cls: type, name: str) -> bool:
    """Return whether a method other than the constructor mentions a name."""
    return any(name in names_in(function.__code__) for method, function in methods_of(cls) if method != "__init__")


__all__ = ["warn_listed"]
