"""Run the trainings of a comparison one after another, and keep each as a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from workbench.data import Split

from ..common.inputs import Model
from ..common.jobs import Job, Jobs
from .board import Board
from .findings import Findings, Settings
from .repeats import Place
from .session import Session
from .settings import Candidate
from .trials import VALIDATION, Trained, trial, versions_of


class Trainer:
    """Trains candidates and keeps the runs.

    Args:
        model: model to wrap.
        findings: findings, to which runs are added.
        session: session file, which is read first and written after each run.
        output: what the model gives.
        threads: number of torch threads per training; unchanged if None.
        board: returns the widgets that show the training, None until they are made.

    Attributes:
        jobs: queue of training jobs.
    """

    def __init__(
        self,
        model: Model,
        findings: Findings,
        session: Session,
        output: Any,
        threads: int | None,
        board: Callable[[], Board | None],
    ) -> None:
        self._model, self._findings, self._session = model, findings, session
        self._output, self._threads, self._board = output, threads, board
        self._parts = lru_cache(1)(self._cut)
        self.jobs = Jobs()
        self._versions = findings.versions = versions_of(findings.data)
        findings.runs = session.read(self._versions)

    def begin(self, settings: Settings, again: bool, block: bool) -> bool:
        """Queue the trainings that are missing for the ticked candidates; return whether there are any.

        Args:
            settings: current settings.
            again: also repeat trainings that exist.
            block: train in this thread, and raise the error of the first training that failed after all others are done.
        """
        findings, places = self._findings, settings.places(self._findings.data.split)
        for candidate in settings.ticked:
            candidate.build(self._output)  # raises for invalid settings before anything trains
        findings.splits.prepare(settings.splits)
        self._note_model_and_data(places)
        current = findings.current_runs()
        complete = {(name, place) for name, at in current.items() for place, run in at.items() if not run.status}
        missing = [
            (candidate, place)
            for place in places  # all models on one place, then on the next, so that results are comparable after Stop
            for candidate in settings.ticked
            if again or (candidate.name, place) not in complete
        ]
        findings.batch_of, findings.batch, findings.before = settings, {}, frozenset(run.id for run in findings.runs)
        for candidate, _ in missing:
            findings.forget_failures(candidate.name)
        failed: Exception | None = None
        for candidate, place in missing:
            try:
                job = self._submit(candidate, place, settings, block)
            except Exception as error:
                if findings.job_name(candidate.name, place) not in findings.batch:
                    raise  # it was not even started
                error.add_note(f"while training {candidate.name}; the other models were trained all the same")
                failed = failed or error
                continue
            findings.batch.setdefault(job.name, job)
            if block and job.cancelled:
                break
        if failed is not None:
            raise failed
        return bool(missing)

    def save(self, new: Sequence[Trained] = (), **changes: Sequence[Trained]) -> None:
        """Write the session file, and take over what another kernel has trained, deleted or restored meanwhile.

        Args:
            new: runs to add.
            **changes: runs to delete (`deleted`) or restore (`restored`).
        """
        findings = self._findings
        findings.runs = self._session.save([*findings.runs, *new], self._versions, **changes)

    def _note_model_and_data(self, places: Sequence[Place]) -> None:
        """Note the current origin of the model and versions of the data: runs of a changed model or changed data become outdated."""
        findings, versions = self._findings, versions_of(self._findings.data)
        if findings.runs:
            # a ready model that reads rows changes only with the data
            if versions != findings.versions or not self._model.reads_rows:
                findings.origins = {}
            for place in [] if self._model.reads_rows else places:
                findings.origin(*place)
            if versions != findings.versions:
                self._parts.cache_clear()
                findings.__dict__.pop("view", None)
        findings.versions = versions

    def _cut(self, split: int, seed: int) -> tuple[Split, Split]:
        return self._findings.splits[split].validation(VALIDATION, seed)

    def _submit(self, candidate: Candidate, place: Place, settings: Settings, block: bool) -> Job:
        board, findings, versions = self._board(), self._findings, self._findings.versions
        split, seed = place
        first = place == findings.places[0]
        live = partial(board.live, candidate.name) if board and board.displayed and first and not block else None
        training, data, parts = (
            replace(settings.training, seed=seed),
            findings.splits[split],
            partial(self._parts, split),
        )

        model = self._model.on(data)

        def work(job: Job) -> None:
            kept = trial(job, candidate, training, model, data, parts, self._output, live)
            if kept is not None:
                if split != findings.data.split:  # pictures show the first split only
                    kept.answers, kept.versions = None, versions
                findings.origins[split if model.reads_rows else findings.data.split, seed] = kept.origin
                self.save([kept])

        def changed(job: Job) -> None:
            findings.batch.setdefault(job.name, job)
            if job.status == "failed" and job.error is not None:
                findings.failed[job.name] = job.error, job.traceback
            if (board := self._board()) is not None:
                if job.ended:
                    board.show_panel(candidate.name)
                board.refresh()

        name = findings.job_name(candidate.name, place)
        return self.jobs.submit(work, name=name, on_change=changed, threads=self._threads, block=block)
