"""What can go wrong, by name; every message says what was found, where, and what to do about it."""

from __future__ import annotations


class WorkbenchWarning(UserWarning):
    """Something works, but not as the caller may expect; told once for each object."""


class NotFittedError(RuntimeError):
    """Risk was asked for before the method had seen any training data."""
