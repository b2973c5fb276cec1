"""`workbench report --from`: the index of the runs in an MLflow store agrees with the store."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup
from helpers.executed_reports import own_text
from helpers.tracker_readers import offline

from workbench.cli import main
from workbench.notebook.curves import curves_figure, curves_plot
from workbench.notebook.mlflow_runs import report_mlflow

LOSSES = {"0.1": [3.0, 2.0, 1.0], "0.01": [3.0, 2.5, 2.25]}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """Two runs that have ended, one that failed and one that goes on, in two experiments."""
    with offline("mlflow", tmp_path):
        import mlflow

        client = mlflow.MlflowClient()
        for lr, losses in LOSSES.items():
            run = client.create_run(client_experiment(client, "rates"), run_name="training")
            client.log_param(run.info.run_id, "lr", lr)
            for epoch, loss in enumerate(losses, 1):
                client.log_metric(run.info.run_id, "loss", loss, step=epoch)
            client.log_metric(run.info.run_id, "rmse", losses[-1] / 10)
            client.log_metric(run.info.run_id, "lr", 0.0)  # at the end
            client.set_terminated(run.info.run_id)
        failed = client.create_run(client_experiment(client, "others"), run_name="a <b> & c")
        client.log_metric(failed.info.run_id, "loss", math.nan, step=1)
        client.set_terminated(failed.info.run_id, "FAILED")
        client.create_run(client_experiment(client, "others"), run_name="going on")
        yield tmp_path / "mlruns"


def client_experiment(client: Any, name: str) -> str:
    known = client.get_experiment_by_name(name)
    return str(client.create_experiment(name) if known is None else known.experiment_id)


def table(page: Path) -> dict[str, list[dict[str, str]]]:
    """Title of a section -> rows of its table of all runs."""
    soup = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")
    tables = {}
    for section in soup.select("section"):
        heads = [own_text(button) for button in section.select("table.runs thead th button")]
        rows = [
            [c.get_text(" ", strip=True) for c in row.select("th, td")] for row in section.select("table.runs tbody tr")
        ]
        tables[section.h1.get_text()] = [dict(zip(heads, row, strict=True)) for row in rows]
    return tables


def test_the_page_says_what_the_store_says(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted((path, path.read_bytes()) for path in store.rglob("*") if path.is_file())
    assert main(["report", "--from", "mlruns"]) == 0
    page = tmp_path / "reports" / "mlflow" / "index.html"
    assert page.as_uri() in capsys.readouterr().out
    sections = table(page)
    assert sections.keys() == {"rates", "others"}
    rows = {row["lr"]: row for row in sections["rates"]}
    assert {lr: (row["status"], float(row["loss"]), float(row["rmse"])) for lr, row in rows.items()} == {
        "0.1": ("ok", 1.0, 0.1),
        "0.01": ("ok", 2.25, 0.225),
    }
    assert len({row["run"] for row in sections["rates"]}) == 2  # of the same name
    states = {row["run"]: row["status"] for row in sections["others"]}
    assert states == {"a <b> & c": "failed", "going on it is still running, or was stopped from outside": "interrupted"}
    soup = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")
    [rates] = [section for section in soup.select("section") if section.h1.get_text() == "rates"]
    [curves] = [image["src"] for image in rates.select("img.plot") if image["alt"].startswith("loss over the steps")]
    assert curves.startswith("data:image/")
    assert "run the same command again" not in soup.get_text()  # no command does
    written = json.loads(page.with_suffix(".json").read_text())
    stored = {run["parameters"]["lr"]: run["curves"] for run in written["runs"] if run["parameters"]}
    assert stored == {
        float(lr): {
            "loss": [[epoch, loss] for epoch, loss in enumerate(losses, 1)],
            "rmse": [[0, losses[-1] / 10]],
            "lr": [[0, 0.0]],
        }
        for lr, losses in LOSSES.items()
    }
    assert sorted((path, path.read_bytes()) for path in store.rglob("*") if path.is_file()) == before
    assert "data:image" in page.read_text()


def test_experiments_can_be_chosen(store: Path, tmp_path: Path) -> None:
    assert main(["report", "--from", store.as_uri(), "--experiment", "rates", "-o", "chosen"]) == 0
    assert table(tmp_path / "chosen" / "index.html").keys() == {"rates"}
    with pytest.raises(ValueError, match="has no experiment 'rate'; it has Default, others, rates"):
        report_mlflow(store, tmp_path / "chosen", ["rate"])


def test_a_folder_is_read_without_leave_that_stays(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    report_mlflow(store, tmp_path / "out")
    assert "MLFLOW_ALLOW_FILE_STORE" not in os.environ


@pytest.mark.usefixtures("store")
def test_what_is_no_store_is_refused_and_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.db").write_text("a text that is long enough to be read as the head of a database")
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("CREATE TABLE runs (n INTEGER)")
    before = (tmp_path / "other.db").read_bytes()
    for command, message in {
        ("--from", "nowhere"): "there is no folder or file nowhere",
        ("--from", "empty"): "is not an MLflow store",
        ("--from", "other.db"): "it has no tables of experiments, runs and metrics",
        ("--from", "text.db"): "file is not a database",
        ("--from", "ftp://somewhere"): "MLflow can't read the store",
        ("--from", "mlruns", "-g", "n=1"): "can't be combined with a notebook",
        ("small.ipynb", "--from", "mlruns"): "can't be combined with a notebook",
        ("--from", "mlruns", "--experiment", "Default"): "mlruns has no runs",
        (): "no notebook given",
        ("small.ipynb", "--experiment", "rates"): "--experiment",
    }.items():
        assert main(["report", *command]) == 2, command
        assert message in capsys.readouterr().err
    assert list((tmp_path / "empty").iterdir()) == []
    assert (tmp_path / "other.db").read_bytes() == before
    assert not (tmp_path / "reports").exists()


def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert main(["report", "--from", str(tmp_path)]) == 2
    assert "pip install 'risk-workbench[trackers]'" in capsys.readouterr().err


# ---- curves
def test_a_line_for_each_run_through_its_points_in_order() -> None:
    points = {"a": [(2, 1.0), (1, 2.0), (3, math.nan)], "b": [(1, 4.0), (2, 3.0)]}
    figure = curves_figure({run: {"loss": p, "best": [(0, 1.0)]} for run, p in points.items()})
    [ax] = [ax for ax in figure.axes if ax.get_visible()]
    drawn = {line.get_label(): [tuple(p) for p in line.get_xydata().tolist()] for line in ax.lines}
    assert drawn == {"a": [(1, 2.0), (2, 1.0)], "b": [(1, 4.0), (2, 3.0)]}
    assert ax.get_title() == "loss"
    assert len({line.get_color() for line in ax.lines}) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_of_more_runs_than_colours_lines_have_no_names() -> None:
    figure = curves_figure({f"run {i}": {"loss": [(1, 2.0), (2, float(i))]} for i in range(20)})
    assert len(figure.axes[0].lines) == 20
    assert figure.legends == []


def test_without_curves_there_is_no_picture() -> None:
    assert curves_plot({"a": {"rmse": [(0, 1.0)], "loss": [(1, math.nan), (2, math.nan)]}}) is None


@pytest.mark.slow
def test_a_database_is_read_as_well(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy", reason="sqlalchemy is not installed: pip install 'risk-workbench[trackers]'")
    with offline("mlflow", tmp_path):
        import mlflow

        client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
        run = client.create_run(client_experiment(client, "rates"), run_name="training")
        client.log_metric(run.info.run_id, "rmse", 0.5)
        client.set_terminated(run.info.run_id)
        page = report_mlflow(tmp_path / "mlflow.db", tmp_path / "out")
        [[row]] = table(page).values()
        assert (row["status"], row["rmse"]) == ("ok", "0.5")
