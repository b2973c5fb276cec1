"""Cells in worker processes: what is kept, what a failure costs, and how an interrupted run resumes."""

from __future__ import annotations

import csv
import doctest
import importlib
import json
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest

from workbench.errors import WorkbenchWarning
from workbench.experiments import run_cells
from workbench.experiments.store import RESERVED, key

WORK = """
import os, signal, sys, time
from pathlib import Path

HERE = Path(__file__).parent

def third(n, tag="none"):
    with (HERE / "calls.log").open("a") as log:
        log.write(f"{n}\\n")
    time.sleep(0.02 * (n % 3))
    return {"value": n / 3, "word": "NA" if n % 2 else "plain", "flag": n > 1, **({"extra": n} if n == 2 else {})}

def several(n):
    return [{"step": step, "value": n * step} for step in range(n)]

def fault(what):
    print("hello from", what, flush=True)
    os.system("echo native")
    if what == "raise":
        raise ValueError("no luck")
    if what == "exit":
        sys.exit(3)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "close":
        sys.stdout.close()
        os.close(1)
        os.close(2)
        os.chdir("/")
    if what == "flood":
        print("x" * 100_000_000)
        raise ValueError("flooded")
    if what == "essay":
        raise ValueError("y" * 50_000_000 + " at last")
    if what == "hang":
        time.sleep(60)
    if what == "object":
        return {"value": object()}
    if what == "nothing":
        return None
    if what == "clash":
        return {"seconds": 1}
    if what == "other":
        return {"what": "else"}
    return {"value": 1}

def once_fixed(n):
    if not (HERE / "fixed").exists():
        raise RuntimeError("not yet")
    return {"value": n}

def threads(n):
    import torch
    return {"torch": torch.get_num_threads(), "omp": os.environ["OMP_NUM_THREADS"]}

def slow(n):
    with (HERE / "slow.log").open("a") as log:
        log.write(f"{n} {os.getpid()}\\n")
    time.sleep(0.1 if n < 5 or (HERE / "again").exists() else 120)
    return {"value": n}

if __name__ == "__main__":
    from workbench.experiments import run_cells
    run_cells(slow, [{"n": n} for n in range(12)], HERE / "slow.csv", jobs=2)
"""


