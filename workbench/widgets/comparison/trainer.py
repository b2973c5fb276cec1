"""The trainings that a comparison starts, one after another, each kept as a run when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from workbench.data import Split

from ..common.inputs import Model
from ..common.jobs import Job, Jobs
from .board import Board
from .findings import Entered, Findings
from .repeats import Place
from .session import Session
from .settings import Candidate
from .trials import VALIDATION, Trained, trial, versions_of


class Trainer:
    """Trains candidates and keeps the runs.

    Args:
        model: what to wrap.
        findings: where the runs are kept.
        session: where they are saved; it is read.
        output: what the model gives.
        threads: for each training; None as torch is set.
        board: the widgets that show it, None until they are made.

    Attributes:
        jobs: the queue that trains.
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

    def begin(self, entered: Entered, again: bool, block: bool) -> bool:
        """Train the ticked candidates wherever they are not trained yet; whether there is something to train.

        Args:
            entered: what to train.
            again: train what is trained already as well.
            block: train here and now.
        """
        findings, places = self._findings, entered.places(self._findings.data.split)
        for candidate in entered.ticked:
            candidate.build(self._output)  # settings that can't be are refused before anything trains
        findings.splits.prepare(entered.splits)
        self._note_model_and_data(places)
        standing = findings.standing()
        whole = {(name, place) for name, at in standing.items() for place, run in at.items() if not run.status}
        wanted = [
            (candidate, place)
            for place in places  # all models on one, then all on the next: what is stopped early can be compared
            for candidate in entered.ticked
            if again or (candidate.name, place) not in whole
        ]
        findings.batch_of, findings.batch, findings.before = entered, {}, frozenset(run.id for run in findings.runs)
        for candidate, _ in wanted:
            findings.forget_failures(candidate.name)
        for candidate, place in wanted:
            job = self._submit(candidate, place, entered, block)
            findings.batch.setdefault(job.name, job)
            if block and job.cancelled:
                break
        return bool(wanted)

    def save(self, new: Sequence[Trained] = (), **changes: Sequence[Trained]) -> None:
        """Write the session file, and take from it what another kernel has trained, deleted or brought back meanwhile.

        Args:
            new: runs that are added.
            **changes: runs that are `deleted`, or `restored`.
        """
        findings = self._findings
        findings.runs = self._session.save([*findings.runs, *new], self._versions, **changes)

    def _note_model_and_data(self, places: Sequence[Place]) -> None:
        """Note what is trained now: a model that the user changed makes other rows of the table, and so do changed data."""
        findings, versions = self._findings, versions_of(self._findings.data)
        if findings.runs:
            # of a text the user can change nothing else
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

    def _submit(self, candidate: Candidate, place: Place, entered: Entered, block: bool) -> Job:
        board, findings, versions = self._board(), self._findings, self._findings.versions
        split, seed = place
        first = place == findings.places[0]
        live = partial(board.live, candidate.name) if board and board.displayed and first and not block else None
        training, data, parts = (
            replace(entered.training, seed=seed),
            findings.splits[split],
            partial(self._parts, split),
        )

        model = self._model.on(data)

        def work(job: Job) -> None:
            kept = trial(job, candidate, training, model, data, parts, self._output, live)
            if kept is not None:
                if split != findings.data.split:  # its answers are about rows that no picture is of
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
