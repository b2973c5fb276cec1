"""Cells on a dask.distributed cluster: a scheduler and two worker processes on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed
import pandas as pd
import pytest
from distributed import Client
from test_experiments import eventually, gone, table

from workbench.cli import main
from workbench.experiments import grid, run_cells, scheduler, sweep
from workbench.experiments.pool import CellOutcome

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]

WORK = """
import os, signal, sys, time
from pathlib import Path

from near_by import THIRD

def third(n):
    return {"value": n * THIRD, "here": __file__}

def fault(what):
    print("hello from", what)
    if what == "raise":
        raise ValueError("no luck")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        time.sleep(60)
    return {"value": 1}

def long(n, log):
    with open(log, "a") as file:
        file.write(f"{n} {os.getpid()} {os.getppid()}\\n")
    time.sleep(0.1 if n < 2 or Path(log).with_name("again").exists() else 300)
    return {"value": n}
"""


class Machines:
    """A scheduler and its workers, by the commands that users start."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{port}"
        self.folder = folder
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard")
        self.workers = [
            self._start("worker", self.address, "--nthreads", "1", "--no-dashboard", "--local-directory", str(folder))
            for _ in range(workers)
        ]
        with Client(self.address, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(workers, timeout=120)

    def _start(self, what: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.dask_{what}", *arguments]
        log = (self.folder / f"{what}.log").open("ab")
        environment = {**os.environ, "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "3"}
        return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, env=environment)

    def close(self) -> None:
        for process in (*self.workers, self.scheduler):
            process.terminate()
        for process in (*self.workers, self.scheduler):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    machines = Machines(tmp_path_factory.mktemp("machines"))
    yield machines
    machines.close()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the file above, which the workers don't know: they are somewhere else."""
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "near_by.py").write_text("THIRD = 1 / 3\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_code_is_sent_and_what_is_there_is_not_run_again(machines: Machines, work: Path) -> None:
    cells = [{"n": n} for n in (4, 1, 2)]
    first = run_cells("work.py:third", cells[:1], "a.csv", scheduler=machines.address, progress=False)
    assert first["value"].tolist() == [4 * (1 / 3)]
    assert not first["here"][0].startswith(str(work))
    frame = run_cells("work.py:third", cells, "a.csv", scheduler=machines.address, progress=False)
    assert frame["n"].tolist() == [4, 1, 2]
    assert frame["value"].tolist() == [n * (1 / 3) for n in (4, 1, 2)]
    assert frame["seconds"][0] == first["seconds"][0]

    (work / "near_by.py").write_text("THIRD = 1 / 4\n")  # the workers go on, with the new code
    frame = run_cells("work.py:third", cells, "b.csv", scheduler=machines.address, progress=False)
    assert frame["value"].tolist() == [1.0, 0.25, 0.5]


def test_a_fault_costs_its_own_cell(machines: Machines, work: Path) -> None:
    cells = [{"what": name} for name in ("raise", "kill", "hang", "fine")]
    frame = run_cells("work.py:fault", cells, "a.csv", scheduler=machines.address, timeout=2, progress=False)
    assert frame["what"].tolist() == ["fine"]
    failed = {failure["cell"]["what"]: failure for failure in frame.attrs["failed"]}
    assert {name: failure["status"] for name, failure in failed.items()} == {
        "raise": "failed",
        "kill": "died",
        "hang": "timeout",
    }
    assert "ValueError: no luck" in failed["raise"]["error"]
    assert "hello from raise" in failed["raise"]["error"]
    assert "killed by SIGKILL" in failed["kill"]["error"]
    with Client(machines.address, set_as_default=False) as client:
        assert len(client.scheduler_info()["workers"]) == 2  # none of them was harmed


def begun(log: Path) -> list[tuple[int, int, int]]:
    """Cell, its process and the dask worker that started it."""
    if not log.exists():
        return []
    return [tuple(map(int, line.split())) for line in log.read_text().splitlines() if line.count(" ") == 2]  # type: ignore[misc]


def test_the_cells_of_a_lost_worker_run_elsewhere(machines: Machines, work: Path) -> None:
    log = work / "long.log"

    def kill() -> None:
        eventually(lambda: any(n == 2 for n, _, _ in begun(log)))
        (work / "again").touch()  # from now on no cell takes long
        worker = next(worker for n, _, worker in begun(log) if n == 2)
        os.kill(worker, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    cells = [{"n": n, "log": str(log)} for n in (0, 1, 2, 5, 1000)]
    frame = run_cells("work.py:long", cells[:3], "a.csv", scheduler=machines.address, progress=False, timeout=250)
    killer.join()
    assert frame.attrs["failed"] == []
    assert frame["value"].tolist() == [0, 1, 2]
    tries = [(process, worker) for n, process, worker in begun(log) if n == 2]
    assert len(tries) == 2
    assert tries[0][1] != tries[1][1]
    assert eventually(lambda: gone(tries[0][0]))  # a cell's process ends with its worker
    with Client(machines.address, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=60)


def test_what_runs_is_ended_with_the_run(machines: Machines, work: Path) -> None:
    log = work / "long.log"
    with scheduler.Cluster(machines.address) as cluster:
        assert cluster.check() == 2
        ended = cluster.outcomes(
            "work.py:long", [{"n": n, "log": str(log)} for n in (0, 7, 8, 9)], threads=1, timeout=None
        )
        outcome = next(ended)
        assert isinstance(outcome, CellOutcome)
        assert (outcome.cell["n"], outcome.status) == (0, "ok")
        assert eventually(lambda: len(begun(log)) == 3)
        ended.close()
        assert eventually(lambda: all(gone(process) for _, process, _ in begun(log)), seconds=60)
    assert len(begun(log)) == 3  # what had not begun does not begin


def test_a_client_may_be_given_and_stays_open(machines: Machines, work: Path) -> None:
    with Client(machines.address, set_as_default=False) as client:
        frame = run_cells("work.py:third", [{"n": 3}], "a.csv", scheduler=client, progress=False)
        assert frame["value"].tolist() == [1.0]
        assert client.status == "running"


def test_the_grid_is_the_same_to_the_last_bit(machines: Machines) -> None:
    options: dict[str, Any] = {"epochs": 2, "rows": 60, "progress": False}
    wrappers = ["sample", "vote(n_voters=2) + sculpt"]
    here = grid("mlp(width=8)", wrappers, ["diabetes", "wine"], 0, **options)
    there = grid("mlp(width=8)", wrappers[::-1], ["diabetes", "wine"], 0, scheduler=machines.address, **options)
    assert len(here) == 4

    def repeatable(frame: pd.DataFrame) -> pd.DataFrame:
        frame = frame.sort_values("cell", ignore_index=True)
        return frame[sorted(set(frame) - set(sweep.MEASURED))]

    pd.testing.assert_frame_equal(repeatable(here), repeatable(there), check_exact=True)


def test_workers_with_other_code_are_refused(machines: Machines, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = scheduler._versions()
    monkeypatch.setattr(scheduler, "_versions", lambda: {**ours, "torch": "1.0"})
    with pytest.raises(ValueError, match=rf"tcp://\S+ has torch {re.escape(ours['torch'])} \(here 1\.0\)"):
        run_cells("work.py:third", [{"n": 1}], "a.csv", scheduler=machines.address, progress=False)
    assert not (work / "a.csv").exists()


def test_a_scheduler_that_is_not_there(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        start = time.monotonic()
        assert main(["compare", "--smoke", "--scheduler", address, "-o", "a.csv"]) == 2
    assert time.monotonic() - start < scheduler.CONNECT_TIMEOUT + 30
    captured = capsys.readouterr()
    assert captured.err.startswith(f"workbench: no dask scheduler answered at {address}")
    assert "Traceback" not in captured.err
    assert not (work / "a.csv").exists()
    assert main(["compare", "--smoke", "--scheduler", "teacup://x", "-o", "a.csv"]) == 2
    assert "is not the address of a dask scheduler" in capsys.readouterr().err
    assert main(["compare", "--smoke", "--scheduler", "none.json", "-o", "a.csv"]) == 2
    assert "no scheduler file none.json" in capsys.readouterr().err


def test_without_dask_it_is_said_what_to_install(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert main(["compare", "--smoke", "--scheduler", "tcp://127.0.0.1:1", "-o", "a.csv"]) == 2
    assert "pip install 'risk-workbench[dask]'" in capsys.readouterr().err


def test_a_scheduler_that_dies_loses_nothing_that_has_ended(
    tmp_path_factory: pytest.TempPathFactory, work: Path
) -> None:
    machines = Machines(tmp_path_factory.mktemp("dying"), workers=1)
    log, cells = work / "long.log", [{"n": n, "log": str(work / "long.log")} for n in range(4)]
    try:

        def kill() -> None:
            eventually(lambda: any(n == 2 for n, _, _ in begun(log)) and len(table(work / "a.csv")) == 2)
            machines.scheduler.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        start = time.monotonic()
        with pytest.raises(ConnectionAbortedError, match="run again to resume"):
            run_cells("work.py:long", cells, "a.csv", scheduler=machines.address, progress=False, timeout=250)
        killer.join()
        assert time.monotonic() - start < 250
    finally:
        machines.close()
    kept = table(work / "a.csv")
    assert [row["value"] for row in kept] == ["0", "1"]
    (work / "again").touch()
    frame = run_cells("work.py:long", cells, "a.csv", progress=False)  # on this machine now
    assert frame["value"].tolist() == [0, 1, 2, 3]
    assert frame["seconds"].tolist()[:2] == [float(row["seconds"]) for row in kept]


def test_dask_is_new_enough() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    wanted = re.search(r'"distributed>=([\d.]+)"', project)
    assert wanted
    assert tuple(map(int, distributed.__version__.split(".")[:2])) >= tuple(map(int, wanted[1].split(".")[:2]))
