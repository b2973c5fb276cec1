"""Keep the widgets of a comparison up to date with its findings."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

from ..common.jobs import Job
from .controls import Controls
from .findings import Findings
from .repeats import in_words, over
from .trials import Trained


class Board:
    """Keeps the widgets of a comparison up to date.

    Args:
        controls: widgets.
        findings: findings that the widgets show.
        save: called when the content may have changed and nothing is training, to update the saved output.
        draw_matrix: returns the picture of all models as HTML; called only while the picture is open.

    Attributes:
        displayed: whether the widgets are displayed; pictures are drawn only then.
    """

    def __init__(
        self, controls: Controls, findings: Findings, save: Callable[[], None], draw_matrix: Callable[[], str]
    ) -> None:
        self._save, self._draw_matrix = save, draw_matrix
        self._matrix_runs: list[str] | None = None
        self._drawn: dict[str, tuple[Any, ...]] = {}  # what each panel depended on when it was drawn
        controls.matrix_fold.observe(lambda _: self.show_matrix(), "selected_index")
        self.controls, self.findings, self.displayed = controls, findings, False
        self._errors: dict[str, tuple[str, str]] = {}

    def live(self, name: str, picture: str) -> None:
        """Show a live picture of a training."""
        row = self.controls.rows[name]
        row.panel.value, row.panel.layout.display = picture, None

    def show_panel(self, name: str) -> None:
        """Draw the panel of a model, if the widgets are displayed."""
        row, kept = self.controls.rows.get(name), self.findings.trained.get(name)
        if row is None or not self.displayed:
            return
        self._drawn[name] = self._panel_key(kept)
        if kept is None or kept.answers is None:
            row.panel.value, row.panel.layout.display = "", "none"
            return
        try:
            row.panel.value = self.findings.panel(kept)
        except Exception as error:  # a picture that fails must not hide the trained model
            row.panel.value = f"<h4>{html.escape(name)}</h4><p>no picture: {html.escape(str(error))}</p>"
        row.panel.layout.display = None

    def _panel_key(self, kept: Trained | None) -> tuple[Any, ...]:
        """Return what the panel of a run depends on; it is drawn again when this changes."""
        if kept is None:
            return ("",)
        return kept.id, over(self.findings.places), sorted(self.findings.scales.items())

    def show_matrix(self) -> None:
        """Draw the matrix of all models, if it is open and the models have changed."""
        c, shown = self.controls, [kept.id for kept in self.findings.present]
        c.matrix_fold.layout.display = None if self.findings.runs else "none"
        if c.matrix_fold.selected_index is None or self._matrix_runs == shown or self.findings.running:
            return
        self._matrix_runs = shown
        c.matrix.value = "<p>drawing …</p>"
        c.matrix.value = self._draw_matrix()

    def refresh(self) -> None:
        """Update buttons, progress, status, table, errors, and outdated panels."""
        c, batch = self.controls, self.findings.jobs
        running = next((job for job in batch if job.status == "running"), None)
        busy = any(not job.ended for job in batch)
        c.train.disabled = busy
        c.stop.disabled = not busy or any(job.cancelled for job in batch)
        if batch:
            c.bar.value = sum(1.0 if job.ended else job.fraction for job in batch) / len(batch)
        if busy:
            c.bar.bar_style = "info"
        # before the status, which must not announce results that are not shown yet
        if not busy or any(job.ended for job in batch):
            text = self.findings.table()
            if c.metrics.value != text:
                c.metrics.value = text
        if running is not None and not running.cancelled:
            place = f" ({batch.index(running) + 1} of {len(batch)})" if len(batch) > 1 else ""
            c.set_status(f"<b>{html.escape(running.name)}</b>{place}: {html.escape(running.text)}")
        elif batch and not busy and self.findings.unchanged:
            self._report_end(batch)
        elif not busy:
            self._announce()
        self._show_errors()
        self._list_runs(busy)
        differences, trained = self.findings.differences, self.findings.trained
        for name in list(c.rows) if self.displayed and not busy else ():
            if name in trained and self._drawn.get(name) != self._panel_key(trained[name]):
                self.show_panel(name)  # another run represents it now
        for name, row in list(c.rows.items()):
            (row.panel.add_class if name in differences else row.panel.remove_class)("wb-outdated")
        self.show_matrix()
        if not busy and self.displayed:
            self._save()

    def _list_runs(self, busy: bool) -> None:
        c, runs = self.controls, list(self.findings.runs)
        options = [
            (
                f"#{run.number} {run.name}, split {run.split}, seed {run.training.seed}, {run.began[:16].replace('T', ' ')} UTC",
                run.number,
            )
            for run in runs
        ]
        if c.pick_run.options != tuple(options):
            before, numbers = c.pick_run.value, [run.number for run in runs]
            c.pick_run.options = options
            c.pick_run.value = before if before in numbers else numbers[-1] if numbers else None
        c.delete.disabled = busy or not runs
        c.undo.disabled = busy or not self.findings.deleted
        c.runs.layout.display = None if runs or self.findings.deleted else "none"

    def _announce(self) -> None:
        """Say in the status what Train would do, and reset the progress bar."""
        c = self.controls
        present, places = {kept.name for kept in self.findings.present}, self.findings.places
        missing = [row.name for row in c.rows.values() if row.tick.value and row.name not in present]
        c.bar.value, c.bar.bar_style = 0.0, ""
        on = f" on {in_words(places)}" if len(places) > 1 else ""
        models = f"{len(missing)} model{'s' if len(missing) > 1 else ''}{on}: {html.escape(', '.join(missing))}"
        c.set_status(
            f"Train starts {models}." if missing else "All ticked models are already trained with these settings."
        )

    def _report_end(self, batch: list[Job]) -> None:
        failed = [job.name for job in batch if job.status == "failed"]
        stopped = [job.name for job in batch if job.status == "stopped"]
        done = sum(job.status == "done" for job in batch)
        seconds = sum(job.seconds for job in batch)
        head = "Stopped" if stopped else "Failed" if failed and not done else "Done"
        words = [f"<b>{head}</b>: {done} of {len(batch)} trained in {seconds:.1f} s"]
        new = [run for run in self.findings.runs if stopped and run.id not in self.findings.before]
        partly = next((run for run in reversed(new) if run.status.startswith("stopped")), None)
        if partly is not None:
            words.append(f"{html.escape(partly.name)} {partly.status} and can be used")
        elif stopped and not done:
            words.append("nothing was trained before Stop")
        if failed:
            words.append(f"failed: {html.escape(', '.join(failed))}")
        self.controls.bar.bar_style = "danger" if failed else "warning" if stopped else "success"
        self.controls.set_status("; ".join(words) + ".")

    def _show_errors(self) -> None:
        errors = {name: (f"{type(e).__name__}: {e}", trace) for name, (e, trace) in list(self.findings.failed.items())}
        for kept in self.findings.kept:
            if kept.error is not None:
                errors[kept.name] = f"trained, but could not be evaluated: {kept.error}", ""
        if errors != self._errors:
            self._errors = errors
            self.controls.show_errors(errors)
