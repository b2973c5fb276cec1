"""Worker processes for cells. An error, a time-out or a crash in a worker costs only the cell that it was running."""

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

# seconds between checks that a worker is alive: children of a dead worker may still hold its end of the connection open
POLL_INTERVAL = 1.0
EXIT_TIMEOUT = 5.0  # seconds that an idle worker has to end by itself
OUTPUT_LENGTH = 4000  # characters, from the end, of the output of a failed cell that are kept


@dataclass
class CellOutcome:
    """Outcome of a cell.

    Attributes:
        cell: keyword arguments of the cell.
        status: ``ok``, ``failed`` (it raised an exception), ``timeout`` or ``died`` (its worker process did).
        seconds: run time in seconds.
        rows: results, empty unless ``ok``.
        error: traceback or message, and the end of the cell's output.
        device: name of the device it ran on, "" if unknown.
    """

    cell: dict[str, Any]
    status: str
    seconds: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    device: str = ""

    @property
    def reason(self) -> str:
        """The error in one line, without traceback and output; "" without an error."""
        lines = self.error.split("\nprinted:\n")[0].strip().splitlines()
        last_frame = max((i for i, line in enumerate(lines) if line.startswith('  File "')), default=None)
        if last_frame is not None:  # the exception starts below it, and its message may have several lines
            start = next((i for i in range(last_frame, len(lines)) if not lines[i].startswith(" ")), len(lines) - 1)
            lines = lines[start:]
        else:
            lines = lines[-1:]
        return " ".join(" ".join(lines).split())


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
    """Run cells in spawned worker processes; each worker runs one cell after another.

    Args:
        function: "module:name" or "path/to/file.py:name"; called with a cell as keyword arguments.
        cells: cells, started in this order.
        jobs: number of processes.
        threads: torch threads per process; None: torch's default.
        timeout: seconds after which the worker of a cell is killed, or None.
        grace: seconds between SIGTERM and SIGKILL when a worker is ended, for functions that save something on SIGTERM.
        gpus: names of GPUs as in CUDA_VISIBLE_DEVICES, of which each process sees one; empty: every process sees all GPUs.

    Yields:
        One outcome per cell, in the order in which they end. Closing the iterator kills the workers.
    """
    waiting = deque(cells)
    idle: list[Worker] = []
    busy: list[Worker] = []
    dismissed: list[Worker] = []
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
                wait(
                    [worker.connection for worker in busy], timeout=min(worker.seconds_left(timeout) for worker in busy)
                )
                for worker in list(busy):
                    if (outcome := worker.outcome(timeout)) is not None:
                        busy.remove(worker)
                        if not waiting:
                            worker.dismiss()  # the process takes a while to end, in which the caller can go on
                        (idle if waiting else dismissed).append(worker)
                        yield outcome
        finally:
            for worker in (*idle, *busy):
                worker.warn()  # before the first is waited for, so that all of them save at the same time
            for worker in (*idle, *busy):
                worker.end()
            for worker in dismissed:
                worker.end(now=False)


def refuse_in_worker(started: str) -> None:
    """Raise a RuntimeError in a worker process that is still importing the user's script, which would start all over again.

    Args:
        started: name of what the script starts, such as "cells".
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself asks
        raise RuntimeError(
            f"each worker process imports your script, and would start all over again here: put what starts the {started} under "
            "if __name__ == '__main__': (in a notebook this is not needed)"
        )


def visible_gpus() -> list[str]:
    """Return the GPUs of this process, named as in CUDA_VISIBLE_DEVICES; empty if there are fewer than two."""
    import torch

    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return [] if count < 2 else named[:count] or [str(number) for number in range(count)]


class Worker:
    """Handle of a worker process in the parent process. A worker that has died is restarted for the next cell.

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
        """Start the process."""
        context = multiprocessing.get_context("spawn")
        self.connection, worker_end = context.Pipe()
        arguments = (worker_end, self.function, self.threads, str(self.log), self.gpu, self.sent)
        self.process = context.Process(target=work, args=arguments)
        self.process.start()
        worker_end.close()  # so that the connection ends when the worker does

    def run(self, cell: dict[str, Any], timeout: float | None) -> CellOutcome:
        """Run one cell and wait for its outcome."""
        self.begin(cell)
        while (outcome := self.outcome(timeout)) is None:
            wait([self.connection], timeout=self.seconds_left(timeout))
        return outcome

    def begin(self, cell: dict[str, Any]) -> None:
        """Send a cell to the process, restarting it if it has died."""
        self.cell, self.begun = cell, None
        if not self.process.is_alive():
            self.end()
            self.start()
        self.sent_at = time.monotonic()
        with contextlib.suppress(OSError):  # if it has died just now, `outcome` reports that
            self.connection.send(cell)

    def seconds_left(self, timeout: float | None) -> float:
        """Return the seconds until this worker should be checked again; 0 when its cell has used up its time."""
        if timeout is None or self.begun is None:
            return POLL_INTERVAL
        return min(POLL_INTERVAL, max(0.0, self.begun + timeout - time.monotonic()))

    def outcome(self, timeout: float | None) -> CellOutcome | None:
        """Return the outcome of the cell, or None while it runs."""
        alive = self.process.is_alive()  # checked before reading: a dead worker may have sent its results before
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
        if timeout is not None and not self.seconds_left(timeout):
            self.end()
            return self._ended("timeout", f"the cell took longer than {timeout:g} s")
        return None

    def warn(self) -> None:
        """Send SIGTERM if the process has a grace period."""
        if self.grace:
            self.process.terminate()

    def dismiss(self) -> None:
        """Ask the process to exit after its cell, and don't wait for it."""
        with contextlib.suppress(OSError):
            self.connection.send(None)

    def end(self, now: bool = True) -> None:
        """End the process: after its grace period if now is true, else by asking it to exit; kill it if it does not."""
        if not now:
            self.dismiss()
            self.process.join(EXIT_TIMEOUT)
        elif self.grace:
            self.warn()
            self.connection.close()  # so that it does not wait for a next cell
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
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * OUTPUT_LENGTH))  # a character has four bytes at most
                text = file.read().decode("utf-8", "replace").strip()
        except FileNotFoundError:  # it died before it could open the file
            return ""
        return f"\nprinted:\n{text[-OUTPUT_LENGTH:]}\n" if text else ""
