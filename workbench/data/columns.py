"""Names and units of the columns of a data set, and its card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Column:
    """Column of a table: its name and its unit ("" if it has none or it is unknown)."""

    name: str
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name


def names_in(x: Any) -> list[str] | None:
    """Return the names of the columns of a frame; None for other inputs, and for names that are not texts or not unique."""
    names = list(getattr(x, "columns", ()))
    known = names and len(set(names)) == len(names) and all(isinstance(name, str) for name in names)
    return names if known else None


def name_in(y: Any) -> str | None:
    """Return the name of a series, or of the only column of a frame; None for other targets."""
    names = list(getattr(y, "columns", [getattr(y, "name", None)]))
    return names[0] if len(names) == 1 and isinstance(names[0], str) else None


@dataclass(frozen=True)
class Card:
    """Card of a data set: description, source, licence, citation, and notes with caveats."""

    description: str
    source: str
    licence: str
    citation: str
    notes: tuple[str, ...] = ()
