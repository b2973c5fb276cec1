"""Which data sets a process has asked for, so that a record of a run can name them."""

from __future__ import annotations

AVAILABLE = "names(available=True)"  # what a notebook decides by, when it takes "what is there"

_asked_for: set[str] = set()


def note(name: str) -> None:
    """Remember that this process has asked for a data set, or for `AVAILABLE`."""
    _asked_for.add(name)


def asked_for() -> list[str]:
    """All that was noted, in order of the alphabet."""
    return sorted(_asked_for)
