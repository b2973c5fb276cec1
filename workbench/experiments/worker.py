"""The loop of a worker process: one cell after another, as they come through the connection."""

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

from .environment import device

BEGUN = "begun"  # sent before a cell's own work, so that no time limit counts what the worker imports
REPORT = 10_000  # characters at either end of a traceback that are kept
RESERVED = ("cell", "seconds", "version", "device")  # columns that are added to every row


SENT: dict[str, str] = {}  # paths of files as they are called elsewhere -> where they lie here


def work(
    connection: Connection,
    function: str,
    threads: int | None,
    log: str,
    gpu: str | None = None,
    sent: Mapping[str, str] | None = None,
) -> None:
    """Run cells until there are no more, or the process that started this one is gone.

    Args:
        connection: gives cells, dicts of keyword arguments, and None at the end; takes BEGUN and then
            (status, rows, seconds, error, device) for each.
        function: "module:name" or "path/to/file.py:name".
        threads: torch threads; None: as many as torch takes by itself.
        log: file that takes what is printed, native code included; emptied before each cell.
        gpu: the one GPU that the process may see, as CUDA_VISIBLE_DEVICES calls it; None: all.
        sent: where the files lie that came from another machine, by their paths there.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process of a terminal; the first one decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    _redirect(descriptor)
    faulthandler.enable(descriptor)
    folder = os.getcwd()
    if gpu is not None:  # before CUDA starts, which reads it once
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    SENT.update(sent or {})
    if threads is not None:
        os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads)))
        if (torch := sys.modules.get("torch")) is not None:  # a script of the user's has imported it already
            torch.set_num_threads(threads)
    tqdm.set_lock(threading.RLock())  # its own is shared between processes, and left behind by one that is killed
    while (cell := connection.recv()) is not None:
        # whatever the cell before has done to them, by closing them or going elsewhere
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
        except BaseException:  # whatever ends a cell, SystemExit too, ends that cell alone
            connection.send(("failed", [], time.perf_counter() - start, _shortened(traceback.format_exc()), ""))


def load(function: str) -> Any:
    """The function that is named by "module:name" or "path/to/file.py:name"."""
    place, _, name = function.rpartition(":")
    module = load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    return getattr(module, name)


def load_file(path: Path) -> ModuleType:
    """Import a file, once; modules beside it can be imported by it.

    Args:
        path: a Python file.

    Returns:
        The module.
    """
    path = Path(SENT.get(str(path), path)).resolve()
    name = f"workbench_bench_{path.stem}"  # no other module is hidden by a benchmark's name
    if (known := sys.modules.get(name)) is not None and known.__file__ == str(path):
        return known
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
    """The value as one of JSON's: numpy's and torch's numbers as Python's.

    Raises:
        TypeError: if it is none.
        ValueError: two keys of a dict are the same as texts.
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
            raise ValueError(f"two keys of {list(value)!r:.100} are the same as texts")
        return items
    raise TypeError(f"found {type(value).__name__}; give numbers, strings, None, or lists and dicts of these")


def _checked(returned: Any, cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = [returned] if isinstance(returned, Mapping) else returned
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise TypeError(f"a cell must return one dict or a list of them, its rows of results; found {returned!r:.200}")
    checked = []
    for row in rows:
        for name in row:
            if not isinstance(name, str) or name in RESERVED or (name in cell and row[name] != cell[name]):
                raise ValueError(
                    f"a row has {name!r}, but names must be strings other than {', '.join(RESERVED)} and the arguments "
                    f"{', '.join(cell)}, which are columns already"
                )
        try:
            checked.append({name: plain(value) for name, value in row.items()})
            json.dumps(checked[-1])
        except (TypeError, ValueError) as error:
            raise TypeError(f"a row of results can't be kept: {error}; the row is {row!r:.200}") from error
    return checked


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # killed: there is no one to give the result to


def _redirect(descriptor: int) -> None:
    """Let both standard streams write to the log, on all levels."""
    for standard, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, f"__{name}__")
        with contextlib.suppress(OSError, ValueError):  # closed; what is left in its buffer belongs to the cell before
            stream.flush()
        os.dup2(descriptor, standard)
        if stream is None or stream.closed:
            stream = open(standard, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _shortened(report: str) -> str:
    """A traceback without the middle of what is too long to be read, and would be written again after each cell."""
    left_out = len(report) - 2 * REPORT
    if left_out <= 0:
        return report
    return f"{report[:REPORT]}\n... {left_out:,} characters are left out ...\n{report[-REPORT:]}"
