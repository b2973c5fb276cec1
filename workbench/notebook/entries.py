"""Entries of an index: runs with their records."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..experiments.paired import Comparison
from .pictures import thumbnail
from .record import Check, failed_checks, read_records
from .report import title
from .run import Run, read
from .values import to_json


@dataclass
class Entry:
    """A run, and its records for the index."""

    run: Run
    title: str
    scalars: dict[str, float] = field(default_factory=dict)
    records: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, Check] = field(default_factory=dict)
    thumbnails: dict[str, str] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)

    @property
    def page(self) -> str:
        """File name of the run's page, "" if there is none."""
        page = Path(self.run.output).with_suffix(".html")
        return page.name if page.is_file() else ""

    @property
    def failed_checks(self) -> list[str]:
        """Recorded claims that do not hold, with the numbers behind them."""
        return failed_checks(self.checks)


def read_entry(run: Run) -> Entry:
    """Read title, records and thumbnails from the executed notebook of a run."""
    if run.status == "waiting":
        return Entry(run, "")
    nb = read(Path(run.output)) if Path(run.output).is_file() else None
    entry = Entry(run, "" if nb is None else title(nb) or "")
    if nb is None:
        return entry
    try:
        recorded = read_records(nb)
    except ValueError as error:  # a name was recorded twice, though the run itself succeeded
        entry.run.error = entry.run.error or str(error)
        return entry
    entry.scalars = {
        name: value
        for name, value in recorded.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    entry.records = {
        "records": {name: to_json(value, name) for name, value in recorded.items()},
        "tables": {name: to_json(table, name) for name, table in recorded.tables.items()},
        "checks": {claim: to_json(check._asdict(), claim) for claim, check in recorded.checks.items()},
        "figures": list(recorded.figures),
    }
    entry.checks, entry.comparisons = recorded.checks, recorded.comparisons
    for name, png in recorded.figures.items():
        with contextlib.suppress(Exception):  # a damaged picture only lacks a thumbnail
            entry.thumbnails[name] = thumbnail(png)
    return entry
