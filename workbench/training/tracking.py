"""Logging of a training to a tracker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from workbench.trackers.base import Tracker
from workbench.trackers.delivery import Delivery
from workbench.training.checkpoint import Checkpoint
from workbench.training.history import History
from workbench.training.progress import Callback, Progress


class TrainingLog:
    """Callback that logs each epoch, and then calls the user's callback.

    The run begins with the first step, so that a refused training leaves none.

    Args:
        tracker: tracker to log to.
        settings: settings of the training.
        callback: the user's callback.
        checkpoint: stores the identifier by which the run can be resumed.
    """

    def __init__(
        self, tracker: Tracker, settings: Mapping[str, Any], callback: Callback | None, checkpoint: Checkpoint | None
    ) -> None:
        self.tracker, self.settings, self.callback = (
            tracker,
            {name.replace(" ", "_"): value for name, value in settings.items()},
            callback,
        )
        self.runs: dict[str, str] = {} if checkpoint is None else checkpoint.runs
        self.deliver = Delivery(tracker)
        self.begun = False
        self.epochs_before = 0  # epochs of shorter trainings of the same run

    def __call__(self, progress: Progress) -> Any:
        if not self.begun:
            self.begun = True
            self.deliver(self._begin)
        if progress.epoch_ended:
            values = {"loss": float(progress.loss), "validation_loss": progress.validation_loss, "lr": progress.lr}
            known = {name: value for name, value in values.items() if not math.isnan(value)}
            self.deliver(lambda: self.tracker.log(known, self.epochs_before + progress.epoch))
        return None if self.callback is None else self.callback(progress)

    def _begin(self) -> None:
        kind = type(self.tracker).__name__
        run = self.tracker.begin(self.settings["wrapped"], self.settings, resume=self.runs.get(kind))
        if run is None:
            self.runs.pop(kind, None)
        else:
            self.runs[kind] = run

    def end(self, status: str, values: Mapping[str, float] | None = None) -> None:
        """End the run, if it has begun."""
        if not self.begun:
            return
        if values:
            self.deliver(lambda: self.tracker.log(values))
        self.deliver(lambda: self.tracker.end(status))
        self.deliver.close()


@contextmanager
def logged(log: TrainingLog | None) -> Iterator[Callable[[History], History]]:
    """Log a training to its end: pass its history to the yielded function; the run is ended even if the training fails."""
    histories: list[History] = []

    def record(history: History) -> History:
        histories.append(history)
        return history

    try:
        yield record
    except BaseException as error:
        if log is not None:
            log.end("failed" if isinstance(error, Exception) else "interrupted")
        raise
    for history in histories:
        if log is not None:
            log.end("interrupted" if history.interrupted else "finished", _summary(history))


def _summary(history: History) -> dict[str, float]:
    values: dict[str, float] = {"seconds": history.seconds, "best_epoch": history.best_epoch}
    if history.best_epoch:
        _, loss, validation, _, _ = history.records[history.best_epoch - 1]
        values |= {"best_loss": loss, "best_validation_loss": validation}
    if history.out_of_fold is not None:
        values["out_of_fold_nll"] = history.out_of_fold.nll
    return {name: value for name, value in values.items() if not math.isnan(value)}


__all__ = ["TrainingLog", "logged"]
