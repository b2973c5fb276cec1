"""A queue of long computations beside a notebook, worked off by one daemon thread, and the flag by which Stop ends one."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from ...errors import WorkbenchWarning

REPORT_INTERVAL = 0.25  # seconds between two reports
ENDED = ("done", "stopped", "failed")
EXIT_TIMEOUT = 2.0  # seconds that a running job is given to stop when Python exits


class Job:
    """One computation and what is to be seen of it; `Jobs.submit` makes them.

    Attributes:
        name: what it is called.
        status: "queued", "running", "done", "stopped" (cancelled, or interrupted) or "failed".
        fraction: how much of it is done, between 0 and 1, as it said last.
        text: what it said last.
        data: the further things that it reported last, by name.
        result: what the function returned, of a job that was stopped while it ran as well; None without.
        error: the exception that it ended with, None without.
        traceback: that exception's traceback as text, empty without.
        complaint: traceback of the last error in `on_change`, empty without.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], name: str, on_change: Callable[[Job], Any] | None
    ) -> None:
        self.name, self.status, self.fraction, self.text = name, "queued", 0.0, ""
        self.data: dict[str, Any] = {}
        self.result: Any = None
        self.error: BaseException | None = None
        self.traceback = ""
        self._function, self._args, self._on_change = function, args, on_change
        self.complaint = ""
        self._lock, self._ended, self._cancelled = threading.Lock(), threading.Event(), False
        self._start = self._end = self._reported = float("-inf")
        self._unreported = False

    # ---- for the function
    @property
    def cancelled(self) -> bool:
        """Whether the job is to end as soon as it can; the function looks at it as often as it can."""
        return self._cancelled

    @property
    def due(self) -> bool:
        """Whether a report would be passed on now; what is costly to make for it need not be made before."""
        return time.perf_counter() - self._reported >= REPORT_INTERVAL

    def report(self, fraction: float, text: str = "", **data: Any) -> None:
        """Say how far the job is; passed on at most four times a second, the first and the last one always.

        Args:
            fraction: how much of it is done, between 0 and 1.
            text: a few words.
            data: anything else, for `Job.data`.
        """
        self.fraction, self.text, self.data = float(fraction), text, data
        if self.due:
            self._reported = time.perf_counter()
            self._tell()
        else:
            self._unreported = True

    # ---- for who submitted it
    @property
    def ended(self) -> bool:
        """Whether it is done, stopped or failed."""
        return self.status in ENDED

    @property
    def seconds(self) -> float:
        """How long it has run, 0 as long as it is queued."""
        if self._start < 0:
            return 0.0
        return (self._end if self._end > 0 else time.perf_counter()) - self._start

    def cancel(self) -> None:
        """End it: one that is queued never starts, one that runs ends as soon as its function looks at `cancelled`."""
        self._cancelled = True
        with self._lock:
            waiting = self.status == "queued"
            self.status = "stopped" if waiting else self.status
        if waiting:
            self._finish("stopped")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most so many seconds; whether it has."""
        return self._ended.wait(timeout)

    def __repr__(self) -> str:
        progress = f" {self.fraction:.0%}" if self.status == "running" else ""
        return f"Job({self.name!r}, {self.status}{progress}, {self.seconds:.1f} s)"

    # ---- for Jobs
    def _run(self, threads: int | None = None) -> None:
        with self._lock:
            if self.status != "queued":  # cancelled meanwhile
                return
            self.status, self._start = "running", time.perf_counter()
        status = "failed"
        try:
            self._tell()
            with torch_threads(threads):
                self.result = self._function(self, *self._args)
            status = "stopped" if self.cancelled else "done"
        except KeyboardInterrupt:
            self._cancelled = True
            status = "stopped"
        except BaseException as error:
            self.error, self.traceback = error, traceback.format_exc()
        if self._unreported:
            self._tell()
        self._finish(status)

    def _finish(self, status: str) -> None:
        self._function, self._args = _nothing, ()  # what they hold may be large
        if status == "done":
            self.fraction = 1.0
        self._end = time.perf_counter()
        self.status = status
        try:
            self._tell()
        finally:
            self._ended.set()

    def _tell(self) -> None:
        self._unreported = False
        if self._on_change is None:
            return
        try:
            self._on_change(self)
        except Exception:
            first, self.complaint = not self.complaint, traceback.format_exc()
            if first:
                with suppress(WorkbenchWarning):  # where warnings are errors
                    warnings.warn(f"on_change of the job {self.name!r} failed:\n{self.complaint}", WorkbenchWarning, 2)


class Jobs:
    """A queue of computations, worked off one after another in a daemon thread, so that cells can run and buttons be clicked meanwhile.

    The thread is there only as long as there is something to do. When Python exits, what runs is asked to stop.

    Example:
        >>> jobs = Jobs()
        >>> def count(job, n):
        ...     for i in range(n):
        ...         if job.cancelled:
        ...             break
        ...         job.report(i / n, f"{i} of {n}")
        ...     return i
        >>> job = jobs.submit(count, 10, name="counting")
        >>> job.wait(5), job.status, job.result
        (True, 'done', 9)
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Job, int | None]] = deque()
        self._running: Job | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        _ALL.add(self)

    def submit(
        self,
        function: Callable[..., Any],
        *args: Any,
        name: str = "",
        on_change: Callable[[Job], Any] | None = None,
        threads: int | None = None,
        block: bool = False,
    ) -> Job:
        """Have function(job, *args) computed.

        Args:
            function: given its `Job`, it reports on it, and ends soon when `job.cancelled`.
            args: given to it as well.
            name: what to call it; empty: the name of the function.
            on_change: on_change(job) is called after each report that is passed on and each change of status, in the thread that computes; if
                a queued job is cancelled, in the thread that cancels. An error in it ends nothing; the first one of a job is shown as a warning.
            threads: how many threads torch may use for the operations of this job on the CPU, unless OMP_NUM_THREADS is set; None: as many as
                it would elsewhere. 1 is best for small models: threads that wait for each other can take most of the time.
            block: compute here and now instead. Ctrl-C then stops the job, which keeps what there is, and an error is raised.

        Returns:
            The job.

        Raises:
            RuntimeError: the queue is closed.
            ValueError: threads is no whole number of at least 1.
            BaseException: with block, whatever the function raised.
        """
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads must be a whole number of at least 1; found {threads!r}")
        job = Job(function, args, name or getattr(function, "__name__", type(function).__name__), on_change)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{job.name}: these Jobs are closed; make new ones")
            if not block:
                self._waiting.append((job, threads))
                if self._thread is None or not self._thread.is_alive():  # it does not live on in a forked process
                    self._thread = threading.Thread(target=self._work, name="workbench jobs", daemon=True)
                    self._thread.start()
        if block:
            with _noting_interrupts(job):
                job._run(threads)
            if job.error is not None:
                raise job.error
        return job

    @property
    def running(self) -> Job | None:
        """The job that the thread works at, None if there is nothing to do."""
        return self._running

    @property
    def queued(self) -> list[Job]:
        """Those that wait, the next one first."""
        with self._lock:
            return [job for job, _ in self._waiting if job.status == "queued"]

    def cancel(self) -> None:
        """End the running job and all that wait."""
        with self._lock:
            jobs = [job for job, _ in self._waiting]
            jobs += [] if self._running is None else [self._running]
        for job in jobs:
            job.cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is nothing to do any more, at most so many seconds; whether that is so."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def close(self, timeout: float | None = 5.0) -> bool:
        """End everything, and take no more jobs; whether all had ended after so many seconds."""
        with self._lock:
            self._closed = True
        self.cancel()
        return self.wait(timeout)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = self._running = None
                    return
                self._running, threads = self._waiting.popleft()
            self._running._run(threads)
            if self._running.error is not None:
                self._running.error.__traceback__ = None  # it would keep alive all that the function had in its hands


