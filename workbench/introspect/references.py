"""What code reaches by name: the modules that a function uses, and the tensors that a method of a module uses."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import os
import sysconfig
import textwrap
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_INSTALLED = tuple(os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "purelib", "platlib"))
_MAKING = ("__init__", "__post_init__", "__new__", "__setstate__")
_MOST = 1000  # a longer container holds data
_CONTAINERS = (list, tuple, set, frozenset, deque)
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, Tensor)


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Global and attribute names that a function mentions, in nested functions, too."""
    nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*(names_in(const) for const in nested))


@functools.lru_cache(maxsize=4096)
def globals_in(code: types.CodeType, opname: str = "LOAD_GLOBAL") -> frozenset[str]:
    """Names of the globals that a function reads (or "STORE_GLOBAL": assigns), in nested functions, too."""
    own = frozenset(str(step.argval) for step in dis.get_instructions(code) if step.opname == opname)
    nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return own.union(*(globals_in(const, opname) for const in nested))


@functools.lru_cache(maxsize=1024)
def _names_of(cls: Any) -> frozenset[str]:
    """Names that the methods of a class mention; what only its making mentions, no call uses."""
    methods = (item for base in cls.__mro__ for name, item in vars(base).items() if name not in _MAKING)
    functions = [item for item in methods if isinstance(item, types.FunctionType)]
    return frozenset().union(*(names_in(function.__code__) for function in functions))


def is_own(file: str | None) -> bool:
    """Whether a file is the user's own code; what is installed holds no models among its globals."""
    return file is not None and not file.startswith(_INSTALLED) and "-packages" not in file


def children(value: Any, names: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """What a value refers to, by name.

    Args:
        value: a function, a bound method, a partial function, a container, a module of Python or another object.
        names: what the code that holds the value mentions: only such attributes of an object are followed.
    """
    if isinstance(value, types.FunctionType):
        code = value.__code__
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not set yet
                continue
        defaults = value.__defaults__ or ()
        yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
        yield from (value.__kwdefaults__ or {}).items()
        if is_own(code.co_filename):
            held = value.__globals__
            yield from ((name, held[name]) for name in sorted(globals_in(code)) if name in held)
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif isinstance(value, functools.partial):
        yield from (("module", value.func), ("arguments", value.args), ("arguments", value.keywords))
    elif isinstance(value, dict):
        yield from ((str(key), item) for key, item in value.items() if len(value) <= _MOST)
    elif isinstance(value, _CONTAINERS):
        yield from ((str(i), item) for i, item in enumerate(value) if len(value) <= _MOST)
    elif isinstance(value, types.ModuleType):
        if is_own(getattr(value, "__file__", None)):
            yield from ((name, vars(value)[name]) for name in sorted(names) if name in vars(value))
    elif hasattr(value, "__dict__") and not isinstance(value, _ATOMS):
        mentioned = names | _names_of(value.__class__)
        yield from ((name, item) for name, item in list(vars(value).items()) if name in mentioned)


def walk(
    value: Any,
    place: str = "",
    label: str = "module",
    names: frozenset[str] = frozenset(),
    seen: set[int] | None = None,
) -> Iterator[tuple[str, str, Any]]:
    """Everything that a value reaches: (place, label, value); modules are not entered.

    A place is the path of names that leads there; a module is given once for each place. A label is a short name.
    """
    seen = set() if seen is None else seen
    if isinstance(value, _ATOMS) or (id(value) in seen and not isinstance(value, nn.Module)):
        return
    seen.add(id(value))
    yield place, label, value
    if isinstance(value, nn.Module):
        return
    inner = names
    if isinstance(code := getattr(value, "__code__", None), types.CodeType):
        inner = names_in(code)
    for name, child in children(value, inner):
        within = f"{label}_{name}" if isinstance(value, (dict, *_CONTAINERS)) else name
        short = label if name in ("self", "arguments", "function") else within
        yield from walk(child, f"{place}.{name}", short, inner, seen)


def reaches(value: Any, names: frozenset[str]) -> bool:
    """Whether a value leads to a module."""
    return any(isinstance(found, nn.Module) for _, _, found in walk(value, names=names))


# ---- methods of modules
class _Everything(Exception):
    """A method hands its object around, so that it may use all of it."""


def used_by(root: nn.Module, method: str) -> set[str] | None:
    """Names of the parameters and buffers that a method of a module uses, judged by its source; None if that cannot be told.

    Args:
        root: the module.
        method: name of one of its methods.
    """
    homes = {id(module): path for path, module in root.named_modules()}
    used: set[str] = set()
    seen: set[tuple[int, Any]] = set()

    def whole(module: nn.Module) -> None:
        if id(module) not in homes:
            raise _Everything
        used.update(n for n, _ in _tensors(root, homes[id(module)]))

    def chain(module: nn.Module, names: list[str]) -> None:
        """What `self.a.b.c` uses."""
        name, rest = names[0], names[1:]
        if module._modules.get(name) is not None:
            child: Any = module._modules[name]
            if rest and not (hasattr(nn.Module, rest[0]) or rest[0] in child.__dict__) and hasattr(child, rest[0]):
                chain(child, rest)
            else:
                whole(child)
        elif name in module._parameters or name in module._buffers:
            path = homes[id(module)]
            used.add(f"{path}.{name}" if path else name)
        elif name in ("_parameters", "_buffers", "_modules"):
            raise _Everything
        elif name in module.__dict__:
            if name != "training":  # what is no module has no parameters either
                for _, _, found in walk(module.__dict__[name], names=frozenset(names)):
                    if isinstance(found, nn.Module):
                        whole(found)
        else:
            items = [vars(cls)[name] for cls in _classes(module) if name in vars(cls)]
            if not items and name != "__class__":
                raise _Everything  # parameters(), children(), what __getattr__ gives
            for item in items:
                follow(module, item)

    def follow(module: nn.Module, item: Any) -> None:
        if isinstance(item, staticmethod | classmethod | type) or not hasattr(item, "__get__"):
            return  # no part of this object
        function = inspect.unwrap(getattr(item, "fget", None) or getattr(item, "func", item))
        if (id(module), function) in seen:
            return
        seen.add((id(module), function))
        for names, stored in _chains(function):
            if not stored or hasattr(module, names[0]):
                chain(module, names)

    try:
        own = root.__dict__.get(method)
        if own is None:
            chain(root, [method])
        else:
            raise _Everything  # set on the object: it may hold anything
    except _Everything:
        return None
    return used


def _classes(module: nn.Module) -> list[type]:
    return [cls for cls in type(module).__mro__ if cls not in (nn.Module, object)]


def _tensors(root: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
    prefix = f"{path}." if path else ""
    for found in (root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False)):
        yield from ((name, tensor) for name, tensor in found if name.startswith(prefix))


def _chains(function: Any) -> list[tuple[list[str], bool]]:
    """Every `self.a.b` of a method as ["a", "b"], those of `super()` included, and whether it is assigned to."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        raise _Everything from None
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    if not found or not (found[0].args.posonlyargs + found[0].args.args):
        raise _Everything
    own = (found[0].args.posonlyargs + found[0].args.args)[0].arg
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    out: list[tuple[list[str], bool]] = []
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else ""
        if name == "super":
            node = parents[node]  # the call
        elif name != own or _of_super(parents[node]):
            continue
        names = []
        while isinstance(up := parents.get(node), ast.Attribute):
            names.append(up.attr)
            node = up
        if not names:
            raise _Everything  # the object itself is handed on
        out.append((names, isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)))
    return out


def _of_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


__all__ = ["children", "globals_in", "is_own", "names_in", "reaches", "used_by", "walk"]
