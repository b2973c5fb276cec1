"""Experiments of many cells: each in a process of its own, results on disk after each, a killed run goes on.

`run_cells` runs a function over a list of arguments; `workbench bench` is that for the modules in `benchmarks/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cells import run_cells

__all__ = ["run_cells"]


def __getattr__(name: str) -> Any:
    """Loaded when first asked for: a worker process sets its number of threads before anything heavy is imported."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .cells import run_cells

    return run_cells


def __dir__() -> list[str]:
    return __all__
