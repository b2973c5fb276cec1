"""Checks of your own wrapper on a zoo of awkward models, as the built-in wrappers are checked."""

from __future__ import annotations

from .check import check_wrapper
from .report import Outcome, Report
from .zoo import CASES, TAGS, Case, cases

__all__ = ["CASES", "TAGS", "Case", "Outcome", "Report", "cases", "check_wrapper"]
