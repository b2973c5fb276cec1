"""The findings of a comparison, and how its widgets show them."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from workbench.data import Data
from workbench.errors import require

from ..common.jobs import Job
from .controls import Controls
from .panels import PanelData, view_of
from .scores import ordered, table
from .settings import Candidate
from .trials import MOST_JUDGED, Trained, Training, panel

if TYPE_CHECKING:
    import pandas as pd


@dataclass(eq=False)
class Findings:
    """What has been trained, what failed, and what runs now; no widgets.

    Args:
        data: the data set.
        names: of the candidates, in the order in which they are shown.
        batch: the jobs of the present training, or of the last one.
        runs: every training, in order.
        deleted: the runs that were deleted at one time, the last ones last.
        failed: exception and traceback, by name.
        entered: the ticked candidates and the training, as they are set now.
        batch_of: what was entered when the batch began.
        origins: by seed, digest of the weights that the model starts at.
        versions: of the data, as they are trained on.
    """

    data: Data
    names: list[str]
    entered: Callable[[], tuple[list[Candidate], Training]]
    batch: dict[str, Job] = field(default_factory=dict)
    runs: list[Trained] = field(default_factory=list)
    deleted: list[list[Trained]] = field(default_factory=list)
    failed: dict[str, tuple[BaseException, str]] = field(default_factory=dict)
    batch_of: tuple[list[Candidate], Training] | None = None
    origins: dict[int, str] = field(default_factory=dict)
    versions: tuple[int, ...] = ()

    @property
    def jobs(self) -> list[Job]:
        """The jobs of the batch; a copy, since another thread may add to it."""
        return list(self.batch.values())

    @property
    def running(self) -> bool:
        """Whether something is trained, or waits for it."""
        return any(not job.ended for job in self.jobs)

    def keep(self, run: Trained) -> None:
        """Add a run; no other is overwritten by it."""
        run.number = max((r.number for r in [*self.runs, *(r for rs in self.deleted for r in rs)]), default=0) + 1
        self.runs.append(run)

    def reasons(self) -> dict[str, str]:
        """Why each run can't be compared with what is trained by the present settings, by its id; empty if it can."""
        ticked, training = self.entered()
        now = {candidate.name: candidate for candidate in ticked}
        reasons: dict[str, str] = {}
        for run in list(self.runs):
            origin = self.origins.get(training.seed, run.origin)
            reasons[run.id] = run.differences(now.get(run.name), training, origin, self.versions)
        return reasons

    @property
    def trained(self) -> dict[str, Trained]:
        """The run that stands for each name: the last one of the present settings, else the last one."""
        reasons = self.reasons()
        chosen: dict[str, Trained] = {}
        for run in list(self.runs):
            before = chosen.get(run.name)
            if before is None or not reasons.get(run.id) or reasons.get(before.id):
                chosen[run.name] = run
        return chosen

    @property
    def kept(self) -> list[Trained]:
        """The runs that stand for the names, in order."""
        trained = self.trained
        return [trained[name] for name in list(self.names) if name in trained]

    @property
    def differences(self) -> dict[str, str]:
        """Why each of those that are not of the present settings can't be compared with the others."""
        reasons = self.reasons()
        return {kept.name: reasons[kept.id] for kept in self.kept if reasons.get(kept.id)}

    def others(self) -> dict[str, Trained]:
        """All other runs, by name and number."""
        kept = {run.id for run in self.kept}
        return {f"{run.name} #{run.number}": run for run in list(self.runs) if run.id not in kept}

    @property
    def present(self) -> list[Trained]:
        """What has been trained with the present settings, in order."""
        differences = self.differences
        return [kept for kept in self.kept if kept.name not in differences]

    @property
    def unchanged(self) -> bool:
        """Whether what is entered is what the batch was begun with."""
        if self.batch_of is None:
            return False
        (before, training), (now, training_now) = self.batch_of, self.entered()
        return training == training_now and len(before) == len(now) and all(map(Candidate.same, before, now))

    @functools.cached_property
    def view(self) -> PanelData:
        """What the pictures show."""
        return view_of(self.data)

    @staticmethod
    def frame(trained: Sequence[Trained]) -> pd.DataFrame:
        """The scores, one row for each of these models."""
        return _frame({kept.name: kept for kept in trained})

    def run_frame(self) -> pd.DataFrame:
        """All runs, one row each: what was trained, when and by what, whether it is of the present settings, and the scores."""
        reasons, present = self.reasons(), {run.id for run in self.present}
        runs = {str(run.number): run for run in list(self.runs)}
        about = [
            {
                "model": run.name,
                "settings": run.settings,
                **asdict(run.training),
                "split": run.split,
                "began": run.began,
                **run.software,
                "status": run.status,
                "differs": reasons[run.id] or ("" if run.id in present else AGAIN),
            }
            for run in runs.values()
        ]
        scores = _frame(runs)
        scores.index = scores.index.astype(int)
        scores.index.name = "run"
        for place, name in enumerate(about[0] if about else ()):
            scores.insert(place, name, [row.get(name) for row in about])
        return scores

    def table(self) -> str:
        """The scores as HTML; empty if there are none."""
        kept, total = self.kept, len(self.data.test)
        if not kept and not self.runs:
            return ""
        n = min(total, MOST_JUDGED)
        rows = f"first {n:,} of {total:,} test rows" if n < total else f"{n:,} test rows"
        lent = self.data.classes is None and any(k.answers is not None and not k.answers.measured for k in kept)
        notes = [f"On the {rows} of {self.data.name}. One split and one seed: small differences mean nothing yet."]
        if lent:
            notes.append(
                "Where no noise is measured, NLL and intervals assume a constant one: the RMSE on the validation rows."
            )
        differences = self.differences
        if differences:
            reasons = "; ".join(f"{name} ({why})" for name, why in differences.items())
            notes.append(f"Grey, and ranked with no other row, since not of the present settings: {reasons}.")
        status = {k.name: k.status for k in kept}
        others = self.others()
        if others:
            notes.append(f"Earlier runs: {', '.join(others)}; the pointer on a row says how they differ.")
            why = self.reasons()
            differences = {**differences, **{label: why[run.id] or AGAIN for label, run in others.items()}}
            status |= {label: run.status for label, run in others.items()}
        frame = _frame({**{k.name: k for k in kept}, **others})
        return table(frame, self.data.target.unit, status, [*notes, self.view.note], differences)

    def panel(self, kept: Trained, losses: bool = True) -> str:
        """The panel of a model that could be judged, as HTML."""
        answers = kept.answers
        assert answers is not None
        notes = [f"{kept.status}."] if kept.status else []
        if not answers.measured and self.view.kind == "table":
            notes.append("No noise is measured: a constant one is assumed.")
        history = kept.history if losses else None
        return panel(kept.candidate, self.view, answers, history, note=" ".join(notes), made=kept.made)


