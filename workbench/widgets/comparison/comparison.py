"""`Comparison`: wrappers side by side on one model, with widgets or without."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from workbench.core.wrapper import Wrapper
from workbench.data import Data

from ..common import cases, pictures
from ..common.inputs import Model, check_fits
from ..common.positions import comparable_data
from . import export as _export
from .board import Board
from .buttons import Buttons
from .controls import CSS, MOST_REPEATS, Controls
from .figure import overview
from .findings import Entered, Findings
from .matrix import matrix_figure, matrix_page
from .repeats import Splits
from .saved import saved_output
from .session import Session
from .settings import PLAIN, Candidate, Part, candidates, fitting, wrapper_classes
from .trainer import Trainer
from .trials import Trained, Training, check_training, digest_of, threads_for

if TYPE_CHECKING:
    import pandas as pd

# what is ticked at first if the user names nothing
USUAL = {"regression": ("sculpt", "vote", "vote+sculpt+neo"), "classification": ("sample", "vote", "vote+neo")}
USUAL |= {"labels": USUAL["classification"]}


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
            [n, height, width], class numbers [n] or of pixels or tokens, or truth values [n, labels]; a fifth of the rows of a pair become test
            rows. Targets of several numbers a row are scored as by `workbench compare`: pixels, tokens and labels alike, columns each in
            its unit.
        wrappers: a dict name -> wrapper (or composition), or a list of wrappers or of texts such as "vote" and "vote(n_voters=5) +
            sculpt"; None: a choice that suits the task. All registered wrappers can be added by hand.
        epochs: passes over the training rows.
        lr: peak learning rate.
        weight_decay: decoupled from the gradient.
        batch_size: rows in a step; None as for `workbench.fit`.
        seed: of first weights, of validation rows, of the order of rows and of all random draws.
        split: which split of the data, for a name or a pair.
        seeds, splits: on how many each model is trained, from `seed` and `split` on; the table then has means and standard errors, and marks
            what is better than the plain model beyond noise: a paired t-test over the splits, or the seeds of one split, corrected for the
            number of comparisons (Holm) and for rows that splits share (Nadeau and Bengio, 2003). Pictures are of the first.
        output: what the model gives: "values", "logits", "probs" or "binary"; None finds out.
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
        seeds: int = 1,
        splits: int = 1,
        output: str | None = None,
        device: str | None = None,
        session: str | os.PathLike[str] | None = None,
    ) -> None:
        training = Training(epochs, lr, weight_decay, batch_size, seed, device)
        check_training(training)
        for name, count in (("seeds", seeds), ("splits", splits)):
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_REPEATS:
                raise ValueError(f"{name} must be a whole number from 1 to {MOST_REPEATS}; found {count!r}")
        self._model = Model(model)
        self._data = comparable_data(data, split)
        self._data_given, self._split = data, split
        task = self.data.task
        if output is not None and output not in ("values", "logits", "probs", "binary"):
            raise ValueError(f'output must be "values", "logits", "probs" or "binary", not {output!r}')
        chosen = candidates(USUAL[task] if wrappers is None else wrappers)
        chosen = [Candidate(c.name, [fitting(part, task) for part in c.parts]) for c in chosen if c.parts]
        for candidate in chosen:
            if candidate.name == PLAIN:
                raise ValueError(f"wrappers: {PLAIN!r} is the baseline; give {candidate.build()!r} another name")
            candidate.build()
        plain = self._model.new(seed)
        meaning = check_fits(plain, self.data)
        if task == "labels":
            fits = output == "binary"
        else:
            fits = (output == "values") == (meaning == "values") if isinstance(meaning, str) else output == "logits"
        if output is not None and (not fits or (output == "binary") != (task == "labels")):
            raise ValueError(f"output={output!r} does not fit {task} data")
        self._output = (output or meaning) if isinstance(meaning, str) or task == "labels" else meaning
        self._repeats = seeds, splits
        self._board: Board | None = None

        self._first = training
        self._rows = [(Candidate(PLAIN), True, False), *((c, True, len(c.parts) > 1) for c in chosen)]
        for name, cls in wrapper_classes().items() if wrappers is None else ():
            if name not in {candidate.name for candidate, _, _ in self._rows}:
                self._rows.append((Candidate(name, [fitting(Part(cls), task)]), False, False))
        self._splits = Splits(data, self.data)
        names = [candidate.name for candidate, _, _ in self._rows]
        self._findings = Findings(self._splits, names, self._entered, lambda seed: digest_of(self._model.new(seed)))
        opened = Session(None if session is None else Path(session), self.data)
        threads = threads_for(plain, self.data)
        self._trainer = Trainer(self._model, self._findings, opened, self._output, threads, lambda: self._board)
        self.jobs = self._trainer.jobs
        self._saved = saved_output(self._findings)
        self._splits.prepare(splits)

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
            controls = Controls(self.data.task, self._first, about, self._repeats, self._splits.several)
            controls.style.value += f"<style>{self._saved.style}</style>"
            buttons = Buttons(controls, self, self._findings, self._drop, self._refresh)
            for candidate, ticked, added in self._rows:
                buttons.put(candidate, ticked, added)
            self._board = Board(
                controls, self._findings, self._saved.update, lambda: matrix_page(self._findings, self._output)
            )
            buttons.connect()
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
        entered = self._entered()
        check_training(entered.training)
        if not self._trainer.begin(entered, again, block):
            self._refresh()
            self._set_status(
                "All ticked models are trained with these settings already. Tick another one, or change a setting."
            )
            return self
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

        With several seeds or splits means over all of them; a model that was not trained on each is in `outdated`.
        NaN where there is nothing to measure. Models that are not ticked any more, that were stopped, or that were trained with other settings,
        from other weights or on other data can't be compared with these: they are in `outdated`.
        """
        return self._findings.frame()

    @property
    def standard_errors(self) -> pd.DataFrame:
        """The standard errors of `results`, over the splits or else over the seeds; NaN with one run for each model."""
        return self._findings.spread_frame()

    @property
    def outdated(self) -> pd.DataFrame:
        """One row for each trained model that is not of the present settings: what differs, and the columns of `results`."""
        differences = self._findings.differences
        frame = self._findings.frame(outdated=True)
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
        self._trainer.save(restored=findings.deleted.pop())
        self._show_all()

    def _check_idle(self, action: str) -> None:
        if self.running:
            raise RuntimeError(f"{action}: this comparison is training; stop() it, or wait() for it")

    def _drop(self, runs: list[Trained]) -> None:
        findings = self._findings
        if runs:
            findings.deleted.append(runs)
            self._trainer.save(deleted=runs)
        self._show_all()

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
        figure = overview(findings.view, trained, self.results, self.data.target.unit, findings.marked())
        alt = f"comparison of {', '.join(kept.name for kept in trained)} on {self.data.name}"
        pictures.display_static(page, figure, alt, CSS + (cases.STYLE if findings.view.kind == "images" else ""))
        self._saved.clear()

    def matrix(self, **options: Any) -> Any:
        """All models of the present settings in one picture: a row each, prediction and risks in columns, the truth where it is known.

        Args:
            **options: of `workbench.plots.matrix`, such as rows, features and target.

        Returns:
            A matplotlib Figure; a cell that ends with it shows it.

        Raises:
            ValueError: nothing is trained with the present settings, or the data have no such picture.
        """
        return matrix_figure(self._findings, self._output, options)

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
        self._saved.display()
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

    def _exported(self) -> _export.Exported:
        entered = self._entered()
        wrapped = [candidate for candidate in entered.ticked if candidate.parts]
        training, repeats = entered.training, (entered.seeds, entered.splits)
        return _export.Exported(
            self._model, self._data_given, self.data, self._split, wrapped, training, self._output, repeats
        )

    # ---- training
    def _entered(self) -> Entered:
        """What is set now."""
        if self._board is None:
            return Entered([candidate for candidate, ticked, _ in self._rows if ticked], self._first, *self._repeats)
        c = self._board.controls
        ticked = [row.candidate() for row in c.rows.values() if row.tick.value]
        return Entered(ticked, c.training(self._first), c.seeds.value, c.splits.value)


__all__ = ["Comparison"]
