"""Run a notebook over a grid of parameters, each run in processes of its own, all results kept after each."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import require
from ..experiments.environment import environment
from ..trackers.base import Tracker
from ..trackers.delivery import Delivery, tracker_of
from .parameters import load_notebook
from .run import CLOCK, ENDED_BADLY, Run, check_timeout, finished, log_run, perform, plan, read, stamp_of, write

if TYPE_CHECKING:
    from nbformat import NotebookNode

    from ..experiments.pool import CellOutcome

GRACE = 20.0  # seconds that a run which is ended has to save what it has
SPARE = 300.0  # seconds beyond a run's limit after which its process is ended, should that hang and not the notebook
LONGEST = 120  # bytes of a file's name


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
    """Run a notebook once for each combination of a grid, and write a report of each and an index of all.

    Each run has a process and a kernel of its own: what one meets, an error, its time limit or its death, costs that
    one run. After each run ``index.html`` (a table to sort, the best values marked, plots over the grid, thumbnails),
    ``index.json`` and ``index.csv`` (one row for each recorded number) are replaced, so that they are right whenever the
    grid is ended. They cover all runs in the folder. Called again, the grid goes on: runs that ended well and of which
    nothing has changed since (see `run_key`) are taken as they are; those that failed run again, after the others.

    Args:
        notebook: path of the .ipynb file; it is read once, so that all runs are of one state of it.
        folder: where the executed notebooks, their pages and the index are written; one grid at a time.
        parameters: name -> value, the same for all runs.
        grid: name -> values; the runs are all combinations, and named by these values.
        jobs: runs at a time. With more than one, each has one torch thread, unless OMP_NUM_THREADS says otherwise.
        timeout: seconds that one run may take, from its first cell on; None: no limit.
        resume: False runs all of them again.
        pdf: print each page as a PDF file too, by a Chromium of this machine.
        progress: print a line for each run, and show a bar on a terminal.
        log_to: a tracker that is given each run that ends as one of its own, see `run_notebook`.

    Returns:
        One `Run` for each combination, in the grid's order.

    Raises:
        FileNotFoundError, ValueError, TypeError: for a notebook, parameters or numbers that can't be; nothing is written.
        BlockingIOError: another grid runs in this folder.
        OSError: the folder can't be written to.
        KeyboardInterrupt: on Ctrl-C or SIGTERM, after all has been saved: what had begun is marked ``interrupted``.

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

    notebook, folder = Path(notebook).resolve(), Path(folder).resolve()
    nb = load_notebook(notebook)
    check_timeout(timeout)
    log = None if log_to is None else Delivery(tracker_of(log_to))
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise ValueError(f"jobs must be a whole number of at least 1, not {jobs!r}")
    planned = [
        plan(nb, notebook, folder / f"{name}.ipynb", values)
        for name, values in combinations(notebook.stem, parameters or {}, grid or {})
    ]
    chromium = find_chromium() if pdf else None
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder), _Grid(nb, planned, Index(folder), chromium, progress, log) as all_of_them:
        return all_of_them.run(jobs, timeout, resume)


