"""Resumable runs of a function over many cells (sets of keyword arguments), in worker processes."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import atomic
from ..console import progress_bar
from ..errors import WorkbenchWarning, as_count, check_timeout, require
from ..trackers.base import Tracker
from ..trackers.delivery import Delivery, tracker_of
from . import environment
from .pool import CellOutcome, outcomes, refuse_in_worker, visible_gpus
from .scheduler import Cluster
from .signals import sigterm_as_interrupt, uninterrupted
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
    """Call a function once per cell, in worker processes, and save what it returns.

    ``name.jsonl`` stores all results with their types, one line per cell. Three files are generated from it: ``name.csv`` or ``name.parquet``, a
    table for other programs; ``name.json``, a record of the runs that made the results; and, while some cells have no results,
    ``name.failed.txt`` with the traceback and the output of each. Files are replaced atomically after each cell, so that a run that is ended in
    any way (Ctrl-C, SIGTERM, even SIGKILL) loses at most the cells in flight. Where writing the table takes more than 0.1 s, only the first file
    is, and the others now and then and at the end. An existing file that is not of this experiment, or was changed by
    hand, is never overwritten: an error names it.

    On a machine with several GPUs each process sees one of them. With a scheduler, the processes run on the workers of a
    dask.distributed cluster instead, as many at a time on each worker as it has threads; a cell whose worker is lost is run
    again on another one. The function's file is sent to the workers, with the modules beside it that it imports.

    Args:
        function: module-level function, or "module:name" or "path/to/file.py:name"; returns one row (a dict of JSON types) or a list of rows.
            For results that do not depend on where and in which order cells run, it must seed all random numbers from its arguments.
        cells: keyword arguments of each call, dicts of JSON types. They become columns of the table, with four more: "cell" (the key of the
            arguments), "seconds", "version" (of the code) and "device".
        path: .csv or .parquet file (Parquet needs pyarrow); its folder is created. A table of an earlier version, without ``name.jsonl``, is
            continued.
        jobs: number of cells run in parallel, each in a spawned worker process that runs many cells one after another.
        threads: torch threads per worker.
        timeout: time limit per cell in seconds; None: no limit.
        resume: whether to skip cells whose results are in the file; False runs all of these cells again.
        progress: whether to print a line per cell and show a progress bar.
        command: command to record as the origin of the file; None: the function's name.
        scheduler: address of a dask.distributed scheduler ("tcp://host:8786", or the path of its .json file), or a Client or
            Cluster; jobs is then ignored.
        files: further .py files that the function loads by `worker.load_file` under these paths, to be sent to the workers of a cluster.
        log_to: "tensorboard", "mlflow", "wandb" or a `workbench.trackers.Tracker`. Each cell that ends is logged from this process as a
            separate run: its arguments, the numbers of its row (several rows as steps) and its status. Earlier results are not logged.

    Returns:
        The rows of these cells, in the order of the cells, each value with its type; a value that a row lacks is NaN.
        ``frame.attrs["failed"]`` lists the cells without results, each a dict with "cell", "status" (failed, timeout or died) and "error".

    Raises:
        TypeError: function or a cell is of the wrong type.
        ValueError: two cells are equal, a number is out of range, one of the files holds something else or was changed by hand, or workers of
            the scheduler have other versions of Python, torch, numpy or workbench.
        BlockingIOError: another run is writing this file.
        ModuleNotFoundError: pyarrow, dask.distributed or the package of log_to is needed and not installed.
        ConnectionError: no scheduler answers at the address.
        ConnectionAbortedError: the connection to the scheduler was lost while cells ran; results so far are kept, run again to resume.

    Warns:
        WorkbenchWarning: some results in the file are of another version of the code, or a file was truncated and the missing cells run again.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     frame = run_cells("builtins:dict", [{"seed": 1}, {"seed": 0}], f"{folder}/seeds.csv", progress=False)
        >>> frame["seed"].tolist(), frame.attrs["failed"]
        ([1, 0], [])
    """
    refuse_in_worker("cells")
    require("filelock")
    require("pandas")
    log = None if log_to is None else Delivery(tracker_of(log_to))
    reference = _reference(function)
    path = Path(path).parent.resolve() / Path(path).name  # the file itself is not resolved: `Store` refuses a link
    cells = _checked(cells)
    jobs, threads = as_count("jobs", jobs), as_count("threads", threads)
    check_timeout(timeout)
    check_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    busy = f"another run is writing {path.name}: wait for it, stop it, or choose another file"
    with atomic.locked(path.with_name(f".{path.name}.lock"), busy):
        store = Store(path)
        store.sweep()
        failed = _run(reference, cells, store, jobs, threads, timeout, resume, progress, command, scheduler, files, log)
        return _frame(store, cells, failed)


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
    progress = progress and sys.stdout is not None
    module = reference.rpartition(":")[0]
    file = Path(module if module.endswith(".py") else getattr(sys.modules[module], "__file__", None) or ".").resolve()
    machine = environment.environment(file.parent)
    stamp = {"version": environment.version(file), "device": machine["device"]}
    keys = [key(cell) for cell in cells]
    if not resume:
        store.drop(keys)
    done = store.keys() & set(keys)
    # without folders, which differ between machines, and of a script that is run as when it is imported
    name = f"{file.stem if file.is_file() else module}:{reference.rpartition(':')[2]}"
    if done and (others := store.other_functions(name)):
        warnings.warn(
            f"the {len(done)} cells that {store.path.name} already has are results of {', '.join(sorted(others))}, not of {name}; choose "
            "another file, or give resume=False (--fresh), which runs them again",
            WorkbenchWarning,
            stacklevel=3,
        )
    _warn_of_versions(store, done, stamp["version"])
    todo = [cell for cell, cell_key in zip(cells, keys, strict=True) if cell_key not in done]
    if not todo:
        store.finish()
        return []
    failed: list[CellOutcome] = []
    bar = progress_bar(
        total=len(cells), initial=len(done), unit="cell", disable=None if progress else True, leave=False
    )
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
        run = store.made_by(command or reference, name, machine, jobs, threads)
        store.write()  # so that a folder without write permission fails now, not after hours of work
        stack.callback(store.finish)
        stack.enter_context(bar)
        stack.enter_context(sigterm_as_interrupt())
        stack.enter_context(contextlib.closing(ended))
        order = {cell_key: position for position, cell_key in enumerate(keys)}
        try:
            for number, outcome in enumerate(ended, len(done) + 1):
                run["ended"] = time.strftime("%Y-%m-%dT%H:%M:%S")
                run["cells"] += outcome.status == "ok"
                run["seconds"] = round(run["seconds"] + outcome.seconds, 3)
                with uninterrupted():
                    store.add(outcome, stamp, order)
                if outcome.status != "ok":
                    failed.append(outcome)
                if log is not None:
                    rows = [{**row, "seconds": outcome.seconds} for row in outcome.rows or [{}]]
                    status = "finished" if outcome.status == "ok" else outcome.status
                    log.run(_arguments(outcome), outcome.cell, rows, status, store.path.stem)
                if progress:
                    bar.write(_line(number, len(cells), outcome), file=sys.stdout)
                    sys.stdout.flush()
                bar.update()
        except KeyboardInterrupt:
            if progress:
                n_done = len(store.keys() & set(keys))
                bar.write(f"{n_done} of {len(cells)} cells have results; run again to resume", file=sys.stdout)
            raise
    return failed


def _line(number: int, total: int, outcome: CellOutcome) -> str:
    reason = f"  {_printable(outcome.reason, 500)}" if outcome.error else ""
    return f"[{number}/{total}] {outcome.status:<8} {outcome.seconds:7.1f} s  {_arguments(outcome)}{reason}"


def _arguments(outcome: CellOutcome) -> str:
    return " ".join(f"{name}={_printable(text(value), 100)}" for name, value in outcome.cell.items())


def _printable(value: str, width: int) -> str:
    """Return a text that any terminal can print: shortened, with unprintable and unencodable characters escaped."""
    value = value if len(value) <= width else f"{value[:width]}..."
    value = value if value.isprintable() else repr(value)[1:-1]
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return value.encode(encoding, "backslashreplace").decode(encoding)


def _frame(store: Store, cells: list[dict[str, Any]], failed: list[CellOutcome]) -> pd.DataFrame:
    import pandas as pd

    if store.cells:
        frame = store.frame()
        positions = {key(cell): position for position, cell in enumerate(cells)}
        frame = frame[frame["cell"].isin(positions)]
        frame = frame.sort_values("cell", key=lambda column: column.map(positions), kind="stable", ignore_index=True)
    else:
        frame = pd.DataFrame(columns=[*RESERVED])
    frame.attrs["failed"] = [{"cell": o.cell, "status": o.status, "error": o.error} for o in failed]
    return frame


def _warn_of_versions(store: Store, done: set[str], version: str) -> None:
    other_versions = {cell_key: other for cell_key, other in store.versions(done).items() if other != version}
    if other_versions:
        versions = ", ".join(sorted(set(other_versions.values())))
        warnings.warn(
            f"{len(other_versions)} of the {len(done)} cells that {store.path.name} already has were computed by other versions of the code "
            f"({versions}; now {version}), see its column version; resume=False (--fresh) runs them again",
            WorkbenchWarning,
            stacklevel=4,
        )


def _reference(function: str | Callable[..., Any]) -> str:
    """Return the text by which a worker process finds the function."""
    if isinstance(function, str):
        if ":" not in function:
            raise ValueError(f'function must be "module:name" or "path/to/file.py:name", not {function!r}')
        load(function)
        return function
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if not name or "." in name or name == "<lambda>":
        raise TypeError(
            f"function must be defined at the top level of a module, so that workers can import it, not {function!r}"
        )
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
                    f"cell {number} has an argument {name!r}; names must be strings other than the reserved columns {', '.join(RESERVED)}"
                )
        try:
            checked.append({name: plain(value) for name, value in cell.items()})
            json.dumps(checked[-1])
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"cell {number}: {error}") from error
    seen: dict[str, int] = {}
    for number, cell in enumerate(checked):
        if (first := seen.setdefault(key(cell), number)) != number:
            raise ValueError(f"cells {first} and {number} are equal: {json.dumps(cell)}")
    return checked
