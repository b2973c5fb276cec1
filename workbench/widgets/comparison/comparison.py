"""`Comparison`: compare wrappers of one model, with or without widgets."""

from __future__ import annotations

import html
import inspect
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from workbench.core.wrapper import Wrapper
from workbench.data import Data

from ..common.inputs import Model
from ..common.jobs import Jobs
from ..common.positions import comparable_data
from ..common.saved import reopen
from . import export as _export
from .board import Board
from .buttons import Buttons
from .choice import Choice, Chosen
from .chooser import Chooser
from .controls import Controls
from .findings import Findings, Settings
from .matrix import matrix_page
from .offers import variables_from
from .outcome import Outcome
from .preparation import Request, prepared
from .repeats import Splits
from .saved import display_snapshot, saved_output
from .session import Session, contents
from .trainer import Trainer
from .trials import Trained, Training, check_training, threads_for


class Comparison(Outcome):
    """Compare wrappers of a model: train them one after another, and see risks, scores and costs side by side.

    In a notebook it displays as a widget: models to tick, settings made from the signatures of the wrappers, Train and Stop, and for each model
    a picture that suits the data. Training runs in the background, so that cells can run meanwhile. Without a browser, use
    `start(block=True)`, `results`, `models` and `snapshot()`.

    Every model starts at the same weights and sees the same rows. A tenth of the training rows selects the best epoch; the test rows are only
    used for evaluation. For a wrapper that does not measure noise, likelihood and intervals assume constant noise: the root mean squared error
    on the validation rows, added to the epistemic risk as variances add.

    Args:
        model: the model to wrap, which is never changed; or a function without arguments (or a class) that returns one, called for each seed;
            or a ready model as text: "tabular" (`workbench.models.tabular`, made for each split), "mlp", "cnn" or "linear", with arguments as
            in "mlp(width=100)". It gives one value, or one score for each class, for each row (pixel, token, column of targets).
        data: a workbench Data, the name of a data set, or a pair (x, y) of tensors or arrays with x [n, ...] and y: values [n], [n, k] or maps
            [n, height, width], class numbers [n] or of pixels or tokens, or booleans [n, labels]. A fifth of the rows of a pair become test
            rows. Several targets per row are scored as by `workbench compare`: pixels, tokens and labels pooled, columns each in its own
            unit. Without model or data, a form in the notebook asks for what is missing; see `choose`.
        wrappers: a dict name -> wrapper (or composition), or a list of wrappers or of texts such as "vote" and "vote(n_voters=5) +
            sculpt"; a default choice for the task if None. All registered wrappers can be added in the widget.
        epochs: passes over the training rows.
        lr: peak learning rate.
        weight_decay: weight decay, decoupled from the gradient.
        batch_size: rows per step; None as for `workbench.fit`.
        seed: seed of initial weights, validation rows, order of rows and all random draws.
        split: number of the split, for data given by name or as a pair.
        seeds, splits: number of seeds and splits each model is trained on, starting from `seed` and `split`. The table then has means and
            standard errors, and marks what is better than the plain model beyond noise: by a paired t-test over the splits, or the seeds of one
            split, corrected for the number of comparisons (Holm) and for rows that splits share (Nadeau and Bengio, 2003). Pictures show the
            first seed and split.
        output: what the model gives: "values", "logits", "probs" or "binary"; inferred if None.
        device: device to train on, such as "cuda"; that of the model if None.
        session: file that every run is saved to as it ends, and that is read first if it exists: the same call after a restart of the kernel,
            or on another machine, shows table, pictures and losses of all runs. It does not contain weights: `models` has the models trained in
            this kernel, and `start(again=True)` trains the others again. No file is written if None.

    Raises:
        TypeError, ValueError: if an argument has the wrong type or value, there is no such wrapper or data set, the model does not fit the
            data, or the session file belongs to other data.

    Example:
        >>> import torch
        >>> def model():
        ...     return torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        >>> comparison = Comparison(model, "diabetes", ["sculpt", "vote"], epochs=2)
        >>> comparison.start(block=True).results.index.tolist()
        ['plain', 'sculpt', 'vote']
    """

    _splits: Splits
    _trainer: Trainer

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | str | None = None,
        data: Data | str | tuple[Any, Any] | None = None,
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
        arguments = dict(locals())
        training = Training(epochs, lr, weight_decay, batch_size, seed, device)
        path = None if session is None else Path(session)
        self._request = Request(wrappers, training, split, seeds, splits, output, path)
        self._board: Board | None = None
        self._chooser: Chooser | None = None
        self._saved = saved_output(lambda: vars(self).get("_findings"))
        self._building = threading.RLock()
        self._choice: Choice | None = None
        if model is not None and data is not None:
            self._build(model, data)
            return
        defaults = inspect.signature(Comparison).parameters
        options = {
            name: arguments[name] for name in list(defaults)[2:] if arguments[name] is not defaults[name].default
        }
        variables, saved = variables_from(sys._getframe(1)), None if path is None else contents(path)
        if model is not None:
            Model(model)
        if data is not None:
            comparable_data(data, split)
        self._choice = Choice(model, data, variables, options, saved)

    def _build(self, model: Any, data: Any) -> None:
        """Set up the comparison for a model and data; if they do not fit, raise before anything is changed."""
        request, made = self._request, prepared(model, data, self._request)
        splits = Splits(data, made.data)
        splits.prepare(request.splits)
        names = [candidate.name for candidate, _, _ in made.rows]
        findings = Findings(splits, names, self._settings, made.model)
        session = Session(request.session, made.data, str(made.model))
        threads = threads_for(made.plain, made.data)
        trainer = Trainer(made.model, findings, session, made.output, threads, lambda: self._board)
        self._board = None
        self._prepared, self._splits, self._findings, self._trainer = made, splits, findings, trainer

    def __getattr__(self, name: str) -> Any:
        choice = vars(self).get("_choice")
        if name in ("_prepared", "_splits", "_findings", "_trainer") and choice is not None:
            raise RuntimeError(choice.missing())
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def choose(self, model: Any = None, data: Any = None) -> Comparison:
        """Choose model or data of a comparison that was made without them, as its form does.

        Once both are known, it is equivalent to `Comparison(model, data, ...)` with its other arguments. The choice can be changed until
        something is trained.

        Args:
            model, data: as for `Comparison`; None keeps the current choice.

        Returns:
            The object itself.

        Raises:
            TypeError, ValueError: as `Comparison`; nothing is changed then.
            RuntimeError: if it was made with both model and data, or something is trained already.

        Example:
            >>> comparison = Comparison(epochs=2)  # in a notebook it shows a form
            >>> comparison.choose("mlp", "diabetes").data.name
            'diabetes'
        """
        with self._building:
            choice = self._choice
            if choice is None:
                raise RuntimeError("choose: this comparison was made with its model and data; make another Comparison")
            self._take(*choice.given_in_code(model, data))
        return self

    def _check_changeable(self) -> None:
        """Raise an error if something is trained, since runs of different models or data can't be compared."""
        findings = vars(self).get("_findings")
        if findings is not None and (findings.runs or findings.deleted or findings.jobs):
            raise RuntimeError(
                f"choose: there are runs of {self._prepared.model} on {self.data.name} already; make another Comparison for other models or data"
            )

    def _take(self, model: Chosen | None, data: Chosen | None) -> None:
        """Take the choice, and set up the comparison if both model and data are known."""
        choice = self._choice
        assert choice is not None
        with self._building:
            self._check_changeable()
            if model is not None and data is not None:
                self._build(model.value, data.value)
            elif model is not None:
                Model(model.value)
            elif data is not None:
                comparable_data(data.value, self._request.split)
            choice.model, choice.data = model, data
            if self._chooser is not None:
                self._show_chosen(self._chooser)

    def _show_chosen(self, chooser: Chooser) -> None:
        """Show the comparison in place of the form, or the form if something is still to be chosen."""
        if "_findings" not in vars(self):
            chooser.show_form()
            return
        controls = self.controls
        assert self._board is not None
        self._board.displayed = True
        chooser.show(controls.root)
        self._show_all()

    @property
    def jobs(self) -> Jobs:
        """The queue of training jobs."""
        return self._trainer.jobs

    @property
    def data(self) -> Data:
        """The data set."""
        return self._prepared.data

    @property
    def controls(self) -> Controls:
        """The widgets, made on first access, since use without a browser needs none."""
        if self._board is None:
            about = (
                f"{html.escape(str(self._prepared.model))} on {html.escape(self.data.name)}: {len(self.data.train):,} training and "
                f"{len(self.data.test):,} test rows of shape {'×'.join(map(str, self.data.input_shape))}, {self.data.task} of "
                f"{html.escape(str(self.data.target))}."
            )
            request = self._request
            repeats = request.seeds, request.splits
            controls = Controls(self.data.task, request.training, about, repeats, self._splits.several)
            controls.style.value += f"<style>{self._saved.style}</style>"
            buttons = Buttons(controls, self, self._findings, self._drop, self._refresh)
            for candidate, ticked, added in self._prepared.rows:
                buttons.put(candidate, ticked, added)
            self._board = Board(
                controls, self._findings, self._saved.update, lambda: matrix_page(self._findings, self._prepared.output)
            )
            buttons.connect()
            self._board.refresh()
        return self._board.controls

    # ---- without widgets
    def start(self, *, block: bool = False, again: bool = False) -> Comparison:
        """Train the ticked models, one after another, except those already trained with these settings.

        Args:
            block: train in this thread; Ctrl-C stops, and trained models are kept. If the training of a model fails, the others are trained, and
                then the first error is raised, with the name of the model.
            again: also train models that are already trained with these settings.

        Returns:
            The object itself.

        Raises:
            RuntimeError: if it is training already.
            ValueError: if a setting is out of range.
        """
        if self.running:
            raise RuntimeError("this comparison is training already: stop() it, or wait() for it")
        settings = self._settings()
        check_training(settings.training)
        if not self._trainer.begin(settings, again, block):
            self._refresh()
            self._set_status(
                "All ticked models are already trained with these settings. Tick another one, or change a setting."
            )
            return self
        self._refresh()
        return self

    def stop(self) -> None:
        """Stop the training; models trained so far are kept and can be used."""
        for job in self._findings.jobs:
            job.cancel()
        if self.running and self._board is not None:
            self._board.controls.stop.disabled = True
            self._set_status("<b>Stopping</b>: models trained so far are kept …")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until training has ended, at most `timeout` seconds; return whether it has."""
        return all(job.wait(timeout) for job in self._findings.jobs)

    @property
    def running(self) -> bool:
        """Whether anything is training or queued."""
        return "_findings" in vars(self) and self._findings.running

    def delete(self, *runs: int) -> None:
        """Delete runs, also from the session file; `undo()` restores them.

        Args:
            *runs: run numbers, as in `runs`.

        Raises:
            KeyError: if there is no such run; nothing is deleted then.
            RuntimeError: while something is training.
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
        """Restore the runs deleted last.

        Raises:
            ValueError: if none was deleted.
            RuntimeError: while something is training.
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
        """Display a static picture in the running cell, which is also shown without a kernel and in reports."""
        display_snapshot(self._findings)
        self._saved.clear()

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write a notebook that repeats the comparison, with parameters for `workbench report` and papermill.

        Args:
            path: path of the .ipynb file; an existing file is replaced.

        Returns:
            The path. For what can't be written as source code, such as a model object made in a notebook, the notebook has a cell to fill in.

        Raises:
            ValueError: if the path does not end in .ipynb.
        """
        return _export.write(path, self._exported())

    def command(self, path: str | os.PathLike[str] = "comparison.ipynb") -> str:
        """Return the command line that runs the exported notebook with the current settings and makes a report of it."""
        return _export.command(path, self._exported())

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        with self._building:
            if self._choice is not None:
                self._chooser = self._chooser or Chooser(
                    self._choice, self._take, self._check_changeable, self._saved.style
                )
                self._show_chosen(self._chooser)
            root = self.controls.root if self._chooser is None else self._chooser.root
            if self._board is not None:
                self._board.displayed = True
                for name in list(self.controls.rows):
                    self._board.show_panel(name)
        self._saved.display()
        bundle = reopen(root)._repr_mimebundle_(**kwargs)
        if isinstance(bundle, dict):  # for viewers without widgets
            bundle["text/plain"] = self._in_words()
        return bundle

    def _mime_(self) -> tuple[str, str]:
        """Return HTML for marimo, which shows no ipywidgets: table and pictures as in a saved notebook, or a text if nothing is trained."""
        return "text/html", self._saved.page() or f"<pre>{html.escape(self._in_words())}</pre>"

    def _in_words(self) -> str:
        if "_findings" not in vars(self):
            assert self._choice is not None
            return f"Comparison: {self._choice.missing()}"
        return f"Comparison of {', '.join(self._findings.names)} on {self.data.name}"

    def _refresh(self) -> None:
        if self._board is not None:
            self._board.refresh()

    def _set_status(self, text: str) -> None:
        if self._board is not None:
            self._board.controls.set_status(text)

    def _exported(self) -> _export.Exported:
        settings, made = self._settings(), self._prepared
        wrapped = [candidate for candidate in settings.ticked if candidate.parts]
        repeats = (settings.seeds, settings.splits)
        return _export.Exported(
            made.model, made.source, made.data, self._request.split, wrapped, settings.training, made.output, repeats
        )

    # ---- training
    def _settings(self) -> Settings:
        """Return the current settings."""
        request = self._request
        if self._board is None:
            ticked = [candidate for candidate, ticked, _ in self._prepared.rows if ticked]
            return Settings(ticked, request.training, request.seeds, request.splits)
        c = self._board.controls
        ticked = [row.candidate() for row in c.rows.values() if row.tick.value]
        return Settings(ticked, c.training(request.training), c.seeds.value, c.splits.value)


__all__ = ["Comparison"]