AGAIN = "trained again since, with the same settings"


def _frame(runs: Mapping[str, Trained]) -> pd.DataFrame:
    """The scores of runs, one row each, by the labels."""
    require("pandas")
    import pandas as pd

    frame = pd.DataFrame.from_dict({label: run.scores for label, run in runs.items()}, orient="index", dtype=float)
    frame.index.name = "model"
    return frame[ordered(map(str, frame))]


class Board:
    """Keeps the widgets of a comparison up to date.

    Args:
        controls: the widgets.
        findings: what they show.

    Attributes:
        displayed: whether somebody looks; pictures that nobody sees are not drawn.
    """

    def __init__(self, controls: Controls, findings: Findings) -> None:
        self.controls, self.findings, self.displayed = controls, findings, False
        self._errors: dict[str, tuple[str, str]] = {}

    def live(self, name: str, picture: str) -> None:
        """Show a picture of a training."""
        row = self.controls.rows[name]
        row.panel.value, row.panel.layout.display = picture, None

    def show_panel(self, name: str) -> None:
        """Draw the panel of a model."""
        row, kept = self.controls.rows.get(name), self.findings.trained.get(name)
        if row is None or not self.displayed:
            return
        if kept is None or kept.answers is None:
            row.panel.value, row.panel.layout.display = "", "none"
            return
        try:
            row.panel.value = self.findings.panel(kept)
        except Exception as error:  # the model is there all the same
            row.panel.value = f"<h4>{html.escape(name)}</h4><p>no picture: {html.escape(str(error))}</p>"
        row.panel.layout.display = None

    def refresh(self) -> None:
        """Everything but the panels: buttons, progress, status, table, errors."""
        c, batch = self.controls, self.findings.jobs
        running = next((job for job in batch if job.status == "running"), None)
        busy = any(not job.ended for job in batch)
        c.train.disabled = busy
        c.stop.disabled = not busy or any(job.cancelled for job in batch)
        if batch:
            c.bar.value = sum(1.0 if job.ended else job.fraction for job in batch) / len(batch)
        if busy:
            c.bar.bar_style = "info"
        # before the status, which must not announce what can't be seen yet
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
        differences = self.findings.differences
        for name, row in list(c.rows.items()):
            (row.panel.add_class if name in differences else row.panel.remove_class)("wb-outdated")

    def _list_runs(self, busy: bool) -> None:
        c, runs = self.controls, list(self.findings.runs)
        options = [(f"#{run.number} {run.name}, {run.began[:16].replace('T', ' ')} UTC", run.number) for run in runs]
        if c.pick_run.options != tuple(options):
            c.pick_run.options = options
        c.delete.disabled = busy or not runs
        c.undo.disabled = busy or not self.findings.deleted
        c.runs.layout.display = None if runs or self.findings.deleted else "none"

    def _announce(self) -> None:
        """Say what Train would do; a changed setting makes what was done a thing of the past."""
        c = self.controls
        present = {kept.name for kept in self.findings.present}
        wanted = [row.name for row in c.rows.values() if row.tick.value and row.name not in present]
        c.bar.value, c.bar.bar_style = 0.0, ""
        models = f"{len(wanted)} model{'s' if len(wanted) > 1 else ''}: {html.escape(', '.join(wanted))}"
        c.set_status(
            f"Train starts {models}." if wanted else "All ticked models are trained with these settings already."
        )

    def _report_end(self, batch: list[Job]) -> None:
        failed = [job.name for job in batch if job.status == "failed"]
        stopped = [job.name for job in batch if job.status == "stopped"]
        done = sum(job.status == "done" for job in batch)
        seconds = sum(job.seconds for job in batch)
        words = [f"<b>{'Stopped' if stopped else 'Done'}</b>: {done} of {len(batch)} trained in {seconds:.1f} s"]
        partly = self.findings.trained.get(stopped[0]) if stopped else None
        if partly is not None and partly.status:
            words.append(f"{html.escape(partly.name)} {partly.status}, and can be used")
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
                errors[kept.name] = f"it is trained, but could not be judged: {kept.error}", ""
        if errors != self._errors:
            self._errors = errors
            self.controls.show_errors(errors)
