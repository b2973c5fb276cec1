"""Fingerprints of users' functions, by which a checkpoint tells two of the same name apart."""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Iterable
from typing import Any

NUMBERS = bool | int | float | complex | None


def fingerprint(functions: Iterable[Any]) -> str:
    """Return a text that is the same in every process, and differs if the code of one of the functions does.

    It covers byte code, constants, defaults, and numbers and functions in closures; lines and names of files do not count, nor do functions of
    packages, whose updates must not end a training. It begins with the version of Python, on which byte code depends.

    Example:
        >>> fingerprint([lambda x: x + 1]) == fingerprint([lambda x: x + 1]), fingerprint([lambda x: x + 1]) == fingerprint([lambda x: x + 2])
        (True, False)
    """
    total = hashlib.sha256()
    for function in functions:
        total.update(repr(_parts(function, ())).encode("utf-8", "backslashreplace"))
    return f"Python {sys.version_info[0]}.{sys.version_info[1]} {total.hexdigest()[:16]}"


def comparable(first: str, second: str) -> bool:
    """Return whether two fingerprints are of the same version of Python."""
    return first.split()[:2] == second.split()[:2]


def _parts(value: Any, above: tuple[Any, ...]) -> Any:
    """Return what makes up a function, as nested tuples; `above` are the functions whose closures led here."""
    if isinstance(value, functools.partial):
        return _parts(value.func, above)  # whose arguments are in its description
    if isinstance(value, types.MethodType):
        return _parts(value.__func__, above)
    if not isinstance(value, types.FunctionType) or value in above or _is_of_package(value):
        return None
    names = value.__code__.co_freevars
    closure = tuple(
        (name, repr(held) if isinstance(held, NUMBERS) else _parts(held, (*above, value)))
        for name, held in zip(names, map(_held, value.__closure__ or ()), strict=True)
        if name not in _assigned(value.__code__)
    )
    defaults = *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
    shown = tuple(repr(v) for v in defaults if isinstance(v, NUMBERS | str))
    return _code(value.__code__, value.__doc__), shown, closure


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_of_package(function: types.FunctionType) -> bool:
    file = function.__code__.co_filename.replace("\\", "/")
    return str(function.__module__).partition(".")[0] in ("torch", "workbench") or "-packages/" in file


def _code(code: types.CodeType, doc: str | None = None) -> tuple[Any, ...]:
    constants = tuple(_constant(constant) for constant in code.co_consts if constant is None or constant != doc)
    return code.co_code, constants, code.co_names


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _code(value)
    if isinstance(value, frozenset):  # whose order differs between processes
        return sorted(map(repr, value))
    return tuple(map(_constant, value)) if isinstance(value, tuple) else repr(value)


def _assigned(code: types.CodeType) -> set[str]:
    """Return the names of the enclosing function that a function assigns, such as counters: they change while it is used."""
    import dis

    return {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "STORE_DEREF"}


__all__ = ["comparable", "fingerprint"]
