"""Notebooks as experiments: record results, run with parameters, render one-file reports."""

from __future__ import annotations

from ..experiments.environment import environment
from .diff import compare_reports
from .grid import run_grid
from .record import Records, read_records, record, record_check, record_figure, record_table
from .report import render
from .run import Run, read_run, run_key, run_notebook

__all__ = [
    "Records",
    "Run",
    "compare_reports",
    "environment",
    "read_records",
    "read_run",
    "record",
    "record_check",
    "record_figure",
    "record_table",
    "render",
    "run_grid",
    "run_key",
    "run_notebook",
]
