"""The wrappers by name: built in, registered by users, or brought by installed packages."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar, overload

from .settings import Settings, hint

W = TypeVar("W", bound=type[Settings])
GROUP = "workbench.wrappers"  # of entry points: name = "package.module:Class"
PLAIN = "plain"  # what texts call the model without a wrapper
_BUILT_IN: dict[str, str] = {}  # name -> "module:Class"
_REGISTERED: dict[str, type[Any]] = {}
OUTER: dict[str, str] = {}  # classes of modules around a wrapped model -> "module:Class"


def build_in(name: str, place: str) -> None:
    """Name a wrapper of this package by where it is, "module:Class"; it is imported when it is first asked for."""
    _BUILT_IN[name] = place


@overload
def register(cls: W, /) -> W: ...
@overload
def register(*, name: str) -> Callable[[W], W]: ...
def register(cls: W | None = None, /, *, name: str = "") -> W | Callable[[W], W]:
    """Make a wrapper of your own known by a name: to texts such as "bayes(n_samples=8) + sculpt", to widgets, sweeps and `load`.

    A package does the same for all who install it by an entry point: `bayes = "package.module:Bayes"` in the group "workbench.wrappers".

    Args:
        cls: the wrapper.
        name: its name, that of its method; by default that of the class in lower case.

    Returns:
        The class, so that this is also a decorator.

    Raises:
        TypeError: if it is no wrapper.
        ValueError: if the name is no identifier, or another wrapper's; a class of the same name takes the place of the one before.

    Example:
        >>> import workbench
        >>> from workbench.methods import vote
        >>> @workbench.register
        ... class Pair(vote.Wrapper):
        ...     "Two voters."
        >>> "pair" in wrapper_names()
        True
        >>> unregister("pair")
    """
    if cls is None:
        return lambda cls: _register(cls, name)
    return _register(cls, name or cls.__name__.lower())


def _register(cls: W, name: str) -> W:
    if not isinstance(cls, type) or not issubclass(cls, Settings) or not hasattr(cls, "make"):
        raise TypeError(f"register takes a subclass of workbench.Wrapper, not {cls!r:.80}")
    if not name.isidentifier() or name == PLAIN:
        raise ValueError(f"name must be an identifier other than {PLAIN!r}, not {name!r}")
    known = _REGISTERED.get(name, cls)
    # the same class may come again: a cell of a notebook may run twice
    if name in _places() or known.__qualname__ != cls.__qualname__:
        raise ValueError(f"there is a wrapper {name!r} already; register {cls.__qualname__} under another name=")
    _REGISTERED[name] = cls
    return cls


def unregister(name: str) -> None:
    """Forget a wrapper that `register` made known."""
    _REGISTERED.pop(name)


@functools.cache
def _installed() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def _places() -> dict[str, str]:
    """Where to import each wrapper from that is built in or installed."""
    return {**_installed(), **_BUILT_IN}


def wrapper_names() -> list[str]:
    """The names of all wrappers, in alphabetical order.

    Example:
        >>> "vote" in wrapper_names()
        True
    """
    return sorted({*_places(), *_REGISTERED})


def wrapper_class(name: str) -> type[Any]:
    """The wrapper of a name.

    Raises:
        ValueError: if there is none.

    Example:
        >>> wrapper_class("vote")().n_voters
        3
    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name not in _places():
        raise ValueError(f"there is no wrapper {name!r}: {hint(name, [PLAIN, *wrapper_names()])}")
    module, _, attribute = _places()[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def name_of(cls: type) -> str:
    """The name that a wrapper is known by; that of its class if it is not registered."""
    place = f"{cls.__module__}:{cls.__qualname__}"
    names = [name for name, known in _places().items() if known == place]
    names += [name for name, known in _REGISTERED.items() if known is cls]
    return names[0] if names else cls.__name__


def name_outer(name: str, place: str) -> None:
    """Make a class of modules around a wrapped model known to files by where it is, "module:Class"; it is imported when it is first asked for.

    Its first argument is what it stands around, its attribute `wrapped`; what it learns lies in buffers; its method `arguments` gives the other
    arguments as JSON has them, and the names of those that are functions, which no file holds.
    """
    OUTER[name] = place


def outer_class(name: str) -> type[Any]:
    """The class of that name."""
    module, _, attribute = OUTER[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


__all__ = ["OUTER", "PLAIN", "name_of", "name_outer", "outer_class", "register", "wrapper_class", "wrapper_names"]
