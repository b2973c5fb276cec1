"""Index of a folder of reports: index.html for people, index.json for programs, index.csv for statistics."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import require
from .entries import Entry, read_entry
from .headline import first_screen
from .plots import grid_plot
from .run import CLOCK, ENDED_BADLY, Run, stamp_of
from .tables import IndexTable, runs_table, summary_table, varied
from .values import as_text, to_json

SCHEMA = 1
_TEMPLATES = Path(__file__).parent / "templates"
_MAX_THUMBNAILS = 120  # per section
_PLOT_INTERVAL = 10  # plots are redrawn after at least this many times the time that they took, unless asked for


class Index:
    """Index of all runs in a folder.

    Args:
        folder: folder of the executed notebooks; existing ones are read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._plots: dict[str, tuple[str, str] | None] = {}
        self._next_plot = 0.0
        for path in sorted(folder.glob("*.ipynb")):
            if (run := stamp_of(path)) is not None:
                run.output = str(path)
                self.add(run)

    def add(self, run: Run) -> None:
        """Add a run, or update it."""
        existing = self.entries.get(run.name)
        if existing is None or existing.run != run:
            self.entries[run.name] = read_entry(run)

    def first(self, names: Iterable[str]) -> None:
        """Move these runs to the front, in this order."""
        self.entries = {name: self.entries[name] for name in dict.fromkeys([*names, *self.entries])}

    def write(self, plots: bool = False) -> None:
        """Replace the three files.

        Args:
            plots: whether to redraw the plots in any case; otherwise they are redrawn only from time to time.
        """
        runs = [self._as_json(entry) for entry in self.entries.values()]
        content = {"schema": SCHEMA, "written": time.strftime(CLOCK), "runs": runs}
        atomic.write(self.folder / "index.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
        atomic.write(self.folder / "index.csv", self._csv())
        atomic.write(self.folder / "index.html", self._html(plots))

    def _as_json(self, entry: Entry) -> dict[str, Any]:
        run = entry.run
        stamp = {name: value for name, value in asdict(run).items() if name not in ("notebook", "output", "cached")}
        has_started = run.status != "waiting"
        return {
            **{name: to_json(value, name) for name, value in stamp.items()},
            "notebook": Path(run.notebook).name,
            "executed": Path(run.output).name if has_started else "",
            "page": entry.page if has_started else "",
            **entry.records,
        }

    def _csv(self) -> str:
        """Return CSV with one row per recorded number of a run and per check (1 if it holds, else 0)."""
        parameters = list(dict.fromkeys(name for entry in self.entries.values() for name in entry.run.parameters))
        buffer = io.StringIO(newline="")
        writer = csv.writer(buffer, lineterminator="\n")
        fixed = ("notebook", "run", "status", "metric", "value")
        heads = [f"parameter {name}" if name in fixed else name for name in parameters]
        writer.writerow([*fixed[:3], *heads, *fixed[3:]])
        for entry in self.entries.values():
            run = entry.run
            values = [run.parameters.get(name, "") for name in parameters]
            cells = [json.dumps(value) if isinstance(value, list | dict) else value for value in values]
            measured = {"seconds": run.seconds, "peak_memory_MiB": run.peak_memory} if run.status == "ok" else {}
            checks = {f"check: {claim}": int(check.holds) for claim, check in entry.checks.items()}
            for metric, value in {**entry.scalars, **checks, **measured}.items():
                if value is not None:
                    writer.writerow([Path(run.notebook).stem, run.name, run.status, *cells, metric, value])
        return buffer.getvalue()

    def _html(self, plots: bool) -> str:
        jinja2 = require("jinja2")
        groups: dict[str, list[Entry]] = {}
        for entry in self.entries.values():
            groups.setdefault(Path(entry.run.notebook).name, []).append(entry)
        start = time.monotonic()
        if plots or start >= self._next_plot:
            self._plots = {name: _plot(entries) for name, entries in groups.items()}
            self._next_plot = time.monotonic() + _PLOT_INTERVAL * (time.monotonic() - start)
        script = (_TEMPLATES / "sort.js").read_text(encoding="utf-8")
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader([_TEMPLATES, _TEMPLATES / "workbench"]), autoescape=True, trim_blocks=True
        )
        return environment.get_template("grid.html.j2").render(
            sections=[self._section(name, entries) for name, entries in groups.items()],
            script=script,
            digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            written=time.strftime(CLOCK).replace("T", " "),
        )

    def _section(self, name: str, entries: list[Entry]) -> dict[str, Any]:
        counts: dict[str, int] = {}
        for entry in entries:
            counts[entry.run.status] = counts.get(entry.run.status, 0) + 1
        succeeded = [entry for entry in entries if entry.run.status == "ok"]
        figures = list(dict.fromkeys(name for entry in entries for name in entry.thumbnails))
        shown = figures[: max(1, _MAX_THUMBNAILS // max(1, len(entries)))]
        differing = varied([entry.run.environment for entry in entries if entry.run.environment])
        example = next((entry.run for entry in entries if entry.run.environment), entries[0].run)
        tables: list[IndexTable | None] = [summary_table(succeeded), runs_table(entries)]
        return {
            "title": next((entry.title for entry in entries if entry.title), Path(name).stem),
            "notebook": name,
            "answers": [
                first_screen(comparison, entry.run.name if len(entries) > 1 else "")
                for entry in succeeded
                for comparison in entry.comparisons.values()
            ],
            "counts": counts,
            "open": any(status in counts for status in ("waiting", "interrupted")),
            "bad": sum(counts.get(status, 0) for status in ENDED_BADLY),
            "doubted": sum(bool(entry.failed_checks) for entry in entries),
            "summary": tables[0],
            "runs": tables[1],
            "plot": self._plots.get(name),
            "figures": {
                name: [(entry, entry.thumbnails[name]) for entry in entries if name in entry.thumbnails]
                for name in shown
            },
            "hidden_figures": len(figures) - len(shown),
            "parameters": {
                name: as_text(value)
                for name, value in entries[0].run.parameters.items()
                if name not in varied([entry.run.parameters for entry in entries])
            },
            "environment": {name: value for name, value in example.environment.items() if name not in differing},
            "data": {name: value for entry in succeeded for name, value in entry.run.data.items() if "(" not in name},
        }


def _plot(entries: list[Entry]) -> tuple[str, str] | None:
    succeeded = [(entry.run.parameters, entry.scalars) for entry in entries if entry.run.status == "ok"]
    finite = [
        (parameters, {name: v for name, v in scalars.items() if math.isfinite(v)}) for parameters, scalars in succeeded
    ]
    return grid_plot(finite)
