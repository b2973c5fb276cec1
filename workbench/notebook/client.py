"""A papermill engine of our own: kernels of this Python, limits on time and output, a record of memory and data."""

from __future__ import annotations

import ast
import contextlib
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import atomic

if TYPE_CHECKING:
    from jupyter_client.manager import AsyncKernelManager

WHOLE = "whole://"  # what papermill is given before a path, so that saves are ours
ENGINE = "workbench"
PRINTED = 1_000_000  # characters that a cell may print, and
SHOWN = 50_000_000  # characters of pictures and tables (pictures count as base64); what is more is left out
QUIET = 60  # seconds in which a kernel must say something after a cell's end


@dataclass
class Watch:
    """What is to be kept an eye on while a notebook runs, and what was seen.

    Attributes:
        timeout: seconds for all cells together, None for no limit.
        exits: exit codes of the kernel, if it has died.
        peak_memory: MiB that the kernel held at most.
        peak_device_memory: MiB of the GPU that torch held at most.
        device: name of what the kernel computes with; "" if it could not be asked.
        data: name -> sha256 of the data sets that the notebook loaded.
    """

    timeout: float | None = None
    exits: list[int] = field(default_factory=list)
    peak_memory: float | None = None
    peak_device_memory: float | None = None
    device: str = ""
    data: dict[str, str] = field(default_factory=dict)

    def begin(self) -> None:
        self.deadline = math.inf if self.timeout is None else time.monotonic() + self.timeout

    def left(self) -> float | None:
        """Seconds until the limit."""
        return None if self.timeout is None else max(1e-3, self.deadline - time.monotonic())

    def saw(self, peak_memory: float | None) -> None:
        if peak_memory is not None:
            self.peak_memory = max(self.peak_memory or 0.0, peak_memory)


def register() -> None:
    """Make `ENGINE` and `WHOLE` known to papermill."""
    from papermill.engines import papermill_engines
    from papermill.iorw import papermill_io

    if ENGINE not in papermill_engines._engines:
        papermill_engines.register(ENGINE, _engine())
    if not any(scheme == WHOLE for scheme, _ in papermill_io._handlers):
        papermill_io.register(WHOLE, _whole_files())


def _engine() -> Any:
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine
    from papermill.log import logger

    class Client(PapermillNotebookClient):
        watch: Watch
        output_of: tuple[int, int, int] = (-1, 0, 0)  # the cell, and what it has printed and shown so far

        def start_new_kernel(self, **options: Any) -> None:
            self._start_options = options
            super().start_new_kernel(**options)

        def start_new_kernel_client(self, **options: Any) -> Any:
            try:
                return super().start_new_kernel_client(**options)
            except RuntimeError as error:
                if "died" not in str(error):
                    raise
            # before it had answered: ports are chosen before a kernel takes them, and another one may be faster
            self.km = self.create_kernel_manager()
            self.start_new_kernel(**self._start_options)
            return super().start_new_kernel_client(**options)

        def papermill_execute_cells(self) -> None:
            self.watch.begin()  # the kernel is there: what its start takes does not count
            try:
                super().papermill_execute_cells()
            except (CellTimeoutError, DeadKernelError):  # nobody there to ask
                raise
            self._ask()

        def _ask(self) -> None:
            usage = "__import__('workbench.experiments.environment', fromlist=['usage']).usage()"
            with contextlib.suppress(KeyError, ValueError, SyntaxError, TypeError):  # a kernel that was tampered with
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
            at, printed, shown = self.output_of
            if at != cell_index or kind == "clear_output":
                printed = shown = 0
            if kind == "stream":
                text = content["text"]
                if printed > PRINTED:
                    text = ""
                elif printed + len(text) > PRINTED:
                    text = f"{text[: PRINTED - printed]}\n… the rest of what this cell printed is left out\n"
                # a million lines of one character are as large a file as one of a million lines
                printed += max(len(text), 100) if text else 0
                msg = {**msg, "content": {**content, "text": text}}
            elif kind in ("display_data", "execute_result"):
                size = sum(len(str(value)) for value in content["data"].values())
                if shown + size > SHOWN:
                    note = f"… left out: this cell showed more than {SHOWN // 1_000_000} MB"
                    msg = {**msg, "content": {**content, "data": {"text/plain": note}, "metadata": {}}}
                else:
                    shown += size
            self.output_of = (cell_index, printed, shown)
            return None if kind == "stream" and not text else super().process_message(msg, cell, cell_index)

    class Engine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, *, watch: Watch, **options: Any) -> None:
            chosen = {name: options[name] for name in ("resources", "kernel_manager_class")}
            client = Client(
                nb_man,
                kernel_name=kernel_name,
                log=logger,
                startup_timeout=120,
                iopub_timeout=QUIET,
                timeout_func=lambda cell: watch.left(),
                **chosen,
            )
            client.watch = watch
            client.execute()

    return Engine


def _whole_files() -> Any:
    """Reads and writes of papermill, each save whole or not at all: its own would leave an empty file where it is killed in the middle."""
    from papermill.iorw import LocalHandler

    class Whole(LocalHandler):
        def read(self, path: str) -> Any:
            return super().read(path.removeprefix(WHOLE))

        def write(self, buf: str, path: str) -> None:
            atomic.write(Path(path.removeprefix(WHOLE)), buf)

        def pretty_path(self, path: str) -> str:
            return path.removeprefix(WHOLE)

    return Whole()


def kernel_manager_class(watch: Watch) -> type[AsyncKernelManager]:
    """A kernel manager for the Python that runs this, whatever kernels are installed."""
    from jupyter_client.manager import AsyncKernelManager

    class ThisPython(AsyncKernelManager):
        def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
            launcher = [sys.executable, "-m", "ipykernel_launcher", "-f", self.connection_file]
            return [*launcher, *(extra_arguments or [])]

        async def start_kernel(self, **kwargs: Any) -> None:  # type: ignore[override]
            if self.has_trait("transport_encryption"):  # or newer kernels print a warning into the first cell
                self.transport_encryption = "auto"
            # a backend chosen for this process (Agg, in tests) would make the notebook's plots vanish without a word
            env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
            env["WORKBENCH_HEADLESS"] = "1"  # notebooks with widgets do then without, since nobody is there to click
            # what cells print, native code included, comes as output; this is the kernel's own noise when it is ended
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
    """MiB that another process held at most, where the system tells (Linux)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    line = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(line[1]) / 1024 if line else None
