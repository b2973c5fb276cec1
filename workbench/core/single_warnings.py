"""Warnings that a wrapped object issues once, not at every call."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..errors import WorkbenchWarning
from ..introspect.source_lines import user_stacklevel


def warn_once(wrapped: Any, key: str, message: str) -> None:
    """Issue a warning once per wrapped object and key, attributed to the user's line."""
    if key not in wrapped._workbench.warned:
        wrapped._workbench.warned.add(key)
        # Dynamo does not follow frames
        level = 5 if torch.compiler.is_dynamo_compiling() else user_stacklevel()
        warnings.warn(message, WorkbenchWarning, stacklevel=level)


__all__ = ["warn_once"]
