"""Notebooks as experiments: record results, run notebooks with parameters, and render self-contained reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..deprecation import deprecated_names
from ..experiments.environment import environment
from .comparison import record_comparison
from .diff import compare_reports
from .grid import run_grid
from .record import Records, read_records, record, record_check, record_figure, record_table
from .report import render
from .run import Run, read_run, run_notebook

__all__ = [
    "Records",
    "Run",
    "compare_reports",
    "environment",
    "read_records",
    "read_run",
    "record",
    "record_check",
    "record_comparison",
    "record_figure",
    "record_table",
    "render",
    "run_grid",
    "run_notebook",
]

if not TYPE_CHECKING:
    __getattr__ = deprecated_names(__name__, {"run_key": (f"{__name__}.run:run_key", "the attribute key of a Run")})
