"""Functions of tensors as modules: the modules that a function uses are found, and replaced by others when it runs."""

from __future__ import annotations

import copy
import functools
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer

from ..introspect.bytecode import globals_assigned, names_in
from ..introspect.objects import is_set
from ..introspect.references import globals_of, reaches_module, references, walk
from ..introspect.source_lines import is_installed


class Function(nn.Module):
    """Module made of a function and the modules that it uses, so that it can be wrapped like any module.

    Modules are found wherever the function refers to them: in its closure, its globals, its default arguments, in lists, dicts and objects
    there, and in the helper functions that it calls.

    Args:
        function: a function, a bound method of an object that holds modules, a partial function, or a callable object.

    Raises:
        TypeError: if no module is found, if the function is a method of a module, or if it trains a model.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        core: Any = function.func if isinstance(function, functools.partial) else function
        name = getattr(core, "__qualname__", type(core).__qualname__)
        owner = getattr(core, "__self__", None)
        if isinstance(owner, nn.Module):
            raise TypeError(
                f"{name} is a method of a module: wrap the module itself, with method={core.__name__!r} if it is not forward"
            )
        self._places: dict[str, str] = {}  # place in which the function refers to a module -> name of the sub-module
        names: dict[int, str] = {}
        for place, label, value in walk(function):
            if isinstance(value, nn.Module):
                if id(value) not in names:
                    names[id(value)] = self._free(label)
                    self.add_module(names[id(value)], value)
                self._places[place] = names[id(value)]
            _refuse_training(name, value)
        if not names:
            raise TypeError(_not_found_message(core, name))
        functools.update_wrapper(self, core, updated=())
        self._held = _Held(function)

    def _free(self, label: str) -> str:
        name = re.sub(r"\W", "_", label)
        while hasattr(self, name):
            name += "_"
        return name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # searched at every call, since a global may refer to another module by now
        swap = {
            id(value): self.get_submodule(self._places[place])
            for place, _, value in walk(self._held.function)
            if isinstance(value, nn.Module) and place in self._places
        }
        swapping = _Swapping(swap)
        function = swapping.of(self._held.function, frozenset())
        try:
            with _refuse_unknown_modules(self):
                return function(*args, **kwargs)
        finally:
            swapping.write_back()


class _Held:
    """The user's function; copies of the module share it, although each runs it with its own modules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __deepcopy__(self, memo: Any) -> _Held:
        return self


# functions whose first call was checked: beside them, since what a call changes in a module would count as the model's own state
_CHECKED: weakref.WeakSet[_Held] = weakref.WeakSet()


def _refuse_training(name: str, value: Any) -> None:
    trains = (
        isinstance(value, types.FunctionType)
        and not is_installed(value.__code__.co_filename)
        and "backward" in names_in(value.__code__)
    )
    if trains or isinstance(value, Optimizer):
        what = f"{value.__qualname__} calls backward" if trains else f"it uses the optimizer {type(value).__name__}"
        raise TypeError(
            f"{name} does not only predict, it trains: {what}; wrap only the forward pass, and call backward on what it returns when wrapped"
        )


def _not_found_message(core: Any, name: str) -> str:
    parts = name.split(".")
    if isinstance(core, types.FunctionType) and len(parts) > 1 and parts[-2] != "<locals>":
        of_keras = f" (of Keras models, which answer as a whole, Wrapper()({parts[-2]}))" if parts[-1] == "call" else ""
        return (
            f"{name} uses no nn.Module that can be found; if it is a method of a class of models, wrap the class, "
            f"Wrapper()({parts[-2]}, method={parts[-1]!r}){of_keras}, or its instances"
        )
    if type(core).__name__ == "ExportedProgram":
        return "an ExportedProgram has no layers to wrap: wrap the nn.Module that it was exported from, or its program.module()"
    return (
        f"{name} uses no nn.Module that can be found in its closure or among its globals; define the module before the function, or wrap the "
        "module itself"
    )


class _Overlay(dict):
    """Globals of a function with some names replaced; all other names are looked up in the original globals."""

    def __init__(self, original: dict[str, Any]) -> None:
        super().__init__()
        self.original = original
        self["__builtins__"] = original.get("__builtins__")

    def __missing__(self, key: str) -> Any:
        return self.original[key]


