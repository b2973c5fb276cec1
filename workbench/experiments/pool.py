"""Worker processes for cells: an error, a time limit or the death of one costs that one cell."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from .environment import cause
from .worker import BEGUN, work

# seconds after which to look whether a worker has died without closing its end (its own children may hold it)
LOOK = 1.0
GOODBYE = 5.0  # seconds that an idle worker has to end by itself
TAIL = 4000  # characters of what a cell printed that are kept if it fails


@dataclass
class CellOutcome:
    """How a cell ended.

    Attributes:
        cell: its keyword arguments.
        status: ``ok``, ``failed`` (it raised), ``timeout`` or ``died`` (the worker process did).
        seconds: that it took.
        rows: its results, empty unless ``ok``.
        error: a traceback or a sentence, and the end of what the cell printed.
        device: name of what it ran on, "" where that is not told.
    """

    cell: dict[str, Any]
    status: str
    seconds: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    device: str = ""


def outcomes(
    function: str,
    cells: Iterable[dict[str, Any]],
    *,
    jobs: int,
    threads: int | None,
    timeout: float | None,
    grace: float = 0.0,
    gpus: Sequence[str] = (),
) -> Generator[CellOutcome, None, None]:
    """Run cells in spawned processes, each of which runs one after another.

    Args:
        function: "module:name" or "path/to/file.py:name"; called with a cell as keyword arguments.
        cells: the cells, begun in this order.
        jobs: number of processes.
        threads: torch threads of each; None: as many as it takes by itself.
        timeout: seconds that a cell may take before its worker is killed, or None.
        grace: seconds between SIGTERM and SIGKILL for a worker that is ended, for functions that have something to save.
        gpus: names of GPUs as CUDA_VISIBLE_DEVICES has them, of which each process sees one; none: all see what there is.

    Yields:
        One outcome for each cell, as they end. Closing the iterator kills the workers.
    """
    waiting = deque(cells)
    idle: list[Worker] = []
    busy: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="workbench-") as logs:
        try:
            for number in range(min(jobs, len(waiting))):
                gpu = gpus[number % len(gpus)] if gpus else None
                idle.append(Worker(function, threads, Path(logs) / f"{number}.log", grace, gpu))
            while waiting or busy:
                while waiting and idle:
                    worker = idle.pop()
                    busy.append(worker)
                    worker.begin(waiting.popleft())
                wait([worker.connection for worker in busy], timeout=min(worker.left(timeout) for worker in busy))
                for worker in list(busy):
                    if (outcome := worker.outcome(timeout)) is not None:
                        busy.remove(worker)
                        if waiting:
                            idle.append(worker)
                        else:
                            worker.end(now=False)
                        yield outcome
        finally:
            for worker in (*idle, *busy):
                worker.warn()  # all of them first: they save what they have at the same time
            for worker in (*idle, *busy):
                worker.end()


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES calls them; empty where there are less than two, which leaves no choice."""
    import torch

    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return [] if count < 2 else named[:count] or [str(number) for number in range(count)]


class Worker:
    """The process that runs cells, seen from the one that gives them; started anew where it has died.

    Args:
        function, threads, log, gpu, sent: see `worker.work`.
        grace: see `outcomes`.
    """

    def __init__(
        self,
        function: str,
        threads: int | None,
        log: Path,
        grace: float = 0.0,
        gpu: str | None = None,
        sent: Mapping[str, str] | None = None,
    ) -> None:
        self.function, self.threads, self.log, self.grace = function, threads, log, grace
        self.gpu, self.sent = gpu, sent
        self.cell: dict[str, Any] = {}
        self.sent_at = 0.0
        self.begun: float | None = None
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, worker_end = context.Pipe()
        arguments = (worker_end, self.function, self.threads, str(self.log), self.gpu, self.sent)
        self.process = context.Process(target=work, args=arguments)
        self.process.start()
        worker_end.close()  # so that the connection ends when the worker does

    def run(self, cell: dict[str, Any], timeout: float | None) -> CellOutcome:
        """Run one cell and wait for its end."""
        self.begin(cell)
        while (outcome := self.outcome(timeout)) is None:
            wait([self.connection], timeout=self.left(timeout))
        return outcome

    def begin(self, cell: dict[str, Any]) -> None:
        self.cell, self.begun = cell, None
        if not self.process.is_alive():
            self.end()
            self.start()
        self.sent_at = time.monotonic()
        with contextlib.suppress(OSError):  # it has died just now, which is found out like any other death
            self.connection.send(cell)

    def left(self, timeout: float | None) -> float:
        """Seconds until the next look at this worker is due: 0 once its cell has used up its time."""
        if timeout is None or self.begun is None:
            return LOOK
        return min(LOOK, max(0.0, self.begun + timeout - time.monotonic()))

    def outcome(self, timeout: float | None) -> CellOutcome | None:
        """How the cell has ended, or None while it runs."""
        alive = self.process.is_alive()  # asked first: what a dead worker has sent before is still to be read
        try:
            while self.connection.poll():
                message = self.connection.recv()
                if message != BEGUN:
                    status, rows, seconds, error, device = message
                    return CellOutcome(self.cell, status, seconds, rows, error and error + self._printed(), device)
                self.begun = time.monotonic()
        except (EOFError, OSError):
            alive = False
        if not alive:
            self.process.join()
            return self._ended("died", f"the worker process died: {cause(self.process.exitcode)}")
        if timeout is not None and not self.left(timeout):
            self.end()
            return self._ended("timeout", f"the cell took longer than {timeout:g} s")
        return None

    def warn(self) -> None:
        if self.grace:
            self.process.terminate()

    def end(self, now: bool = True) -> None:
        if not now:
            with contextlib.suppress(OSError):
                self.connection.send(None)
            self.process.join(GOODBYE)
        elif self.grace:
            self.warn()
            self.connection.close()  # or it would wait for the next cell
            self.process.join(self.grace)
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _ended(self, status: str, error: str) -> CellOutcome:
        seconds = time.monotonic() - (self.begun or self.sent_at)
        return CellOutcome(self.cell, status, seconds, error=f"{error}\n{self._printed()}")

    def _printed(self) -> str:
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * TAIL))  # a character has four bytes at most
                text = file.read().decode("utf-8", "replace").strip()
        except FileNotFoundError:  # it died before it could open the file
            return ""
        return f"\nprinted:\n{text[-TAIL:]}\n" if text else ""
