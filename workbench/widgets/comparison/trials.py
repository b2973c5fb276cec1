"""Train and evaluate one candidate of a comparison, as a job."""

from __future__ import annotations

import copy
import html
import platform
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

import workbench
from workbench import metrics, plots
from workbench.calibration.collection import collect
from workbench.data import Data, Split
from workbench.engine.effects.private_random import own_random
from workbench.errors import as_count
from workbench.experiments.positions import batch_rows
from workbench.training import History, fit
from workbench.training.progress import Progress

from ..common import cases, pictures, positions
from ..common.inputs import Model
from ..common.jobs import Job
from ..common.predictions import CAUSES, Predictions, predict
from . import several
from .origin import difference, origin_of
from .panels import PanelData, draw, size, view_of
from .scales import Scales
from .scores import TIMED_ROWS, parameters_added, passes, scores
from .settings import Candidate

MAX_TEST_ROWS = 10_000  # test rows that are evaluated
SMALL_MODEL = 200_000  # number of parameters up to which one thread is faster than several
VALIDATION = 0.1  # share of the training rows
FIRST_LIVE, LIVE_SHARE = 0.3, 0.12  # seconds before the first live picture; maximum share of time spent on drawing


@dataclass(frozen=True)
class Training:
    """The settings of the training that all candidates share."""

    epochs: int
    lr: float
    weight_decay: float
    batch_size: int | None
    seed: int
    device: str | None


@dataclass
class Trained:
    """A run: a trained candidate with its settings and results.

    Args:
        name: name of the candidate.
        candidate: candidate with its settings.
        training: settings of the training.
        wrapped: trained model; None for a run read from a session file.
        history: history of the training.
        status: "" if complete, else what is missing, such as "stopped in epoch 3".
        scores: scores by the names of `scores.COLUMNS`.
        answers: predictions for the inputs of the picture; None if it could not be evaluated.
        error: exception of the evaluation, or None.
        origin: digests of the initial weights and of the structure of the plain model.
        versions: versions of the data, see `versions_of`.
        id: unique id of the run.
        number: number of the run within its comparison, from 1.
        settings: settings of the candidate, as text.
        made: parts of the candidate, as text.
        began: start of the training, UTC.
        split: split of the data.
        software: software versions by name.
    """

    name: str
    candidate: Candidate
    training: Training
    wrapped: Any
    history: History
    status: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    answers: Predictions | None = None
    error: BaseException | None = None
    origin: str = ""
    versions: tuple[int, ...] = ()
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    number: int = 0
    settings: str = ""
    made: str = ""
    began: str = ""
    split: int = 0
    software: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.settings:
            self.settings = repr(self.candidate.build())
            self.made = " + ".join(map(repr, self.candidate.build().make()))

    def differences(
        self, candidate: Candidate | None, training: Training, origin: str | None, versions: tuple[int, ...]
    ) -> str:
        """Return why the run can't be compared with runs of the current settings; "" if it can.

        Args:
            candidate: candidate of this name as entered; None if it is not ticked.
            training: settings of the training as entered.
            origin, versions: current origin of the model and versions of the data; None for an unknown origin.
        """
        reasons = ["not ticked"] if candidate is None else []
        for setting in fields(Training):
            before, now = getattr(self.training, setting.name), getattr(training, setting.name)
            if before != now:
                label = {"lr": "learning rate"}.get(setting.name, setting.name.replace("_", " "))
                reasons.append(f"{label} {_setting_text(before)}, not {_setting_text(now)}")
        if candidate is not None and repr(candidate.build()) != self.settings:
            reasons.append(f"trained as {self.settings}")
        if self.status.startswith("stopped"):
            reasons.append(self.status)
        if origin is not None and (other := difference(self.origin, origin)):
            reasons.append(other)
        if self.versions != versions:
            reasons.append("the data were changed since")
        return "; ".join(reasons)


def _setting_text(value: Any) -> str:
    return "by default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def software() -> dict[str, str]:
    """Return the versions of workbench, torch and Python."""
    return {"workbench": workbench.__version__, "torch": str(torch.__version__), "python": platform.python_version()}


def versions_of(data: Data) -> tuple[int, ...]:
    """Return how often each tensor of a data set was changed in place."""
    tensors = (data.train.x, data.train.y, data.test.x, data.test.y)
    return tuple(0 if not isinstance(t, Tensor) or t.is_inference() else t._version for t in tensors)


