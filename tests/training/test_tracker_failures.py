"""Failing trackers do not break a training, no tracker changes one, and other objects are refused."""

from __future__ import annotations

import doctest
import importlib
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.logged_trainings import made, quiet, rows, weights
from helpers.tracker_readers import PACKAGES, RecordingTracker, active_run, offline, read

from workbench.errors import WorkbenchWarning
from workbench.trackers import TensorBoard
from workbench.trackers.delivery import Delivery, tracker_of


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with offline(request.param, tmp_path):
        yield request.param


# ---- trackers that fail
@pytest.mark.parametrize("method", ["begin", "log", "end"])
def test_a_tracker_that_fails_costs_a_warning_then_and_one_at_the_end(method: str) -> None:
    tracker, logged, alone = RecordingTracker(lambda calls: calls[-1][0] == method), made(), made()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        history = quiet(logged, rows(), epochs=4, log_to=tracker)
    # settings, four epochs, summary and end; of a run that never began, each call fails
    lost = {"begin": "6 calls are lost", "log": "5 calls are lost", "end": "1 call is lost"}[method]
    first, last = (str(warning.message) for warning in warned if warning.category is WorkbenchWarning)
    assert "RecordingTracker failed (OSError: no space left on device); everything else continues" in first
    assert f"RecordingTracker failed again at the end (OSError: no space left on device): {lost}" in last
    assert len(history.records) == 4
    assert not history.interrupted
    quiet(alone, rows(), epochs=4)
    assert all(map(torch.equal, weights(logged), weights(alone)))
    assert (tracker.calls[-1] == ("end", "finished")) == (method != "end")


def test_what_a_tracker_has_missed_it_gets_at_the_end() -> None:
    asked = []

    def fails(calls: list[Any]) -> bool:
        if calls[-1][0] == "log":
            asked.append(calls[-1][2])
        return calls[-1][2:] == (2,) and asked.count(2) == 1

    tracker = RecordingTracker(fails)
    with pytest.warns(WorkbenchWarning, match="missed calls are tried again at the end") as warned:
        quiet(made(), rows(), epochs=4, log_to=tracker)
    assert len(warned) == 1
    assert asked == [1, 2, 2, 3, 4, None]  # not asked for long, in epochs 3 and 4
    assert tracker.epochs() == [1, 2, 3, 4]
    assert tracker.calls[-1] == ("end", "finished")


def test_a_folder_that_cannot_be_written_to_costs_a_warning(tmp_path: Path) -> None:
    with offline("tensorboard", tmp_path):
        (tmp_path / "runs").write_text("somebody else's")
        with pytest.warns(WorkbenchWarning, match="TensorBoard failed"):
            history = quiet(made(), rows(), epochs=2, log_to="tensorboard")
        assert len(history.records) == 2
        assert (tmp_path / "runs").read_text() == "somebody else's"


def test_an_mlflow_run_that_cannot_be_logged_to_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with offline("mlflow", tmp_path):
        import mlflow

        def fail(*_: Any, **__: Any) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr(mlflow, "log_metrics", fail)
        with pytest.warns(WorkbenchWarning, match="MLflow failed"):
            quiet(made(), rows(), epochs=2, log_to="mlflow")
        assert active_run("mlflow") is None
        monkeypatch.setattr(mlflow.MlflowClient, "log_batch", fail)
        with pytest.warns(WorkbenchWarning, match="MLflow failed"):
            quiet(made(), rows(), epochs=2, log_to="mlflow")
        assert active_run("mlflow") is None
        assert {run.status for run in read("mlflow", tmp_path)} == {"finished", "failed"}


def test_an_interrupt_of_the_tracker_loses_no_call() -> None:
    tracker, raised = RecordingTracker(), []
    deliver = Delivery(tracker)

    def interrupted() -> None:
        if not raised:
            raised.append(True)
            raise KeyboardInterrupt
        tracker.log({"loss": 1.0}, 1)

    with pytest.raises(KeyboardInterrupt):
        deliver(interrupted)
    deliver(lambda: tracker.end("interrupted"))
    assert tracker.calls == [("log", {"loss": 1.0}, 1), ("end", "interrupted")]


# ---- what stays as it was
def test_nothing_is_drawn_and_the_weights_are_the_same(package: str) -> None:
    logged, alone = made(), made()
    quiet(alone, rows(), epochs=3)
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    quiet(logged, rows(), epochs=3, log_to=package)
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])
    assert all(map(torch.equal, weights(logged), weights(alone)))


def test_runs_of_one_moment_have_folders_of_their_own(tmp_path: Path) -> None:
    with offline("tensorboard", tmp_path):
        for seed in range(3):
            quiet(made(), rows(), epochs=1, seed=seed, log_to=TensorBoard(tmp_path / "here"))
        runs = read("tensorboard", tmp_path)
        assert sorted(run.settings["seed"] for run in runs) == ["0", "1", "2"]


@pytest.mark.slow
def test_no_tracker_is_imported_before_it_is_asked_for() -> None:
    code = "import sys, workbench.training; print({'tensorboard', 'mlflow', 'wandb'} & sys.modules.keys())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, sys.path)))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "set()"), done.stderr


# ---- what is refused
def test_a_missing_package_is_named_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what an import of something missing finds
    wrapped = made()
    before = [value.clone() for value in weights(wrapped)]
    with pytest.raises(ModuleNotFoundError, match=r"needs wandb.*pip install 'risk-workbench\[trackers\]'"):
        quiet(wrapped, rows(), epochs=1, log_to="wandb")
    assert all(map(torch.equal, weights(wrapped), before))


@pytest.mark.parametrize(
    ("log_to", "error", "message"),
    [
        ("clearml", ValueError, "there is no tracker 'clearml'; give \"tensorboard\""),
        (TensorBoard, TypeError, r"TensorBoard is a class; give an instance of it, TensorBoard\(\)"),
        (print, TypeError, "lacks begin, log, end"),
    ],
)
def test_what_is_no_tracker_is_refused(log_to: Any, error: type[Exception], message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error, match=message):
            tracker_of(log_to)
        with pytest.raises(error, match=message):
            quiet(made(), rows(), epochs=1, log_to=log_to)


@pytest.mark.parametrize("module", ["workbench.trackers", "workbench.trackers.delivery"])
def test_examples_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted
    assert not result.failed