class _Swapping:
    """Copies functions and the objects they refer to with modules replaced; objects that lead to no module are not copied.

    Args:
        swap: id of a module -> its replacement.
    """

    def __init__(self, swap: dict[int, nn.Module]) -> None:
        self.swap = swap
        # id -> (value, referenced so that its id stays unique; its replacement)
        self.done: dict[int, tuple[Any, Any]] = {}
        self.made: list[tuple[Any, Any, dict[str, Any]]] = []  # (object, its copy, initial attributes of the copy)

    def of(self, value: Any, names: frozenset[str]) -> Any:
        if isinstance(value, nn.Module):
            return self.swap.get(id(value), value)
        if id(value) in self.done:
            return self.done[id(value)][1]
        if not reaches_module(value, names):
            return value
        if isinstance(value, types.FunctionType):
            return self._function(value)
        return self._other(value, names)

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        code, original, names = function.__code__, function.__globals__, names_in(function.__code__)
        followed = () if is_installed(code.co_filename) else globals_of(function)
        changing = {name for name, item in followed if reaches_module(item, names)}
        namespace: Any = _Overlay(original) if changing else original
        # cells whose content does not change are shared, since other functions may read what this one writes there
        cells = tuple(
            types.CellType() if is_set(cell) and reaches_module(cell.cell_contents, names) else cell
            for cell in function.__closure__ or ()
        )
        new = types.FunctionType(code, namespace, function.__name__, None, cells or None)
        self.done[id(function)] = function, new
        new.__module__, new.__qualname__ = function.__module__, function.__qualname__
        new.__dict__.update(function.__dict__)
        new.__defaults__ = self.of(function.__defaults__, names)
        new.__kwdefaults__ = self.of(function.__kwdefaults__, names)
        for new_cell, cell in zip(cells, function.__closure__ or (), strict=True):
            if new_cell is not cell:
                new_cell.cell_contents = self.of(cell.cell_contents, names)
        for name in changing:
            dict.__setitem__(namespace, name, self.of(original[name], names))
        return new

    def _other(self, value: Any, names: frozenset[str]) -> Any:
        if isinstance(value, types.MethodType):
            code = getattr(value, "__code__", None)
            inner = names_in(code) if isinstance(code, types.CodeType) else names
            return types.MethodType(self.of(value.__func__, inner), self.of(value.__self__, inner))
        if isinstance(value, functools.partial):
            args, keywords = self.of(value.args, names), self.of(value.keywords, names)
            return functools.partial(self.of(value.func, names), *args, **keywords)
        if isinstance(value, tuple):
            items = [self.of(item, names) for item in value]
            return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
        if isinstance(value, set | frozenset):
            return type(value)(self.of(item, names) for item in value)
        new: Any
        if isinstance(value, types.ModuleType):
            new = types.ModuleType(value.__name__)
            vars(new).update(vars(value))
        else:
            new = copy.copy(value)
        self.done[id(value)] = value, new
        if isinstance(value, list | deque):
            for i, item in enumerate(value):
                new[i] = self.of(item, names)
        elif isinstance(value, dict):
            for key, item in value.items():
                new[key] = self.of(item, names)
        else:
            vars(new).update({name: self.of(item, names) for name, item in references(value, names)})
            self.made.append((value, new, dict(vars(new))))
        return new

    def write_back(self) -> None:
        """Apply to the originals what the functions assigned to globals and to attributes of objects."""
        for function, new in self.done.values():
            if isinstance(function, types.FunctionType) and isinstance(new.__globals__, _Overlay):
                for name, _ in globals_assigned(new.__code__):
                    if dict.__contains__(new.__globals__, name):
                        function.__globals__[name] = dict.__getitem__(new.__globals__, name)
        for value, new, initial in self.made:
            for name, item in vars(new).items():
                if name not in initial or initial[name] is not item:
                    setattr(value, name, item)


@contextmanager
def _refuse_unknown_modules(module: Function) -> Iterator[None]:
    """Raise RuntimeError if the function, in its first call, calls a module that was not found and so would not be replaced."""
    if module._held in _CHECKED:
        yield
        return
    known = set(map(id, module.modules()))
    thread, depth = threading.get_ident(), 0

    def before(called: nn.Module, args: Any) -> None:
        nonlocal depth
        if threading.get_ident() != thread:
            return
        if not depth and id(called) not in known and next(called.parameters(), None) is not None:
            raise RuntimeError(
                f"{module.__name__} calls a {type(called).__name__} that it does not refer to in a way that can be followed, so that it would "
                "stay as it is: refer to it by a variable, by an attribute of an object, or in a list or dict"
            )
        depth += 1

    def after(called: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= threading.get_ident() == thread

    first, second = register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)
    try:
        yield
    finally:
        first.remove()
        second.remove()
    _CHECKED.add(module._held)


__all__ = ["Function"]