def trial(
    job: Job,
    candidate: Candidate,
    training: Training,
    model: Model,
    data: Data,
    parts: Callable[[int], tuple[Split, Split]],
    output: Any,
    publish: Callable[[str], Any] | None,
) -> Trained | None:
    """Train a candidate and evaluate it.

    Args:
        job: job to report progress on, which also says when to stop.
        candidate: candidate to wrap the model with.
        training: settings of the training.
        model: model to wrap; it is not changed.
        data: data set, for its test rows.
        parts: returns training and validation rows for a seed.
        output: what the model gives.
        publish: called with the HTML of live pictures; None for no pictures.

    Returns:
        The run; None if it was stopped before the first step.
    """
    job.report(0.0, "preparing")
    plain = model.new(training.seed)
    if training.device is not None:
        plain = plain.to(training.device)
    with own_random(training.seed, *{p.device for p in plain.parameters()}):
        # a copy where making a model takes long
        fresh = copy.deepcopy(plain) if model.reads_rows else model.new(training.seed)
        wrapped = candidate.build(output)(fresh.to(next(plain.parameters()).device))
    origin, versions = origin_of(plain), versions_of(data)
    train, valid = parts(training.seed)
    monitor = _Monitor(job, candidate, data, output, training, publish)
    if job.cancelled:
        return None
    began = datetime.now(UTC).isoformat(timespec="seconds")
    start = time.perf_counter()
    history = fit(
        wrapped,
        train,
        validation=valid,
        epochs=training.epochs,
        lr=training.lr,
        weight_decay=training.weight_decay,
        batch_size=training.batch_size,
        seed=training.seed,
        progress=False,
        callback=monitor,
    )
    seconds = time.perf_counter() - start - monitor.drawing - monitor.excess
    stopped = history.interrupted or job.cancelled
    if stopped and not monitor.steps:
        return None
    kept = Trained(candidate.name, candidate, training, wrapped, history, origin=origin, versions=versions)
    kept.began, kept.split, kept.software = began, data.split, software()
    if history.interrupted:
        kept.status = f"stopped in epoch {monitor.epoch} of {training.epochs}"
    kept.scores = {"parameters_added": float(parameters_added(wrapped, plain)), "seconds": seconds}
    job.report(1.0, "evaluating")
    try:
        _evaluate(kept, plain, data, valid, output)
        if not stopped:
            kept.scores["passes"] = (
                passes(wrapped, plain, data.test.x[: batch_rows(data.test.y, TIMED_ROWS)]) if candidate.parts else 1.0
            )
    except (ValueError, RuntimeError, TypeError) as error:
        kept.error, kept.status = error, "trained, but could not be evaluated"
    return kept


def check_training(training: Training) -> None:
    """Raise an error for settings of the training that `fit` would refuse."""
    from workbench.training.checks import check_numbers

    check_numbers(training.epochs, training.batch_size, training.lr, training.weight_decay, None, None, None)
    as_count("seed", training.seed, 0)


def threads_for(plain: nn.Module, data: Data) -> int | None:
    """Return 1 for a small model on small rows, where synchronizing threads would take longer than the operations; else None."""
    small = sum(p.numel() for p in plain.parameters()) <= SMALL_MODEL and data.train.x[0].numel() <= 100
    return 1 if small else None


def _evaluate(kept: Trained, plain: nn.Module, data: Data, valid: Split, output: Any) -> None:
    seed, noise = kept.training.seed, None
    if positions.has_several(data):
        evaluated = replace(data, test=data.test.take(range(min(len(data.test), MAX_TEST_ROWS))))
        kept.scores |= several.scores(kept.wrapped, plain, evaluated, valid, seed)
        kept.answers = positions.answers(kept.wrapped, data, view_of(data).x, seed)
        return
    if output == "values":
        predicted = collect(kept.wrapped, valid, risk=False, seed=seed)
        noise = float(metrics.rmse(predicted.y.cpu(), predicted.target.cpu())) or None
    n = min(len(data.test), MAX_TEST_ROWS)
    about = predict(kept.wrapped, data.test.x[:n], output, noise=noise, seed=seed)
    kept.scores |= scores(about, data, data.test.y[:n])
    view = view_of(data)
    kept.answers = predict(kept.wrapped, view.x, output, noise=noise, seed=seed)


