"""Offline trackers that write into a folder, readers of what they wrote, and a tracker that keeps its calls."""

from __future__ import annotations

import importlib
import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("tensorboard", "mlflow", "wandb")


class RecordingTracker:
    """A user-written tracker, which keeps its calls."""

    def __init__(self, fails: Callable[[list[Any]], bool] = lambda calls: False) -> None:
        self.calls: list[Any] = []
        self.fails = fails

    def _record(self, *what: Any) -> None:
        if self.fails([*self.calls, what]):
            raise OSError("no space left on device")
        self.calls.append(what)

    def begin(self, name: str, settings: Any, group: str = "", resume: str | None = None) -> str:
        self._record("begin", name, dict(settings), group, resume)
        return "run 1"

    def log(self, values: Any, step: int | None = None) -> None:
        self._record("log", dict(values), step)

    def end(self, status: str) -> None:
        self._record("end", status)

    def epochs(self) -> list[int]:
        return [call[2] for call in self.calls if call[0] == "log" and call[2] is not None]


@dataclass
class Read:
    """A run, as shown by the tracker's own reader."""

    id: str
    status: str = ""
    state: str = ""  # the status in the tracker's own words, if it has one
    group: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    summary: dict[str, float] = field(default_factory=dict)


@contextmanager
def offline(package: str, folder: Path) -> Iterator[None]:
    """Let a tracker write into a folder, without a network; skip the test if it is not installed."""
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'risk-workbench[trackers]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in {
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "WANDB_DIR": str(folder),
            "WANDB_ERROR_REPORTING": "false",
        }.items():
            patch.setenv(name, value)
        try:
            yield
        finally:
            active = active_run(package)
            while active is not None:  # left by a test that has failed
                importlib.import_module("mlflow").end_run() if package == "mlflow" else active.finish()
                active = active_run(package)
            if package == "wandb":  # it reads the environment only once
                importlib.import_module("wandb").teardown()


def active_run(package: str) -> Any:
    """Return the run that the user's own calls would log to."""
    module = importlib.import_module(package)
    return {"mlflow": lambda: module.active_run(), "wandb": lambda: module.run}.get(package, lambda: None)()


def read(package: str, folder: Path) -> list[Read]:
    """Return all runs of a tracker in a folder, oldest first."""
    return {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}[package](folder)


def _tensorboard(folder: Path) -> list[Read]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    runs = []
    for path in sorted(
        {file.parent for file in folder.rglob("events.out.tfevents.*")}, key=lambda p: p.stat().st_ctime
    ):
        events = EventAccumulator(str(path))
        events.Reload()
        run = Read(str(path), group=path.parent.name if path.parent.name != "runs" else "")
        for tag in events.Tags()["scalars"]:
            run.curves[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
            run.summary[tag] = run.curves[tag][-1][1]
        [table] = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("settings/text_summary")[-1:]]
        run.settings = dict(line.strip("|").split("|", 1) for line in table.splitlines()[2:])
        if "status/text_summary" in events.Tags()["tensors"]:
            run.status = events.Tensors("status/text_summary")[-1].tensor_proto.string_val[0].decode()
            started = plugin_data_pb2.HParamsPluginData.FromString(
                events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
            ).session_start_info
            assert started.hparams.keys() == run.settings.keys()
        runs.append(run)
    return runs


def _mlflow(folder: Path) -> list[Read]:
    import mlflow

    client = mlflow.MlflowClient()
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = []
    for stored in client.search_runs(experiments, order_by=["attributes.start_time ASC"]):
        tags = stored.data.tags
        status, group = (tags.get(f"workbench.{name}", "") for name in ("status", "group"))
        run = Read(stored.info.run_id, status, stored.info.status, group, dict(stored.data.params))
        for name in stored.data.metrics:
            run.curves[name] = [(m.step, m.value) for m in client.get_metric_history(run.id, name)]
        run.summary = dict(stored.data.metrics)
        runs.append(run)
    return runs


def _wandb(folder: Path) -> list[Read]:
    """Read runs from their transaction logs; a resumed run has several."""
    importlib.import_module("wandb").teardown()  # waits for the process that writes the logs
    runs: dict[str, Read] = {}
    for file in sorted(folder.rglob("*.wandb"), key=lambda path: path.stat().st_ctime):
        for record in _records(file.read_bytes()):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run = runs.setdefault(record.run.run_id, Read(record.run.run_id, group=record.run.run_group))
                _take(run.settings, record.run.config.update)
            elif kind == "config":
                _take(run.settings, record.config.update)
            elif kind == "summary":
                _take(run.summary, record.summary.update)
            elif kind == "history":
                values: dict[str, Any] = {}
                _take(values, record.history.item)
                for name in values.keys() - {"step", "_step", "_runtime", "_timestamp"}:
                    run.curves[name].append((values["step"], values[name]))
    for run in runs.values():
        run.settings = {name: str(value) for name, value in run.settings.items() if not name.startswith("_")}
        run.status = str(run.summary.pop("status", ""))
    return list(runs.values())


def _take(values: dict[str, Any], items: Any) -> None:
    values |= {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[Any]:
    """Yield the records of a wandb log in the LevelDB format: blocks of 32 KiB, with records in one or several pieces."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, parts = 7, b""  # starts after the header
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        length, piece = struct.unpack_from("<HB", data, position + 4)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if piece in (1, 4):  # a whole record, or its last piece
            yield Record.FromString(parts)
            parts = b""
