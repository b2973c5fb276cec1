"""Experiments made of many cells. A cell is one call of a function with one set of keyword arguments.

Each cell runs in a worker process and its results are saved when it ends, so that a killed run can be resumed. `run_cells` runs a function over
a list of cells; `workbench bench` does so for the modules in `benchmarks/`. `grid` runs models x wrappers x data x seeds; `workbench compare` is
its command line. `backtest` makes rolling forecasts of a series, each from earlier values only; `novelty`, `anomaly_likelihood` and
`first_alarms` detect anomalies in a series in the same causal way.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backtests import Backtest, backtest
    from .cells import run_cells
    from .streams import anomaly_likelihood, first_alarms, novelty
    from .sweep import grid

_MODULES = {
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
    """Import a name on first use: a worker process must set its number of threads before it imports anything heavy."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
