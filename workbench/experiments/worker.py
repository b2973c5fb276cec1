"""Main loop of a worker process, which receives cells through a connection and runs one after another."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from ..core.settings import hint
from .environment import device

BEGUN = "begun"  # sent before a cell's own work, so that imports do not count towards its time limit
TRACEBACK_LENGTH = 10_000  # characters at either end of a traceback that are kept
RESERVED = ("cell", "seconds", "version", "device")  # columns that are added to every row


SENT: dict[str, str] = {}  # path of a file on the submitting machine -> path of its copy here


def work(
    connection: Connection,
    function: str,
    threads: int | None,
    log: str,
    gpu: str | None = None,
    sent: Mapping[str, str] | None = None,
) -> None:
    """Run cells until there are no more, or the parent process is gone.

    Args:
        connection: connection to the parent. Receives cells (dicts of keyword arguments) and None at the end; sends, for each cell, BEGUN and
            then (status, rows, seconds, error, device).
        function: "module:name" or "path/to/file.py:name".
        threads: torch threads; None: torch's default.
        log: path of the file that receives all output, that of native code included; emptied before each cell.
        gpu: the only GPU that the process may see, as in CUDA_VISIBLE_DEVICES; None: all.
        sent: local paths of files that came from another machine, by their paths there.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all its processes; the parent handles it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    _redirect(descriptor)
    faulthandler.enable(descriptor)
    folder = os.getcwd()
    if gpu is not None:  # CUDA reads the variable once, when it starts
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    SENT.update(sent or {})
    if threads is not None:
        os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads)))
        if (torch := sys.modules.get("torch")) is not None:  # imported already by the user's script
            torch.set_num_threads(threads)
    # tqdm's default lock is shared between processes, and stays locked when one is killed
    tqdm.set_lock(threading.RLock())
    while (cell := connection.recv()) is not None:
        # the cell before may have closed the streams or changed the working directory
        _redirect(descriptor)
        os.chdir(folder)
        os.ftruncate(descriptor, 0)
        start = time.perf_counter()
        try:
            run = load(function)
            connection.send(BEGUN)
            start = time.perf_counter()
            rows = _checked(run(**cell), cell)
            seconds = time.perf_counter() - start
            connection.send(("ok", rows, seconds, "", device() if "torch" in sys.modules else ""))
        except BaseException:  # even SystemExit ends only its cell
            connection.send(("failed", [], time.perf_counter() - start, _shortened(traceback.format_exc()), ""))


def load(function: str) -> Any:
    """Return the function named by "module:name" or "path/to/file.py:name".

    Raises:
        ValueError: the module or file has no such function.
    """
    location, _, name = function.rpartition(":")
    module = load_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    if not hasattr(module, name):
        functions = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        raise ValueError(f"{location} has no {name!r}: {hint(name, functions)}")
    return getattr(module, name)


def load_file(path: Path) -> ModuleType:
    """Return the module of a Python file, importing it on the first call. It can import the modules beside it."""
    path = Path(SENT.get(str(path), path)).resolve()
    name = f"workbench_bench_{path.stem}"  # a prefix, so that a benchmark does not hide a module of the same name
    if (loaded := sys.modules.get(name)) is not None and loaded.__file__ == str(path):
        return loaded
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def plain(value: Any) -> Any:
    """Return a value as JSON types; numpy and torch numbers become Python numbers.

    Raises:
        TypeError: the value has no JSON type.
        ValueError: two keys of a dict become equal as strings.
    """
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return value if type(value) is kind else getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        items = {str(name): plain(item) for name, item in value.items()}
        if len(items) < len(value):
            raise ValueError(f"two keys of {list(value)!r:.100} are equal as strings")
        return items
    raise TypeError(f"found {type(value).__name__}; use numbers, strings, None, or lists and dicts of these")


def _checked(returned: Any, cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = [returned] if isinstance(returned, Mapping) else returned
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise TypeError(f"a cell must return one dict or a list of them, its rows of results; found {returned!r:.200}")
    checked = []
    for row in rows:
        for name in row:
            if not isinstance(name, str) or name in RESERVED or (name in cell and row[name] != cell[name]):
                raise ValueError(
                    f"a row has the name {name!r}; names must be strings, and the columns {', '.join(RESERVED)} and those of the arguments "
                    f"({', '.join(cell)}) exist already"
                )
        try:
            checked.append({name: plain(value) for name, value in row.items()})
            json.dumps(checked[-1])
        except (TypeError, ValueError) as error:
            raise TypeError(f"a row of results can't be saved: {error}; the row is {row!r:.200}") from error
    return checked


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # the parent was killed, so nobody waits for the result


def _redirect(descriptor: int) -> None:
    """Redirect stdout and stderr to the log, both the Python streams and the file descriptors that native code uses."""
    for standard, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, f"__{name}__")
        # the stream may be closed; its buffer belongs to the cell before
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
        os.dup2(descriptor, standard)
        if stream is None or stream.closed:
            stream = open(standard, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _shortened(report: str) -> str:
    """Return a traceback without its middle if it is very long, since all tracebacks are written again after each cell."""
    n_omitted = len(report) - 2 * TRACEBACK_LENGTH
    if n_omitted <= 0:
        return report
    return f"{report[:TRACEBACK_LENGTH]}\n... {n_omitted:,} characters are left out ...\n{report[-TRACEBACK_LENGTH:]}"
