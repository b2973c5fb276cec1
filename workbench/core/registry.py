"""Registry of wrappers by name: built-in, registered by users, or provided by installed packages."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar, overload

from .settings import Settings, hint

W = TypeVar("W", bound=type[Settings])
GROUP = "workbench.wrappers"  # group of entry points, name = "package.module:Class"
PLAIN = "plain"  # name of the model without a wrapper in strings
_BUILT_IN: dict[str, str] = {}  # name -> "module:Class"
_REGISTERED: dict[str, type[Any]] = {}
OUTER: dict[str, str] = {}  # name of a class of modules around a wrapped model -> "module:Class"


def build_in(name: str, place: str) -> None:
    """Register a wrapper of this package by its location "module:Class"; it is imported on first use."""
    _BUILT_IN[name] = place


@overload
def register(cls: W, /) -> W: ...
@overload
def register(*, name: str) -> Callable[[W], W]: ...
def register(cls: W | None = None, /, *, name: str = "") -> W | Callable[[W], W]:
    """Register a custom wrapper under a name, for strings such as "bayes(n_samples=8) + sculpt", widgets, sweeps and `load`.

    Packages register wrappers for all their users with an entry point: `bayes = "package.module:Bayes"` in the group "workbench.wrappers".

    Args:
        cls: the wrapper class.
        name: name of the wrapper, that of its method; by default the class name in lower case.

    Returns:
        The class, so that `register` can be used as a decorator.

    Raises:
        TypeError: if `cls` is not a wrapper class.
        ValueError: if the name is not an identifier, or belongs to another wrapper; a class with the same name replaces the earlier one.

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
    registered = _REGISTERED.get(name, cls)
    # the same class may be registered again, as when a notebook cell runs twice
    if name in _locations() or registered.__qualname__ != cls.__qualname__:
        raise ValueError(f"there is a wrapper {name!r} already; register {cls.__qualname__} under another name=")
    _REGISTERED[name] = cls
    return cls


def unregister(name: str) -> None:
    """Remove a wrapper added by `register`."""
    _REGISTERED.pop(name)


@functools.cache
def _installed() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def _locations() -> dict[str, str]:
    """Return name -> "module:Class" of the built-in and installed wrappers."""
    return {**_installed(), **_BUILT_IN}


def wrapper_names() -> list[str]:
    """Return the names of all wrappers, in alphabetical order.

    Example:
        >>> "vote" in wrapper_names()
        True
    """
    return sorted({*_locations(), *_REGISTERED})


def wrapper_class(name: str) -> type[Any]:
    """Return the wrapper class of a name.

    Raises:
        ValueError: if there is no such wrapper.

    Example:
        >>> wrapper_class("vote")().n_voters
        3
    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name not in _locations():
        raise ValueError(f"there is no wrapper {name!r}: {hint(name, [PLAIN, *wrapper_names()])}")
    module, _, attribute = _locations()[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def name_of(cls: type) -> str:
    """Return the registered name of a wrapper class; the class name if it is not registered."""
    place = f"{cls.__module__}:{cls.__qualname__}"
    names = [name for name, known in _locations().items() if known == place]
    names += [name for name, known in _REGISTERED.items() if known is cls]
    return names[0] if names else cls.__name__


def name_outer(name: str, place: str) -> None:
    """Register a class of modules around a wrapped model, such as a calibration, so that files can name it.

    The class is given by its location "module:Class" and imported on first use. Its first argument, also its attribute `wrapped`, is the inner
    model; what it learns is held in buffers; its method `arguments` returns the other arguments as JSON values, and the names of those that are
    functions, which files cannot hold.
    """
    OUTER[name] = place


def outer_class(name: str) -> type[Any]:
    """Return the class registered by `name_outer` under a name."""
    module, _, attribute = OUTER[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


__all__ = ["OUTER", "PLAIN", "name_of", "name_outer", "outer_class", "register", "wrapper_class", "wrapper_names"]
