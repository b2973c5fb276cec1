"""References in code: the modules that a function reaches by name, and the tensors that a method of a module uses."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from .bytecode import globals_read, names_in
from .objects import ATOMS, CONTAINERS, closure_variables, parts
from .source_lines import is_installed

_NOT_IN_CALLS = ("__init__", "__post_init__", "__new__", "__setstate__")
_MAX_ITEMS = 1000  # a longer container holds data


# ---- functions: unlike `objects.parts`, this follows only attributes that the code mentions, and enters functions and Python modules
@functools.lru_cache(maxsize=1024)
def _names_in_class(cls: Any) -> frozenset[str]:
    """Names that the methods of a class mention, except those that only construct objects, which no call runs."""
    methods = (item for base in cls.__mro__ for name, item in vars(base).items() if name not in _NOT_IN_CALLS)
    return frozenset().union(*(names_in(item.__code__) for item in methods if isinstance(item, types.FunctionType)))


def globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield (name, current value) of the global variables that a function reads."""
    for name in globals_read(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _references_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code, defaults = function.__code__, function.__defaults__ or ()
    yield from closure_variables(function)
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    if not is_installed(code.co_filename):
        yield from globals_of(function)


def references(value: Any, names: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for the objects that a value refers to.

    Args:
        value: a function, a bound method, a partial function, a container, a Python module or another object.
        names: names that the code using the value mentions; of an object, only these attributes are followed.
    """
    if isinstance(value, types.FunctionType):
        yield from _references_of_function(value)
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif isinstance(value, functools.partial):
        yield from (("module", value.func), ("arguments", value.args), ("arguments", value.keywords))
    elif isinstance(value, CONTAINERS):
        yield from ((str(key), item) for key, item in parts(value) if len(value) <= _MAX_ITEMS)
    elif isinstance(value, types.ModuleType):
        if not is_installed(getattr(value, "__file__", None)):
            yield from ((name, vars(value)[name]) for name in sorted(names) if name in vars(value))
    elif not isinstance(value, (Tensor, *ATOMS)):
        mentioned = names | _names_in_class(value.__class__)
        yield from [(name, item) for name, item in parts(value) if name in mentioned]


def walk(
    value: Any,
    place: str = "",
    label: str = "module",
    names: frozenset[str] = frozenset(),
    seen: set[int] | None = None,
) -> Iterator[tuple[str, str, Any]]:
    """Yield everything that a value reaches, as (place, label, value); modules are not entered.

    A place is the path of names that leads to a value; a module is yielded once for each place. A label is a short name.
    """
    seen = set() if seen is None else seen
    is_atom = isinstance(value, (Tensor, *ATOMS)) and not isinstance(value, types.ModuleType)
    if is_atom or (id(value) in seen and not isinstance(value, nn.Module)):
        return
    seen.add(id(value))
    yield place, label, value
    if isinstance(value, nn.Module):
        return
    if isinstance(code := getattr(value, "__code__", None), types.CodeType):
        names = names_in(code)
    for name, item in references(value, names):
        longer = f"{label}_{name}" if isinstance(value, CONTAINERS) else name
        item_label = label if name in ("self", "arguments", "function") else longer
        yield from walk(item, f"{place}.{name}", item_label, names, seen)


def reaches_module(value: Any, names: frozenset[str]) -> bool:
    """Return whether a value leads to a module."""
    return any(isinstance(item, nn.Module) for _, _, item in walk(value, names=names))


# ---- methods of modules
def used_by(root: nn.Module, method: str) -> set[str] | None:
    """Return the names of the parameters and buffers that a method of a module uses, judged by its source; None if unknown.

    Args:
        root: the module.
        method: name of one of its methods.
    """
    if method in root.__dict__:  # set on the object: it may use anything
        return None
    usage = _Usage(root)
    try:
        usage.follow_attribute(root, [method])
    except _AllUsed:
        return None
    return usage.tensors


class _AllUsed(Exception):
    """A method passes its object on, so that it may use all of it."""


class _Usage:
    """Collect the names of the tensors of a module and its sub-modules that its methods use.

    Args:
        root: the module.
    """

    def __init__(self, root: nn.Module) -> None:
        self.tensors: set[str] = set()
        self._paths = {id(module): path for path, module in root.named_modules()}
        self._all = [
            name
            for entries in (
                nn.Module.named_parameters(root, remove_duplicate=False),
                nn.Module.named_buffers(root, remove_duplicate=False),
            )
            for name, _ in entries
        ]
        self._read: set[tuple[int, Any]] = set()

    def follow_attribute(self, module: nn.Module, names: list[str]) -> None:
        """Add the tensors that `self.a.b.c` uses.

        Raises:
            _AllUsed: if these may be any tensors.
        """
        name, *rest = names
        if module._modules.get(name) is not None:
            child: Any = module._modules[name]
            if rest and not (hasattr(nn.Module, rest[0]) or rest[0] in child.__dict__) and hasattr(child, rest[0]):
                self.follow_attribute(child, rest)
            else:
                self._add_module(child)
        elif name in module._parameters or name in module._buffers:
            path = self._paths[id(module)]
            self.tensors.add(f"{path}.{name}" if path else name)
        elif name in ("_parameters", "_buffers", "_modules"):
            raise _AllUsed
        elif name in module.__dict__:
            if name != "training":  # only modules among the values have parameters
                for _, _, item in walk(module.__dict__[name], names=frozenset(names)):
                    if isinstance(item, nn.Module):
                        self._add_module(item)
        else:
            self._follow_class(module, name)

    def _follow_class(self, module: nn.Module, name: str) -> None:
        """Add the tensors that the methods and properties with a name use."""
        classes = [cls for cls in type(module).__mro__ if cls not in (nn.Module, object) and name in vars(cls)]
        if not classes and name != "__class__":
            raise _AllUsed  # parameters(), children(), or a result of __getattr__
        for item in (vars(cls)[name] for cls in classes):
            if isinstance(item, staticmethod | classmethod | type) or not hasattr(item, "__get__"):
                continue  # not bound to this object
            function = inspect.unwrap(getattr(item, "fget", None) or getattr(item, "func", item))
            if (id(module), function) not in self._read:
                self._read.add((id(module), function))
                for names, is_assigned in _attributes_of_self(function):
                    if not is_assigned or hasattr(module, names[0]):
                        self.follow_attribute(module, names)

    def _add_module(self, module: nn.Module) -> None:
        if id(module) not in self._paths:
            raise _AllUsed
        path = self._paths[id(module)]
        self.tensors.update(name for name in self._all if not path or name.startswith(f"{path}."))


def _attributes_of_self(function: Any) -> list[tuple[list[str], bool]]:
    """Every `self.a.b` of a method as ["a", "b"], those of `super()` included, and whether it is assigned to.

    Raises:
        _AllUsed: if the method has no source, or passes its object on.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        raise _AllUsed from None
    definition = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    arguments = [*definition.args.posonlyargs, *definition.args.args] if definition is not None else []
    if not arguments:
        raise _AllUsed
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    attributes: list[tuple[list[str], bool]] = []
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else ""
        if name == "super":
            node = parents[node]  # the call super()
        elif name != arguments[0].arg or _is_super_call(parents[node]):
            continue
        names = []
        while isinstance(parent := parents.get(node), ast.Attribute):
            names.append(parent.attr)
            node = parent
        if not names:
            raise _AllUsed  # the object itself is passed on
        attributes.append((names, isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)))
    return attributes


def _is_super_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


__all__ = ["globals_of", "reaches_module", "references", "used_by", "walk"]
