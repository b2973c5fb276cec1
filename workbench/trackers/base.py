"""What a tracker must be able to do."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

from workbench.errors import WorkbenchWarning


class Tracker(Protocol):
    """Where measurements are logged to: runs, one after another, each begun, logged to and ended.

    Whatever is raised here costs no training: it is told once, and what was missed is tried again at the end.
    """

    def begin(self, name: str, settings: Mapping[str, Any], group: str = "", resume: str | None = None) -> str | None:
        """Begin a run.

        Args:
            name: of the run, for people.
            settings: what is known of it before: numbers, texts, truth values, None, or lists of these.
            group: the sweep or grid that the run is one of; "" for a run that stands alone, and goes into one that is active already.
            resume: what was returned when the run was begun, if it is gone on with after a break.

        Returns:
            By what it can be resumed, None if it can't.
        """

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers.

        Args:
            values: by their names.
            step: the epoch, or the row; None: they are said of the whole run.
        """

    def end(self, status: str) -> None:
        """End the run; one that was active before it was begun stays open.

        Args:
            status: "finished", "interrupted", or what went wrong: "failed", "timeout", "died".
        """


def new_settings(known: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings that a run does not have yet; a warning tells which it has with another value, which stays."""
    differing = [name for name, value in settings.items() if name in known and str(known[name]) != str(value)]
    if differing:
        warnings.warn(
            f"{where} has other values of {', '.join(differing)} already, and keeps them: log each training to a run of its own",
            WorkbenchWarning,
            stacklevel=2,
        )
    return {name: value for name, value in settings.items() if name not in known}


__all__ = ["Tracker", "new_settings"]