def combinations(
    stem: str, parameters: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]
) -> list[tuple[str, dict[str, Any]]]:
    """Every run's name and parameters.

    A name is for people; where it does not tell all values apart on every file system, a hash of them ends it.

    Example:
        >>> combinations("compare", {"epochs": 5}, {"data": ["yacht"], "split": [0, 1]})[1]
        ('compare_data-yacht_split-1', {'epochs': 5, 'data': 'yacht', 'split': 1})
    """
    for name, values in grid.items():
        if name in parameters:
            raise ValueError(f"parameter {name} is given twice, once for all runs and once in the grid")
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(f"the grid names no values for {name}: give a list with at least one")
    runs: dict[str, dict[str, Any]] = {}
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        label = _label(stem, chosen)
        if label in runs:
            raise ValueError(f"two runs of the grid would both be called {label}: give each value once")
        runs[label] = {**parameters, **chosen}
    return list(runs.items())


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _label(stem: str, chosen: Mapping[str, Any]) -> str:
    """The name of a run: of different notebooks' names or values different ones, upper and lower case counted alike."""
    text = "_".join([stem, *(f"{name}-{_text(value)}" for name, value in chosen.items())])
    label, hashed = re.sub(r"[^\w.+=-]+", "-", text).strip("-"), text
    if label != text or text == "index-run" or not all(map(_is_told, chosen.values())):
        hashed = json.dumps([stem, chosen], default=str)
    if hashed is not text or len(label.encode()) > LONGEST:
        digest = hashlib.sha256(hashed.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        label = f"{label.encode()[: LONGEST - 9].decode(errors='ignore')}-{digest}"
    return "index-run" if label == "index" else label


def _is_told(value: Any) -> bool:
    """Whether the text of a value can be that of no other, nor of this and a parameter after it."""
    if not isinstance(value, str):
        return not isinstance(value, list | tuple | Mapping)
    with contextlib.suppress(ValueError):
        json.loads(value)
        return False
    return value.casefold() == value and re.search(r"_[^_]*-", value) is None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    filelock = require("filelock")
    lock = filelock.FileLock(folder / ".workbench.lock")
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout as error:
        raise BlockingIOError(f"another report is being written to {folder}: wait for it, end it, or use -o") from error
    try:
        yield
    finally:
        lock.release()


class _Grid:
    """The runs of a grid, and what has become of them."""

    def __init__(
        self,
        nb: NotebookNode,
        planned: list[tuple[Run, dict[str, Any]]],
        index: Any,
        chromium: str | None,
        progress: bool,
        log: Delivery | None,
    ) -> None:
        from tqdm.auto import tqdm

        self.nb, self.index, self.chromium, self.progress, self.log = nb, index, chromium, progress, log
        self.runs = {run.name: run for run, _ in planned}
        self.values = {run.name: values for run, values in planned}
        self.ended: set[str] = set()
        self.notebook_folder = Path(planned[0][0].notebook).parent
        self.began = time.strftime(CLOCK)
        self.bar = tqdm(total=len(planned), unit="run", disable=None if progress else True, leave=False)

    def __enter__(self) -> _Grid:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.log is not None:
            self.log.close()

    def run(self, jobs: int, timeout: float | None, resume: bool) -> list[Run]:
        import nbformat

        from ..experiments.cells import _sigterm_as_interrupt, _uninterrupted
        from ..experiments.pool import outcomes

        new, again = self._sorted_out(resume)
        self.index.write()  # a folder that can't be written to is found out before hours are spent
        for name in self.runs:
            if name not in (*new, *again):
                self._tell(name, self._published(name))
        here = environment(self.notebook_folder, ask_torch=False) if new or again else {}
        source = nbformat.writes(self.nb)
        cells = [
            {
                "source": source,
                "run": asdict(replace(self.runs[name], environment=here)),
                "values": self.values[name],
                "timeout": timeout,
                "chromium": self.chromium,
            }
            for name in new + again
        ]
        ended = outcomes(
            f"{__name__}:work",
            cells,
            jobs=jobs,
            threads=1 if jobs > 1 and "OMP_NUM_THREADS" not in os.environ else None,
            timeout=None if timeout is None else timeout + SPARE,
            grace=GRACE,
        )
        try:
            with _sigterm_as_interrupt(), contextlib.closing(ended):
                for outcome in ended:
                    with _uninterrupted():
                        name, problem = self._take(outcome)
                        self.index.write()
                    self._tell(name, problem)
                    if self.log is not None:
                        log_run(self.log, self.runs[name], Path(self.runs[name].notebook).stem)
        except KeyboardInterrupt:
            self._mark_interrupted(new + again)
            raise
        finally:
            self.index.write(plots=True)
        return list(self.runs.values())

    def _sorted_out(self, resume: bool) -> tuple[list[str], list[str]]:
        """The runs that are to be done: the new ones, and those that ended badly before."""
        new, again = [], []
        for name, run in self.runs.items():
            earlier = stamp_of(Path(run.output))
            if earlier is None or earlier.key != run.key:
                earlier = None
            if resume and (done := finished(run)) is not None:
                self.runs[name] = done
            elif resume and earlier is not None and earlier.status in ENDED_BADLY:
                again.append(name)
            else:
                new.append(name)
            self.index.add(run if earlier is None else replace(earlier, output=run.output))
            if self.runs[name].cached:  # what is recorded twice is found out by the index
                self.runs[name].error = self.index.entries[name].run.error
        self.index.first(self.runs)
        return new, again

    def _published(self, name: str) -> str:
        """Make what is missing of the page of a run that is taken as it is."""
        output = Path(self.runs[name].output)
        page = output.with_suffix(".html")
        files = [page, *([output.with_suffix(".pdf")] if self.chromium else [])]
        if all(file.is_file() and file.stat().st_mtime >= output.stat().st_mtime for file in files):
            return ""
        return _publish(output, self.chromium)

    def _take(self, outcome: CellOutcome) -> tuple[str, str]:
        """Keep how a run ended; its name, and what went wrong with its page."""
        run = Run(**outcome.cell["run"])
        output = Path(run.output)
        if outcome.status == "ok":
            done, problem = stamp_of(output) or run, outcome.rows[0]["problem"]
        else:
            # the process around the kernel ended in some way: what the kernel had shown is on disk, and is kept
            before = stamp_of(output)
            begun = before is not None and (before.key, before.status) == (run.key, "interrupted")
            done = replace(
                before if before is not None and begun else run,
                status=outcome.status,
                seconds=round(outcome.seconds, 3),
                error=_reason(outcome),
            )
            with contextlib.suppress(OSError):  # a full disk was the reason, maybe
                write(read(output) if begun else self.nb, done)
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
                or stamped.started < self.began
            ):
                continue
            self.runs[name] = stamped
            self.index.add(stamped)
            interrupted = stamped.status == "interrupted"
            problem = _publish(Path(stamped.output), None) if interrupted else self._published(name)
            self._tell(name, problem, count=not interrupted)
        if self.progress:
            self.bar.clear()
            print(f"{len(self.ended)} of {len(self.runs)} runs have ended; the same command again goes on", flush=True)

    def _tell(self, name: str, problem: str, count: bool = True) -> None:
        run = self.runs[name]
        if count:
            self.ended.add(name)
        if problem:
            run.error = f"{f'{run.error}; ' if run.error else ''}no page: {problem}"
        if self.progress:
            place = sum(other in self.ended for other in self.runs) if count else "-"
            failed = self.index.entries[name].failed_checks
            said = [run.error] if run.error else [f"does not hold: {'; '.join(failed)}"] if failed else []
            what = "  ".join([run.name, *(" ".join(text.split()) for text in said)])
            seconds = "   cached" if run.cached else f"{run.seconds:7.1f} s"
            self.bar.write(f"[{place}/{len(self.runs)}] {run.status:<11} {seconds}  {what}", file=sys.stdout)
            sys.stdout.flush()
        self.bar.update(count)


def work(
    source: str, run: dict[str, Any], values: dict[str, Any], timeout: float | None, chromium: str | None
) -> dict[str, Any]:
    """What a worker process does for one run; ended by SIGTERM, it saves what there is."""
    import nbformat

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        done = perform(nbformat.reads(source, as_version=4), Run(**run), values, timeout=timeout)
        return {"problem": _publish(Path(done.output), chromium)}
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _publish(output: Path, chromium: str | None) -> str:
    """Write the page of a run, and print it; what went wrong with that."""
    from .pdf import print_pdf
    from .report import render

    try:
        page = render(output)
        if chromium is not None:
            print_pdf(page, chromium)
    except Exception as error:  # whatever a page meets, the run's results are there
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


def _reason(outcome: CellOutcome) -> str:
    """The last line of a traceback, or the sentence that the pool says."""
    lines = outcome.error.split("\nprinted:\n")[0].strip().splitlines()
    return lines[-1].strip() if lines else outcome.status
