"""A papermill engine that runs kernels of this Python, limits run time and output, and records memory and data."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from jupyter_client.manager import AsyncKernelManager
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.iorw import LocalHandler, papermill_io
from papermill.log import logger
from traitlets import default

from .. import atomic
from .watch import Watch

ATOMIC_SCHEME = "whole://"  # URL scheme of paths whose files papermill reads and writes by `AtomicHandler`
ENGINE = "workbench"
MAX_PRINTED = 1_000_000  # characters of printed output per cell; the rest is dropped
MAX_SHOWN = 50_000_000  # characters of pictures (as base64) and tables per cell; further ones are dropped
IOPUB_TIMEOUT = 60  # seconds to wait for the kernel's remaining messages after a cell has ended


def register() -> None:
    """Register `ENGINE` and `ATOMIC_SCHEME` with papermill."""
    if ENGINE not in papermill_engines._engines:
        papermill_engines.register(ENGINE, Engine)
    if not any(scheme == ATOMIC_SCHEME for scheme, _ in papermill_io._handlers):
        papermill_io.register(ATOMIC_SCHEME, AtomicHandler())


class ThisPython(AsyncKernelManager):
    """A manager of kernels of the running Python, whatever kernels are installed."""

    watch: Watch

    def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
        # run by its path, since the notebook may set variables for torch before it imports the package
        launcher = [sys.executable, str(Path(__file__).with_name("kernel.py")), "-f", self.connection_file]
        return [*launcher, *(extra_arguments or [])]

    async def start_kernel(self, **kwargs: Any) -> None:  # type: ignore[override]
        if self.has_trait("transport_encryption"):  # without it, newer kernels print a warning into the first cell
            self.transport_encryption = "auto"
        # a backend chosen for this process (Agg in tests) would hide the notebook's plots
        env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
        env["WORKBENCH_HEADLESS"] = "1"  # notebooks can skip their widgets, since nobody can use them
        # waiting threads of torch spin 300,000 times by default: if other processes need the cores, small models take up to 20 times as long
        env.setdefault("GOMP_SPINCOUNT", "10000")
        # output of cells, even that of native code, comes as messages; this silences the kernel process itself
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        await super().start_kernel(**{"env": env, **quiet, **kwargs})

    async def is_alive(self) -> bool:  # type: ignore[override]
        alive: bool = await super().is_alive()
        if self.provisioner is not None:
            self.watch.saw(_peak_memory(getattr(self.provisioner, "pid", None)))
            if not alive and (code := await self.provisioner.poll()) is not None:
                self.watch.exits.append(code)
        return alive


class Client(PapermillNotebookClient):
    """A client that keeps to the limits of a `Watch` and of output, and fills in what it observes."""

    # index of the cell, and characters that it has printed and shown so far
    output_sizes: tuple[int, int, int] = (-1, 0, 0)

    def __init__(self, nb_man: Any, *, watch: Watch, **options: Any) -> None:
        self.watch = watch
        super().__init__(nb_man, timeout_func=lambda cell: watch.left(), **options)

    @default("kernel_manager_class")
    def _this_python(self) -> type[ThisPython]:
        return ThisPython

    def create_kernel_manager(self) -> Any:
        manager = super().create_kernel_manager()
        manager.watch = self.watch
        return manager

    def start_new_kernel(self, **options: Any) -> None:
        self._start_options = options
        super().start_new_kernel(**options)

    def start_new_kernel_client(self, **options: Any) -> Any:
        try:
            return super().start_new_kernel_client(**options)
        except RuntimeError as error:
            if "died" not in str(error):
                raise
        # the kernel died before it replied, perhaps since another process took one of its ports: try once more
        self.km = self.create_kernel_manager()
        self.start_new_kernel(**self._start_options)
        return super().start_new_kernel_client(**options)

    def papermill_execute_cells(self) -> None:
        self.watch.begin()  # the kernel runs; its start does not count towards the time limit
        super().papermill_execute_cells()  # if it raises, the kernel can't reply any more
        self._request_usage()

    def _request_usage(self) -> None:
        usage = "__import__('workbench.experiments.environment', fromlist=['usage']).usage()"
        # the notebook may have changed its kernel
        with contextlib.suppress(KeyError, ValueError, SyntaxError, TypeError):
            message = self.kc.execute("", silent=True, store_history=False, user_expressions={"usage": usage})
            reply = self.wait_for_reply(message)
            usage_reply = ast.literal_eval(reply["content"]["user_expressions"]["usage"]["data"]["text/plain"])
            self.watch.saw(usage_reply["peak_memory"])
            self.watch.peak_device_memory, self.watch.device = (
                usage_reply["peak_device_memory"],
                usage_reply["device"],
            )
            self.watch.data.update(usage_reply["data"])

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        kind, content = msg["msg_type"], msg["content"]
        last_index, printed, shown = self.output_sizes
        if last_index != cell_index or kind == "clear_output":
            printed = shown = 0
        if kind == "stream":
            text = content["text"]
            if printed > MAX_PRINTED:
                text = ""
            elif printed + len(text) > MAX_PRINTED:
                text = f"{text[: MAX_PRINTED - printed]}\n… the rest of what this cell printed is left out\n"
            # each message counts as at least 100 characters, since many short ones make a large file as well
            printed += max(len(text), 100) if text else 0
            msg = {**msg, "content": {**content, "text": text}}
        elif kind in ("display_data", "execute_result"):
            size = sum(len(str(value)) for value in content["data"].values())
            if shown + size > MAX_SHOWN:
                note = f"… left out: this cell showed more than {MAX_SHOWN // 1_000_000} MB"
                msg = {**msg, "content": {**content, "data": {"text/plain": note}, "metadata": {}}}
            else:
                shown += size
                if self.watch.on_picture is not None and "image/png" in content["data"]:
                    self.watch.on_picture(content["data"]["image/png"])
        self.output_sizes = (cell_index, printed, shown)
        return None if kind == "stream" and not text else super().process_message(msg, cell, cell_index)


class Engine(NBClientEngine):
    """The engine that runs a notebook by a `Client`."""

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: Any, kernel_name: str, *, watch: Watch, resources: dict[str, Any], **options: Any
    ) -> None:
        Client(
            nb_man,
            watch=watch,
            kernel_name=kernel_name,
            log=logger,
            startup_timeout=120,
            iopub_timeout=IOPUB_TIMEOUT,
            resources=resources,
        ).execute()


class AtomicHandler(LocalHandler):
    """A file handler that writes atomically. Papermill's own leaves an empty file if it is killed while writing."""

    def read(self, path: str) -> Any:
        return super().read(path.removeprefix(ATOMIC_SCHEME))

    def write(self, buf: str, path: str) -> None:
        atomic.write(Path(path.removeprefix(ATOMIC_SCHEME)), buf)

    def pretty_path(self, path: str) -> str:
        return path.removeprefix(ATOMIC_SCHEME)


def _peak_memory(pid: int | None) -> float | None:
    """Return the peak memory of another process in MiB; None if the system does not report it (Linux does)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    line = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(line[1]) / 1024 if line else None
