"""Cells on a dask.distributed cluster. Each dask worker runs its cells in child processes.

A child process is the same as in a run on one machine (`pool.Worker`): an error, a time-out or a crash costs one cell, the number of threads is
the one asked for, and results are bitwise the same on the same hardware. If a dask worker itself is lost, dask gives its cells to another one.
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

CONNECT_TIMEOUT = 10.0  # seconds
IDLE_TIMEOUT = 10.0  # seconds that a child process waits for its next cell before it is ended
RETRIES = 3  # of a cell whose process was ended from outside, as when a cluster job reaches its time limit


class Cluster:
    """Connection to a dask.distributed cluster, as a context manager.

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
        options: dict[str, Any] = {"timeout": CONNECT_TIMEOUT, "set_as_default": False}
        if isinstance(scheduler, str | Path) and str(scheduler).endswith(".json"):
            if not Path(scheduler).is_file():
                raise ConnectionError(f"there is no scheduler file {scheduler}: is its scheduler running?")
            options["scheduler_file"] = str(scheduler)
        else:
            options["address"] = scheduler
        with _quiet():
            try:
                self.client = Client(**options)
            except OSError as error:
                raise ConnectionError(
                    f"no dask scheduler answered at {scheduler} within {CONNECT_TIMEOUT:g} s: start one (dask scheduler), or check the address"
                ) from error
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"scheduler: {scheduler!r} is not the address of a dask scheduler ({error}); give one such as tcp://host:8786"
                ) from error

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        if self.owns_client:
            with _quiet(), contextlib.suppress(Exception):  # the scheduler may be gone
                self.client.close(timeout=2)

    def check(self) -> int:
        """Check that all workers have the same code as this process, and return how many cells can run in parallel.

        Raises:
            ValueError: a worker has other versions or lacks a package.
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
                raise ValueError(_mismatch(worker, packages))
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
        """Run cells on the workers; see `pool.outcomes`.

        Args:
            function: "module:name" or "path/to/file.py:name".
            cells: cells, started in this order.
            threads: torch threads per cell.
            timeout: time limit per cell in seconds, or None.
            files: further files that cells load, see `run_cells`.

        Yields:
            One outcome per cell, in the order in which they end. Closing the iterator ends the running cells.

        Raises:
            ConnectionAbortedError: the connection to the scheduler was lost.
        """
        from distributed import Future, KilledWorker

        module = function.rpartition(":")[0]
        paths = [Path(path) for path in (module, *files) if str(path).endswith(".py")]
        settings = RunSettings(
            self.token, function, threads, timeout, _versions(), {str(path): sources(path) for path in paths}
        )
        ended: queue.SimpleQueue[Future] = queue.SimpleQueue()
        futures: dict[str, dict[str, Any]] = {}
        submitted: list[Future] = []
        try:
            for number, cell in enumerate(cells):
                future = self.client.submit(
                    run, settings, cell, key=f"workbench-{self.token}-{number}", retries=RETRIES, priority=-number
                )
                futures[future.key] = cell
                submitted.append(future)
                future.add_done_callback(ended.put)
            for _ in submitted:
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
                        "the connection to the dask scheduler was lost, or it dropped the cells; results so far are kept, run again to resume"
                    )
                future.release()
        finally:
            unfinished = [future for future in submitted if not future.done()]
            if unfinished and self.client.status == "running":
                with contextlib.suppress(Exception):
                    self.client.cancel(unfinished, force=True)
                    self.client.run(stop, self.token)


def _next(ended: queue.SimpleQueue[Any]) -> Any:
    while True:  # on some systems Ctrl-C can't interrupt a wait without a timeout
        with contextlib.suppress(queue.Empty):
            return ended.get(timeout=1.0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the tracebacks that dask logs for errors that we report in one sentence."""
    logger = logging.getLogger("distributed")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


# ---- code that runs in a dask worker
@dataclass(frozen=True)
class RunSettings:
    """Settings that all cells of one run share.

    Args:
        token: identifier of the run.
        function, threads, timeout: see `Cluster.outcomes`.
        versions: versions of the code in the process that submits the cells.
        files: for each path on the submitting machine, the texts of that file and of the files beside it that it imports: name -> text.
    """

    token: str
    function: str
    threads: int
    timeout: float | None
    versions: dict[str, str]
    files: dict[str, dict[str, str]]


class EndedError(RuntimeError):
    """Raised so that dask retries a cell whose process was ended from outside."""


