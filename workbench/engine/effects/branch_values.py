"""Values that branches have of their own beside tensors: attributes that forward changes, and objects among its inputs."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from ...introspect.objects import is_atom, is_generator, tensors_and_generators
from .attributes import Attribute, Tree, Values, attributes

MISSING: Any = type("Missing", (), {})()  # stands for an attribute that is not there


def duplicate(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy that shares no memory with the value, tensors included (with their gradients' path); what has no copy is shared.

    Args:
        value: anything.
        memo: id of an object -> what is to stand in its place.
    """
    if is_atom(value) or is_generator(value):
        return value
    memo = {} if memo is None else dict(memo)
    for item in tensors_and_generators(value):
        if id(item) not in memo:
            memo[id(item)] = item.clone() if isinstance(item, Tensor) else item
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # not copyable
        return value


def taken(names: frozenset[Attribute], tree: Tree) -> Values:
    """The named attributes' values; what is not there is marked as missing."""
    return {(path, name): tree[path].__dict__.get(name, MISSING) for path, name in names if path in tree}


def put(values: Values, tree: Tree) -> None:
    """Set attributes, or take away those that are marked as missing."""
    for (path, name), value in values.items():
        if path in tree:
            if value is MISSING:
                tree[path].__dict__.pop(name, None)
            else:
                tree[path].__dict__[name] = value


def carried(values: Values, source: Tree, target: Tree) -> Values:
    """Copies of attribute values for another tree: references to modules and registered tensors follow, other tensors are copied."""
    if not values:
        return {}
    memo: dict[int, Any] = {}
    for path, module in source.items():
        if path in target:
            memo[id(module)] = target[path]
            for kind in ("_parameters", "_buffers"):
                theirs = target[path].__dict__[kind]
                memo.update(
                    {id(t): theirs[n] for n, t in module.__dict__[kind].items() if t is not None and n in theirs}
                )
    return {name: value if value is MISSING else duplicate(value, memo) for name, value in values.items()}


def transfer(names: frozenset[Attribute], source: Tree, target: Tree) -> None:
    """Give the modules of one tree the attribute values of another."""
    put(carried(taken(names, source), source, target), target)


def holds_tensors(value: Any) -> bool:
    """Whether there is a tensor somewhere inside."""
    return _holds_other(value, set())


def tensors_in(tree: Tree, names: frozenset[Attribute] | None = None) -> Values:
    """The attributes that hold a tensor, in whatever depth, that no module has registered."""
    known = {id(t) for m in tree.values() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None}
    values: Values = {}
    for name, value in attributes(tree):
        if (names is None or name in names) and _holds_other(value, known):
            values[name] = value
    return values


def _holds_other(value: Any, known: set[int]) -> bool:
    """Whether a tensor is inside a value that is not among the known ones."""
    return any(isinstance(item, Tensor) and id(item) not in known for item in tensors_and_generators(value))
