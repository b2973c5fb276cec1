"""`Comparison`: wrappers side by side on one model, with widgets or without."""

from __future__ import annotations

import functools
import html
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from workbench.core.wrapper import Wrapper
from workbench.data import Data, Split

from ..common import cases, pictures
from ..common.inputs import Model, check_fits
from ..common.jobs import Job, Jobs
from ..common.positions import comparable_data
from . import export as _export
from .board import Board, Findings
from .controls import CSS, Controls, Row
from .figure import overview
from .session import Session
from .settings import PLAIN, Candidate, Part, candidates, fitting, numbered, wrapper_classes
from .trials import VALIDATION, Trained, Training, digest_of, threads_for, trial, versions_of

if TYPE_CHECKING:
    import pandas as pd

# what is ticked at first if the user names nothing
USUAL = {"regression": ("sculpt", "vote", "vote+sculpt+neo"), "classification": ("sample", "vote", "vote+neo")}


class Comparison:
    """Compare what wrappers make of a model: train them one after another, and see risks, scores and costs side by side.

    In a notebook it shows itself: models to tick, settings made from the wrappers' own signatures, Train and Stop, and for each model a picture
    that suits the data. Training runs beside the notebook, so that cells can run meanwhile. Without a browser the same object is used by
    `start(block=True)`, `results`, `models` and `snapshot()`.

    Every model starts at the same weights and sees the same rows: a tenth of the training rows chooses the best epoch, the test rows judge and
    decide nothing. A wrapper that measures no noise is lent a constant one for likelihood and intervals, the root mean squared error on these
    validation rows, added to its epistemic risk as variances add.

    Args:
        model: the model to wrap, which is never changed; or a function without arguments that returns one (a class, too), called anew for
            each seed. It gives one value, or one score for each class, for each row (pixel, token, column of targets).
        data: a workbench Data, the name of a data set, or a pair (x, y) of tensors or arrays with x [n, ...] and y values [n], [n, k] or maps
            [n, height, width], or class numbers [n] or of pixels or tokens; a fifth of the rows of a pair become test rows. Targets of several
            numbers a row are scored as by `workbench compare`: pixels and tokens alike, columns each in its unit.
        wrappers: a dict name -> wrapper (or composition), or a list of wrappers or of texts such as "vote" and "vote(n_voters=5) +
            sculpt"; None: a choice that suits the task. All registered wrappers can be added by hand.
        epochs: passes over the training rows.
        lr: peak learning rate.
        weight_decay: decoupled from the gradient.
        batch_size: rows in a step; None as for `workbench.fit`.
        seed: of first weights, of validation rows, of the order of rows and of all random draws.
        split: which split of the data, for a name or a pair.
        output: what the model gives: "values", "logits" or "probs"; None finds out.
        device: where to train, such as "cuda"; None: where the model is.
        session: a file that every run is saved in as it ends, and that is read first if it is there: the same call after a restart of the
            kernel, or on another machine, shows the table, pictures and losses of all runs. Weights are not in it: `models` has what was
            trained in this kernel, and `start(again=True)` makes the others. None writes no file.

    Attributes:
        jobs: the queue that trains.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, there is no such wrapper or data set, the model does not fit the data, or
            the session file is of other data.

    Example:
        >>> import torch
        >>> def model():
        ...     return torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        >>> comparison = Comparison(model, "diabetes", ["sculpt", "vote"], epochs=2)
        >>> comparison.start(block=True).results.index.tolist()
        ['plain', 'sculpt', 'vote']
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        data: Data | str | tuple[Any, Any],
        wrappers: dict[str, Wrapper] | Sequence[Wrapper | str] | None = None,
        *,
        epochs: int = 100,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        batch_size: int | None = None,
        seed: int = 0,
        split: int = 0,
        output: str | None = None,
        device: str | None = None,
        session: str | os.PathLike[str] | None = None,
    ) -> None:
        training = Training(epochs, lr, weight_decay, batch_size, seed, device)
        check_training(training)
        self._model = Model(model)
        self._data = comparable_data(data, split)
        self._data_given, self._split = data, split
        task = self.data.task
        if output is not None and output not in ("values", "logits", "probs"):
            raise ValueError(f'output must be "values", "logits" or "probs", not {output!r}')
        chosen = candidates(USUAL[task] if wrappers is None else wrappers)
        chosen = [Candidate(c.name, [fitting(part, task) for part in c.parts]) for c in chosen if c.parts]
        for candidate in chosen:
            if candidate.name == PLAIN:
                raise ValueError(f"wrappers: {PLAIN!r} is the baseline; give {candidate.build()!r} another name")
            candidate.build()
        plain = self._model.new(seed)
        meaning = check_fits(plain, self.data)
        fits = (output == "values") == (meaning == "values") if isinstance(meaning, str) else output == "logits"
        if output is not None and not fits:
            raise ValueError(f"output={output!r} does not fit {task} data")
        self._output = (output or meaning) if isinstance(meaning, str) else meaning
        self._threads = threads_for(plain, self.data)
        self._batch_size, self._device = batch_size, device
        self.jobs = Jobs()
        self._written: set[Path] = set()  # by the button, which replaces nothing else
        self._parts = functools.lru_cache(1)(self._cut)

        self._first = training
        self._rows = [(Candidate(PLAIN), True, False), *((c, True, len(c.parts) > 1) for c in chosen)]
        for name, cls in wrapper_classes().items() if wrappers is None else ():
            if name not in {candidate.name for candidate, _, _ in self._rows}:
                self._rows.append((Candidate(name, [fitting(Part(cls), task)]), False, False))
        self._findings = Findings(self.data, [candidate.name for candidate, _, _ in self._rows], self._entered)
        self._findings.versions = self._versions = versions_of(self.data)
        self._session = Session(None if session is None else Path(session), self.data)
        for run in self._session.read(self._versions):
            self._findings.origins.setdefault(seed, digest_of(plain))
            self._findings.keep(run)
        self._board: Board | None = None

    @property
    def data(self) -> Data:
        """The data set; another one makes another comparison."""
        return self._data

    @property
    def controls(self) -> Controls:
        """The widgets, made when they are first asked for: what runs without a browser needs none."""
        if self._board is None:
            about = (
                f"{html.escape(str(self._model))} on {html.escape(self.data.name)}: {len(self.data.train):,} training and "
                f"{len(self.data.test):,} test rows of shape {'×'.join(map(str, self.data.input_shape))}, {self.data.task} of "
                f"{html.escape(str(self.data.target))}."
            )
            self._board = Board(Controls(self.data.task, self._first, about), self._findings)
            for candidate, ticked, added in self._rows:
                self._put(candidate, ticked, added)
            self._connect()
            self._board.refresh()
        return self._board.controls

    # ---- without widgets
    def start(self, *, block: bool = False, again: bool = False) -> Comparison:
        """Train the ticked models, one after another; those that are trained with these settings already are kept.

        Args:
            block: train here and now, and raise what fails; Ctrl-C stops, and what is trained is kept.
            again: train those that are kept as well.

        Returns:
            The object itself.

        Raises:
            RuntimeError: it is training already.
            ValueError: a setting is out of range.
        """
        if self.running:
            raise RuntimeError("this comparison is training already: stop() it, or wait() for it")
        ticked, training = self._entered()
        check_training(training)
        for candidate in ticked:
            candidate.build(self._output)  # settings that can't be are refused before anything trains
        self._note_model_and_data(training)
        whole = {kept.name for kept in self._findings.present if not kept.status}
        wanted = [candidate for candidate in ticked if again or candidate.name not in whole]
        self._findings.batch_of = ticked, training
        for candidate in wanted:
            self._findings.failed.pop(candidate.name, None)
        self._findings.batch = {}
        if not wanted:
            self._refresh()
            self._set_status(
                "All ticked models are trained with these settings already. Tick another one, or change a setting."
            )
            return self
        for candidate in wanted:
            job = self._submit(candidate, training, block)
            self._findings.batch.setdefault(job.name, job)
            if block and job.cancelled:
                break
        self._refresh()
        return self

    def stop(self) -> None:
        """End the training; what is trained so far is kept, and can be used."""
        for job in self._findings.jobs:
            job.cancel()
        if self.running and self._board is not None:
            self._board.controls.stop.disabled = True
            self._set_status("<b>Stopping</b>: what is trained so far is kept …")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is trained any more, at most so many seconds; whether that is so."""
        return all(job.wait(timeout) for job in self._findings.jobs)

    @property
    def running(self) -> bool:
        """Whether something is trained, or waits for it."""
        return self._findings.running

    @property
    def models(self) -> dict[str, Any]:
        """The trained models by name, wrapped, in evaluation mode; those of `outdated` are among them."""
        return {kept.name: kept.wrapped for kept in self._findings.kept if kept.wrapped is not None}

    @property
    def histories(self) -> dict[str, Any]:
        """The course of each training, by name; see `workbench.History`."""
        return {kept.name: kept.history for kept in self._findings.kept}

    @property
    def errors(self) -> dict[str, BaseException]:
        """What failed, by name."""
        judged = {kept.name: kept.error for kept in self._findings.kept if kept.error is not None}
        return {**{name: error for name, (error, _) in self._findings.failed.items()}, **judged}

    @property
    def results(self) -> pd.DataFrame:
        """One row for each model that is trained with the present settings: metrics on the test rows, and costs.

        NaN where there is nothing to measure. Models that are not ticked any more, that were stopped, or that were trained with other settings,
        from other weights or on other data can't be compared with these: they are in `outdated`.
        """
        return self._findings.frame(self._findings.present)

    @property
    def outdated(self) -> pd.DataFrame:
        """One row for each trained model that is not of the present settings: what differs, and the columns of `results`."""
        differences = self._findings.differences
        frame = self._findings.frame([kept for kept in self._findings.kept if kept.name in differences])
        frame.insert(0, "differs", [differences.get(name, "") for name in frame.index])
        return frame

    @property
    def runs(self) -> pd.DataFrame:
        """One row for each training, by its number: settings, seed, split, when and by what versions, what differs now, scores.

        A training overwrites no other: with the settings of an earlier run entered again, that run is in `results` again.
        """
        return self._findings.run_frame()

    def delete(self, *runs: int) -> None:
        """Delete runs, from the session file too; `undo()` brings them back.

        Args:
            *runs: their numbers, as in `runs`.

        Raises:
            KeyError: there is no such run; nothing is deleted.
            RuntimeError: something is being trained.
        """
        findings = self._findings
        self._check_idle("delete")
        numbers = {run.number: run for run in findings.runs}
        if missing := [run for run in runs if run not in numbers]:
            raise KeyError(
                f"delete: there is no run {missing[0]!r}; there are {', '.join(map(str, numbers)) or 'none'}"
            )
        self._drop([numbers[run] for run in dict.fromkeys(runs)])

    def undo(self) -> None:
        """Bring back the runs that were deleted last.

        Raises:
            ValueError: none was deleted.
            RuntimeError: something is being trained.
        """
        findings = self._findings
        self._check_idle("undo")
        if not findings.deleted:
            raise ValueError("undo: no run was deleted in this kernel")
        findings.runs = sorted([*findings.runs, *findings.deleted.pop()], key=lambda run: run.number)
        self._save()
        self._show_all()

    def _check_idle(self, action: str) -> None:
        if self.running:
            raise RuntimeError(f"{action}: this comparison is training; stop() it, or wait() for it")

    def _drop(self, runs: list[Trained]) -> None:
        findings = self._findings
        if runs:
            ids = {run.id for run in runs}
            findings.deleted.append(runs)
            findings.runs = [run for run in findings.runs if run.id not in ids]
            self._save()
        self._show_all()

    def _save(self) -> None:
        """Write the session file, with the runs that another kernel has put there meanwhile."""
        for run in self._session.read(self._versions):
            self._findings.keep(run)
        self._session.save(self._findings.runs, self._versions)

    def _show_all(self) -> None:
        if self._board is not None:
            for name in list(self._board.controls.rows):
                self._board.show_panel(name)
        self._refresh()

    def snapshot(self) -> None:
        """Leave a static picture in the cell that runs: it shows without a kernel, and in reports."""
        findings = self._findings
        trained = [kept for kept in findings.present if kept.answers is not None]
        if not trained:
            before = f" with the present settings, only {', '.join(self.models)} with others" if self.models else " yet"
            raise ValueError(f"snapshot: nothing is trained{before}; start(block=True) first")
        panels = "".join(f'<div class="wb-panel">{findings.panel(kept, losses=False)}</div>' for kept in trained)
        metrics = f'<div class="wb-metrics">{findings.table()}</div>'
        page = f'<div class="wb-comparison">{metrics}<div class="wb-panels" style="display:none">{panels}</div></div>'
        figure = overview(findings.view, trained, self.results, self.data.target.unit)
        alt = f"comparison of {', '.join(kept.name for kept in trained)} on {self.data.name}"
        pictures.display_static(page, figure, alt, CSS + (cases.STYLE if findings.view.kind == "images" else ""))

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the comparison as a notebook that repeats it, with parameters for `workbench report` and papermill.

        Args:
            path: the .ipynb file; a file that is there is replaced.

        Returns:
            The path. What can't be written as source code, such as a model that was made in a notebook, leaves a cell that says so, to be
            filled in.

        Raises:
            ValueError: the path does not end in .ipynb.
        """
        return _export.write(path, self._exported())

    def command(self, path: str | os.PathLike[str] = "comparison.ipynb") -> str:
        """The command line that runs the exported notebook with the present settings, and makes a report of it."""
        return _export.command(path, self._exported())

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        root = self.controls.root
        assert self._board is not None
        self._board.displayed = True
        for name in list(self.controls.rows):
            self._board.show_panel(name)
        bundle = root._repr_mimebundle_(**kwargs)
        if isinstance(bundle, dict):  # what is left where no widgets are shown
            bundle["text/plain"] = f"Comparison of {', '.join(self._findings.names)} on {self.data.name}"
        return bundle

    def _refresh(self) -> None:
        if self._board is not None:
            self._board.refresh()

    def _set_status(self, text: str) -> None:
        if self._board is not None:
            self._board.controls.set_status(text)

    # ---- candidates
    def _put(self, candidate: Candidate, ticked: bool, added: bool = False) -> None:
        row = Row(candidate, ticked, self.data.task, added, self._refresh)
        self.controls.put(row, self._remove)
        self._findings.names = list(self.controls.rows)

    def _remove(self, row: Row) -> None:
        if self.running:
            self.controls.set_status("<b>Training</b>: stop it before a model is removed.")
            return
        self.controls.drop(row)
        self._findings.names = list(self.controls.rows)
        self._findings.failed.pop(row.name, None)
        self._drop([run for run in self._findings.runs if run.name == row.name])

    def _add(self, _: Any = None) -> None:
        names = self.controls.pressed()
        if not names:
            self.controls.set_status("Press the wrappers that are to work together, then Add.")
            return
        known = wrapper_classes()
        parts = [fitting(Part(known[name]), self.data.task) for name in names]
        added = Candidate(numbered("+".join(names), set(self.controls.rows)), parts)
        self._put(added, True, added=True)
        self.controls.show_settings(added.name)

    def _connect(self) -> None:
        c = self.controls
        c.train.on_click(self._guarded(lambda: self.start()))
        c.stop.on_click(lambda _: self.stop())
        c.add.on_click(self._add)
        c.delete.on_click(self._guarded(lambda: self.delete(c.pick_run.value)))
        c.undo.on_click(self._guarded(self.undo))
        c.export.on_click(self._guarded(self._export_clicked))
        for setting in (c.epochs, c.lr, c.weight_decay, c.seed):
            setting.observe(lambda _: self._refresh(), "value")

    def _guarded(self, action: Callable[[], Any]) -> Callable[[Any], None]:
        """An action of a button, whose errors are shown."""

        def clicked(_: Any) -> None:
            try:
                action()
            except Exception as error:
                self.controls.set_status(f'<span class="wb-error">{html.escape(str(error))}</span>')

        return clicked

    def _export_clicked(self) -> None:
        path = Path(self.controls.path.value).resolve()
        if path.exists() and path not in self._written:
            raise FileExistsError(
                f"{path} is there already: give another name, or call export() in a cell to replace it"
            )
        self._written.add(self.export(path).resolve())
        self.controls.set_status(
            f"Written: {html.escape(str(path))}. As a report: <code>{html.escape(self.command(path))}</code>"
        )

    def _exported(self) -> _export.Exported:
        ticked, training = self._entered()
        wrapped = [candidate for candidate in ticked if candidate.parts]
        return _export.Exported(self._model, self._data_given, self.data, self._split, wrapped, training, self._output)

    # ---- training
    def _entered(self) -> tuple[list[Candidate], Training]:
        """The ticked candidates and the training, as they are set now."""
        if self._board is None:
            return [candidate for candidate, ticked, _ in self._rows if ticked], self._first
        c = self._board.controls
        return [row.candidate() for row in c.rows.values() if row.tick.value], c.training(self._first)

    def _note_model_and_data(self, training: Training) -> None:
        """Note what is trained now: a model that the user changed makes other rows of the table, and so do changed data."""
        findings, versions = self._findings, versions_of(self.data)
        if findings.runs:
            findings.origins[training.seed] = digest_of(self._model.new(training.seed))
            if versions != findings.versions:
                self._parts.cache_clear()
                findings.__dict__.pop("view", None)
        findings.versions = versions

    def _cut(self, seed: int) -> tuple[Split, Split]:
        return self.data.validation(VALIDATION, seed)

    def _submit(self, candidate: Candidate, training: Training, block: bool) -> Job:
        board, findings = self._board, self._findings
        watched = board is not None and board.displayed and not block

        def work(job: Job) -> None:
            live = functools.partial(board.live, candidate.name) if board is not None and watched else None
            kept = trial(job, candidate, training, self._model, self.data, self._parts, self._output, live)
            if kept is not None:
                findings.origins[training.seed] = kept.origin
                findings.keep(kept)
                self._save()

        def changed(job: Job) -> None:
            findings.batch.setdefault(job.name, job)
            if job.status == "failed" and job.error is not None:
                findings.failed[job.name] = job.error, job.traceback
            if job.ended and self._board is not None:
                self._board.show_panel(job.name)
            self._refresh()

        return self.jobs.submit(work, name=candidate.name, on_change=changed, threads=self._threads, block=block)


def check_training(training: Training) -> None:
    """Refuse settings of the training that `fit` would refuse."""
    from workbench.training.checks import check_numbers

    check_numbers(training.epochs, training.batch_size, training.lr, training.weight_decay, None, None, None)
    if isinstance(training.seed, bool) or not isinstance(training.seed, int) or training.seed < 0:
        raise ValueError(f"seed must be a whole number of at least 0; found {training.seed!r}")


__all__ = ["Comparison"]
