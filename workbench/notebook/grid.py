"""Runs of a notebook over a grid of parameters, each in its own processes, with results saved after each run."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import atomic
from ..console import progress_bar
from ..errors import as_count, check_packages, check_timeout
from ..experiments.environment import environment
from ..experiments.pool import refuse_in_worker
from ..trackers.base import Tracker
from ..trackers.delivery import Delivery, tracker_of
from .parameters import load_notebook, skip_iri_grammars
from .run import ENDED_BADLY, Run, finished, log_run, perform, plan, read, stamp_of, write

if TYPE_CHECKING:
    from nbformat import NotebookNode

    from ..experiments.pool import CellOutcome

GRACE_PERIOD = 20.0  # seconds that a run has to save its outputs after SIGTERM
EXTRA_TIME = 300.0  # seconds after a run's time limit at which its process is ended, in case the process itself hangs
KERNEL_START = 5.0  # seconds after which a kernel has probably started
MAX_NAME_BYTES = 120  # of a file name


def run_grid(
    notebook: Path | str,
    folder: Path | str,
    parameters: Mapping[str, Any] | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    jobs: int = 1,
    timeout: float | None = None,
    resume: bool = True,
    pdf: bool = False,
    progress: bool = True,
    log_to: str | Tracker | None = None,
) -> list[Run]:
    """Run a notebook once per combination of a grid, and write a report of each run and an index of all runs.

    Each run has its own process and kernel: an error, a time-out or a crash costs only that run. After each run
    ``index.html`` (a sortable table with the best values marked, plots over the grid, thumbnails), ``index.json`` and
    ``index.csv`` (one row per recorded number) are replaced, so that they are up to date whenever the grid is stopped.
    They cover all runs in the folder. Calling it again resumes the grid: runs that ended with status ``ok`` and are
    unchanged since (see `run_key`) are reused; failed runs are repeated, after the others.

    Args:
        notebook: path of the .ipynb file; it is read once, so that all runs use the same version.
        folder: folder for the executed notebooks, their pages and the index; used by one grid at a time.
        parameters: name -> value, the same for all runs.
        grid: name -> values; there is one run per combination, named by these values.
        jobs: number of parallel runs. With more than one, each uses one torch thread unless OMP_NUM_THREADS is set.
        timeout: time limit per run in seconds, for all its cells together; None: no limit.
        resume: whether to reuse finished runs; False runs all of them again.
        pdf: whether to print each page as a PDF file, which needs Chromium, Chrome, Edge or Brave.
        progress: whether to print a line per run, and show a progress bar on a terminal.
        log_to: tracker to which each run that ends is logged separately, see `run_notebook`.

    Returns:
        One `Run` per combination, in the order of the grid.

    Raises:
        FileNotFoundError, ValueError, TypeError: the notebook, the parameters or a number is invalid; nothing is written.
        FileExistsError: a notebook that is no report lies where a run would be written.
        OSError: the folder can't be made or written to, or another grid is running in it (BlockingIOError).
        RuntimeError: a script calls it outside of ``if __name__ == "__main__":``, which the processes of the runs would start again.
        KeyboardInterrupt: after Ctrl-C or SIGTERM; unfinished runs have been saved as ``interrupted``.

    Example:
        >>> import nbformat, tempfile
        >>> v4 = nbformat.v4
        >>> cells = [
        ...     v4.new_code_cell("n = 1", metadata={"tags": ["parameters"]}),
        ...     v4.new_code_cell("from workbench import record; record(rmse=1 / n)"),
        ... ]
        >>> folder = Path(tempfile.mkdtemp())
        >>> nbformat.write(v4.new_notebook(cells=cells), folder / "small.ipynb")
        >>> runs = run_grid(folder / "small.ipynb", folder / "reports", grid={"n": [2, 4]}, progress=False)
        >>> [(run.name, run.status, run.records["rmse"]) for run in runs]
        [('small_n-2', 'ok', 0.5), ('small_n-4', 'ok', 0.25)]
        >>> sorted(path.name for path in (folder / "reports").glob("index.*"))
        ['index.csv', 'index.html', 'index.json']
    """
    from .index import Index
    from .pdf import find_chromium

    refuse_in_worker("runs")
    notebook, folder = Path(notebook).resolve(), Path(folder).resolve()
    nb = load_notebook(notebook)
    check_timeout(timeout)
    log = None if log_to is None else Delivery(tracker_of(log_to))
    jobs = as_count("jobs", jobs)
    check_packages("papermill", "nbconvert", "bs4")
    planned = [
        plan(nb, notebook, folder / f"{name}.ipynb", values)
        for name, values in combinations(notebook.stem, parameters or {}, grid or {})
    ]
    for run, _ in planned:
        _check_not_foreign(Path(run.output))
    chromium = find_chromium() if pdf else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"the folder for reports {folder} can't be made: {error.strerror}") from error
    with _locked(folder), _Grid(nb, planned, Index(folder), chromium, progress, log) as runner:
        return runner.run(jobs, timeout, resume)


def combinations(
    stem: str, parameters: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]
) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the parameters of every run.

    Names are readable; a hash is appended where values could give the same name, or the same file on some file system.

    Example:
        >>> combinations("compare", {"epochs": 5}, {"data": ["yacht"], "split": [0, 1]})[1]
        ('compare_data-yacht_split-1', {'epochs': 5, 'data': 'yacht', 'split': 1})
    """
    for argument, value in (("parameters", parameters), ("grid", grid)):
        if not isinstance(value, Mapping):
            raise TypeError(f"{argument}: found {value!r:.100}; give a dict of names and values")
    for name, values in grid.items():
        if name in parameters:
            raise ValueError(f"parameter {name} is given both for all runs and in the grid: give it once")
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(f"the grid has no values for {name}: give a list with at least one value")
    runs: dict[str, dict[str, Any]] = {}
    for values in itertools.product(*grid.values()):
        grid_values = dict(zip(grid, values, strict=True))
        label = _label(stem, grid_values)
        if label in runs:
            raise ValueError(f"two runs of the grid would have the same name {label}: give each value once")
        runs[label] = {**parameters, **grid_values}
    return list(runs.items())


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _label(stem: str, grid_values: Mapping[str, Any]) -> str:
    """Return the name of a run. It differs for different notebooks or values, even if upper and lower case are not distinguished."""
    text = "_".join([stem, *(f"{name}-{_text(value)}" for name, value in grid_values.items())])
    label, hashed = re.sub(r"[^\w.+=-]+", "-", text).strip("-"), text
    if label != text or text == "index-run" or not all(map(_is_unambiguous, grid_values.values())):
        hashed = json.dumps([stem, grid_values], default=str)
    if hashed is not text or len(label.encode()) > MAX_NAME_BYTES:
        digest = hashlib.sha256(hashed.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        label = f"{label.encode()[: MAX_NAME_BYTES - 9].decode(errors='ignore')}-{digest}"
    return "index-run" if label == "index" else label


def _is_unambiguous(value: Any) -> bool:
    """Return whether no other value, nor this value followed by another parameter, could have the same text."""
    if not isinstance(value, str):
        return not isinstance(value, list | tuple | Mapping)
    with contextlib.suppress(ValueError):
        json.loads(value)
        return False
    return value.casefold() == value and re.search(r"_[^_]*-", value) is None


def _check_not_foreign(output: Path) -> None:
    """Raise if a notebook that no report wrote, such as one of the user, would be replaced."""
    if output.is_symlink() or not output.is_file():  # a link is replaced, and what it leads to stays
        return
    with contextlib.suppress(ValueError):  # a damaged file
        if "workbench" not in load_notebook(output).metadata:
            raise FileExistsError(
                f"{output} is a notebook, not a report, and would be replaced: choose another folder (-o), or move it"
            )


def _replaced(earlier: Run, run: Run) -> str:
    """Return the words about an earlier report of the same name, "" unless it had other parameters or was of another notebook."""
    if earlier.notebook != run.notebook:
        return f"replaces the report of {earlier.notebook}; -o DIR keeps both"
    names = [name for name, value in earlier.parameters.items() if run.parameters.get(name, value) != value]
    if not names:
        return ""
    before = ", ".join(f"{name}={_text(earlier.parameters[name])}" for name in names)
    return f"replaces the report with {before}; -g {names[0]}={_text(run.parameters[names[0]])} or -o DIR keeps both"


def _locked(folder: Path) -> contextlib.AbstractContextManager[None]:
    busy = f"another report is being written to {folder}: wait for it, stop it, or choose another folder (-o)"
    return atomic.locked(folder / ".workbench.lock", busy)


class _Grid:
    """The runs of a grid and their outcomes."""

    def __init__(
        self,
        nb: NotebookNode,
        planned: list[tuple[Run, dict[str, Any]]],
        index: Any,
        chromium: str | None,
        progress: bool,
        log: Delivery | None,
    ) -> None:
        self.nb, self.index, self.chromium, self.log = nb, index, chromium, log
        self.progress = progress and sys.stdout is not None
        self.runs = {run.name: run for run, _ in planned}
        self.values = {run.name: values for run, values in planned}
        self.earlier = {name: stamp_of(Path(run.output)) for name, run in self.runs.items()}
        self.replaced = {
            name: _replaced(earlier, self.runs[name]) for name, earlier in self.earlier.items() if earlier is not None
        }
        self.ended: set[str] = set()
        self.notebook_folder = Path(planned[0][0].notebook).parent
        self.bar = progress_bar(total=len(planned), unit="run", disable=None if progress else True, leave=False)

    def __enter__(self) -> _Grid:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.log is not None:
            self.log.close()

    def run(self, jobs: int, timeout: float | None, resume: bool) -> list[Run]:
        import nbformat

        from ..experiments.pool import outcomes
        from ..experiments.signals import sigterm_as_interrupt, uninterrupted

        new, failed_before = self._unfinished(resume)
        self.index.write()  # so that a folder without write permission fails now, not after hours of work
        for name in self.runs:
            if name not in (*new, *failed_before):
                self._report(name, self._published(name))
        current_environment = environment(self.notebook_folder, ask_torch=False) if new or failed_before else {}
        source = nbformat.writes(self.nb)
        cells = [
            {
                "source": source,
                "run": asdict(replace(self.runs[name], environment=current_environment)),
                "values": self.values[name],
                "timeout": timeout,
                "chromium": self.chromium,
            }
            for name in new + failed_before
        ]
        ended = outcomes(
            f"{__name__}:work",
            cells,
            jobs=jobs,
            threads=1 if jobs > 1 and "OMP_NUM_THREADS" not in os.environ else None,
            timeout=None if timeout is None else timeout + EXTRA_TIME,
            grace=GRACE_PERIOD,
        )
        try:
            with sigterm_as_interrupt(), contextlib.closing(ended), _meanwhile(_import_metrics):
                for outcome in ended:
                    with uninterrupted():
                        name, problem = self._add_outcome(outcome)
                        self.index.write()
                    self._report(name, problem)
                    if self.log is not None:
                        log_run(self.log, self.runs[name], Path(self.runs[name].notebook).stem)
        except KeyboardInterrupt:
            self._mark_interrupted(new + failed_before)
            raise
        finally:
            self.index.write(plots=True)
        return list(self.runs.values())

    def _unfinished(self, resume: bool) -> tuple[list[str], list[str]]:
        """Return the names of the runs to do: new ones, and those that failed before."""
        new, failed_before = [], []
        for name, run in self.runs.items():
            earlier = stamp_of(Path(run.output))
            if earlier is None or earlier.key != run.key:
                earlier = None
            if resume and (done := finished(run)) is not None:
                self.runs[name] = done
            elif resume and earlier is not None and earlier.status in ENDED_BADLY:
                failed_before.append(name)
            else:
                new.append(name)
            self.index.add(run if earlier is None else replace(earlier, output=run.output))
            # reading it into the index may have found an error, such as a name recorded twice
            if self.runs[name].cached:
                self.runs[name].error = self.index.entries[name].run.error
        self.index.first(self.runs)
        return new, failed_before

    def _published(self, name: str) -> str:
        """Write the page of a reused run if it is missing or outdated, and return what went wrong."""
        output = Path(self.runs[name].output)
        page = output.with_suffix(".html")
        files = [page, *([output.with_suffix(".pdf")] if self.chromium else [])]
        if all(file.is_file() and file.stat().st_mtime >= output.stat().st_mtime for file in files):
            return ""
        return _publish(output, self.chromium)

    def _add_outcome(self, outcome: CellOutcome) -> tuple[str, str]:
        """Store the outcome of a run, and return its name and what went wrong with its page."""
        run = Run(**outcome.cell["run"])
        output = Path(run.output)
        if outcome.status == "ok":
            done, problem = stamp_of(output) or run, outcome.rows[0]["problem"]
        else:
            # the worker process failed or was ended; the outputs up to then are on disk, and are kept
            stamped = stamp_of(output)
            has_begun = stamped is not None and (stamped.key, stamped.status) == (run.key, "interrupted")
            done = replace(
                stamped if stamped is not None and has_begun else run,
                status=outcome.status,
                seconds=round(outcome.seconds, 3),
                error=outcome.reason or outcome.status,
            )
            with contextlib.suppress(OSError):  # the disk may be full
                write(read(output) if has_begun else self.nb, done)
            problem = _publish(output, None)
        self.runs[run.name] = done
        self.index.add(done)
        return run.name, problem

    def _mark_interrupted(self, names: list[str]) -> None:
        for name in names:
            stamped = stamp_of(Path(self.runs[name].output))
            if (
                name in self.ended
                or stamped is None
                or stamped.key != self.runs[name].key
                or stamped == self.earlier[name]
            ):
                continue
            self.runs[name] = stamped
            self.index.add(stamped)
            interrupted = stamped.status == "interrupted"
            problem = _publish(Path(stamped.output), None) if interrupted else self._published(name)
            self._report(name, problem, count=not interrupted)
        if self.progress:
            self.bar.clear()
            print(
                f"{len(self.ended)} of {len(self.runs)} runs have ended; run the same command again to resume",
                flush=True,
            )

    def _report(self, name: str, problem: str, count: bool = True) -> None:
        run = self.runs[name]
        if count:
            self.ended.add(name)
        if problem:
            run.error = f"{f'{run.error}; ' if run.error else ''}no page: {problem}"
        if self.progress:
            n_ended = sum(other in self.ended for other in self.runs) if count else "-"
            failed = self.index.entries[name].failed_checks
            problems = [run.error] if run.error else [f"does not hold: {'; '.join(failed)}"] if failed else []
            notes = [self.replaced[name]] if self.replaced.get(name) else []
            line = "  ".join([run.name, *(" ".join(text.split()) for text in problems + notes)])
            seconds = "   cached" if run.cached else f"{run.seconds:7.1f} s"
            self.bar.write(f"[{n_ended}/{len(self.runs)}] {run.status:<11} {seconds}  {line}", file=sys.stdout)
            sys.stdout.flush()
        self.bar.update(count)


def work(
    source: str, run: dict[str, Any], values: dict[str, Any], timeout: float | None, chromium: str | None
) -> dict[str, Any]:
    """Execute one run in a worker process. On SIGTERM the outputs so far are saved."""
    skip_iri_grammars()
    import nbformat

    from .pictures import embedded
    from .report import prepare

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        with ThreadPoolExecutor(1) as pictures, _meanwhile(_import_metrics, prepare):
            done = perform(
                nbformat.reads(source, as_version=4),
                Run(**run),
                values,
                timeout=timeout,
                on_picture=lambda png: pictures.submit(embedded, png),
            )
        return {"problem": _publish(Path(done.output), chromium)}
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _import_metrics() -> None:
    importlib.import_module("workbench.metrics")


@contextlib.contextmanager
def _meanwhile(*tasks: Callable[[], object]) -> Iterator[None]:
    """Prepare in a thread what is needed after this context, while its kernel works in another process."""

    def work_off() -> None:
        for task in tasks:
            with contextlib.suppress(Exception):  # raised again where it is needed
                task()

    timer = threading.Timer(KERNEL_START, work_off)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _publish(output: Path, chromium: str | None) -> str:
    """Write the page of a run, and its PDF if a browser is given; return what went wrong, "" if nothing."""
    from .pdf import print_pdf
    from .report import render

    try:
        page = render(output)
        if chromium is not None:
            print_pdf(page, chromium)
    except Exception as error:  # a page that fails must not lose the run's results
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""
