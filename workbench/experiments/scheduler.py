"""Cells on the workers of a dask.distributed cluster, each in a process of its own beside its worker.

A cell's process is the same as on one machine: what a cell meets (an error, a time limit, a crash) costs that cell alone, its threads are
those that were asked for, and its result is the same to the last bit on the same hardware. What befalls a dask worker itself costs nothing:
dask gives its cells to another.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import logging
import multiprocessing
import multiprocessing.util
import queue
import signal
import sys
import tempfile
import threading
import uuid
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import require
from . import environment
from .pool import CellOutcome, Worker
from .specs import sources

CONNECT = 10.0  # seconds to find the scheduler in
IDLE = 10.0  # seconds that a cell's process waits for the next cell
RETRIES = 3  # of a cell whose process was ended from outside, as when a job's time on a cluster is over


class Cluster:
    """A dask.distributed cluster, for as long as the context lasts.

    Args:
        scheduler: address, path of a scheduler's .json file, Client (which is left open), or Cluster.

    Raises:
        ModuleNotFoundError: dask.distributed is not installed.
        ConnectionError: there is no scheduler at the address.
    """

    def __init__(self, scheduler: Any) -> None:
        Client = require("distributed", "dask").Client
        self.token = uuid.uuid4().hex
        self.owns_client = not isinstance(scheduler, Client)
        if not self.owns_client:
            self.client = scheduler
            return
        options: dict[str, Any] = {"timeout": CONNECT, "set_as_default": False}
        if isinstance(scheduler, str | Path) and str(scheduler).endswith(".json"):
            if not Path(scheduler).is_file():
                raise ConnectionError(f"there is no scheduler file {scheduler}: does its scheduler run?")
            options["scheduler_file"] = str(scheduler)
        else:
            options["address"] = scheduler
        with _quiet():
            try:
                self.client = Client(**options)
            except OSError as error:
                raise ConnectionError(
                    f"no dask scheduler answers at {scheduler} within {CONNECT:g} s: start one (dask scheduler), or give the address it printed"
                ) from error
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"scheduler: {scheduler!r} is no address of a dask scheduler ({error}); it looks like tcp://host:8786"
                ) from error

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        if self.owns_client:
            with _quiet(), contextlib.suppress(Exception):  # a scheduler that is gone can't be told goodbye
                self.client.close(timeout=2)

    def check(self) -> int:
        """How many cells run at a time, once the workers that are there are found to have the same code as this process.

        Raises:
            ValueError: a worker has other versions.
        """
        from distributed.versions import VersionMismatchWarning

        with warnings.catch_warnings():
            warnings.simplefilter("error", VersionMismatchWarning)
            try:
                self.client.get_versions(check=True)
                differing = self.client.run(_differing, _versions())
            except VersionMismatchWarning as error:
                raise ValueError(f"scheduler, workers and this process must have the same packages; {error}") from error
            except ModuleNotFoundError as error:
                raise ValueError(f"the workers lack {error.name}: install the same packages there as here") from error
        for worker, packages in differing.items():
            if packages:
                raise ValueError(_refused(worker, packages))
        info = self.client.scheduler_info(n_workers=-1)
        return max(1, sum(worker["nthreads"] for worker in info["workers"].values()))

    def outcomes(
        self,
        function: str,
        cells: Iterable[dict[str, Any]],
        *,
        threads: int,
        timeout: float | None,
        files: Sequence[Path | str] = (),
    ) -> Generator[CellOutcome, None, None]:
        """Run cells on the workers; as `pool.outcomes`.

        Args:
            function: "module:name" or "path/to/file.py:name".
            cells: the cells, begun in this order.
            threads: torch threads of each.
            timeout: seconds that a cell may take, or None.
            files: more files that cells load, see `run_cells`.

        Yields:
            One outcome for each cell, as they end. Closing the iterator ends those that run.

        Raises:
            ConnectionAbortedError: the scheduler was lost.
        """
        from distributed import Future, KilledWorker

        place = function.rpartition(":")[0]
        sent = [Path(path) for path in (place, *files) if str(path).endswith(".py")]
        order = Order(self.token, function, threads, timeout, _versions(), {str(path): sources(path) for path in sent})
        ended: queue.SimpleQueue[Future] = queue.SimpleQueue()
        futures: dict[str, dict[str, Any]] = {}
        kept: list[Future] = []
        try:
            for number, cell in enumerate(cells):
                future = self.client.submit(
                    run, order, cell, key=f"workbench-{self.token}-{number}", retries=RETRIES, priority=-number
                )
                futures[future.key] = cell
                kept.append(future)
                future.add_done_callback(ended.put)
            for _ in kept:
                future = _next(ended)
                cell = futures[future.key]
                if future.status == "finished":
                    yield future.result()
                elif future.status == "error":
                    error: Any = future.exception()
                    status = "died" if isinstance(error, KilledWorker | EndedError) else "failed"
                    yield CellOutcome(cell, status, 0.0, error=f"{type(error).__name__}: {error}")
                else:
                    raise ConnectionAbortedError(
                        "the dask scheduler was lost, or it dropped the cells; those that have ended are kept, run again to go on"
                    )
                future.release()
        finally:
            left = [future for future in kept if not future.done()]
            if left and self.client.status == "running":
                with contextlib.suppress(Exception):
                    self.client.cancel(left, force=True)
                    self.client.run(stop, self.token)


def _next(ended: queue.SimpleQueue[Any]) -> Any:
    while True:  # a wait without a limit would not let Ctrl-C through on every system
        with contextlib.suppress(queue.Empty):
            return ended.get(timeout=1.0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """dask logs the tracebacks of what is told here in one sentence."""
    logger = logging.getLogger("distributed")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


# ---- what runs in a dask worker
@dataclass(frozen=True)
class Order:
    """What all cells of one run have in common.

    Args:
        token: of the run.
        function, threads, timeout: see `Cluster.outcomes`.
        versions: of the code that asks.
        files: for each path, as it is called there, the file and those beside it that it imports: name -> text.
    """

    token: str
    function: str
    threads: int
    timeout: float | None
    versions: dict[str, str]
    files: dict[str, dict[str, str]]


class EndedError(RuntimeError):
    """The process of a cell was ended from outside."""


@dataclass
class _Processes:
    """The processes of cells beside this worker: those that wait and those that run, by the run that they belong to."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: list[tuple[str, Worker, threading.Timer]] = field(default_factory=list)
    busy: list[tuple[str, Worker]] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)

    def take(self, order: Order) -> Worker:
        with self.lock:
            for entry in self.idle:
                if entry[0] == order.token:
                    self.idle.remove(entry)
                    entry[2].cancel()
                    worker = entry[1]
                    break
            else:
                worker = _start(order)
            self.busy.append((order.token, worker))
        return worker

    def give(self, order: Order, worker: Worker) -> None:
        timer = threading.Timer(IDLE, self._end, [worker])
        timer.daemon = True
        with self.lock:
            self.busy.remove((order.token, worker))
            self.idle.append((order.token, worker, timer))
        timer.start()

    def _end(self, worker: Worker) -> None:
        with self.lock:
            ended = [entry for entry in self.idle if entry[1] is worker]
            self.idle = [entry for entry in self.idle if entry[1] is not worker]
        for _ in ended:
            worker.end()

    def stop(self, token: str) -> None:
        """End the processes of a run."""
        with self.lock:
            self.stopped.add(token)
            waiting = [entry for entry in self.idle if entry[0] == token]
            self.idle = [entry for entry in self.idle if entry[0] != token]
            running = [worker for known, worker in self.busy if known == token]
        for _, worker, timer in waiting:
            timer.cancel()
            worker.end()
        for worker in running:
            worker.process.kill()

    def end(self) -> None:
        for token in {*(entry[0] for entry in self.idle), *(entry[0] for entry in self.busy)}:
            self.stop(token)


