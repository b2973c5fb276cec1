"""Compare wrappers and look into a wrapped model, with widgets in a notebook or without."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comparison import Comparison
    from .explorer import Explorer
    from .jobs import Job, Jobs

_HOMES = {"Comparison": "comparison", "Explorer": "explorer", "Job": "jobs", "Jobs": "jobs"}
__all__ = ["Comparison", "Explorer", "Job", "Jobs"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench.widgets' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
