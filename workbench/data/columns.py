"""Names and units of the columns of a data set, and its card."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """Column of a table: its name and its unit ("" if it has none or it is unknown)."""

    name: str
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Card:
    """Card of a data set: description, source, licence, citation, and notes with caveats."""

    description: str
    source: str
    licence: str
    citation: str
    notes: tuple[str, ...] = ()
