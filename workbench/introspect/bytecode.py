"""Names that code mentions, reads and assigns to, from its bytecode."""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any

_MUTATORS = frozenset(
    ["append", "appendleft", "extend", "insert", "add", "update", "setdefault", "pop", "popleft", "clear"]
)
_CONSTANTS = frozenset(["LOAD_CONST", "LOAD_SMALL_INT"])  # the latter from Python 3.14 on
_STORES = frozenset(["STORE_SUBSCR", "STORE_SLICE"])  # the latter from Python 3.12 on
# depth of the stack after an instruction that changes a container, counted from there
_DEPTHS = {"STORE_SUBSCR": -1, "STORE_SLICE": -1, "DELETE_SUBSCR": 0}


def methods_of(cls: Any) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield (name, function) for the functions that a class and its bases define, except torch's own.

    Properties and decorated functions are unwrapped.
    """
    for base in cls.__mro__:
        if not base.__module__.startswith("torch."):
            for name, item in vars(base).items():
                is_bound = isinstance(item, staticmethod | classmethod | types.MethodType)
                function: Any = item.__func__ if is_bound else item.fget if isinstance(item, property) else item
                yield from ((name, each) for each in unwrapped(function))


def unwrapped(function: Any) -> Iterator[types.FunctionType]:
    """Yield a function and those that it decorates, of which the first may be another kind of object."""
    while function is not None:
        if isinstance(function, types.FunctionType):
            yield function
        function = getattr(function, "__dict__", {}).get("__wrapped__")


def _with_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object, and those of the functions and classes defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_nested(constant)


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that code mentions, including its nested functions."""
    return frozenset().union(*(each.co_names for each in _with_nested(code)))


def walks_parameters(function: Any) -> bool:
    """Return whether a function goes through the parameters of a module, not only to ask the first for its device or dtype."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType):
        return False
    names = names_in(function.__code__)
    return not names.isdisjoint(("parameters", "named_parameters")) and "next" not in names


@functools.cache
def _arguments(code: types.CodeType, operation: str) -> tuple[tuple[str, int], ...]:
    """(name, line) of every instruction of a kind, including nested functions."""
    return tuple(
        (str(step.argval), (step.positions and step.positions.lineno) or each.co_firstlineno)
        for each in _with_nested(code)
        for step in dis.get_instructions(each)
        if step.opname == operation
    )


def globals_read(code: types.CodeType) -> list[str]:
    """Return the names of the globals that code reads, sorted."""
    return sorted({name for name, _ in _arguments(code, "LOAD_GLOBAL")})


def globals_assigned(code: types.CodeType) -> tuple[tuple[str, int], ...]:
    """Return (name, line) of the globals that code assigns to."""
    return _arguments(code, "STORE_GLOBAL")


def keywords_in(code: types.CodeType) -> frozenset[str]:
    """Return the names by which code may pass keyword arguments, including its nested functions: all strings in its constant tuples."""
    constants = [constant for each in _with_nested(code) for constant in each.co_consts if isinstance(constant, tuple)]
    return frozenset(item for constant in constants for item in constant if isinstance(item, str))


def stores_in_place(code: types.CodeType) -> bool:
    """Return whether code assigns to items, has an operator such as `*=`, or passes an argument `out`."""
    return "out" in keywords_in(code) or any(
        step.opname in _STORES or (step.opname == "BINARY_OP" and step.argrepr.endswith("="))
        for each in _with_nested(code)
        for step in dis.get_instructions(each)
    )


def attributes_assigned(code: types.CodeType) -> tuple[tuple[str, int], ...]:
    """Return (name, line) of the attributes that code assigns to, of any object."""
    return _arguments(code, "STORE_ATTR")


@functools.cache
def attributes_of_self(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Return every `self.a.b` that a method reads, as ("a", "b"); `self.layers[0].weight` is ("layers", "0", "weight")."""
    chains = []
    for each in _with_nested(code):
        steps = [step for step in dis.get_instructions(each) if step.opname != "EXTENDED_ARG"]
        for i, step in enumerate(steps):
            loaded = step.argval[-1] if isinstance(step.argval, tuple) and step.argval else step.argval
            if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and loaded == code.co_varnames[0]:
                chains.append(tuple(_names_loaded(steps, i + 1)))
    return tuple(chains)


def _names_loaded(steps: list[dis.Instruction], i: int) -> Iterator[str]:
    """Names of the chained attributes and constant items that are loaded from step i on."""
    while i + 1 < len(steps):
        if "LOAD_ATTR" in steps[i].opname or steps[i].opname == "LOAD_METHOD":
            yield str(steps[i].argval)
            i += 1
        elif steps[i].opname in _CONSTANTS and _takes_item(steps[i + 1]):
            yield str(steps[i].argval)
            i += 2
        else:
            return


def _takes_item(step: dis.Instruction) -> bool:
    is_operator = step.opname == "BINARY_OP" and step.argrepr == "[]"  # from Python 3.14 on
    return is_operator or step.opname == "BINARY_SUBSCR"


@functools.cache
def containers_changed(code: types.CodeType) -> frozenset[str]:
    """Return the names of the attributes whose containers code changes, by a method such as append or by setting or deleting items."""
    changed = set()
    for each in _with_nested(code):
        steps = [step for step in dis.get_instructions(each) if step.opname != "EXTENDED_ARG"]
        loads = (i for i, step in enumerate(steps) if "LOAD_ATTR" in step.opname)
        changed |= {str(steps[i].argval) for i in loads if _changes_loaded(steps, i)}
    return frozenset(changed)


def _changes_loaded(steps: list[dis.Instruction], i: int) -> bool:
    """Whether the container that step i loads is changed by a method or by setting or deleting items."""
    if i + 1 < len(steps) and steps[i + 1].argval in _MUTATORS:
        return True
    depth = 1  # of the stack, counted from the container
    for before, step in itertools.pairwise(steps[i:]):
        depth += dis.stack_effect(step.opcode, step.arg, jump=False)
        if depth < 2:  # the container is used
            # `container[k] += x` swaps a copy of the container and the new value, which otherwise lies below the container
            return depth == _DEPTHS.get(step.opname) or (step.opname in _STORES and before.opname == "SWAP")
    return False
