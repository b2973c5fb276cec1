"""Run a notebook with papermill, and say honestly how it ended."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..experiments.environment import cause, environment, versions
from ..experiments.environment import source_digest as _source_digest
from .parameters import COMPUTED, check_parameters, declared_parameters, load_notebook
from .record import Records, read_records

if TYPE_CHECKING:
    from jupyter_client.manager import AsyncKernelManager
    from nbformat import NotebookNode


WHOLE = "whole://"  # what papermill is given before a path, so that saves are ours


@dataclass
class Run:
    """One run of a notebook, as it is also stamped into the executed notebook's metadata (key ``workbench``).

    Attributes:
        name: the output's name without its ending.
        notebook: path of the notebook that was run.
        output: path of the executed notebook.
        status: ``ok``, ``failed`` (a cell raised), ``timeout``, ``died`` (the kernel did) or ``interrupted``.
        seconds: wall time.
        parameters: name -> value, the notebook's defaults included.
        error: what went wrong, None if nothing did.
        key: hash of all that decides the result: see `run_key`.
        environment: versions, machine and git state: see `environment`.
        started: local time at which the run began, ISO 8601.
        cached: whether an earlier run was found and taken as it is.
    """

    name: str
    notebook: str
    output: str
    status: str
    seconds: float
    parameters: dict[str, Any]
    error: str | None = None
    key: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    started: str = ""
    cached: bool = False

    @property
    def records(self) -> Records:
        """What the notebook has recorded: see `workbench.notebook.read_records`."""
        return read_records(self.output)


def run_key(notebook: Path | str, parameters: Mapping[str, Any] | None = None) -> str:
    """Hash of what decides a run's result, so that a run is repeated only when that changed.

    Hashed are the notebook's cells, the parameters (defaults included, so that spelling one out changes nothing), the
    source of this package, the versions of the packages under it and WORKBENCH_DATA. Other files that the notebook
    reads are not: where those change, ask for a fresh run.

    Args:
        notebook: path of the notebook.
        parameters: name -> value.

    Returns:
        16 hexadecimal digits.
    """
    nb = load_notebook(notebook)
    return _key(nb, {**declared_parameters(nb), **(parameters or {})})


def run_notebook(
    notebook: Path | str,
    output: Path | str,
    parameters: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = 3600,
    resume: bool = False,
    progress: bool = False,
) -> Run:
    """Run a notebook from top to bottom in a kernel of its own, and keep what it showed.

    The kernel is this Python, its folder the notebook's, as in JupyterLab. `output` is written as cells finish and says
    ``interrupted`` until the run has ended, so that it never claims more than happened. It is signed: JupyterLab trusts
    it and shows its widgets and tables.

    Args:
        notebook: path of the .ipynb file.
        output: path to write the executed notebook to.
        parameters: name -> value for the notebook's ``parameters`` cell; checked before anything runs.
        timeout: whole seconds that one cell may take (fractions are rounded up); None: no limit.
        resume: take an earlier `output` as it is if it ended well with the same `run_key`.
        progress: show a progress bar.

    Returns:
        How it went. A notebook that fails is a result, not an exception: look at `Run.status`.

    Raises:
        FileNotFoundError, ValueError, TypeError: for a notebook or parameters that can't be run; nothing is written.
        KeyboardInterrupt: on Ctrl-C, after what there is has been saved as ``interrupted``.

    Example:
        >>> import nbformat, tempfile
        >>> cell = nbformat.v4.new_code_cell("from workbench.notebook import record; record(rmse=0.5)")
        >>> folder = Path(tempfile.mkdtemp())
        >>> nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / "small.ipynb")
        >>> run = run_notebook(folder / "small.ipynb", folder / "executed.ipynb")
        >>> run.status, run.records["rmse"]
        ('ok', 0.5)
    """
    notebook, output = Path(notebook).resolve(), Path(output).resolve()
    nb = load_notebook(notebook)
    declared = declared_parameters(nb)
    given = check_parameters(declared, parameters or {}, notebook.name)
    if output == notebook:
        raise ValueError(f"the output would overwrite the notebook itself: {notebook}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, or None for no limit, not {timeout!r}")
    values = {**declared, **given}
    key = _key(nb, values)
    if resume and (earlier := _stamp_of(output)) is not None and (earlier.key, earlier.status) == (key, "ok"):
        return replace(earlier, output=str(output), cached=True)

    run = Run(
        name=output.stem,
        notebook=str(notebook),
        output=str(output),
        status="interrupted",
        seconds=0.0,
        parameters={name: value for name, value in values.items() if value is not COMPUTED},
        error="the run was ended from outside before the notebook was through",
        key=key,
        environment=environment(notebook.parent),
        started=time.strftime("%Y-%m-%dT%H:%M:%S"),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    _write(nb, run)
    start = time.perf_counter()
    try:
        run.status, run.error = _execute(output, given, notebook.parent, timeout, progress)
    finally:  # also on Ctrl-C, which is then on its way to the caller
        run.seconds = round(time.perf_counter() - start, 3)
        _write(_read(output), run)
    return run


def read_run(executed: Path | str) -> Run:
    """The outcome that is stamped into an executed notebook.

    Args:
        executed: path of a notebook that `run_notebook` wrote.

    Returns:
        The run, as `run_notebook` returned it.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if `run_notebook` did not write it.
    """
    load_notebook(executed)
    run = _stamp_of(Path(executed))
    if run is None:
        raise ValueError(f"{executed} holds no outcome of a run: run it with workbench.notebook.run_notebook first")
    return run


def _execute(
    output: Path, parameters: dict[str, Any], folder: Path, timeout: float | None, progress: bool
) -> tuple[str, str | None]:
    """Run the notebook in place; papermill's own outcome calls timeouts and dead kernels "completed"."""
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.iorw import papermill_io

    if not (logger := logging.getLogger("papermill")).handlers:
        logger.addHandler(
            logging.NullHandler()
        )  # the outcome says it all; who configures logging still gets the messages
    if not any(scheme == WHOLE for scheme, _ in papermill_io._handlers):
        papermill_io.register(WHOLE, _whole_files())
    # papermill takes paths for templates
    path = WHOLE + str(output.resolve()).replace("{", "{{").replace("}", "}}")
    exits: list[int] = []
    try:
        papermill.execute_notebook(
            path,
            path,
            parameters,
            kernel_name="python3",
            language="python",
            execution_timeout=None if timeout is None else math.ceil(timeout),  # nbclient takes whole seconds
            progress_bar=progress,
            resources={"metadata": {"path": str(folder)}},
            kernel_manager_class=_kernel_manager_class(exits),
        )
    except papermill.PapermillExecutionError as error:
        return "failed", f"{error.ename}: {error.evalue}"
    except CellTimeoutError:
        return "timeout", f"cell {_last_cell(output)} ran longer than {timeout:g} s"
    except DeadKernelError:
        return "died", f"the kernel died in cell {_last_cell(output)}, {cause(exits[-1] if exits else 0)}"
    except RuntimeError as error:
        return "died", f"the kernel did not start: {error}"
    return "ok", None


