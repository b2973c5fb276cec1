"""Contents of objects: the direct parts of a value, and the tensors at any depth."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, type, types.ModuleType),
    *(torch.dtype, torch.device, torch.Size),
)
ATOM_TYPES = frozenset(ATOMS)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_CONTAINER_TYPES = frozenset([*CONTAINERS, OrderedDict])
MUTABLE = (dict, list, set, deque)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # attributes of modules
GLOBAL_HOOKS = tuple(vars(nn.modules.module)[f"_global{kind}"] for kind in HOOKS)  # the same for all modules at once


def is_atom(value: Any) -> bool:
    """Return whether a value has no parts, and needs no copy."""
    # exact types first for speed: they cover nearly all values
    return type(value) in ATOM_TYPES or isinstance(value, ATOMS)


def is_bare(value: Any) -> bool:
    """Return whether a value has no parts: an atom or an empty container, as most attributes of modules are."""
    return type(value) in ATOM_TYPES or (type(value) in _CONTAINER_TYPES and not value) or isinstance(value, ATOMS)


def is_scripted(module: nn.Module) -> bool:
    """Return whether a module lives in C++, out of reach of structural copies."""
    return isinstance(module, torch.jit.ScriptModule | torch.jit.ScriptFunction)


def is_keras(target: Any) -> bool:
    """Return whether something is a Keras layer or model, or a class of them, without importing Keras."""
    layers = getattr(sys.modules.get("keras"), "layers", None)
    kind = target if isinstance(target, type) else type(target)
    return layers is not None and issubclass(kind, layers.Layer)


def is_generator(value: Any) -> bool:
    """Return whether a value is a random generator; branches share one generator and draw from it one after another."""
    cls = type(value)  # not isinstance: it would run Python code of torch.Generator for every attribute of every module
    return issubclass(cls, (torch.Generator, random.Random)) or cls.__module__.startswith("numpy.random")


def is_graph(value: Any) -> bool:
    """Return whether a value is a graph of torch_geometric, or a batch of them, judged by its stores of nodes and edges and its `apply`.

    Such a value is callable, and yet is data.
    """
    kind = type(value)
    return hasattr(kind, "node_stores") and all(hasattr(kind, name) for name in ("edge_stores", "to_dict", "apply"))


def attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of a module's attributes other than its tensors and sub-modules, slots included."""
    for name, value in module.__dict__.items():
        if name not in ("_parameters", "_buffers", "_modules", "_engine"):
            yield name, value
    for name in slots(module):
        if hasattr(module, name):
            yield name, getattr(module, name)


def slots(value: Any) -> list[str]:
    """Return the names of an object's slots."""
    names: list[str] = []
    for cls in type(value).__mro__:
        if declared := cls.__dict__.get("__slots__"):
            names += (declared,) if isinstance(declared, str) else declared
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the direct parts of a value, as (key, part): a key, an index, or the name of an attribute or of a variable.

    Parts are the items of containers, the object of a bound method, function and arguments of a partial function, the closure variables of a
    function, and the attributes of any other object.
    """
    if isinstance(value, dict):
        yield from dict.items(value)  # bypasses an `items` that a subclass overrides
    elif isinstance(value, CONTAINERS):
        yield from enumerate(value)
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield "__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from closure_variables(value)
    elif hasattr(value, "__dict__"):
        yield from vars(value).items()


def access_code(holder: Any, key: Any) -> str:
    """Return the code that leads from a value to one of its `parts`.

    Example:
        >>> access_code({}, "a"), access_code([], 0), access_code(object(), "name")
        ("['a']", '[0]', '.name')
    """
    if isinstance(holder, set | frozenset):
        return "{...}"
    if isinstance(holder, tuple) and hasattr(holder, "_fields"):
        return f".{holder._fields[key]}"
    if isinstance(holder, CONTAINERS):
        return f"[{key!r}]"
    return f": {key}" if isinstance(holder, types.FunctionType) else f".{key}"


def closure_variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield (name, current value) of a function's closure variables; those that are not set yet are left out."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if is_set(cell):
            yield name, cell.cell_contents


def is_set(cell: types.CellType) -> bool:
    """Return whether a closure variable has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def tensors_and_generators(value: Any) -> list[Any]:
    """Return each tensor and each random generator inside a value, at any depth; closures are not entered."""
    leaves: list[Any] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if is_bare(item) or isinstance(item, types.FunctionType) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor) or is_generator(item):
            leaves.append(item)
        else:
            waiting.extend(part for _, part in parts(item))
    return leaves
