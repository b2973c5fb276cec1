"""Where in the user's code something happens: file, line and module of a frame, and lines by bytecode."""

from __future__ import annotations

import dis
import functools
import linecache
import os
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.wrapped import is_wrapped
from .source_lines import is_users, line_name

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LAYERS = tuple(os.path.join(_TORCH, "nn", folder, "") for folder in ("modules", "utils"))


@functools.cache
def is_layer(filename: str) -> bool:
    """Whether code is that of torch's own layers, which the user can't write in another way."""
    return filename.startswith(_LAYERS) and not filename.endswith(("module.py", "container.py", "parametrize.py"))


def is_users_class(cls: type) -> bool:
    """Whether a class was written in the user's code."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls.__module__ != "builtins" and (file is None or is_users(file))


@dataclass(frozen=True)
class Place:
    """A line of the user's code and the module that runs it.

    Args:
        path: of the module whose code it is; where no code of the user's runs, of the innermost module.
        file: the file, "" where no code of the user's runs.
        number: the line in it.
    """

    path: str
    file: str = ""
    number: int = 0

    @property
    def line(self) -> str:
        """See `workbench.introspect.source_lines.line_name`; "" where no code of the user's runs."""
        return line_name(self.file, self.number) if self.file else ""

    @property
    def code(self) -> str:
        """The source of the line."""
        return linecache.getline(self.file, self.number).strip() if self.file else ""


NOWHERE = Place("")


def called(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the model; frames outside of this one are not the model's."""
    return model(*args, **kwargs)


def frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """The frames of the model's call, innermost first."""
    while frame is not None and frame.f_code is not called.__code__:
        yield frame
        frame = frame.f_back


def first_argument(frame: types.FrameType) -> Any:
    """What a method calls self."""
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names and frame.f_code.co_argcount else None


def place_of(frame: types.FrameType | None, paths: Mapping[int, str], number: int = 0) -> Place:
    """Where a frame of the model's call stands.

    Args:
        frame: the innermost frame to look at.
        paths: id of a module -> its path.
        number: the line of the innermost frame, if it has moved on.
    """
    file, line, torchs = "", 0, None
    for each in frames(frame):
        if not file and is_users(each.f_code.co_filename):
            file, line = each.f_code.co_filename, number if number and each is frame else each.f_lineno
        path = paths.get(id(first_argument(each)))
        if path is not None and file:
            return Place(path, file, line)
        torchs = path if torchs is None else torchs
    return Place("" if file or torchs is None else torchs, file, line)


def place_of_error(error: BaseException) -> tuple[Place, bool]:
    """The innermost line of the user's in a traceback, and whether a layer of torch's own raised below it."""
    calls = list(traceback.walk_tb(error.__traceback__))
    starts = [i for i, (frame, _) in enumerate(calls) if frame.f_code is called.__code__]
    place, path, layer, paths = NOWHERE, "", False, dict[int, str]()
    for frame, line in calls[starts[0] if starts else 0 :]:  # a cause was caught inside of the call
        owner, file = first_argument(frame), frame.f_code.co_filename
        if not paths and isinstance(owner, nn.Module) and not is_wrapped(owner):
            paths = {id(module): each for each, module in owner.named_modules()}
        path = paths.get(id(owner), path)
        if is_users(file):
            place, layer = Place(path, file, line), False
        layer = layer or is_layer(file)
    return (place if place.file else Place(path)), layer


def functions_of(cls: type) -> Iterator[types.FunctionType]:
    """The functions that the user wrote in a class and its bases."""
    for base in cls.__mro__:
        for item in vars(base).values():
            function = getattr(item, "__func__", getattr(item, "fget", item))
            function = getattr(function, "__wrapped__", function)
            if isinstance(function, types.FunctionType) and is_users(function.__code__.co_filename):
                yield function


@functools.cache
def stores(code: types.CodeType, operation: str) -> tuple[tuple[str, int], ...]:
    """(name, line) of what code stores by STORE_ATTR or STORE_GLOBAL, in nested functions, too."""
    starts = dict(dis.findlinestarts(code))
    line, found = code.co_firstlineno, []
    for step in dis.get_instructions(code):
        line = starts.get(step.offset) or line
        if step.opname == operation:
            found.append((str(step.argval), line))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += stores(constant, operation)
    return tuple(found)


@functools.cache
def names(code: types.CodeType) -> frozenset[str]:
    """Global names and attributes that code mentions, in nested functions, too."""
    nested = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*(names(each) for each in nested))


def assigned(cls: type, attribute: str) -> Place:
    """The first line of a class that assigns to an attribute."""
    for function in functions_of(cls):
        for name, line in stores(function.__code__, "STORE_ATTR"):
            if name == attribute:
                return Place("", function.__code__.co_filename, line)
    return NOWHERE
