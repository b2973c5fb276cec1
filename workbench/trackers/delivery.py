"""What is logged reaches the tracker, or costs nothing but a warning."""

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
    """The tracker that is meant.

    Args:
        log_to: "tensorboard", "mlflow", "wandb", or an object with the methods of `Tracker`.

    Raises:
        ValueError: there is none of this name.
        TypeError: an object lacks a method.
        ModuleNotFoundError: its package is not installed.

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
        raise TypeError(f"log_to: {log_to.__name__} is a class; give an object of it, {log_to.__name__}()")
    if missing := [name for name in METHODS if not callable(getattr(log_to, name, None))]:
        raise TypeError(
            f"log_to: an object of type {type(log_to).__name__} is no tracker, it lacks {', '.join(missing)}; see workbench.trackers.Tracker"
        )
    return log_to


class Delivery:
    """Calls of a tracker, made in order as they come; once one has failed they wait for the end, so that a dead network is not waited for often.

    Args:
        tracker: whom they are made to.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._calls: deque[Callable[[], Any]] = deque()
        self._failed = False

    def __call__(self, call: Callable[[], Any]) -> None:
        """Make a call of the tracker, now or at the end."""
        self._calls.append(call)
        if not self._failed:
            self._make()

    def run(
        self, name: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], status: str, group: str = ""
    ) -> None:
        """Log a run that is over: one row of results are its numbers, several are its steps; what is no number is left out."""
        self(lambda: self.tracker.begin(name, settings, group))
        for number, row in enumerate(rows):
            values = {key: v for key, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
            step = None if len(rows) == 1 else number
            self(partial(self.tracker.log, values, step))
        self(lambda: self.tracker.end(status))

    def close(self) -> None:
        """Try again what has failed; whatever happens, no run that was begun stays open."""
        self._make()
        if self._calls:
            with contextlib.suppress(Exception):
                self._calls[-1]()
            self._calls.clear()

    def _make(self) -> None:
        while self._calls:
            try:
                self._calls[0]()
            except Exception as error:
                if not self._failed:
                    self._failed = True
                    warnings.warn(
                        f"log_to: {type(self.tracker).__name__} failed ({type(error).__name__}: {error}); all goes on without it, and what it "
                        "misses is given to it at the end, if it takes it then",
                        WorkbenchWarning,
                        stacklevel=3,
                    )
                return
            self._calls.popleft()


__all__ = ["Delivery", "tracker_of"]