@pytest.fixture
def work(tmp_path: Path) -> Callable[[str], str]:
    """work("third") refers to a function of the file above."""
    (tmp_path / "work.py").write_text(WORK)
    return lambda name: f"{tmp_path / 'work.py'}:{name}"


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def gone(process: int) -> bool:
    """Whether there is no such process, or only its exit code is left."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def eventually(condition: Callable[[], bool], seconds: float = 180) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_script_that_workers_would_start_again_is_told_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)  # as in a new worker
    with pytest.raises(RuntimeError, match="put what starts the cells under if __name__ == '__main__':"):
        run_cells("builtins:dict", [{"n": 1}], tmp_path / "a.csv", progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_rows_keep_every_digit_and_the_order_of_cells(work: Callable[[str], str], tmp_path: Path) -> None:
    cells = [{"n": n, "tag": "none"} for n in (5, 2, 1, 4)]
    frame = run_cells(work("third"), cells, tmp_path / "out" / "a.csv", jobs=2, progress=False)
    assert frame["n"].tolist() == [5, 2, 1, 4]
    assert frame["value"].tolist() == [n / 3 for n in (5, 2, 1, 4)]
    # words that pandas likes to take for missing values
    assert frame["word"].tolist() == ["NA", "plain", "NA", "plain"]
    assert frame["tag"].tolist() == ["none"] * 4
    assert frame["flag"].tolist() == [True, True, False, True]
    assert frame["extra"].isna().tolist() == [True, False, True, True]
    assert frame["cell"].tolist() == [key(cell) for cell in cells]
    assert frame.attrs["failed"] == []
    assert list(frame.columns[-4:]) == list(RESERVED)

    alone = run_cells(work("third"), cells, tmp_path / "b.csv", progress=False)
    assert alone.drop(columns="seconds").equals(frame.drop(columns="seconds"))
    assert not list(tmp_path.rglob("*.part"))


def test_a_cell_may_give_several_rows(work: Callable[[str], str], tmp_path: Path) -> None:
    frame = run_cells(work("several"), [{"n": 3}, {"n": 2}], tmp_path / "a.csv", progress=False)
    assert frame[["n", "step", "value"]].to_numpy().tolist() == [[3, 0, 0], [3, 1, 3], [3, 2, 6], [2, 0, 0], [2, 1, 2]]


@pytest.mark.slow
def test_what_is_there_is_not_run_again(work: Callable[[str], str], tmp_path: Path) -> None:
    path, calls = tmp_path / "a.csv", tmp_path / "calls.log"
    cells = [{"n": n} for n in range(4)]
    run_cells(work("third"), cells[:2], path, progress=False, command="first")
    before = table(path)
    frame = run_cells(work("third"), cells, path, progress=False, command="second")
    assert calls.read_text().split() == ["0", "1", "2", "3"]
    assert frame["n"].tolist() == [0, 1, 2, 3]
    assert [{**row, "extra": ""} for row in before] == table(path)[:2]

    again = run_cells(work("third"), cells[1:3], path, progress=False, resume=False, command="third")
    assert calls.read_text().split()[4:] == ["1", "2"]
    assert again["n"].tolist() == [1, 2]
    assert sorted(row["n"] for row in table(path)) == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_the_record_says_what_made_the_file_and_no_more(work: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for cells, command in (([{"n": 0}], "one"), ([{"n": 0}, {"n": 1}], "one"), ([{"n": 2}], "two")):
        run_cells(work("third"), cells, path, progress=False, command=command)
    content = path.with_suffix(".json").read_text()
    runs = json.loads(content)["runs"]
    assert [(run["command"], run["cells"]) for run in runs] == [("one", 2), ("two", 1)]
    assert runs[0]["seconds"] == pytest.approx(sum(float(row["seconds"]) for row in table(path)[:2]), abs=0.01)
    assert {"python", "torch", "numpy", "workbench", "device", "git"} <= set(runs[0]["environment"])
    for private in (str(tmp_path), str(Path.home()), platform.node()):
        assert private not in content + path.read_text()

    run_cells(work("third"), [{"n": n} for n in range(3)], path, progress=False, resume=False, command="all again")
    assert [run["command"] for run in json.loads(path.with_suffix(".json").read_text())["runs"]] == ["all again"]


@pytest.mark.slow
def test_a_fault_costs_its_own_cell(
    work: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["raise", "fine", "exit", "kill", "object", "nothing", "clash", "other", "hang", "last"]
    path = tmp_path / "a.csv"
    frame = run_cells(work("fault"), [{"what": name} for name in names], path, jobs=2, timeout=4)
    assert frame["what"].tolist() == ["fine", "last"]
    failed = {failure["cell"]["what"]: failure for failure in frame.attrs["failed"]}
    assert {name: failure["status"] for name, failure in failed.items()} == {
        **dict.fromkeys(("raise", "exit", "object", "nothing", "clash", "other"), "failed"),
        "kill": "died",
        "hang": "timeout",
    }
    assert "line" in failed["raise"]["error"]
    assert "ValueError: no luck" in failed["raise"]["error"]
    assert "killed by SIGKILL" in failed["kill"]["error"]
    assert "longer than 4 s" in failed["hang"]["error"]
    assert "found object" in failed["object"]["error"]
    assert "must return one dict or a list" in failed["nothing"]["error"]
    assert "'seconds'" in failed["clash"]["error"]
    assert "'what'" in failed["other"]["error"]

    told = path.with_suffix(".failed.txt").read_text()
    for name in failed:
        assert f'{{"what": "{name}"}}' in told
        assert f"hello from {name}\nnative\n" in told  # also what other programs print
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(names)
    assert {line.split()[1] for line in lines} == {"ok", "failed", "died", "timeout"}
    assert next(line for line in lines if "what=raise" in line).endswith("ValueError: no luck")


@pytest.mark.slow
def test_a_cell_that_closes_streams_or_floods_them_costs_nobody_else(
    work: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.csv"
    monkeypatch.chdir(tmp_path)
    names = ["close", "raise", "flood", "kind", "essay", "fine", "\ud800\x1b[31m"]
    frame = run_cells("work.py:fault", [{"what": name} for name in names], path)  # one worker runs all of them
    assert frame["what"].tolist() == ["close", "kind", "fine", "\ud800\x1b[31m"]
    failed = {failure["cell"]["what"]: failure["error"] for failure in frame.attrs["failed"]}
    assert "hello from raise\nnative\n" in failed["raise"]
    assert failed["flood"].count("x") >= 3000
    assert failed["essay"].strip().splitlines()[-3].endswith("y at last") or "y at last\n" in failed["essay"]
    assert "50,000," in failed["essay"] or "49,9" in failed["essay"]
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 300_000
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == len(names)
    assert len(printed) < 3000
    assert "\x1b" not in printed


def test_the_reason_of_a_failure_is_the_whole_exception_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "def fault(n):\n    raise RuntimeError('error in loading:' + chr(10) + chr(9) + 'size mismatch')\n"
    (tmp_path / "work.py").write_text(lines)
    monkeypatch.chdir(tmp_path)
    run_cells("work.py:fault", [{"n": 1}], tmp_path / "a.csv")
    assert capsys.readouterr().out.rstrip().endswith("n=1  RuntimeError: error in loading: size mismatch")


@pytest.mark.slow
def test_failures_are_forgotten_once_mended(work: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    frame = run_cells(work("once_fixed"), [{"n": 1}, {"n": 2}], path, progress=False)
    assert len(frame) == 0
    assert len(frame.attrs["failed"]) == 2
    (tmp_path / "fixed").touch()
    run_cells(work("once_fixed"), [{"n": 1}], path, progress=False)
    told = path.with_suffix(".failed.txt").read_text()
    assert re.findall(r'{"n": (\d)}', told) == ["2"]
    run_cells(work("once_fixed"), [{"n": 1}, {"n": 2}], path, progress=False)
    assert not path.with_suffix(".failed.txt").exists()


@pytest.mark.slow
def test_workers_have_the_threads_that_were_asked_for(work: Callable[[str], str], tmp_path: Path) -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    frame = run_cells(work("threads"), [{"n": 0}], tmp_path / "a.csv", threads=2, progress=False)
    assert frame[["torch", "omp"]].to_numpy().tolist() == [[2, "2"]]
    assert os.environ.get("OMP_NUM_THREADS") == before


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, *(pytest.param(how, marks=pytest.mark.slow) for how in (signal.SIGTERM, signal.SIGINT))]
)
def test_a_run_that_is_ended_loses_the_cells_in_flight_only(
    work: Callable[[str], str], tmp_path: Path, how: signal.Signals
) -> None:
    script, path, log = work("").removesuffix(":"), tmp_path / "slow.csv", tmp_path / "slow.log"
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert eventually(lambda: path.exists() and len(table(path)) == 5)
    if how == signal.SIGINT:  # as Ctrl-C does: workers get it too
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    begun = [line.split() for line in log.read_text().splitlines()]
    assert eventually(lambda: all(gone(int(worker)) for _, worker in begun))  # though they were in the middle of a cell
    kept = table(path)
    assert len(kept) == 5
    assert len(begun) <= 5 + 2
    if how != signal.SIGKILL:
        assert not list(tmp_path.glob(".*.part"))
        assert f"{len(kept)} of 12 cells have results; run again to resume" in out

    (tmp_path / "again").touch()
    run_cells(work("slow"), [{"n": n} for n in range(12)], path, jobs=2, progress=False)
    assert [row["n"] for row in table(path)] == [str(n) for n in range(12)]
    assert [row["seconds"] for row in table(path) if row["n"] in {k["n"] for k in kept}] == [k["seconds"] for k in kept]
    assert len(log.read_text().splitlines()) <= 12 + 2


def test_a_full_disk_leaves_the_file_as_it_was(
    work: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.csv"
    run_cells(work("third"), [{"n": 0}], path, progress=False)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workbench.atomic.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run_cells(work("third"), [{"n": 0}, {"n": 1}], path, progress=False)
    assert path.read_bytes() == before
    assert (tmp_path / "calls.log").read_text().split() == ["0"]  # found out before anything ran
    assert not list(tmp_path.glob(".*.part"))


def test_one_run_at_a_time_writes_a_file(work: Callable[[str], str], tmp_path: Path) -> None:
    with (
        filelock.FileLock(tmp_path / ".a.csv.lock"),
        pytest.raises(BlockingIOError, match="another run is writing"),
    ):
        run_cells(work("third"), [{"n": 0}], tmp_path / "a.csv", progress=False)
    assert len(run_cells(work("third"), [{"n": 0}], tmp_path / "a.csv", progress=False)) == 1


@pytest.mark.slow
def test_results_of_other_versions_are_told(work: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    run_cells(work("third"), [{"n": 0}], path, progress=False)
    version = table(path)[0]["version"]
    path.with_suffix(".jsonl").unlink()  # as versions without a store left it
    path.write_text(path.read_text().replace(version, "v0.0.1"))
    with pytest.warns(
        WorkbenchWarning, match=r"1 of the 1 cells that a\.csv already has were computed by other versions .*v0\.0\.1"
    ):
        frame = run_cells(work("third"), [{"n": 0}, {"n": 1}], path, progress=False)
    assert frame["version"].tolist() == ["v0.0.1", version]
    frame = run_cells(work("third"), [{"n": 0}, {"n": 1}], path, progress=False, resume=False)
    assert frame["version"].tolist() == [version] * 2


@pytest.mark.slow
def test_results_of_another_function_are_told(work: Callable[[str], str], tmp_path: Path) -> None:
    path, cells = tmp_path / "a.csv", [{"n": 0}]
    run_cells(work("third"), cells, path, progress=False, command="first")
    run_cells(work("third"), cells, path, progress=False, command="second")
    with pytest.warns(
        WorkbenchWarning, match=r"the 1 cells that a\.csv already has are results of \w+:third, not of \w+:threads"
    ):
        run_cells(work("threads"), cells, path, progress=False)
    run_cells(work("threads"), [{"n": 1}], path, progress=False)


def local(n: int) -> dict[str, int]:
    return {"value": n}


class Holder:
    def method(self) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"function": lambda n: n}, TypeError, "at the top level of a module"),
        ({"function": Holder.method}, TypeError, "at the top level of a module"),
        ({"function": "dict"}, ValueError, "module:name"),
        ({"cells": [3]}, TypeError, "cell 0 must be a dict"),
        ({"cells": [{"n": 1}, {"n": object()}]}, TypeError, "cell 1: found object"),
        ({"cells": [{"seconds": 1}]}, ValueError, "'seconds'"),
        ({"cells": [{"n": 1}, {"n": 2}, {"n": 1}]}, ValueError, "cells 0 and 2 are equal"),
        ({"jobs": 0}, ValueError, "jobs must be a whole number"),
        ({"threads": 1.5}, ValueError, "threads must be a whole number"),
        ({"timeout": 0}, ValueError, "timeout must be a positive number"),
        ({"timeout": "5"}, ValueError, "timeout must be a positive number of seconds, or None for no limit, not '5'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    keywords = {"function": local, "cells": [{"n": 1}], "path": tmp_path / "out" / "a.csv", **arguments}
    with pytest.raises(error, match=re.escape(message)):
        run_cells(**keywords)
    assert not (tmp_path / "out").exists()


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kept in a \.csv or \.parquet file"):
        run_cells(local, [], tmp_path / "a.xlsx")
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with pytest.raises(ValueError, match="is not a results file"):
        run_cells(local, [{"n": 1}], tmp_path / "a.csv", progress=False)
    assert (tmp_path / "a.csv").read_text() == "x,y\n1,2\n"
    with pytest.raises(OSError, match=r"a\.csv"):
        run_cells(local, [{"n": 1}], tmp_path / "a.csv" / "b.csv", progress=False)


def test_a_function_of_a_notebook_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(local, "__module__", "__main__")
    with pytest.raises(TypeError, match="defined in a notebook or at a prompt"):
        run_cells(local, [{"n": 1}], tmp_path / "a.csv")


@pytest.mark.parametrize("module", ["bench", "cells", "environment", "pool", "store", "worker"])
def test_examples_run(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    failed, _ = doctest.testmod(importlib.import_module(f"workbench.experiments.{module}"))
    assert failed == 0, capsys.readouterr().out
