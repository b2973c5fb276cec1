"""Jobs: queued, monitored, stopped and failed, in a thread or blocking; Python can exit while one runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from workbench import compose, fit
from workbench.errors import WorkbenchWarning
from workbench.widgets import Job, Jobs
from workbench.widgets.common import jobs as module

WAIT = 20.0  # far more than anything here takes


def until_cancelled(job: Job, started: threading.Event | None = None) -> str:
    if started is not None:
        started.set()
    while not job.cancelled:
        time.sleep(0.001)
    return "what there is"


# ---- the queue
def test_jobs_run_one_after_another_in_one_daemon_thread() -> None:
    jobs, seen, running = Jobs(), [], []

    def work(job: Job, i: int) -> int:
        running.append(jobs.running)
        seen.append((i, threading.current_thread()))
        return i * i

    submitted = [jobs.submit(work, i, name=f"job {i}") for i in range(5)]
    assert jobs.wait(WAIT)
    assert [job.result for job in submitted] == [0, 1, 4, 9, 16]
    assert [i for i, _ in seen] == list(range(5))
    assert running == submitted
    thread = seen[0][1]
    assert thread.daemon
    assert thread is not threading.current_thread()
    assert {job.status for job in submitted} == {"done"}
    assert jobs.running is None
    assert jobs.queued == []
    assert jobs.submit(work, 3).wait(WAIT)  # a new thread, since the first one has ended


def test_a_job_says_where_it_stands() -> None:
    jobs, started, seen = Jobs(), threading.Event(), []
    first = jobs.submit(until_cancelled, started, name="first", on_change=lambda job: seen.append(job.status))
    second = jobs.submit(until_cancelled, name="second")
    assert started.wait(WAIT)
    assert (first.status, second.status) == ("running", "queued")
    assert (first.ended, second.ended) == (False, False)
    assert jobs.running is first
    assert jobs.queued == [second]
    assert second.seconds == 0
    assert not first.wait(0.001)
    assert repr(first).startswith("Job('first', running 0%, ")
    jobs.cancel()
    assert jobs.wait(WAIT)
    assert seen == ["running", "stopped"]
    assert 0 < first.seconds < WAIT
    assert first.seconds == first.seconds
    assert jobs.submit(until_cancelled).name == "until_cancelled"
    jobs.close()


# ---- reports
def test_reports_are_limited_in_rate_and_the_first_and_last_are_passed_on() -> None:
    seen: list[tuple[str, float, str, dict[str, Any]]] = []

    def work(job: Job) -> None:
        for i in range(1000):
            job.report(i / 1000, f"step {i}", loss=i)

    job = Jobs().submit(
        work, on_change=lambda job: seen.append((job.status, job.fraction, job.text, job.data)), block=True
    )
    assert seen[0] == ("running", 0.0, "", {})
    assert seen[1] == ("running", 0.0, "step 0", {"loss": 0})
    assert seen[-2] == ("running", 0.999, "step 999", {"loss": 999})
    assert seen[-1] == ("done", 1.0, "step 999", {"loss": 999})
    assert len(seen) <= 4 + job.seconds / module.REPORT_INTERVAL


def test_what_is_costly_is_made_only_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = SimpleNamespace(now=0), []
    monkeypatch.setattr(module, "REPORT_INTERVAL", 5)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def work(job: Job) -> None:
        for now in range(100, 120):
            clock.now = now
            if job.due:
                made.append(now)
                job.report(0.5)

    Jobs().submit(work, block=True)
    assert made == [100, 105, 110, 115]


def test_an_error_in_on_change_is_told_once_and_ends_nothing() -> None:
    calls: list[str] = []

    def broken(job: Job) -> None:
        calls.append(job.status)
        raise ZeroDivisionError("in the widget")

    with pytest.warns(WorkbenchWarning, match="in the widget") as warned:
        job = Jobs().submit(lambda job: 7, name="seven", on_change=broken, block=True)
    assert len(warned) == 1
    assert (job.status, job.result, calls) == ("done", 7, ["running", "done"])
    assert "ZeroDivisionError" in job.complaint

    jobs = Jobs()  # warnings are errors in these tests, and even that ends neither
    assert jobs.submit(lambda job: 8, on_change=broken).wait(WAIT)
    after = jobs.submit(lambda job: 9)
    assert after.wait(WAIT)
    assert after.result == 9


# ---- stopping
def test_a_running_job_is_stopped_and_keeps_its_result() -> None:
    jobs, started = Jobs(), threading.Event()
    job = jobs.submit(until_cancelled, started)
    assert started.wait(WAIT)
    job.cancel()
    assert job.wait(WAIT)
    assert (job.status, job.result, job.error) == ("stopped", "what there is", None)


def test_a_queued_job_that_is_cancelled_never_starts_and_ends_at_once() -> None:
    jobs, started, ran, seen = Jobs(), threading.Event(), [], []
    first = jobs.submit(until_cancelled, started)
    second = jobs.submit(lambda job: ran.append(1), on_change=lambda job: seen.append(job.status))
    third = jobs.submit(lambda job: "third")
    assert started.wait(WAIT)
    second.cancel()
    assert second.wait(0)
    assert (second.status, second.seconds, seen) == ("stopped", 0, ["stopped"])
    assert jobs.queued == [third]
    first.cancel()
    assert third.wait(WAIT)
    assert ran == []
    assert third.result == "third"
    second.cancel()
    third.cancel()
    assert (second.status, third.status, seen) == ("stopped", "done", ["stopped"])


def test_a_training_is_stopped_within_a_step() -> None:
    jobs, started, after = Jobs(), threading.Event(), []
    wrapped = compose()(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)))

    def train(job: Job) -> Any:
        def watch(progress: Any) -> bool:
            cancelled = job.cancelled
            if cancelled:
                after.append(progress.step)
            started.set()
            job.report(progress.fraction, loss=progress.loss)
            return cancelled

        return fit(wrapped, (torch.randn(100, 2), torch.randn(100, 1)), epochs=10**6, progress=False, callback=watch)

    job = jobs.submit(train)
    assert started.wait(WAIT)
    job.cancel()
    assert job.wait(WAIT)
    assert len(after) == 1
    assert job.status == "stopped"
    assert job.result.interrupted
    assert not wrapped.training


def test_closing_ends_everything_and_takes_nothing_more() -> None:
    jobs, started = Jobs(), threading.Event()
    submitted = [jobs.submit(until_cancelled, started), *(jobs.submit(until_cancelled) for _ in range(3))]
    assert started.wait(WAIT)
    assert jobs.close(WAIT)
    assert [job.status for job in submitted] == ["stopped"] * 4
    with pytest.raises(RuntimeError, match="again: these Jobs are closed"):
        jobs.submit(until_cancelled, name="again")


# ---- failing
def test_an_error_is_kept_with_its_traceback_and_the_next_job_runs() -> None:
    jobs = Jobs()

    def fail(job: Job) -> None:
        raise KeyError("no such column")

    job, after = jobs.submit(fail), jobs.submit(lambda job: 1)
    assert after.wait(WAIT)
    assert job.status == "failed"
    assert isinstance(job.error, KeyError)
    assert "no such column" in job.traceback
    assert "in fail" in job.traceback
    assert after.status == "done"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_nothing_that_is_raised_ends_the_thread(error: BaseException) -> None:
    def leave(job: Job) -> None:
        raise error

    jobs = Jobs()
    job, after = jobs.submit(leave), jobs.submit(lambda job: 1)
    assert after.wait(WAIT)
    assert job.status == ("failed" if isinstance(error, SystemExit) else "stopped")
    assert after.result == 1


def test_what_a_job_held_is_let_go() -> None:
    import weakref

    class Big:
        pass

    def work(job: Job, big: Big) -> None:
        raise ValueError(str(job))

    big = Big()
    alive, jobs = weakref.ref(big), Jobs()
    job = jobs.submit(work, big)
    del big
    assert jobs.wait(WAIT)
    assert isinstance(job.error, ValueError)
    assert alive() is None


# ---- blocking
def test_blocking_goes_the_same_way_in_this_thread() -> None:
    seen: list[Any] = []

    def work(job: Job) -> threading.Thread:
        job.report(0.5, "half")
        return threading.current_thread()

    job = Jobs().submit(work, on_change=lambda job: seen.append((job.status, job.fraction)), block=True)
    assert job.result is threading.current_thread()
    assert seen == [("running", 0.0), ("running", 0.5), ("done", 1.0)]
    assert job.wait(0)


def test_blocking_raises_what_the_function_raised() -> None:
    seen: list[Job] = []

    def fail(job: Job) -> None:
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        Jobs().submit(fail, on_change=seen.append, block=True)
    assert seen[-1].status == "failed"


def interruptible() -> Any:
    """Whether Ctrl-C is there to be sent; it can be switched off from outside."""
    return signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("caught", [True, False])
def test_an_interrupt_stops_a_blocking_job_also_if_its_function_catches_it(caught: bool) -> None:
    before = interruptible()

    def work(job: Job) -> str:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(WAIT)
        except KeyboardInterrupt:
            if not caught:
                raise
        return "what there is"

    try:
        job = Jobs().submit(work, block=True)
        assert (job.status, job.cancelled) == ("stopped", True)
        assert job.result == ("what there is" if caught else None)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_while_it_is_reported_on_stops_it_as_well() -> None:
    before, seen = interruptible(), []

    def show(job: Job) -> None:
        seen.append(job.status)
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(WAIT)

    try:
        job = Jobs().submit(lambda job: 1, on_change=show, block=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (job.status, job.result, seen) == ("stopped", None, ["running", "stopped"])


def test_a_second_interrupt_while_the_first_is_reported_ends_the_job() -> None:
    def work(job: Job) -> None:
        job.report(0.1)
        job.report(0.2)  # so soon after the first that it is passed on at the end only
        raise KeyboardInterrupt

    def show(job: Job) -> None:
        if job.cancelled and not job.ended:
            raise KeyboardInterrupt

    jobs: list[Job] = []
    with pytest.raises(KeyboardInterrupt):
        Jobs().submit(work, on_change=lambda job: (jobs.append(job), show(job)), block=True)
    assert (jobs[0].status, jobs[0].wait(0)) == ("stopped", True)


# ---- threads of torch
def in_thread(function: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_the_number_of_torch_threads_is_that_of_the_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)

        def work(job: Job) -> tuple[int, int, int]:
            elsewhere = in_thread(torch.get_num_threads)
            torch.ones(100, 100) @ torch.ones(100, 100)
            return torch.get_num_threads(), elsewhere, torch.get_num_threads()

        jobs = Jobs()
        few, as_ever = jobs.submit(work, threads=1), jobs.submit(work)
        assert jobs.wait(WAIT)
        assert few.result == (1, 3, 1)
        assert as_ever.result == (3, 3, 3)
        assert torch.get_num_threads() == 3
        assert jobs.submit(work, threads=2, block=True).result == (2, 3, 2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_number_of_threads_that_the_user_has_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = torch.get_num_threads()
    assert Jobs().submit(lambda job: torch.get_num_threads(), threads=before + 1, block=True).result == before


@pytest.mark.parametrize("threads", [0, -1, 1.5, True])
def test_a_number_of_threads_that_makes_no_sense_is_refused(threads: Any) -> None:
    with pytest.raises(ValueError, match="threads must be a whole number"):
        Jobs().submit(until_cancelled, threads=threads)


# ---- leaving
@pytest.mark.parametrize("polls", [True, False], ids=["polls", "does not poll"])
@pytest.mark.slow
def test_python_can_end_while_a_job_runs(polls: bool) -> None:
    script = f"""
        import threading, torch
        from workbench.widgets.common import jobs as module
        module.EXIT_TIMEOUT = 0.5
        started = threading.Event()
        def work(job):
            while not ({polls} and job.cancelled):
                torch.ones(200, 200) @ torch.ones(200, 200)
                started.set()
        jobs = module.Jobs()
        jobs.submit(work, name="long")
        jobs.submit(work, name="next")
        started.wait()
        print("leaving")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


def test_no_widgets_are_imported_for_it() -> None:
    script = "import sys, workbench.widgets.common.jobs as j; j.Jobs(); print({'ipywidgets', 'torch', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
