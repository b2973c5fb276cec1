"""Tracker for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import require
from workbench.trackers.base import new_settings


class WandB:
    """Logs to Weights & Biases: to the active run, which stays open, or to a new run.

    Args:
        **options: options of `wandb.init` for new runs, such as ``project="risk"`` or ``mode="offline"``.

    Raises:
        ModuleNotFoundError: if wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        self._wandb = require("wandb", "trackers")
        self.options = options
        self._run: Any = None
        self._owned = False

    def begin(self, name: str, settings: Mapping[str, Any], group: str = "", resume: str | None = None) -> str | None:
        """Begin a run, see `Tracker`."""
        active = self._wandb.run
        self._owned = active is None or bool(group)
        self._named: set[str] = set()
        if not self._owned:
            self._run = active
            active.config.update(new_settings(dict(active.config), settings, "the wandb run"))
            return None
        options: dict[str, Any] = {"name": name, "config": dict(settings)}
        if group:  # a separate run, which does not replace the active one
            options |= {"group": group, "reinit": "create_new"}
            if active is not None:
                options |= {"project": active.project, "entity": active.entity or None}
        if resume is not None:
            options |= {"id": resume, "resume": "allow"}
        self._run = self._wandb.init(**{**options, **self.options})
        return str(self._run.id)

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers, see `Tracker`, against their own step metric, since the step of an active run may be ahead."""
        if step is None:
            self._run.summary.update(dict(values))
            return
        for name in values.keys() - self._named:
            self._run.define_metric(name, step_metric="step")
            self._named.add(name)
        self._run.log({**values, "step": step})

    def end(self, status: str) -> None:
        """End the run, see `Tracker`."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.summary["status"] = status
        finally:
            if self._owned:
                run.finish(exit_code=0 if status == "finished" else 1)


__all__ = ["WandB"]
