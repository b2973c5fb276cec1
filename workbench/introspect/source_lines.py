"""Parts of messages: source files and lines, whether they are user code and how they are named, and lists of names."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from types import TracebackType

import numpy as np
import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_ZOO = os.path.join(_PACKAGE, "testing", "")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LAYERS = tuple(os.path.join(_TORCH, "nn", folder, "") for folder in ("modules", "utils"))
_NOT_USER_CODE = (_PACKAGE, _TORCH, os.path.dirname(os.path.abspath(np.__file__)) + os.sep)
_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = (_LIBRARY, *(os.path.join(sysconfig.get_path(kind), "") for kind in ("purelib", "platlib")))
_SITES = ("site-packages", "dist-packages")
_MAX_LENGTH = 160  # characters of a message


# "Is this the user's file?" is two questions. `is_user_code` answers which line a message points at: a model of timm was chosen by the user,
# and its line helps. `is_installed` answers where to look for models among global variables: an installed package holds none of the user's,
# but code that was compiled from a string, as in tests and notebooks, may.
@functools.cache
def is_user_code(filename: str) -> bool:
    """Return whether messages may point at a file: not one of torch, numpy, Python's library or this package, except its zoo of models.

    Other installed packages count as user code here; see `is_installed`.
    """
    if filename.startswith("<"):
        return filename.startswith(("<ipython", "<stdin", "<python-input"))
    if filename.startswith(_ZOO):
        return True
    if filename.startswith(_LIBRARY) and not any(folder in filename for folder in _SITES):
        return False
    return not filename.startswith(_NOT_USER_CODE)


@functools.cache
def is_installed(filename: str | None) -> bool:
    """Return whether a file belongs to Python or an installed package, or is no Python file, so that its globals hold no user's models."""
    return filename is None or filename.startswith(_INSTALLED) or "-packages" in filename


@functools.cache
def is_torch_layer(filename: str) -> bool:
    """Return whether a file is one of torch's own layers, which the user can't rewrite."""
    return filename.startswith(_LAYERS) and not filename.endswith(("module.py", "container.py", "parametrize.py"))


def is_user_class(cls: type) -> bool:
    """Return whether a class was written in user code."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls.__module__ != "builtins" and (file is None or is_user_code(file))


def line_name(file: str, number: int) -> str:
    """Return the name of a line of code in messages.

    Returns:
        "file.py:12", with the path relative to the working directory, or for packages to `site-packages`; "cell:12" in a notebook.

    Example:
        >>> line_name("/lib/python3.11/site-packages/timm/layers/drop.py", 12)
        'timm/layers/drop.py:12'
    """
    if "ipykernel_" in os.path.dirname(file) or file.startswith("<ipython"):
        return f"cell:{number}"
    for folder in _SITES:
        if folder in file:
            return f"{file.partition(folder)[2][1:]}:{number}"
    relative = os.path.relpath(file) if os.path.isabs(file) and _same_drive(file) else file
    return f"{file if relative.startswith(os.pardir) else relative}:{number}"


def user_stacklevel() -> int:
    """Return the `stacklevel` with which a warning of the calling function points at the innermost line of user code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_user_code(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def users_line(raised: TracebackType | None) -> str:
    """Return the innermost line of user code in a traceback, as `line_name` gives it; "" if there is none."""
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(raised)]
    return next((line_name(*line) for line in reversed(lines) if is_user_code(line[0])), "")


def first_sentence(message: str) -> str:
    """Return the first sentence of an error's message, in one line and cut at the end of a word; the rest is often advice for others.

    Example:
        >>> first_sentence("This is not supported yet. Please file an issue")
        'This is not supported yet'
    """
    line = message.strip().partition("\n")[0]
    sentence = re.split(r"(?<!\be\.g)(?<!\bi\.e)\. (?=[A-Z])", line)[0]
    if len(sentence) <= _MAX_LENGTH:
        return sentence.removesuffix(".")
    head = sentence[: _MAX_LENGTH - 3]
    return f"{head.rpartition(' ')[0] or head[:-1]} ..."


def some_of(names: Iterable[object], most: int = 3) -> str:
    """List the first of some names, for messages that have no room for all.

    Example:
        >>> some_of(["a", "b", "c", "d"])
        'a, b, c, ...'
    """
    words = list(map(str, names))
    return ", ".join([*words[:most], *["..."] * (len(words) > most)])


def _same_drive(file: str) -> bool:
    return os.path.splitdrive(file)[0] == os.path.splitdrive(os.getcwd())[0]
