"""`workbench compare`: what it runs, prints and returns."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from workbench.cli import main
from workbench.experiments.compare import _options, summary


def frame(**columns: Any) -> pd.DataFrame:
    """Results of a grid with two wrappers and three seeds."""
    rows = [(wrapper, seed) for seed in range(3) for wrapper in ("plain", "vote + sculpt")]
    same = {"model": "auto", "network": "mlp", "data": "yacht", "task": "regression", "epochs": 5}
    return pd.DataFrame(rows, columns=["wrapper", "seed"]).assign(**same, **columns)


@pytest.mark.slow
def test_a_run_prints_a_table_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [
        "compare",
        "-g",
        "data=cubic,moons",
        "-g",
        "wrapper=plain, vote(n_voters=2)+sculpt",
        "-m",
        "linear",
        "--smoke",
    ]
    assert main([*command, "-g", "seed=0", "-p", "rows", "40", "--epochs", "1"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert [line.split()[1] for line in lines[:4]] == ["ok"] * 4
    assert "cubic: linear, 1 epoch, rows 40, 1 seed" in lines
    assert "moons: linear, 1 epoch, rows 40, 1 seed" in lines
    assert sum(line.startswith("vote(n_voters=2) + sculpt  ") for line in lines) == 2
    assert lines[-1] == "4 of 4 cells: compare.csv"
    assert "±" not in printed
    record = json.loads((tmp_path / "compare.json").read_text())["runs"][0]
    assert record["command"].startswith(
        'workbench compare -g data=cubic,moons -g "wrapper=plain, vote(n_voters=2)+sculpt"'
    )
    assert str(tmp_path) not in json.dumps(record)

    before = (tmp_path / "compare.csv").read_bytes()
    assert main([*command, "-g", "seed=0", "-p", "rows", "40", "--epochs", "1", "--metrics", "mae,accuracy"]) == 0
    again = capsys.readouterr().out
    assert (tmp_path / "compare.csv").read_bytes() == before
    assert "mae" in again
    assert "rmse" not in again
    assert "[1/4]" not in again


@pytest.mark.slow
def test_cells_that_fail_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "a.csv"
    arguments = ["compare", "-g", "data=cubic", "-g", "wrapper=plain", "-m", "cnn,linear", "-p", "rows", "40"]
    assert main([*arguments, "-g", "seed=0", "--epochs", "1", "-o", str(output)]) == 1
    printed = capsys.readouterr().out
    assert "1 of 2 cells" in printed
    assert f"1 without results: {output.with_suffix('.failed.txt')}" in printed
    assert "cnn takes images" in output.with_suffix(".failed.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-g", "wrapper=voter"], "did you mean vote"),
        (["-g", "data=conrete"], "did you mean 'concrete'"),
        (["-g", "seed=0,x"], "seeds are whole numbers"),
        (["-g", "seeds=0"], "did you mean seed"),
        (["-g", "lr=0.1"], "-p NAME VALUE"),
        (["-g", "seed"], "-g takes NAME=A,B"),
        (["-g", "data="], "names no values"),
        (["-g", "data=yacht", "-g", "data=energy"], "data is given twice"),
        (["-m", "mlp", "-g", "model=cnn"], "model is given twice"),
        (["-p", "learning_rate", "1"], "-p has no 'learning_rate'"),
        (["--epochs", "0"], "epochs must be a whole number"),
        (["-p", "epochs", "0"], "epochs must be a whole number"),
        (["-p", "standardize", "no"], "standardize must be True, False or None; found 'no'"),
        (["-g", "data=json:lods"], "json has no 'lods': did you mean loads"),
        (["-m", "json:lods"], "json has no 'lods': did you mean loads"),
        (["--metrics", "rmse,nl"], "did you mean nll"),
        (["-j", "0"], "jobs must be a whole number"),
        (["-o", "a.xlsx"], ".csv or .parquet file"),
    ],
)
def test_bad_input_ends_with_2_before_anything_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("workbench: ")
    assert message in captured.err
    assert captured.out == ""
    assert not list(tmp_path.iterdir())


def test_a_scheduler_that_is_lost_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise ConnectionAbortedError("the scheduler was lost, run again to go on")

    monkeypatch.setattr("workbench.experiments.sweep.grid", lost)
    assert main(["compare", "--scheduler", "tcp://far:8786", "-o", str(tmp_path / "a.csv")]) == 1
    assert capsys.readouterr().err == "workbench: the scheduler was lost, run again to go on\n"


def test_the_table_says_mean_error_and_best() -> None:
    rmse = [3.0, 1.0, 4.0, 2.0, 5.0, 6.0]  # plain 3 4 5, vote 1 2 6
    text = summary(frame(rmse=rmse, picp90=[0.99, 0.88] * 3, passes=[1.0, 6.0] * 3))
    lines = text.splitlines()
    assert lines[0] == "yacht: mlp, 5 epochs, 3 seeds"
    shown = [" ".join(line.split()) for line in lines]
    assert shown[2] == "plain 4.00 ± 0.58 0.990 ± 0.000 1.00"
    assert shown[3] == "vote + sculpt 3.00 ± 1.53 * 0.880 ± 0.000 * 6.00"
    assert lines[-1] == "mean ± standard error over seeds; * the best mean of its column"


def test_a_width_is_best_only_where_it_covers_and_a_mean_only_over_all_seeds() -> None:
    widths = {"mpiw90": [4.0, 1.0] * 3, "picp90": [0.91, 0.5] * 3}
    first, second = summary(frame(**widths), ["mpiw90"]).splitlines()[2:4]
    assert "*" not in first + second  # one alone is not the best of anything
    covered = {**widths, "picp90": [0.91, 0.95] * 3}
    first, second = summary(frame(**covered), ["mpiw90"]).splitlines()[2:4]
    assert ("*" in first, "*" in second) == (False, True)
    uneven = frame(rmse=[2.0, 9.0, 2.0, 1.0, 2.0, 1.0]).drop(index=1)
    assert " *" not in summary(uneven, ["rmse"]).splitlines()[3]


def test_runs_with_other_options_are_no_repeats() -> None:
    both = [frame(rmse=[1.0, 2.0] * 3), frame(rmse=[5.0, 8.0] * 3)]
    for name, first, second in (("standardize", True, False), ("patience", 5, 10), ("fit_device", "cpu", "cuda")):
        mixed = pd.concat([both[0].assign(**{name: first}), both[1].assign(**{name: second})], ignore_index=True)
        lines = [" ".join(line.split()) for line in summary(mixed, ["rmse"]).splitlines()]
        shown = name.removeprefix("fit_")
        assert lines[0] == f"yacht: mlp, 5 epochs, {shown} {first}, 3 seeds"
        assert lines[2] == "plain 1.00 ± 0.00 *"
        assert lines[5] == f"yacht: mlp, 5 epochs, {shown} {second}, 3 seeds"
        assert lines[7] == "plain 5.00 ± 0.00 *"


def test_options_are_read_as_python_or_as_a_shell_spells_them() -> None:
    texts = {"standardize": "false", "patience": "None", "lr": "1e-3", "device": "cpu"}
    arguments = argparse.Namespace(smoke=False, epochs=None, parameter=list(texts.items()))
    assert _options(arguments) == {"standardize": False, "patience": None, "lr": 1e-3, "device": "cpu"}


def test_what_is_missing_or_alike_is_no_best() -> None:
    text = summary(frame(nll=[1.0, 1.0] * 3, aurc=[float("nan"), 2.0] * 3, picp90=[float("nan")] * 6))
    lines = text.splitlines()
    assert "in 90%" not in text
    assert "*" not in "".join(lines[:-1])
    assert lines[2].split()[-1] == "–"
    uneven = frame(rmse=[3.0, 1.0, 4.0, 2.0, 5.0, 6.0]).iloc[:5]
    assert "3 seeds at most (some are missing)" in summary(uneven)


def test_higher_is_better_where_it_is() -> None:
    text = summary(frame(accuracy=[0.9, 0.8] * 3).assign(task="classification"))
    assert [line.split()[0] for line in text.splitlines()[:-1] if line.endswith("*")] == ["plain"]
