"""Access to members of `Wrapped` that the user's model shadows by an attribute or method of the same name."""

from __future__ import annotations

import inspect
from typing import Any

from workbench.core.wrapped import Wrapped


def unshadowed(wrapped: Any, name: str) -> Any:
    """Return the method or property of `Wrapped` of this name, bound to a wrapped model."""
    return inspect.getattr_static(Wrapped, name).__get__(wrapped)
