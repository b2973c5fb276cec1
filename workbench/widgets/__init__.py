"""Compare wrappers, explore a wrapped model case by case, and read generated texts by risk, with or without notebook widgets."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .common.jobs import Job, Jobs
    from .comparison.comparison import Comparison
    from .explorer.explorer import Explorer
    from .tokens import TokenRisks

_HOMES = {
    "Comparison": "comparison.comparison",
    "Explorer": "explorer.explorer",
    "Job": "common.jobs",
    "Jobs": "common.jobs",
    "TokenRisks": "tokens",
}
__all__ = ["Comparison", "Explorer", "Job", "Jobs", "TokenRisks"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench.widgets' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
