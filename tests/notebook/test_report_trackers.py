"""What a report has recorded becomes a run in a tracker."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from helpers.tracker_readers import PACKAGES, RecordingTracker, active_run, offline, read

from workbench import cli
from workbench.errors import WorkbenchWarning
from workbench.notebook import run_grid, run_notebook

CODE = """
from workbench import record, record_check
record(half=n / 2, word="a text", curve=[1, 2], gone=float("nan"))
record_check("small (for now)", n < 3)
"""


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    def cell(code: str, *tags: str) -> Any:
        return nbformat.v4.new_code_cell(code.strip(), metadata={"tags": list(tags)})

    cells = [cell("n = 2\nname = 'a|b'", "parameters"), cell(CODE), cell("assert n != 5, 'not five'")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "small.ipynb")
    return tmp_path / "small.ipynb"


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with offline(request.param, tmp_path):
        yield request.param


@pytest.mark.slow
def test_a_report_is_a_run(package: str, notebook: Path, tmp_path: Path) -> None:
    run = run_notebook(notebook, tmp_path / "out.ipynb", {"n": 4}, log_to=package)
    [logged] = read(package, tmp_path)
    assert (logged.status, logged.group) == ("finished", "")
    assert logged.settings["n"] == "4"
    assert {name: v for name, v in logged.summary.items() if name == "half"} == {"half": 2.0}
    gone = logged.summary["gone"]
    assert gone is None or math.isnan(gone)  # of which W&B keeps that it is no number
    assert logged.summary.keys() & {"word", "curve"} == set()
    assert [v for name, v in logged.summary.items() if name.startswith("check")] == [0]
    assert logged.summary["seconds"] == pytest.approx(run.seconds, rel=1e-6)
    assert active_run(package) is None


@pytest.mark.slow
def test_it_is_told_as_it_was_recorded_and_once(notebook: Path, tmp_path: Path) -> None:
    tracker = RecordingTracker()
    for _ in range(2):
        run = run_notebook(notebook, tmp_path / "out.ipynb", resume=True, log_to=tracker)
    begin, logged, end = tracker.calls
    assert begin == ("begin", "out", {"n": 2, "name": "a|b"}, "", None)
    costs = {"seconds": run.seconds, "peak_memory_MiB": run.peak_memory}
    assert logged[1].items() >= {"half": 1.0, "check: small (for now)": 1, **costs}.items()
    assert end == ("end", "finished")


@pytest.mark.slow
def test_a_notebook_that_fails_is_logged_with_what_it_has_recorded(notebook: Path, tmp_path: Path) -> None:
    tracker = RecordingTracker()
    assert run_notebook(notebook, tmp_path / "out.ipynb", {"n": 5}, log_to=tracker).status == "failed"
    assert tracker.calls[1][1]["half"] == 2.5
    assert tracker.calls[2] == ("end", "failed")


def test_the_active_mlflow_run_is_logged_to_and_stays_open(notebook: Path, tmp_path: Path) -> None:
    with offline("mlflow", tmp_path):
        import mlflow

        with mlflow.start_run() as mine:
            run_notebook(notebook, tmp_path / "out.ipynb", log_to="mlflow")
            assert mlflow.active_run().info.run_id == mine.info.run_id
        [run] = read("mlflow", tmp_path)
        assert run.summary["half"] == 1.0


@pytest.mark.slow
def test_each_run_of_a_grid_is_one_of_a_group(notebook: Path, tmp_path: Path) -> None:
    tracker, again = RecordingTracker(), RecordingTracker()
    for log_to in (tracker, again):
        run_grid(notebook, tmp_path / "reports", grid={"n": [2, 5]}, progress=False, log_to=log_to)
    assert [(call[1], call[2]["n"], call[3]) for call in tracker.calls if call[0] == "begin"] == [
        ("small_n-2", 2, "small"),
        ("small_n-5", 5, "small"),
    ]
    assert [call[1] for call in tracker.calls if call[0] == "end"] == ["finished", "failed"]
    assert [call[1]["half"] for call in tracker.calls if call[0] == "log"] == [1.0, 2.5]
    assert [call[1] for call in again.calls if call[0] == "begin"] == ["small_n-5"]  # the other one was not run again


@pytest.mark.slow
def test_a_tracker_that_fails_costs_a_warning(notebook: Path, tmp_path: Path) -> None:
    with pytest.warns(WorkbenchWarning, match="RecordingTracker failed") as warned:
        runs = run_grid(
            notebook,
            tmp_path,
            grid={"n": [1, 2]},
            progress=False,
            log_to=RecordingTracker(lambda calls: calls[-1][0] == "log"),
        )
    assert ["failed again at the end" in str(warning.message) for warning in warned] == [False, True]
    assert [run.status for run in runs] == ["ok", "ok"]


def test_a_missing_package_is_named_before_anything_runs(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert cli.main(["report", str(notebook), "-o", str(tmp_path / "reports"), "--log-to", "mlflow"]) == 2
    assert "pip install 'risk-workbench[trackers]'" in capsys.readouterr().err
    assert not (tmp_path / "reports").exists()


@pytest.mark.slow
def test_the_command_line_logs(notebook: Path, tmp_path: Path) -> None:
    with offline("tensorboard", tmp_path):
        assert cli.main(["report", str(notebook), "-o", "reports", "-p", "n", "1", "--log-to", "tensorboard"]) == 0
        [run] = read("tensorboard", tmp_path)
        assert (run.settings["n"], run.summary["half"], run.group) == ("1", 0.5, "small")
