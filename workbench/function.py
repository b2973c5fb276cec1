"""A function of tensors as a module: the modules that it uses are found, and it runs with others in their place."""

from __future__ import annotations

import copy
import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


class _Overlay(dict):
    """Globals of a function with some names replaced; all others are looked up where the function was defined."""

    def __init__(self, replaced: dict[str, Any], original: dict[str, Any]) -> None:
        super().__init__(replaced)
        self.original = original
        self["__builtins__"] = original.get("__builtins__")

    def __missing__(self, key: str) -> Any:
        return self.original[key]


def _names(code: types.CodeType) -> set[str]:
    """Global names that a function reads, in nested functions, too."""
    nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*(_names(const) for const in nested))


def _references(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reaches by name: its closure and the globals that it reads."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _found(function: types.FunctionType, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    seen.add(id(function))
    for name, value in _references(function):
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from ((f"{name}_{i}", item) for i, item in enumerate(value) if isinstance(item, nn.Module))
        elif isinstance(value, dict):
            yield from ((f"{name}_{key}", item) for key, item in value.items() if isinstance(item, nn.Module))
        elif (
            isinstance(value, types.FunctionType)
            and id(value) not in seen
            and value.__globals__ is function.__globals__
        ):
            yield from _found(value, seen)


def _rebound(
    function: types.FunctionType, swap: dict[int, nn.Module], done: dict[int, types.FunctionType]
) -> types.FunctionType:
    """The function with every module in `swap` (id -> replacement) replaced, in its helpers as well."""
    if id(function) in done:
        return done[id(function)]
    overlay = _Overlay({}, function.__globals__)
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    new = types.FunctionType(function.__code__, overlay, function.__name__, function.__defaults__, cells or None)
    new.__kwdefaults__ = function.__kwdefaults__
    done[id(function)] = new

    def swapped(value: Any) -> Any:
        if id(value) in swap:
            return swap[id(value)]
        if isinstance(value, list | tuple) and any(id(item) in swap for item in value):
            return type(value)(swapped(item) for item in value)
        if isinstance(value, dict) and any(id(item) in swap for item in value.values()):
            return {key: swapped(item) for key, item in value.items()}
        if isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__:
            return _rebound(value, swap, done)
        return value

    for new_cell, cell in zip(cells, function.__closure__ or (), strict=True):
        try:
            new_cell.cell_contents = swapped(cell.cell_contents)
        except ValueError:  # not set yet
            continue
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        other = swapped(value)
        if other is not value:
            dict.__setitem__(overlay, name, other)
    return new


def _uses(function: Any) -> tuple[Any, dict[str, nn.Module]]:
    """The function behind partial arguments, and the modules that it uses by name."""
    core: Any = function.func if isinstance(function, functools.partial) else function
    if isinstance(core, nn.Module):
        return core, {"module": core}
    if not isinstance(core, types.FunctionType | types.MethodType):
        core = getattr(core, "__call__", core)  # noqa: B004 - a callable object: its method
    found: dict[str, nn.Module] = {}
    plain: Any = core
    if isinstance(core, types.MethodType):
        owner = core.__self__
        if isinstance(owner, nn.Module):
            raise TypeError(f"{core.__qualname__} is a method of a module: wrap the module itself")
        found.update({name: value for name, value in vars(owner).items() if isinstance(value, nn.Module)})
        plain = core.__func__
    for name, module in _found(plain, set()) if isinstance(plain, types.FunctionType) else ():
        if not any(module is known for known in found.values()):
            found.setdefault(name, module)
    return core, found


class Function(nn.Module):
    """A function and the modules that it uses, so that it can be wrapped like any module.

    Args:
        function: a function, a bound method (its object's modules are those of the object), or a partial function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        core, found = _uses(function)
        if not found:
            raise TypeError(
                f"{getattr(core, '__qualname__', core)} uses no nn.Module that can be found in its closure or among its globals; define the "
                "module before the function, or wrap the module itself"
            )
        functools.update_wrapper(self, core, updated=())
        self._function = function
        for name, module in found.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # found anew each time: a structural copy refers to modules of its own where the function has them in its closure
        core, found = _uses(self._function)
        swap = {id(module): self.get_submodule(name) for name, module in found.items()}
        if isinstance(self._function, functools.partial):
            args, kwargs = (*self._function.args, *args), {**self._function.keywords, **kwargs}
        if isinstance(core, nn.Module):
            return swap[id(core)](*args, **kwargs)
        if isinstance(core, types.MethodType):
            owner = copy.copy(core.__self__)
            vars(owner).update({k: swap[id(v)] for k, v in vars(owner).items() if id(v) in swap})
            inner: Any = core.__func__
            return _rebound(inner, swap, {})(owner, *args, **kwargs)
        done: dict[int, types.FunctionType] = {}
        bound = _rebound(core, swap, done)
        try:
            return bound(*args, **kwargs)
        finally:
            for new in done.values():  # what the function assigned to globals
                overlay: Any = new.__globals__
                written = {name for code in (new.__code__,) for name in _stored(code)}
                overlay.original.update({name: overlay[name] for name in written if dict.__contains__(overlay, name)})


def _stored(code: types.CodeType) -> set[str]:
    return {str(i.argval) for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}