_ALL: weakref.WeakSet[Jobs] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A daemon thread that is inside torch when the interpreter goes away would take the process down with it."""
    for jobs in list(_ALL):
        with jobs._lock:
            jobs._closed = True
        jobs.cancel()
    end = time.monotonic() + EXIT_TIMEOUT
    for jobs in list(_ALL):
        thread = jobs._thread
        if not jobs.wait(max(0.0, end - time.monotonic())) and thread is not None and thread.ident is not None:
            # Stop never comes here: it sets `cancelled`, which a training looks at in each step. This is for a function that
            # does not look (a long calibration) when Python exits: nothing but an exception from outside ends it at its next line, and left
            # alone inside torch it aborts the process (std::terminate, exit code 134; measured with torch 2.13 on Python 3.11)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
            jobs.wait(EXIT_TIMEOUT)


@contextmanager
def _noting_interrupts(job: Job) -> Iterator[None]:
    """Ctrl-C is what it is elsewhere, and cancels the job as well, which a function that catches it, as `workbench.fit` does, would not tell."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> Any:
        job._cancelled = True  # without a lock, which the interrupted code may hold
        return before(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """As many threads for torch's operations on the CPU that this thread calls; other threads keep theirs.

    Args:
        count: how many; None changes nothing, as does a set OMP_NUM_THREADS.
    """
    import torch

    if count is None or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    before = torch.get_num_threads()
    _set_threads(count, before)
    try:
        yield
    finally:
        _set_threads(before, before)


def _set_threads(count: int, elsewhere: int) -> None:
    import torch

    torch.set_num_threads(count)
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return
    # OpenMP's number is one of each thread, but torch also keeps it for threads that have not computed anything yet
    torch.get_num_threads()  # this one has computed now
    other = threading.Thread(target=torch.set_num_threads, args=(elsewhere,))
    other.start()
    other.join()


def _nothing(job: Job) -> None:
    """In place of a function that has been called."""
