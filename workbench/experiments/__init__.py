"""Experiments of many cells: each in a process of its own, results on disk after each, a killed run goes on.

`run_cells` runs a function over a list of arguments; `workbench bench` is that for the modules in `benchmarks/`. `grid` runs models x wrappers
x data x seeds; `workbench compare` is that on the command line. `backtest` makes forecasts of a series as if time went by; `novelty`,
`anomaly_likelihood` and `first_alarms` find anomalies in it likewise.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backtests import Backtest, backtest
    from .cells import run_cells
    from .streams import anomaly_likelihood, first_alarms, novelty
    from .sweep import grid

_HOMES = {
    "Backtest": "backtests",
    "anomaly_likelihood": "streams",
    "backtest": "backtests",
    "first_alarms": "streams",
    "grid": "sweep",
    "novelty": "streams",
    "run_cells": "cells",
}
__all__ = ["Backtest", "anomaly_likelihood", "backtest", "first_alarms", "grid", "novelty", "run_cells"]


def __getattr__(name: str) -> Any:
    """Loaded when first asked for: a worker process sets its number of threads before anything heavy is imported."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
