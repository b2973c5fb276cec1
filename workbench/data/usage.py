"""Record of the data sets that a process has used, for the records of runs."""

from __future__ import annotations

AVAILABLE = "names(available=True)"  # recorded when a notebook's result depends on which data sets are available

_names: set[str] = set()


def note(name: str) -> None:
    """Record that this process has used a data set, or `AVAILABLE`."""
    _names.add(name)


def used_names() -> list[str]:
    """Return all recorded names, sorted."""
    return sorted(_names)
