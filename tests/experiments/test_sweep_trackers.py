"""Each cell of a sweep is a run of its own in a tracker, separate from the user's open run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tracker_readers import PACKAGES, RecordingTracker, active_run, offline, read

from workbench import cli, compose
from workbench.errors import WorkbenchWarning
from workbench.experiments import backtest, grid, run_cells

WORK = """
def work(n):
    if n == 2:
        raise ValueError("not two")
    return {"square": n * n, "word": "a text", "even": n % 2 == 0}

def several(n):
    return [{"row": i, "square": i * i} for i in range(n)]
"""


@pytest.fixture
def work(tmp_path: Path) -> str:
    (tmp_path / "work.py").write_text(WORK)
    return f"{tmp_path / 'work.py'}:work"


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with offline(request.param, tmp_path):
        yield request.param


def swept(function: str, folder: Path, log_to: Any, numbers: tuple[int, ...] = (1, 2, 3)) -> Any:
    return run_cells(function, [{"n": n} for n in numbers], folder / "squares.csv", progress=False, log_to=log_to)


def test_each_cell_is_a_run(package: str, work: str, tmp_path: Path) -> None:
    frame = swept(work, tmp_path, package)
    runs = {run.settings["n"]: run for run in read(package, tmp_path)}
    assert {n: (run.status, run.group) for n, run in runs.items()} == {
        "1": ("finished", "squares"),
        "2": ("failed", "squares"),
        "3": ("finished", "squares"),
    }
    for n, seconds in zip((1, 3), frame["seconds"], strict=True):
        assert runs[str(n)].summary["square"] == n * n
        assert runs[str(n)].summary["seconds"] == pytest.approx(seconds, abs=1e-3)
        assert runs[str(n)].summary.keys() & {"word", "even"} == set()
    assert runs["2"].summary.keys() & {"square", "seconds"} == {"seconds"}
    assert active_run(package) is None
    swept(work, tmp_path, package, (1, 3))  # which are there
    assert len(read(package, tmp_path)) == 3


def test_cells_stand_below_the_active_mlflow_run(work: str, tmp_path: Path) -> None:
    with offline("mlflow", tmp_path):
        import mlflow

        with mlflow.start_run() as mine:
            swept(work, tmp_path, "mlflow", (1, 3))
            assert mlflow.active_run().info.run_id == mine.info.run_id
        client = mlflow.MlflowClient()
        assert client.get_run(mine.info.run_id).data.params == {}
        assert client.get_run(mine.info.run_id).data.metrics == {}
        cells = [run for run in read("mlflow", tmp_path) if run.id != mine.info.run_id]
        assert [run.state for run in cells] == ["FINISHED", "FINISHED"]
        parents = {client.get_run(run.id).data.tags["mlflow.parentRunId"] for run in cells}
        assert parents == {mine.info.run_id}


def test_cells_stand_beside_the_active_wandb_run(work: str, tmp_path: Path) -> None:
    with offline("wandb", tmp_path):
        import wandb

        mine = wandb.init()
        swept(work, tmp_path, "wandb", (1, 3))
        assert wandb.run is mine
        mine.log({"after": 1.0, "step": 0})
        mine.finish()
        cells = {run.id: run for run in read("wandb", tmp_path)}
        users_run = cells.pop(mine.id)
        assert (users_run.settings, users_run.curves.keys()) == ({}, {"after"})
        assert sorted((run.settings["n"], run.summary["square"]) for run in cells.values()) == [("1", 1), ("3", 9)]


def test_rows_are_steps(work: str, tmp_path: Path) -> None:
    tracker = RecordingTracker()
    swept(work.replace(":work", ":several"), tmp_path, tracker, (3,))
    begin, *logged, end = tracker.calls
    assert begin == ("begin", "n=3", {"n": 3}, "squares", None)
    assert [(call[1]["square"], call[2]) for call in logged] == [(0, 0), (1, 1), (4, 2)]
    assert end == ("end", "finished")


def test_a_tracker_that_fails_costs_a_warning_then_and_one_at_the_end(work: str, tmp_path: Path) -> None:
    tracker = RecordingTracker(lambda calls: calls[-1][0] == "log" and len(calls) < 9)
    with pytest.warns(WorkbenchWarning, match="RecordingTracker failed .*OSError: no space left on device") as warned:
        frame = swept(work, tmp_path, tracker, (1, 3, 4))
    assert ["failed again at the end" in str(warning.message) for warning in warned] == [False, True]
    assert frame["square"].tolist() == [1, 9, 16]


def test_what_is_missing_is_told_before_anything_is_written(
    work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'risk-workbench\[trackers\]'"):
        swept(work, tmp_path / "results", "mlflow")
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_grid_logs_its_scores(tmp_path: Path) -> None:
    tracker = RecordingTracker()
    frame = grid("linear", "plain", "cubic", [3], epochs=1, rows=40, progress=False, log_to=tracker)
    begin, logged, end = tracker.calls
    assert {"model": "linear", "wrapper": "plain", "data": "cubic", "seed": 3}.items() <= begin[2].items()
    assert begin[3] == "grid"
    assert {name: logged[1][name] for name in ("rmse", "nll", "fit_seconds")} == {
        name: frame[name][0] for name in ("rmse", "nll", "fit_seconds")
    }
    assert end == ("end", "finished")


def test_a_backtest_logs_its_trainings_and_goes_on_without(tmp_path: Path) -> None:
    tracker = RecordingTracker()
    series = torch.sin(0.3 * torch.arange(80.0))
    options: dict[str, Any] = {"window": 4, "horizon": 2, "start": 60, "every": 5, "refit": 2, "epochs": 2}
    options |= {"progress": False, "checkpoint": tmp_path / "state"}
    model = compose()(torch.nn.Linear(4, 2))
    first = backtest(model, series, log_to=tracker, **options)
    assert tracker.epochs() == [1, 2, 1, 2]  # for the origins 60 and 70
    assert [call[1] for call in tracker.calls if call[0] == "end"] == ["finished"] * 2
    assert torch.equal(backtest(model, series, **options).prediction, first.prediction)  # from the file


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["compare", "-g", "data=cubic", "-g", "wrapper=plain", "--smoke", "-o", "compare.csv"],
        ["bench", "small.py", "-o", "results"],
    ],
    ids=["compare", "bench"],
)
def test_the_command_line_logs(command: list[str], tmp_path: Path) -> None:
    with offline("tensorboard", tmp_path):
        code = "def cells(smoke=False):\n    return [{'n': 1}]\ndef run(n):\n    return {'rmse': 0.5}\ndef summary(*_):\n    return ''\n"
        (tmp_path / "small.py").write_text(code)
        assert cli.main([*command, "--log-to", "tensorboard"]) == 0
        [run] = read("tensorboard", tmp_path)
        frame = importlib.import_module("pandas").read_csv(next(tmp_path.rglob("*.csv")))
        assert run.summary["rmse"] == pytest.approx(frame["rmse"][0], rel=1e-6)
        assert run.group == next(tmp_path.rglob("*.csv")).stem
