"""The loop of a worker process: one cell after another, as they come through the connection."""

from __future__ import annotations

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
    _redirect(log)
    faulthandler.enable()
    if gpu is not None:  # before CUDA starts, which reads it once
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    SENT.update(sent or {})
    if threads is not None:
        os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads)))
        if (torch := sys.modules.get("torch")) is not None:  # a script of the user's has imported it already
            torch.set_num_threads(threads)
    tqdm.set_lock(threading.RLock())  # its own is shared between processes, and left behind by one that is killed
    while (cell := connection.recv()) is not None:
        os.ftruncate(1, 0)
        start = time.perf_counter()
        try:
            run = load(function)
            connection.send(BEGUN)
            start = time.perf_counter()
            rows = _checked(run(**cell), cell)
            seconds = time.perf_counter() - start
            connection.send(("ok", rows, seconds, "", device() if "torch" in sys.modules else ""))
        except BaseException:  # whatever ends a cell, SystemExit too, ends that cell alone
            connection.send(("failed", [], time.perf_counter() - start, traceback.format_exc(), ""))


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
    """
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
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


def _redirect(log: str) -> None:
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for standard, stream in ((1, sys.stdout), (2, sys.stderr)):
        os.dup2(descriptor, standard)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.close(descriptor)
