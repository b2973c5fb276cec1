"""What a column of a data set is called, and where a data set is from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One column of a table: its name and its unit ("" where it has none or none is known)."""

    name: str
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Card:
    """Where a data set is from, what may be done with it, how to cite it, and what to beware of."""

    description: str
    source: str
    licence: str
    citation: str
    notes: tuple[str, ...] = ()
