"""Lines of code in messages: whose they are, what they are called, and how much of an error's message is said beside them."""

from __future__ import annotations

import functools
import os
import re
import sysconfig
import traceback
from types import TracebackType

import numpy as np
import torch

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_ZOO = os.path.join(_OURS, "testing", "")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_FOREIGN = (_OURS, _TORCH, os.path.dirname(os.path.abspath(np.__file__)) + os.sep)
_LONGEST = 160


@functools.cache
def is_users(filename: str) -> bool:
    """Whether code is the user's: not of torch, numpy, Python's library or this package, but for its zoo of models."""
    if filename.startswith("<"):
        return filename.startswith(("<ipython", "<stdin", "<python-input"))
    if filename.startswith(_ZOO):
        return True
    if filename.startswith(_LIBRARY):
        return any(folder in filename for folder in ("site-packages", "dist-packages")) and not filename.startswith(
            _FOREIGN
        )
    return not filename.startswith(_FOREIGN)


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
    for folder in ("site-packages", "dist-packages"):
        if folder in file:
            return f"{file.partition(folder)[2][1:]}:{number}"
    near = os.path.relpath(file) if os.path.isabs(file) and _same_drive(file) else file
    return f"{file if near.startswith(os.pardir) else near}:{number}"


def users_line(raised: TracebackType | None) -> str:
    """The innermost line of the user's in a traceback, by `line_name`; "" if there is none."""
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(raised)]
    return next((line_name(*line) for line in reversed(lines) if is_users(line[0])), "")


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
