"""Locations of events in a call of a model: the line of the user's code, and the module that runs it."""

from __future__ import annotations

import linecache
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .bytecode import attributes_assigned, methods_of
from .source_lines import is_torch_layer, is_user_code, line_name


@dataclass(frozen=True)
class Location:
    """A line of the user's code and the module that runs it.

    Args:
        path: path of the module that runs the line; if no user code runs, of the innermost module.
        file: the file, "" if no user code runs.
        number: line number.
    """

    path: str
    file: str = ""
    number: int = 0

    @property
    def line(self) -> str:
        """See `workbench.introspect.source_lines.line_name`; "" if no user code runs."""
        return line_name(self.file, self.number) if self.file else ""

    @property
    def code(self) -> str:
        """The source of the line."""
        return linecache.getline(self.file, self.number).strip() if self.file else ""


NOWHERE = Location("")


def call_model(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the model; this frame marks where the model's frames begin."""
    return model(*args, **kwargs)


def _is_call_of_model(frame: types.FrameType) -> bool:
    """Whether a frame is that of `call_model`."""
    return frame.f_code is call_model.__code__


def model_frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """Yield the frames of the model's call, innermost first."""
    while frame is not None and not _is_call_of_model(frame):
        yield frame
        frame = frame.f_back


def _first_argument(frame: types.FrameType) -> Any:
    """The value of the first argument, which is `self` in a method."""
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names and frame.f_code.co_argcount else None


def locate_frame(frame: types.FrameType | None, paths: Mapping[int, str], number: int = 0) -> Location:
    """Return the location of a frame of the model's call.

    Args:
        frame: the innermost frame to consider.
        paths: id of a module -> its path.
        number: the line in the innermost frame, if the frame itself has moved on.
    """
    file, line, innermost_path = "", 0, None
    for each in model_frames(frame):
        if not file and is_user_code(each.f_code.co_filename):
            file, line = each.f_code.co_filename, number if number and each is frame else each.f_lineno
        path = paths.get(id(_first_argument(each)))
        if path is not None and file:
            return Location(path, file, line)
        innermost_path = path if innermost_path is None else innermost_path
    return Location("" if file or innermost_path is None else innermost_path, file, line)


def locate_error(error: BaseException, is_wrapped: Callable[[object], bool]) -> tuple[Location, bool]:
    """Return the innermost line of user code in a traceback, and whether one of torch's own layers raised below it.

    Args:
        error: an error raised inside `call_model`.
        is_wrapped: whether a module is wrapped; paths are those of the copy that runs inside it.
    """
    calls = list(traceback.walk_tb(error.__traceback__))
    # the traceback of a cause has no such frame, since the error was caught inside the call
    start = next((i for i, (frame, _) in enumerate(calls) if _is_call_of_model(frame)), 0)
    location, path, in_layer, paths = NOWHERE, "", False, dict[int, str]()
    for frame, line in calls[start:]:
        owner, file = _first_argument(frame), frame.f_code.co_filename
        if not paths and isinstance(owner, nn.Module) and not is_wrapped(owner):
            paths = {id(module): each for each, module in owner.named_modules()}
        path = paths.get(id(owner), path)
        if is_user_code(file):
            location, in_layer = Location(path, file, line), False
        in_layer = in_layer or is_torch_layer(file)
    return (location if location.file else Location(path)), in_layer


def user_methods(cls: type) -> Iterator[types.FunctionType]:
    """Yield the functions that the user wrote in a class and its bases."""
    return (function for _, function in methods_of(cls) if is_user_code(function.__code__.co_filename))


def first_assignment(cls: type, attribute: str) -> Location:
    """Return the first line in a class that assigns to an attribute."""
    for function in user_methods(cls):
        for name, line in attributes_assigned(function.__code__):
            if name == attribute:
                return Location("", function.__code__.co_filename, line)
    return NOWHERE
