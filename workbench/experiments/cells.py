"""Run a function over many cells of arguments, in processes, resumable."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import WorkbenchWarning, require
from ..trackers.base import Tracker
from ..trackers.delivery import Delivery, tracker_of
from . import environment
from .pool import CellOutcome, outcomes, visible_gpus
from .scheduler import Cluster
from .store import Store, check_path, key
from .tables import text
from .worker import RESERVED, load, plain

if TYPE_CHECKING:
    import pandas as pd


def run_cells(
    function: str | Callable[..., Any],
    cells: Sequence[dict[str, Any]],
    path: Path | str,
    *,
    jobs: int = 1,
    threads: int = 1,
    timeout: float | None = None,
    resume: bool = True,
    progress: bool = True,
    command: str | None = None,
    scheduler: Any = None,
    files: Sequence[Path | str] = (),
    log_to: str | Tracker | None = None,
) -> pd.DataFrame:
    """Call a function once for each cell, in processes of their own, and keep what it returns in files.

    ``name.jsonl`` keeps all results with their types, a line for each cell. ``name.csv`` or ``name.parquet``, a table to open elsewhere, is made
    from it, and so are ``name.json``, what made the results, and, while there are cells without, ``name.failed.txt`` with the traceback of each
    and what it printed. Files are replaced in one step after each cell, so that a run that is ended in any way (Ctrl-C, SIGTERM and SIGKILL
    too) loses at most the cells in flight. A file of that name that is somebody else's, or was changed since, is named and left as it is.

    On a machine with several GPUs each process sees one of them. With a scheduler, processes run on the workers of a
    dask.distributed cluster instead, each worker giving as many at a time as it has threads; a cell whose worker is lost runs
    again elsewhere. The function's file, and those beside it that it imports, are sent along.

    Args:
        function: a function at the top of a module, or "module:name" or "path/to/file.py:name"; returns one row (dict
            of JSON's types) or a list of rows. To give the same result wherever and in whichever order
            cells run, it must draw all that is random from its arguments.
        cells: keyword arguments, each a dict of JSON's types; the file has them as columns, and four more: "cell" (the
            key of the arguments), "seconds", "version" (of the code) and "device".
        path: the .csv or .parquet file (for which pyarrow is needed); its folder is made. Without ``name.jsonl`` a table of an earlier
            version is gone on with.
        jobs: cells at a time, each in a worker process (spawned; it runs many cells one after another).
        threads: torch threads of each worker.
        timeout: seconds that one cell may take, None for no limit.
        resume: whether cells whose results are in the file are taken from there; False runs all of these cells again.
        progress: whether to print a line for each cell, and show a bar.
        command: what to record as the command that made the file; None: the function's name.
        scheduler: address of a dask.distributed scheduler ("tcp://host:8786", or the path of its .json file), or a Client or
            Cluster; jobs then says nothing.
        files: more .py files that the function loads by `worker.load_file` under these paths, to be sent to a cluster's workers.
        log_to: "tensorboard", "mlflow", "wandb" or a `workbench.trackers.Tracker`, which is given each cell that has ended as a run of its own,
            from this process: its arguments, the numbers of its row (of several rows as steps) and how it ended. What is there already is not.

    Returns:
        The rows of these cells, in their order, each value with its type; one that a row does not have is NaN.
        ``frame.attrs["failed"]`` lists the cells that have none, each a dict
        with "cell", "status" (failed, timeout or died) and "error".

    Raises:
        TypeError: function or a cell is of the wrong type.
        ValueError: two cells are the same, a number is out of range, one of the files holds something else or was changed since, or workers of
            the scheduler have other versions of Python, torch, numpy or workbench.
        BlockingIOError: another run writes this file.
        ModuleNotFoundError: pyarrow, dask.distributed or the package of log_to is asked for and not installed.
        ConnectionError: there is no scheduler.
        ConnectionAbortedError: the scheduler was lost while cells ran; those that have ended are kept, run again to go on.

    Warns:
        WorkbenchWarning: some results in the file are of another version of the code, or a file was cut off, and what is missing runs again.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     frame = run_cells("builtins:dict", [{"seed": 1}, {"seed": 0}], f"{folder}/seeds.csv", progress=False)
        >>> frame["seed"].tolist(), frame.attrs["failed"]
        ([1, 0], [])
    """
    filelock = require("filelock")
    require("pandas")
    log = None if log_to is None else Delivery(tracker_of(log_to))
    reference = _reference(function)
    path = Path(path).parent.resolve() / Path(path).name  # a link there is refused, not followed
    cells = _checked(cells)
    for name, number in (("jobs", jobs), ("threads", threads)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {number!r}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, or None for no limit, not {timeout!r}")
    check_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout as error:
        raise BlockingIOError(f"another run writes {path.name}: wait for it, end it, or write elsewhere") from error
    try:
        store = Store(path)
        store.sweep()
        failed = _run(reference, cells, store, jobs, threads, timeout, resume, progress, command, scheduler, files, log)
        return _frame(store, cells, failed)
    finally:
        lock.release()


def _run(
    reference: str,
    cells: list[dict[str, Any]],
    store: Store,
    jobs: int,
    threads: int,
    timeout: float | None,
    resume: bool,
    progress: bool,
    command: str | None,
    scheduler: Any,
    files: Sequence[Path | str],
    log: Delivery | None,
) -> list[CellOutcome]:
    from tqdm.auto import tqdm

    place = reference.rpartition(":")[0]
    file = Path(place if place.endswith(".py") else getattr(sys.modules[place], "__file__", None) or ".").resolve()
    here = environment.environment(file.parent)
    stamp = {"version": environment.version(file), "device": here["device"]}
    order = [key(cell) for cell in cells]
    if not resume:
        store.drop(order)
    done = store.keys() & set(order)
    _tell_versions(store, done, stamp["version"])
    todo = [cell for cell, known in zip(cells, order, strict=True) if known not in done]
    if not todo:
        return []
    failed: list[CellOutcome] = []
    bar = tqdm(total=len(cells), initial=len(done), unit="cell", disable=None if progress else True, leave=False)
    with contextlib.ExitStack() as stack:
        if log is not None:
            stack.callback(log.close)
        if scheduler is None:
            gpus = visible_gpus() if jobs > 1 else []
            ended = outcomes(reference, todo, jobs=jobs, threads=threads, timeout=timeout, gpus=gpus)
        else:
            cluster = stack.enter_context(Cluster(scheduler))
            jobs = cluster.check()
            ended = cluster.outcomes(reference, todo, threads=threads, timeout=timeout, files=files)
        run = store.made_by(command or reference, here, jobs, threads)
        store.write()  # a folder that can't be written to is found out before hours are spent
        stack.enter_context(bar)
        stack.enter_context(_terminated_like_interrupted())
        stack.enter_context(contextlib.closing(ended))
        try:
            for number, outcome in enumerate(ended, len(done) + 1):
                run["ended"] = time.strftime("%Y-%m-%dT%H:%M:%S")
                run["cells"] += outcome.status == "ok"
                run["seconds"] = round(run["seconds"] + outcome.seconds, 3)
                with _uninterrupted():
                    store.add(outcome, stamp, order)
                if outcome.status != "ok":
                    failed.append(outcome)
                if log is not None:
                    rows = [{**row, "seconds": outcome.seconds} for row in outcome.rows or [{}]]
                    status = "finished" if outcome.status == "ok" else outcome.status
                    log.run(_what(outcome), outcome.cell, rows, status, store.path.stem)
                if progress:
                    tqdm.write(_line(number, len(cells), outcome), file=sys.stdout)
                    sys.stdout.flush()
                bar.update()
        except KeyboardInterrupt:
            if progress:
                there = len(store.keys() & set(order))
                tqdm.write(f"{there} of {len(cells)} cells have results; run again to go on", file=sys.stdout)
            raise
    return failed


def _line(number: int, of: int, outcome: CellOutcome) -> str:
    reason = ""
    if outcome.error:
        lines = outcome.error.split("\nprinted:\n")[0].strip().splitlines()
        reason = f"  {_shown(lines[-1].strip(), 500)}"
    return f"[{number}/{of}] {outcome.status:<8} {outcome.seconds:7.1f} s  {_what(outcome)}{reason}"


def _what(outcome: CellOutcome) -> str:
    return " ".join(f"{name}={_shown(text(value), 100)}" for name, value in outcome.cell.items())


def _shown(value: str, width: int) -> str:
    """A text as any terminal takes it: what does not print, in its encoding too, as an escape."""
    value = value if len(value) <= width else f"{value[:width]}..."
    value = value if value.isprintable() else repr(value)[1:-1]
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return value.encode(encoding, "backslashreplace").decode(encoding)


def _frame(store: Store, cells: list[dict[str, Any]], failed: list[CellOutcome]) -> pd.DataFrame:
    import pandas as pd

    if store.cells:
        frame = store.frame()
        places = {key(cell): place for place, cell in enumerate(cells)}
        frame = frame[frame["cell"].isin(places)]
        frame = frame.sort_values("cell", key=lambda column: column.map(places), kind="stable", ignore_index=True)
    else:
        frame = pd.DataFrame(columns=[*RESERVED])
    frame.attrs["failed"] = [{"cell": o.cell, "status": o.status, "error": o.error} for o in failed]
    return frame


def _tell_versions(store: Store, done: set[str], version: str) -> None:
    others = {known: other for known, other in store.versions(done).items() if other != version}
    if others:
        versions = ", ".join(sorted(set(others.values())))
        warnings.warn(
            f"{len(others)} of the {len(done)} cells that {store.path.name} has already are of other versions of the code ({versions}; "
            f"now {version}): the column version tells which; resume=False (--fresh) runs them again",
            WorkbenchWarning,
            stacklevel=4,
        )


def _reference(function: str | Callable[..., Any]) -> str:
    """The function as a text by which a worker finds it."""
    if isinstance(function, str):
        if ":" not in function:
            raise ValueError(f'function must be "module:name" or "path/to/file.py:name", not {function!r}')
        load(function)
        return function
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if not name or "." in name or name == "<lambda>":
        raise TypeError(f"function must be one at the top of a module, which a worker can import, not {function!r}")
    if module == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise TypeError(
            f"{name} is defined in a notebook or at a prompt, where no worker process can import it: put it in a .py "
            f'file, and give "path/to/file.py:{name}"'
        )
    return f"{module}:{name}"


def _checked(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    checked: list[dict[str, Any]] = []
    for number, cell in enumerate(cells):
        if not isinstance(cell, dict):
            raise TypeError(f"cell {number} must be a dict of keyword arguments, not {cell!r:.200}")
        for name in cell:
            if not isinstance(name, str) or name in RESERVED:
                raise ValueError(
                    f"cell {number} has an argument {name!r}; {', '.join(RESERVED)} are columns of their own"
                )
        try:
            checked.append({name: plain(value) for name, value in cell.items()})
            json.dumps(checked[-1])
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"cell {number}: {error}") from error
    seen: dict[str, int] = {}
    for number, cell in enumerate(checked):
        if (first := seen.setdefault(key(cell), number)) != number:
            raise ValueError(f"cells {first} and {number} are the same: {json.dumps(cell)}")
    return checked


@contextlib.contextmanager
def _handled(handler: Callable[..., None], *numbers: signal.Signals) -> Iterator[None]:
    """Signals are given to this handler, where signals can be taken: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, known in before.items():
            signal.signal(number, signal.SIG_DFL if known is None else known)


def _terminated_like_interrupted() -> contextlib.AbstractContextManager[None]:
    """SIGTERM ends workers and lock in the same orderly way as Ctrl-C."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    return _handled(stop, signal.SIGTERM)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals wait until the files are written, all of them."""
    came: list[int] = []
    with _handled(lambda number, _: came.append(number), signal.SIGINT, signal.SIGTERM):
        yield
    for number in came[:1]:
        signal.raise_signal(number)