_PROCESSES = _Processes()


def run(order: Order, cell: dict[str, Any]) -> CellOutcome:
    """Run one cell beside this dask worker."""
    if differing := _differing(order.versions):
        raise ValueError(_refused("a worker that came later", differing))
    worker = _PROCESSES.take(order)
    try:
        outcome = worker.run(cell, order.timeout)
        if outcome.status == "died" and worker.process.exitcode == -signal.SIGTERM:
            raise EndedError(outcome.error)
    finally:
        _PROCESSES.give(order, worker)
    return outcome


def stop(token: str) -> None:
    """End the cells of a run on this dask worker."""
    _PROCESSES.stop(token)


def _start(order: Order) -> Worker:
    # dask's nannies start workers as daemons, which may have no children; ours end by themselves with this process
    multiprocessing.current_process().daemon = False
    _end_at_exit()
    folder = _folder()
    sent = {path: str(_written(folder, path, files)) for path, files in order.files.items()}
    return Worker(order.function, order.threads, folder / f"{uuid.uuid4().hex}.log", sent=sent)


@functools.cache
def _end_at_exit() -> None:
    """Processes of cells don't keep this one from ending."""
    multiprocessing.util.Finalize(None, _PROCESSES.end, exitpriority=100)
    atexit.register(_PROCESSES.end)


@functools.cache
def _folder() -> Path:
    keeper = tempfile.TemporaryDirectory(prefix="workbench-")
    _KEPT.append(keeper)
    return Path(keeper.name)


_KEPT: list[Any] = []


def _written(folder: Path, path: str, files: dict[str, str]) -> Path:
    """Where a file lies here with those beside it; one folder for each state of them."""
    total = hashlib.sha256("\n".join(f"{name}\n{text}" for name, text in sorted(files.items())).encode()).hexdigest()
    inside = folder / total[:16]
    inside.mkdir(exist_ok=True)
    for name, text in files.items():
        (inside / name).write_text(text, encoding="utf-8")
    return inside / Path(path).name


# ---- versions
def _versions() -> dict[str, str]:
    """What decides the numbers."""
    installed = environment.versions()
    names = ("workbench", "torch", "numpy")
    python = ".".join(map(str, sys.version_info[:2]))
    return {**{name: installed[name] for name in names}, "python": python, "source": _source()}


@functools.cache
def _source() -> str:
    return environment.source_digest()[:12]


def _differing(wanted: dict[str, str]) -> dict[str, tuple[str, str]]:
    """What is other in this process: name -> (here, wanted)."""
    here = _versions()
    return {name: (here[name], value) for name, value in wanted.items() if here[name] != value}


def _refused(worker: str, differing: dict[str, tuple[str, str]]) -> str:
    what = ", ".join(
        f"{'code of workbench' if name == 'source' else name} {here} (here {ours})"
        for name, (here, ours) in differing.items()
    )
    return f"{worker} has {what}: results would depend on where a cell ran; install the same there as here"
