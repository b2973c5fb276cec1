"""Index of the runs in an MLflow store, with their curves."""

from __future__ import annotations

import ast
import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import require
from .curves import Curves, curves_plot
from .entries import Entry
from .index import Index
from .run import CLOCK, Run
from .values import to_json

STATUS = {"FINISHED": "ok", "FAILED": "failed"}
ALLOW_FILE_STORE = "MLFLOW_ALLOW_FILE_STORE"  # environment variable without which MLflow refuses to read folders


class MLflowIndex(Index):
    """Index of runs in an MLflow store, which have curves and can't be resumed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.entries = {}  # without executed notebooks that are in the folder
        self.curves: dict[str, Curves] = {}

    def _section(self, name: str, entries: list[Entry]) -> dict[str, Any]:
        curves = curves_plot({entry.run.name: self.curves[entry.run.name] for entry in entries})
        return {**super()._section(name, entries), "open": False, "store": True, "curves": curves}


def report_mlflow(store: Path | str, folder: Path | str, experiments: list[str] | None = None) -> Path:
    """Write index.html, index.json and index.csv of the runs in an MLflow store: parameters, last values of metrics, and curves.

    Args:
        store: folder such as mlruns, file such as mlflow.db, or tracking URI.
        folder: output folder.
        experiments: names of the experiments; None: all.

    Returns:
        Path of index.html.

    Raises:
        FileNotFoundError: there is no such folder or file.
        ValueError: it is not an MLflow store, has no runs, or has no experiment of that name.
        ModuleNotFoundError: mlflow is not installed.
    """
    mlflow = require("mlflow", "trackers")
    folder = Path(folder).resolve()
    uri = _uri(store)
    with _readable(mlflow):
        client = mlflow.MlflowClient(tracking_uri=uri)
        names = {experiment.name: experiment.experiment_id for experiment in client.search_experiments()}
        if missing := [name for name in experiments or () if name not in names]:
            raise ValueError(f"{store} has no experiment {missing[0]!r}; it has {', '.join(sorted(names))}")
        runs = [
            (name, run)
            for name, number in names.items()
            if experiments is None or name in experiments
            for run in _pages(client, number)
        ]
        if not runs:
            raise ValueError(f"{store} has no runs")
        folder.mkdir(parents=True, exist_ok=True)
        index = MLflowIndex(folder)
        for experiment, run in reversed(runs):  # the oldest first
            _add(index, client, experiment, run)
    index.write(plots=True)
    return folder / "index.html"


def _pages(client: Any, experiment: str) -> Iterator[Any]:
    token = None
    while True:
        page = client.search_runs([experiment], page_token=token)
        yield from page
        if not (token := page.token):
            return


def _add(index: MLflowIndex, client: Any, experiment: str, run: Any) -> None:
    info, data = run.info, run.data
    name = info.run_name or info.run_id
    if name in index.entries:
        name = f"{name} ({info.run_id[:8]})"
    status = STATUS.get(info.status, "interrupted")
    started = time.localtime(info.start_time / 1000)
    entry_run = Run(
        name=name,
        notebook=experiment,
        output=str(index.folder / f"{info.run_id}.ipynb"),  # never written: runs have no pages of their own
        status=status,
        seconds=round((info.end_time - info.start_time) / 1000, 3) if info.end_time else 0.0,
        parameters={key: _value(text) for key, text in data.params.items()},
        error="it is still running, or was stopped from outside" if info.status in ("RUNNING", "SCHEDULED") else None,
        started=time.strftime(CLOCK, started),
    )
    curves = {key: [(m.step, m.value) for m in client.get_metric_history(info.run_id, key)] for key in data.metrics}
    index.curves[name] = curves
    logged = {"records": dict(data.metrics), "curves": curves}
    records = {kind: to_json(values, kind) for kind, values in logged.items()}
    # the table has a column for seconds already, and so has each parameter, such as lr, that was also logged as a metric
    scalars = {key: value for key, value in data.metrics.items() if key not in ("seconds", *data.params)}
    index.entries[name] = Entry(entry_run, experiment, scalars, {**records, "mlflow_run": info.run_id})


def _value(text: str) -> Any:
    """Parse a text as a number if possible, so that columns are sorted numerically."""
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(text)
        if isinstance(value, int | float):
            return value
    return text


def _uri(store: Path | str) -> str:
    if isinstance(store, str) and "://" in store:
        return store
    path = Path(store).resolve()
    if path.is_file():
        _check_database(path)
        return f"sqlite:///{path}"
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder or file {store}; give mlruns, mlflow.db or a tracking URI")
    if not any(path.glob("*/meta.yaml")):  # MLflow would create a store in it
        raise ValueError(f"{store} is not an MLflow store: no folder in it has a meta.yaml")
    return path.as_uri()


def _check_database(path: Path) -> None:
    """Raise unless the file is an MLflow database, since MLflow would create its tables in any other one."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} is not an MLflow store: {error}") from error
    if not {"experiments", "runs", "metrics"} <= tables:
        raise ValueError(f"{path} is not an MLflow store: it has no tables of experiments, runs and metrics")


@contextlib.contextmanager
def _readable(mlflow: Any) -> Iterator[None]:
    """Let MLflow read folders within the context, and turn its exceptions into ValueErrors."""
    previous = os.environ.get(ALLOW_FILE_STORE)
    os.environ[ALLOW_FILE_STORE] = "true"
    try:
        yield
    except mlflow.MlflowException as error:
        raise ValueError(f"MLflow can't read the store: {error}") from error
    finally:
        if previous is None:
            del os.environ[ALLOW_FILE_STORE]
        else:
            os.environ[ALLOW_FILE_STORE] = previous


__all__ = ["report_mlflow"]