def _whole_files() -> Any:
    """Reads and writes of papermill, each save whole or not at all: its own would leave an empty file where it is killed in the middle."""
    from papermill.iorw import LocalHandler

    class Whole(LocalHandler):
        def read(self, path: str) -> Any:
            return super().read(path.removeprefix(WHOLE))

        def write(self, buf: str, path: str) -> None:
            target = Path(path.removeprefix(WHOLE))
            part = target.with_name(f".{target.name}.part")
            super().write(buf, str(part))
            os.replace(part, target)

        def pretty_path(self, path: str) -> str:
            return path.removeprefix(WHOLE)

    return Whole()


def _kernel_manager_class(exits: list[int]) -> type[AsyncKernelManager]:
    from jupyter_client.manager import AsyncKernelManager

    class ThisPython(AsyncKernelManager):
        """The kernel that runs is the Python that is described in `environment`, whatever kernels are installed."""

        def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
            launcher = [sys.executable, "-m", "ipykernel_launcher", "-f", self.connection_file]
            return [*launcher, *(extra_arguments or [])]

        async def start_kernel(self, **kwargs: Any) -> None:  # type: ignore[override]
            if self.has_trait("transport_encryption"):  # or newer kernels print a warning into the first cell
                self.transport_encryption = "auto"
            # a backend chosen for this process (Agg, in tests) would make the notebook's plots vanish without a word
            env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
            # what cells print, native code included, comes as output; this is the kernel's own noise when it is ended
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            await super().start_kernel(**{"env": env, **quiet, **kwargs})

        async def is_alive(self) -> bool:  # type: ignore[override]
            alive: bool = await super().is_alive()
            if not alive and self.provisioner is not None and (code := await self.provisioner.poll()) is not None:
                exits.append(code)
            return alive

    return ThisPython


def _last_cell(output: Path) -> str:
    """The cell that ran last, as a number (counted as in the notebook, without papermill's own) and its id."""
    cells = [c for c in _read(output).cells if "injected-parameters" not in c.metadata.get("tags", [])]
    started = [i for i, c in enumerate(cells) if c.metadata.get("papermill", {}).get("start_time")]
    return f"{started[-1] + 1} ({cells[started[-1]].id})" if started else "1"


def _key(nb: NotebookNode, values: Mapping[str, Any]) -> str:
    cells = [(cell.cell_type, cell.source) for cell in nb.cells]
    known = {name: value for name, value in values.items() if value is not COMPUTED}
    parts = [cells, sorted(known.items()), _source_digest(), versions(), os.environ.get("WORKBENCH_DATA", "")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def _stamp_of(path: Path) -> Run | None:
    try:
        return Run(**load_notebook(path).metadata["workbench"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # no file, half a file, or not one of ours
        return None


def _read(path: Path) -> NotebookNode:
    import nbformat

    return nbformat.read(path, as_version=4)


def _write(nb: NotebookNode, run: Run) -> None:
    """Stamp, sign and write the notebook in one step, so that there is never half a file."""
    import nbformat
    from nbformat.sign import NotebookNotary

    nb.metadata["workbench"] = asdict(run)
    if "papermill" in nb.metadata:  # it was given the output to run in place
        nb.metadata["papermill"] |= {"input_path": run.notebook, "output_path": run.output}
    path = Path(run.output)
    part = path.with_name(f".{path.name}.part")
    nbformat.write(nb, part)
    part.replace(path)
    with contextlib.suppress(OSError):  # no home to keep signatures in: JupyterLab will ask before it trusts the file
        NotebookNotary().sign(nb)
