"""Source files and lines in messages: whose they are, and what they are called."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import traceback
from types import TracebackType

import numpy as np
import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_ZOO = os.path.join(_PACKAGE, "testing", "")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LAYERS = tuple(os.path.join(_TORCH, "nn", folder, "") for folder in ("modules", "utils"))
_NEVER_USERS = (_PACKAGE, _TORCH, os.path.dirname(os.path.abspath(np.__file__)) + os.sep)
_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = (_LIBRARY, *(os.path.join(sysconfig.get_path(kind), "") for kind in ("purelib", "platlib")))
_SITES = ("site-packages", "dist-packages")
_LONGEST = 160


# There are two answers to "is this the user's file?", since there are two questions: which line a message points at (a model of timm is one
# that the user brought, and its line helps), and where to look for models among global variables (an installed package holds none, and code
# that was compiled from a string, as in tests and notebooks, may).
@functools.cache
def is_user_code(filename: str) -> bool:
    """Whether messages may point at a file: not of torch, numpy, Python's library or this package, but for its zoo of models.

    Other installed packages count as the user's code, see `is_installed` for those.
    """
    if filename.startswith("<"):
        return filename.startswith(("<ipython", "<stdin", "<python-input"))
    if filename.startswith(_ZOO):
        return True
    if filename.startswith(_LIBRARY) and not any(folder in filename for folder in _SITES):
        return False
    return not filename.startswith(_NEVER_USERS)


@functools.cache
def is_installed(filename: str | None) -> bool:
    """Whether a file is part of Python or of any installed package, or no file of Python's at all: its globals hold no models of the user."""
    return filename is None or filename.startswith(_INSTALLED) or "-packages" in filename


@functools.cache
def is_torch_layer(filename: str) -> bool:
    """Whether code is that of torch's own layers, which the user can't write in another way."""
    return filename.startswith(_LAYERS) and not filename.endswith(("module.py", "container.py", "parametrize.py"))


def is_user_class(cls: type) -> bool:
    """Whether a class was written in user code."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls.__module__ != "builtins" and (file is None or is_user_code(file))


def line_name(file: str, number: int) -> str:
    """What a line of code is called in messages.

    Returns:
        "file.py:12", the file as seen from the working directory, of packages from theirs; "cell:12" in a notebook.

    Example:
        >>> line_name("/lib/python3.11/site-packages/timm/layers/drop.py", 12)
        'timm/layers/drop.py:12'
    """
    if "ipykernel_" in os.path.dirname(file) or file.startswith("<ipython"):
        return f"cell:{number}"
    for folder in _SITES:
        if folder in file:
            return f"{file.partition(folder)[2][1:]}:{number}"
    near = os.path.relpath(file) if os.path.isabs(file) and _same_drive(file) else file
    return f"{file if near.startswith(os.pardir) else near}:{number}"


def user_stacklevel() -> int:
    """The `stacklevel` by which a warning of the function that calls this points at the innermost line of the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_user_code(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def users_line(raised: TracebackType | None) -> str:
    """The innermost line of the user's in a traceback, by `line_name`; "" if there is none."""
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(raised)]
    return next((line_name(*line) for line in reversed(lines) if is_user_code(line[0])), "")


def first_sentence(message: str) -> str:
    """The first sentence of an error's message, in one line and cut where a word ends: what follows is often advice for others.

    Example:
        >>> first_sentence("This is not supported yet. Please file an issue")
        'This is not supported yet'
    """
    line = message.strip().partition("\n")[0]
    sentence = re.split(r"(?<!\be\.g)(?<!\bi\.e)\. (?=[A-Z])", line)[0]
    if len(sentence) <= _LONGEST:
        return sentence.removesuffix(".")
    head = sentence[: _LONGEST - 3]
    return f"{head.rpartition(' ')[0] or head[:-1]} ..."


def _same_drive(file: str) -> bool:
    return os.path.splitdrive(file)[0] == os.path.splitdrive(os.getcwd())[0]