class _Monitor:
    """Callback of a training: reports progress, collects losses, draws live pictures, and says when to stop."""

    def __init__(
        self,
        job: Job,
        candidate: Candidate,
        data: Data,
        output: Any,
        training: Training,
        publish: Callable[[str], Any] | None,
    ) -> None:
        self.job, self.candidate, self.output, self.training, self.publish = job, candidate, output, training, publish
        self.view = view_of(data, fine=False)
        self.records: list[tuple[int, float, float, float, float]] = []
        self.steps = self.epoch = 0
        self._start: float | None = None
        self._first = self.excess = 0.0
        self._begun = time.perf_counter()
        self.drawing, self._next = 0.0, time.perf_counter() + FIRST_LIVE

    def __call__(self, progress: Progress) -> bool:
        if self.job.cancelled:
            return True
        now = time.perf_counter()
        # the first step may take much longer, for loading and recording; `excess` is by how much
        if self._start is None:
            self._start, self._first = now, progress.fraction
        elif self.steps == 1:
            self.excess = max(0.0, self._start - self._begun - (now - self._start))
        self.steps, self.epoch = progress.step, progress.epoch
        if progress.epoch_ended:
            self.records.append((progress.epoch, float(progress.loss), progress.validation_loss, 0.0, 0.0))
        if self.job.due or progress.epoch_ended:
            valid = (
                f", validation {progress.validation_loss:.4g}"
                if progress.validation_loss == progress.validation_loss
                else ""
            )
            text = f"epoch {progress.epoch} of {progress.epochs}, loss {float(progress.loss):.4g}{valid}"
            seconds = time.perf_counter() - self._start - self.drawing
            text += time_left(seconds, progress.fraction - self._first, 1 - progress.fraction)
            self.job.report(progress.fraction, text)
        if self.publish is not None and progress.epoch_ended and time.perf_counter() >= self._next:
            self._draw(progress)
        return self.job.cancelled

    def _draw(self, progress: Progress) -> None:
        start = time.perf_counter()
        try:
            if positions.has_several(self.view.data):
                answers = positions.answers(progress.wrapped, self.view.data, self.view.x, self.training.seed)
            else:
                answers = predict(progress.wrapped, self.view.x, self.output, seed=self.training.seed)
            picture = panel(self.candidate, self.view, answers, History(self.records, 0), live=True)
        except (ValueError, RuntimeError) as error:  # training goes on, and reports its own errors
            picture = f"<h4>{html.escape(self.candidate.name)}</h4><p>no live picture: {html.escape(str(error))}</p>"
        assert self.publish is not None
        self.publish(picture)
        spent = time.perf_counter() - start
        self.drawing += spent
        self._next = time.perf_counter() + max(0.7, spent / LIVE_SHARE)


def time_left(seconds: float, done: float, rest: float) -> str:
    """Describe the remaining time of a training; "" while it can't be estimated.

    Args:
        seconds: time that the finished share took.
        done, rest: finished and remaining share of the training.

    Example:
        >>> time_left(10.0, 0.2, 0.7), time_left(60.0, 0.1, 0.9), time_left(0.1, 0.5, 0.5)
        (', about 35 s left', ', about 9 min left', '')
    """
    if seconds < 1 or done <= 0 or rest <= 0:
        return ""
    left = seconds / done * rest
    amount = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min" if left < 6000 else f"{left / 3600:.1f} h"
    return f", about {amount} left"


# ---- HTML
def panel(
    candidate: Candidate,
    view: PanelData,
    answers: Predictions,
    history: History | None,
    live: bool = False,
    note: str = "",
    made: str | None = None,
    scales: Scales | None = None,
) -> str:
    """Return the panel of one model as HTML: name, settings (`made`, else those of the candidate), picture and losses."""
    name, unit = html.escape(candidate.name), view.data.target.unit
    if view.kind == "images" and not live:
        picture = _gallery(view, answers)
    else:
        figure = pictures.new_figure(*size(view, answers))
        spots = draw(figure, view, answers, unit, scales)
        picture = pictures.svg(figure, describe(candidate.name, view, answers), () if live else spots)
    losses = ""
    if history is not None and history.records:
        figure = pictures.new_figure(5.6, 1.9 if live else 2.3)
        plots.history(history.frame, pictures.paint(figure.subplots()))
        drawn = pictures.svg(figure, f"losses of {candidate.name} over {len(history.records)} epochs")
        losses = drawn if live else f"<details><summary>losses over the epochs</summary>{drawn}</details>"
    made = " + ".join(map(repr, candidate.build().make())) if made is None else made
    settings = html.escape(made) or "the plain model"
    paragraph = f"<p>{html.escape(note)}</p>" if note else ""
    return f"<h4>{name}</h4><code>{settings}</code>{paragraph}{picture}{losses}"


def describe(name: str, view: PanelData, answers: Predictions) -> str:
    """Return the alternative text of a picture."""
    what = {
        "curve": "prediction over the input with bands of risk",
        "plane": "maps of prediction and risk over both inputs",
        "maps": "truth, prediction and risks of the first test rows as maps",
        "several": "scores only",
    }
    kind = what.get(
        view.kind, "the most uncertain test rows" if view.kind == "images" else "predictions and risk against the truth"
    )
    causes = f" ({', '.join(answers.causes)})" if answers.causes else ""
    return f"{name} on {view.data.name}: {kind}{causes}"


def _gallery(view: PanelData, answers: Predictions) -> str:
    """Return the images of highest risk by each cause, as HTML."""
    galleries = []
    for kind in [name for name in CAUSES if name in answers.risk] or ["total"]:
        rows = answers.risk[kind].argsort(descending=True)[:4]
        names = [f"row {int(view.rows[i])}" for i in rows]
        output = "values" if answers.probs is None else "logits"
        y = view.y[rows] if answers.probs is not None else view.y[rows][:, None]
        described = cases.cases(view.data, view.x[rows], answers.take(rows), names, y, output)
        galleries.append(cases.gallery(described, f"highest {kind} risk", output))
    return "".join(galleries)