@dataclass
class _Processes:
    """The child processes of this dask worker, idle and busy, each with the token of its run."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: list[tuple[str, Worker, threading.Timer]] = field(default_factory=list)
    busy: list[tuple[str, Worker]] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)

    def acquire(self, settings: RunSettings) -> Worker:
        """Return an idle process of the run, or a new one, and mark it as busy."""
        with self.lock:
            for entry in self.idle:
                if entry[0] == settings.token:
                    self.idle.remove(entry)
                    entry[2].cancel()
                    worker = entry[1]
                    break
            else:
                worker = _start(settings)
            self.busy.append((settings.token, worker))
        return worker

    def release(self, settings: RunSettings, worker: Worker) -> None:
        """Mark a process as idle, to be ended if no cell comes for `IDLE_TIMEOUT` seconds."""
        timer = threading.Timer(IDLE_TIMEOUT, self._end, [worker])
        timer.daemon = True
        with self.lock:
            self.busy.remove((settings.token, worker))
            self.idle.append((settings.token, worker, timer))
        timer.start()

    def _end(self, worker: Worker) -> None:
        with self.lock:
            ended = [entry for entry in self.idle if entry[1] is worker]
            self.idle = [entry for entry in self.idle if entry[1] is not worker]
        for _ in ended:
            worker.end()

    def stop(self, token: str) -> None:
        """End all processes of a run."""
        with self.lock:
            self.stopped.add(token)
            waiting = [entry for entry in self.idle if entry[0] == token]
            self.idle = [entry for entry in self.idle if entry[0] != token]
            running = [worker for owner, worker in self.busy if owner == token]
        for _, worker, timer in waiting:
            timer.cancel()
            worker.end()
        for worker in running:
            worker.process.kill()

    def end(self) -> None:
        for token in {*(entry[0] for entry in self.idle), *(entry[0] for entry in self.busy)}:
            self.stop(token)


_PROCESSES = _Processes()


def run(settings: RunSettings, cell: dict[str, Any]) -> CellOutcome:
    """Run one cell in a child process of this dask worker."""
    if differing := _differing(settings.versions):
        raise ValueError(_mismatch("a worker that joined later", differing))
    worker = _PROCESSES.acquire(settings)
    try:
        outcome = worker.run(cell, settings.timeout)
        if outcome.status == "died" and worker.process.exitcode == -signal.SIGTERM:
            raise EndedError(outcome.error)
    finally:
        _PROCESSES.release(settings, worker)
    return outcome


def stop(token: str) -> None:
    """End the cells of a run on this dask worker."""
    _PROCESSES.stop(token)


def _start(settings: RunSettings) -> Worker:
    # dask's nannies start workers as daemon processes, which may not have children; ours end with this process anyway
    multiprocessing.current_process().daemon = False
    _end_at_exit()
    folder = _folder()
    sent = {path: str(_written(folder, path, files)) for path, files in settings.files.items()}
    return Worker(settings.function, settings.threads, folder / f"{uuid.uuid4().hex}.log", sent=sent)


@functools.cache
def _end_at_exit() -> None:
    """Register that child processes are ended when this process exits, so that they do not block the exit."""
    multiprocessing.util.Finalize(None, _PROCESSES.end, exitpriority=100)
    atexit.register(_PROCESSES.end)


@functools.cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="workbench-")
    _TEMPORARY_FOLDERS.append(folder)
    return Path(folder.name)


_TEMPORARY_FOLDERS: list[Any] = []  # keeps them from being deleted before the process ends


def _written(folder: Path, path: str, files: dict[str, str]) -> Path:
    """Write a file and the files beside it to a folder named by their digest, and return the path of the file there."""
    digest = hashlib.sha256("\n".join(f"{name}\n{text}" for name, text in sorted(files.items())).encode()).hexdigest()
    subfolder = folder / digest[:16]
    subfolder.mkdir(exist_ok=True)
    for name, text in files.items():
        (subfolder / name).write_text(text, encoding="utf-8")
    return subfolder / Path(path).name


# ---- versions
def _versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    installed = environment.versions()
    names = ("workbench", "torch", "numpy")
    python = ".".join(map(str, sys.version_info[:2]))
    return {**{name: installed[name] for name in names}, "python": python, "source": _source()}


@functools.cache
def _source() -> str:
    return environment.source_digest()[:12]


def _differing(required: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Return the versions that differ in this process: name -> (installed, required)."""
    installed = _versions()
    return {name: (installed[name], value) for name, value in required.items() if installed[name] != value}


def _mismatch(worker: str, differing: dict[str, tuple[str, str]]) -> str:
    versions = ", ".join(
        f"{'code of workbench' if name == 'source' else name} {installed} (here {required})"
        for name, (installed, required) in differing.items()
    )
    return f"{worker} has {versions}: results would depend on where a cell ran; install the same versions there as here"
