"""Delivery of log calls to a tracker, whose failures only cause a warning."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from workbench.errors import WorkbenchWarning
from workbench.trackers.base import Tracker
from workbench.trackers.mlflow import MLflow
from workbench.trackers.tensorboard import TensorBoard
from workbench.trackers.wandb import WandB

NAMED: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
METHODS = ("begin", "log", "end")


def tracker_of(log_to: str | Tracker) -> Tracker:
    """Return the tracker for `log_to`.

    Args:
        log_to: "tensorboard", "mlflow", "wandb", or an object with the methods of `Tracker`.

    Raises:
        ValueError: if there is no tracker of this name.
        TypeError: if an object lacks a method.
        ModuleNotFoundError: if the tracker's package is not installed.

    Example:
        >>> tracker_of("clearml")
        Traceback (most recent call last):
        ...
        ValueError: log_to: there is no tracker 'clearml'; give "tensorboard", "mlflow" or "wandb", or an object with begin, log and end
    """
    if isinstance(log_to, str):
        if log_to not in NAMED:
            raise ValueError(
                f'log_to: there is no tracker {log_to!r}; give "tensorboard", "mlflow" or "wandb", or an object with begin, log and end'
            )
        return NAMED[log_to]()
    if isinstance(log_to, type):
        raise TypeError(f"log_to: {log_to.__name__} is a class; give an instance of it, {log_to.__name__}()")
    if missing := [name for name in METHODS if not callable(getattr(log_to, name, None))]:
        raise TypeError(
            f"log_to: an object of type {type(log_to).__name__} is not a tracker, it lacks {', '.join(missing)}; see workbench.trackers.Tracker"
        )
    return log_to


class Delivery:
    """Makes the calls of a tracker in order; after a failure, the rest wait for the end, so that a dead network causes no repeated waits.

    Args:
        tracker: tracker to call.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._calls: deque[Callable[[], Any]] = deque()
        self._failed = False

    def __call__(self, call: Callable[[], Any]) -> None:
        """Make a call, now, or at the end if an earlier one has failed."""
        self._calls.append(call)
        if not self._failed:
            self._flush()

    def run(
        self, name: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], status: str, group: str = ""
    ) -> None:
        """Log a completed run: a single row of results as its numbers, several rows as its steps; values that are not numbers are left out."""
        self(lambda: self.tracker.begin(name, settings, group))
        for number, row in enumerate(rows):
            values = {key: v for key, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
            step = None if len(rows) == 1 else number
            self(partial(self.tracker.log, values, step))
        self(lambda: self.tracker.end(status))

    def close(self) -> None:
        """Retry the failed calls, try to end the run in any case, and warn of calls that failed again: they are lost."""
        error = self._flush()
        if error is not None:
            with contextlib.suppress(Exception):
                self._calls[-1]()
                self._calls.pop()
            lost = len(self._calls)
            self._calls.clear()
            warnings.warn(
                f"log_to: {type(self.tracker).__name__} failed again at the end ({type(error).__name__}: {error}): {lost} "
                f"{'call is' if lost == 1 else 'calls are'} lost, and the logged run is not complete",
                WorkbenchWarning,
                stacklevel=3,
            )

    def _flush(self) -> Exception | None:
        """Make the waiting calls, and return the error of the first that fails."""
        while self._calls:
            try:
                self._calls[0]()
            except Exception as error:
                if not self._failed:
                    self._failed = True
                    warnings.warn(
                        f"log_to: {type(self.tracker).__name__} failed ({type(error).__name__}: {error}); everything else continues, and the "
                        "missed calls are tried again at the end",
                        WorkbenchWarning,
                        stacklevel=3,
                    )
                return error
            self._calls.popleft()
        return None


__all__ = ["Delivery", "tracker_of"]
