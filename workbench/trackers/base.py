"""Interface of experiment trackers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

from workbench.errors import WorkbenchWarning


class Tracker(Protocol):
    """Destination of measurements, in runs that are begun, logged to and ended one after another.

    An error raised by a method does not stop the training: there is one warning, and the missed calls are tried again at the end.
    """

    def begin(self, name: str, settings: Mapping[str, Any], group: str = "", resume: str | None = None) -> str | None:
        """Begin a run.

        Args:
            name: readable name of the run.
            settings: settings of the run: numbers, strings, booleans, None, or lists of these.
            group: the sweep or grid that the run belongs to; "" for a single run, which is logged to a run that is already active, if any.
            resume: the identifier returned when the run was first begun, to continue it after an interruption.

        Returns:
            An identifier for resuming the run, None if it cannot be resumed.
        """

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers.

        Args:
            values: numbers by name.
            step: epoch or row; None: the numbers describe the whole run.
        """

    def end(self, status: str) -> None:
        """End the run; a run that was already active before stays open.

        Args:
            status: "finished", "interrupted", or the kind of failure: "failed", "timeout", "died".
        """


def new_settings(known: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings that a run does not have yet, and warn about those that it has with another value, which it keeps."""
    differing = [name for name, value in settings.items() if name in known and str(known[name]) != str(value)]
    if differing:
        warnings.warn(
            f"{where} already has other values of {', '.join(differing)}, and keeps them: log each training to its own run",
            WorkbenchWarning,
            stacklevel=2,
        )
    return {name: value for name, value in settings.items() if name not in known}


__all__ = ["Tracker", "new_settings"]
