"""A queue of long computations, run by one daemon thread while notebook cells can run, and the flag that stops them."""

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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

from ...errors import WorkbenchWarning, as_count

REPORT_INTERVAL = 0.25  # seconds between two reports
ENDED = ("done", "stopped", "failed")
EXIT_TIMEOUT = 2.0  # seconds a running job has to stop when Python exits


class Job:
    """One computation and its progress; made by `Jobs.submit`.

    Attributes:
        name: name of the job.
        status: "queued", "running", "done", "stopped" (cancelled or interrupted) or "failed".
        fraction: share that is done, 0 to 1, as last reported.
        text: text last reported.
        data: further data last reported, by name.
        result: return value of the function, also of a job stopped while running; None if there is none.
        error: exception that ended the job, or None.
        traceback: traceback of that exception as text, or "".
        complaint: traceback of the last error in `on_change`, or "".
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

    # ---- used by the function
    @property
    def cancelled(self) -> bool:
        """Whether the job should end as soon as possible; the function should check this often."""
        return self._cancelled

    @property
    def due(self) -> bool:
        """Whether a report would be passed on now; check it before computing anything costly for a report."""
        return time.perf_counter() - self._reported >= REPORT_INTERVAL

    def report(self, fraction: float, text: str = "", **data: Any) -> None:
        """Report progress; passed on at most four times a second, but always the first and last report.

        Args:
            fraction: share that is done, 0 to 1.
            text: short description.
            data: further data, for `Job.data`.
        """
        self.fraction, self.text, self.data = float(fraction), text, data
        if self.due:
            self._reported = time.perf_counter()
            self._notify()
        else:
            self._unreported = True

    # ---- used by the submitter
    @property
    def ended(self) -> bool:
        """Whether the job is done, stopped or failed."""
        return self.status in ENDED

    @property
    def seconds(self) -> float:
        """Running time in seconds; 0 while queued."""
        if self._start < 0:
            return 0.0
        return (self._end if self._end > 0 else time.perf_counter()) - self._start

    def cancel(self) -> None:
        """Cancel the job: a queued one never starts, a running one ends when its function next checks `cancelled`."""
        self._cancelled = True
        with self._lock:
            waiting = self.status == "queued"
            self.status = "stopped" if waiting else self.status
        if waiting:
            self._finish("stopped")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the job has ended, at most `timeout` seconds; return whether it has."""
        return self._ended.wait(timeout)

    def __repr__(self) -> str:
        progress = f" {self.fraction:.0%}" if self.status == "running" else ""
        return f"Job({self.name!r}, {self.status}{progress}, {self.seconds:.1f} s)"

    # ---- used by Jobs
    def _run(self, threads: int | None = None) -> None:
        with self._lock:
            if self.status != "queued":  # cancelled meanwhile
                return
            self.status, self._start = "running", time.perf_counter()
        status = "failed"
        try:
            try:
                self._notify()
                with _threads_of(threads):
                    self.result = self._function(self, *self._args)
                status = "stopped" if self.cancelled else "done"
            except KeyboardInterrupt:
                self._cancelled = True
                status = "stopped"
            except BaseException as error:
                self.error, self.traceback = error, traceback.format_exc()
            if self._unreported:
                self._notify()
        finally:  # also at a second Ctrl-C, after which the job would otherwise seem to run for ever
            self._finish(status)

    def _finish(self, status: str) -> None:
        self._function, self._args = _released, ()  # free memory that they may hold
        if status == "done":
            self.fraction = 1.0
        self._end = time.perf_counter()
        self.status = status
        try:
            self._notify()
        finally:
            self._ended.set()

    def _notify(self) -> None:
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
    """A queue of computations, run one after another in a daemon thread, so that cells can run and buttons be clicked meanwhile.

    The thread exists only while there are jobs. When Python exits, the running job is asked to stop.

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
        """Queue a call of function(job, *args).

        Args:
            function: called with its `Job`, on which it reports progress; it should end soon once `job.cancelled`.
            args: further arguments of the function.
            name: name of the job; that of the function if empty.
            on_change: called with the job after each report that is passed on and each change of status, in the computing thread; if a queued
                job is cancelled, in the cancelling thread. Its errors do not end the job; the first one is shown as a warning.
            threads: number of threads torch uses for CPU operations of this job, unless OMP_NUM_THREADS is set; unchanged if None. 1 is best
                for small models, where threads would spend most of the time waiting for each other.
            block: compute in this thread instead and wait. Ctrl-C then stops the job, which keeps its result so far; errors are raised.

        Returns:
            The job.

        Raises:
            RuntimeError: if the queue is closed.
            ValueError: if threads is not a whole number of at least 1.
            BaseException: with block, whatever the function raised.
        """
        threads = None if threads is None else as_count("threads", threads)
        job = Job(function, args, name or getattr(function, "__name__", type(function).__name__), on_change)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{job.name}: these Jobs are closed; make new ones")
            if not block:
                self._waiting.append((job, threads))
                if self._thread is None or not self._thread.is_alive():  # threads do not survive a fork
                    self._thread = threading.Thread(target=self._work, name="workbench jobs", daemon=True)
                    self._thread.start()
        if block:
            with _cancelled_by_interrupt(job):
                job._run(threads)
            if job.error is not None:
                raise job.error
        return job

    @property
    def running(self) -> Job | None:
        """The running job, or None."""
        return self._running

    @property
    def queued(self) -> list[Job]:
        """The queued jobs, the next one first."""
        with self._lock:
            return [job for job, _ in self._waiting if job.status == "queued"]

    def cancel(self) -> None:
        """Cancel the running job and all queued ones."""
        with self._lock:
            jobs = [job for job, _ in self._waiting]
            jobs += [] if self._running is None else [self._running]
        for job in jobs:
            job.cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all jobs have ended, at most `timeout` seconds; return whether they have."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def close(self, timeout: float | None = 5.0) -> bool:
        """Cancel all jobs and accept no more; return whether all ended within `timeout` seconds."""
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
                self._running.error.__traceback__ = None  # it would keep all locals of the function alive


_ALL: weakref.WeakSet[Jobs] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Stop all jobs when Python exits: a daemon thread inside torch at interpreter shutdown would abort the process."""
    for jobs in list(_ALL):
        with jobs._lock:
            jobs._closed = True
        jobs.cancel()
    end = time.monotonic() + EXIT_TIMEOUT
    for jobs in list(_ALL):
        thread = jobs._thread
        if not jobs.wait(max(0.0, end - time.monotonic())) and thread is not None and thread.ident is not None:
            # This concerns only functions that do not check `cancelled` when Python exits, such as a long calibration; trainings check it
            # in each step. Only an asynchronous exception ends such a function at its next line; left running inside torch, it aborts the
            # process (std::terminate, exit code 134; measured with torch 2.13 on Python 3.11)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
            jobs.wait(EXIT_TIMEOUT)


@contextmanager
def _cancelled_by_interrupt(job: Job) -> Iterator[None]:
    """Let Ctrl-C also cancel the job, since a function may catch KeyboardInterrupt, as `workbench.fit` does."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> Any:
        job._cancelled = True  # without the lock, which the interrupted code may hold
        return before(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _threads_of(count: int | None) -> AbstractContextManager[None]:
    """Set the number of threads for torch's CPU operations of a job, unless it is None or OMP_NUM_THREADS is set."""
    from ...engine.threads import torch_threads

    return nullcontext() if count is None or "OMP_NUM_THREADS" in os.environ else torch_threads(count)


def _released(job: Job) -> None:
    """Stand in for a function that has been called."""
