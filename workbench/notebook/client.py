"""A papermill engine that runs kernels of this Python, limits run time and output, and records memory and data."""

from __future__ import annotations

import ast
import contextlib
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import atomic

if TYPE_CHECKING:
    from jupyter_client.manager import AsyncKernelManager

ATOMIC_SCHEME = "whole://"  # URL scheme of paths whose files papermill reads and writes by `_atomic_handler`
ENGINE = "workbench"
MAX_PRINTED = 1_000_000  # characters of printed output per cell; the rest is dropped
MAX_SHOWN = 50_000_000  # characters of pictures (as base64) and tables per cell; further ones are dropped
IOPUB_TIMEOUT = 60  # seconds to wait for the kernel's remaining messages after a cell has ended


@dataclass
class Watch:
    """Time limit of a running notebook, and observations of its kernel.

    Attributes:
        timeout: time limit in seconds for all cells together, None for no limit.
        exits: exit codes of the kernel, if it has died.
        peak_memory: peak memory of the kernel, MiB.
        peak_device_memory: peak of torch's GPU memory, MiB.
        device: name of the kernel's device; "" if the kernel could not be asked.
        data: name -> sha256 of the data sets that the notebook loaded.
        on_picture: called with each picture that a cell shows, a PNG file in base64.
    """

    timeout: float | None = None
    exits: list[int] = field(default_factory=list)
    peak_memory: float | None = None
    peak_device_memory: float | None = None
    device: str = ""
    data: dict[str, str] = field(default_factory=dict)
    on_picture: Callable[[str], object] | None = None

    def begin(self) -> None:
        """Start the time limit."""
        self.deadline = math.inf if self.timeout is None else time.monotonic() + self.timeout

    def left(self) -> float | None:
        """Return the seconds left until the limit, or None."""
        return None if self.timeout is None else max(1e-3, self.deadline - time.monotonic())

    def saw(self, peak_memory: float | None) -> None:
        """Update the peak memory."""
        if peak_memory is not None:
            self.peak_memory = max(self.peak_memory or 0.0, peak_memory)


def register() -> None:
    """Register `ENGINE` and `ATOMIC_SCHEME` with papermill."""
    from papermill.engines import papermill_engines
    from papermill.iorw import papermill_io

    if ENGINE not in papermill_engines._engines:
        papermill_engines.register(ENGINE, _engine())
    if not any(scheme == ATOMIC_SCHEME for scheme, _ in papermill_io._handlers):
        papermill_io.register(ATOMIC_SCHEME, _atomic_handler())


def _engine() -> Any:
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine
    from papermill.log import logger

    class Client(PapermillNotebookClient):
        watch: Watch
        # index of the cell, and characters that it has printed and shown so far
        output_sizes: tuple[int, int, int] = (-1, 0, 0)

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
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, *, watch: Watch, **options: Any) -> None:
            selected = {name: options[name] for name in ("resources", "kernel_manager_class")}
            client = Client(
                nb_man,
                kernel_name=kernel_name,
                log=logger,
                startup_timeout=120,
                iopub_timeout=IOPUB_TIMEOUT,
                timeout_func=lambda cell: watch.left(),
                **selected,
            )
            client.watch = watch
            client.execute()

    return Engine


def _atomic_handler() -> Any:
    """Return a papermill file handler that writes atomically. Papermill's own handler leaves an empty file if it is killed while writing."""
    from papermill.iorw import LocalHandler

    class AtomicHandler(LocalHandler):
        def read(self, path: str) -> Any:
            return super().read(path.removeprefix(ATOMIC_SCHEME))

        def write(self, buf: str, path: str) -> None:
            atomic.write(Path(path.removeprefix(ATOMIC_SCHEME)), buf)

        def pretty_path(self, path: str) -> str:
            return path.removeprefix(ATOMIC_SCHEME)

    return AtomicHandler()


def kernel_manager_class(watch: Watch) -> type[AsyncKernelManager]:
    """Return a kernel manager that starts kernels of the running Python, whatever kernels are installed."""
    from jupyter_client.manager import AsyncKernelManager

    class ThisPython(AsyncKernelManager):
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
                watch.saw(_peak_memory(getattr(self.provisioner, "pid", None)))
                if not alive and (code := await self.provisioner.poll()) is not None:
                    watch.exits.append(code)
            return alive

    return ThisPython


def _peak_memory(pid: int | None) -> float | None:
    """Return the peak memory of another process in MiB; None if the system does not report it (Linux does)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    line = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(line[1]) / 1024 if line else None
