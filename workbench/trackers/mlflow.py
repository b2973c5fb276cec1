"""Tracker for MLflow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from workbench.errors import require
from workbench.trackers.base import new_settings

STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


class MLflow:
    """Logs to MLflow: to the active run, which stays open, or to a new run in the current experiment.

    Store and experiment are set by `mlflow.set_tracking_uri` and `mlflow.set_experiment`, or by MLFLOW_TRACKING_URI and
    MLFLOW_EXPERIMENT_NAME. The runs of a sweep are children of the active run if there is one.

    Raises:
        ModuleNotFoundError: if mlflow is not installed.
    """

    def __init__(self) -> None:
        self._mlflow = require("mlflow", "trackers")
        self._run: str | None = None
        self._owned = False

    def begin(self, name: str, settings: Mapping[str, Any], group: str = "", resume: str | None = None) -> str | None:
        """Begin a run, see `Tracker`."""
        mlflow = self._mlflow
        run = mlflow.active_run()
        self._owned = run is None or bool(group)
        if self._owned:
            tags = {"workbench.group": group} if group else None
            nested = run is not None
            resumes = resume is not None and self._has(resume)
            run = (
                mlflow.start_run(run_id=resume)
                if resumes
                else mlflow.start_run(run_name=name, nested=nested, tags=tags)
            )
        self._run = run.info.run_id
        try:
            existing = mlflow.get_run(self._run).data.params
            mlflow.MlflowClient().log_batch(
                self._run, params=self._params(new_settings(existing, settings, "the mlflow run"))
            )
        except BaseException:
            self.end("failed")
            raise
        return self._run if self._owned else None

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers, see `Tracker`."""
        self._mlflow.log_metrics({_key(name): value for name, value in values.items()}, step=step, run_id=self._run)

    def end(self, status: str) -> None:
        """End the run, see `Tracker`."""
        mlflow, run, self._run = self._mlflow, self._run, None
        if run is None:
            return
        try:
            mlflow.MlflowClient().set_tag(run, "workbench.status", status)
        finally:
            if self._owned:
                active = mlflow.active_run()
                if active is not None and active.info.run_id == run:
                    mlflow.end_run(STATUS.get(status, "FAILED"))
                else:  # it was closed elsewhere, or a nested run was left open
                    mlflow.MlflowClient().set_terminated(run, STATUS.get(status, "FAILED"))

    def _params(self, settings: Mapping[str, Any]) -> list[Any]:
        param = self._mlflow.entities.Param
        return [param(_key(name), str(value)) for name, value in settings.items()]

    def _has(self, run: str) -> bool:
        """Whether the store has this run; the tracking URI may have changed, or the run may have been deleted."""
        try:
            return bool(self._mlflow.get_run(run).info.lifecycle_stage == "active")
        except self._mlflow.MlflowException:
            return False


def _key(name: str) -> str:
    """Return a name with all characters that MLflow does not allow replaced."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


__all__ = ["MLflow"]
