"""Runs of notebooks with papermill, and records of how they ended."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import atomic
from ..errors import check_packages, check_timeout, require
from ..experiments.environment import cause, environment, versions
from ..experiments.environment import source_digest as _source_digest
from ..experiments.user_code import imported
from ..trackers.base import Tracker
from ..trackers.delivery import Delivery, tracker_of
from .parameters import check_parameters, check_syntax, declared_parameters, is_json, load_notebook, plain
from .record import Records, read_records
from .watch import Watch

if TYPE_CHECKING:
    from nbformat import NotebookNode

CLOCK = "%Y-%m-%dT%H:%M:%S"
ENDED_BADLY = ("failed", "timeout", "died")
ENDED_FROM_OUTSIDE = "the run was stopped from outside before the notebook had finished"


@dataclass
class Run:
    """One run of a notebook. It is also stored in the metadata of the executed notebook (key ``workbench``).

    Attributes:
        name: name of the output without its suffix.
        notebook: path of the notebook.
        output: path of the executed notebook.
        status: ``ok``, ``failed`` (a cell raised an exception), ``timeout``, ``died`` (the kernel did), ``interrupted``, or ``waiting``
            (not started).
        seconds: wall time.
        parameters: name -> value, including the notebook's defaults.
        error: error message; None without an error.
        key: hash of everything that determines the result, see `run_key`.
        environment: versions, machine and git state, see `environment`.
        started: local start time, ISO 8601.
        cached: whether the result of an earlier run was reused.
        peak_memory: peak memory of the kernel, MiB; None if the system does not report it.
        peak_device_memory: peak of torch's GPU memory, MiB; None without a GPU.
        data: name -> sha256 of the data sets that the notebook loaded by `workbench.data.load`.
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
    peak_memory: float | None = None
    peak_device_memory: float | None = None
    data: dict[str, str] = field(default_factory=dict)

    @property
    def records(self) -> Records:
        """Values that the notebook recorded, see `workbench.notebook.read_records`."""
        return read_records(self.output)


def run_key(notebook: Path | str, parameters: Mapping[str, Any] | None = None) -> str:
    """Return a hash of everything known beforehand that determines a run's result; a finished run is repeated only if it changes.

    It covers the notebook's cells, the files of yours that they import, the parameters (including defaults, so that passing a default
    changes nothing), the source of this package and the versions of its dependencies. The data that a run loaded by `workbench.data` are
    compared separately. Other files that the notebook reads are not considered: if those change, ask for a fresh run.

    Args:
        notebook: path of the notebook.
        parameters: name -> value.

    Returns:
        16 hexadecimal digits.
    """
    nb = load_notebook(notebook)
    return _key(nb, Path(notebook), {**declared_parameters(nb), **(parameters or {})})


def run_notebook(
    notebook: Path | str,
    output: Path | str,
    parameters: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = None,
    resume: bool = False,
    progress: bool = False,
    log_to: str | Tracker | None = None,
) -> Run:
    """Run a notebook from top to bottom in a new kernel, and save it with its outputs.

    The kernel is this Python, in the notebook's folder, as in JupyterLab. `output` is written as cells finish, with the status
    ``interrupted`` until the run has ended, so that it never claims more than happened. It is signed, so that JupyterLab trusts
    it and shows its widgets and tables. The printed output of each cell is limited to a million characters.

    Args:
        notebook: path of the .ipynb file.
        output: path of the executed notebook to write.
        parameters: name -> value for the notebook's ``parameters`` cell; checked before anything runs.
        timeout: time limit in seconds for all cells together; None: no limit.
        resume: whether to reuse an existing `output` that ended with status ``ok`` and has the same `run_key` and data.
        progress: whether to show a progress bar.
        log_to: "tensorboard", "mlflow", "wandb" or a `workbench.trackers.Tracker`, to which the parameters, the recorded numbers and checks, and
            the status are logged, in its active run or a new one. A reused `output` is not logged.

    Returns:
        The outcome. A notebook that fails raises no exception: check `Run.status`.

    Raises:
        FileNotFoundError, ValueError, TypeError: the notebook or the parameters can't be run; nothing is written.
        ModuleNotFoundError: the package of `log_to` is not installed.
        OSError: `output` can't be written.
        KeyboardInterrupt: Ctrl-C was pressed; the outputs so far have been saved as ``interrupted``.

    Example:
        >>> import nbformat, tempfile
        >>> cell = nbformat.v4.new_code_cell("from workbench.notebook import record; record(rmse=0.5)")
        >>> folder = Path(tempfile.mkdtemp())
        >>> nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / "small.ipynb")
        >>> run = run_notebook(folder / "small.ipynb", folder / "executed.ipynb")
        >>> run.status, run.records["rmse"]
        ('ok', 0.5)
    """
    notebook = Path(notebook).resolve()
    nb = load_notebook(notebook)
    run, values = plan(nb, notebook, output, parameters)
    check_timeout(timeout)
    log = None if log_to is None else Delivery(tracker_of(log_to))
    if resume and (earlier := finished(run)) is not None:
        return earlier
    check_packages("papermill")  # else an earlier output would be replaced by one that did not run
    run.environment = environment(notebook.parent, ask_torch=False)
    try:
        return perform(nb, run, values, timeout=timeout, progress=progress)
    finally:  # also on Ctrl-C
        if log is not None:
            log_run(log, run)
            log.close()


def plan(
    nb: NotebookNode, notebook: Path, output: Path | str, parameters: Mapping[str, Any] | None
) -> tuple[Run, dict[str, Any]]:
    """Check a notebook and its parameters, and return a waiting run and the checked parameters.

    Raises:
        ValueError, TypeError: the notebook or the parameters can't be run.
    """
    if not isinstance(parameters or {}, Mapping):
        raise TypeError(f"parameters: found {parameters!r:.100}; give a dict of names and values")
    output = Path(output)
    # the name is not resolved: a link is replaced, and its target is kept
    output = output.parent.resolve() / output.name
    declared = declared_parameters(nb)
    checked = check_parameters(declared, parameters or {}, notebook.name)
    check_syntax(nb, notebook.name)
    if output == notebook:
        raise ValueError(f"the output would overwrite the notebook itself: {notebook}")
    values = {**declared, **checked}
    run = Run(
        name=output.stem,
        notebook=str(notebook),
        output=str(output),
        status="waiting",
        seconds=0.0,
        parameters=_recorded(values),
        key=_key(nb, notebook, values),
    )
    return run, checked


def finished(run: Run) -> Run | None:
    """Return the earlier run with status ``ok`` in the output of a run if its key and data are unchanged, or None."""
    earlier = stamp_of(Path(run.output))
    if earlier is None or (earlier.key, earlier.status) != (run.key, "ok") or not _same_data(earlier.data):
        return None
    return replace(earlier, output=run.output, cached=True)


def perform(
    nb: NotebookNode,
    run: Run,
    parameters: dict[str, Any],
    *,
    timeout: float | None = None,
    progress: bool = False,
    on_picture: Callable[[str], object] | None = None,
) -> Run:
    """Execute a planned run; see `run_notebook`, and `Watch.on_picture`."""
    output = Path(run.output)
    run.status, run.error, run.started = "interrupted", ENDED_FROM_OUTSIDE, time.strftime(CLOCK)
    output.parent.mkdir(parents=True, exist_ok=True)
    write(nb, run)
    watch, start = Watch(timeout, on_picture=on_picture), time.perf_counter()
    try:
        run.status, run.error = _execute(output, parameters, Path(run.notebook).parent, watch, progress)
    finally:  # also on Ctrl-C, which is then raised to the caller
        run.seconds = round(time.perf_counter() - start, 3)
        run.peak_memory, run.peak_device_memory, run.data = watch.peak_memory, watch.peak_device_memory, watch.data
        run.environment |= {"device": watch.device} if watch.device else {}
        write(read(output), run)
    return run


def log_run(log: Delivery, run: Run, group: str = "") -> None:
    """Log a run that has ended to a tracker: parameters, recorded numbers, checks as 1 or 0, and costs."""
    measured = {"seconds": run.seconds, "peak_memory_MiB": run.peak_memory}
    with contextlib.suppress(FileNotFoundError, ValueError):  # the disk was full, or a name was recorded twice
        records = run.records
        measured |= records | {f"check: {claim}": int(check.holds) for claim, check in records.checks.items()}
    log.run(run.name, run.parameters, [measured], "finished" if run.status == "ok" else run.status, group)


def read_run(executed: Path | str) -> Run:
    """Read the outcome of a run from the metadata of an executed notebook.

    Args:
        executed: path of a notebook that `run_notebook` wrote.

    Returns:
        The run, as `run_notebook` returned it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file was not written by `run_notebook`.
    """
    load_notebook(executed)
    run = stamp_of(Path(executed))
    if run is None:
        raise ValueError(f"{executed} has no record of a run: run it with workbench.notebook.run_notebook first")
    return run


def _execute(
    output: Path, parameters: dict[str, Any], folder: Path, watch: Watch, progress: bool
) -> tuple[str, str | None]:
    """Run the notebook in place, and return status and error. Papermill's own status reports timeouts and dead kernels as "completed"."""
    papermill = require("papermill")
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    from .client import ATOMIC_SCHEME, ENGINE, register

    if not (logger := logging.getLogger("papermill")).handlers:
        # silence papermill unless the user configures logging: status and error say it all
        logger.addHandler(logging.NullHandler())
    register()
    # papermill formats paths as templates
    path = ATOMIC_SCHEME + str(output).replace("{", "{{").replace("}", "}}")
    try:
        papermill.execute_notebook(
            path,
            path,
            parameters,
            engine_name=ENGINE,
            kernel_name="python3",
            language="python",
            progress_bar=progress,
            resources={"metadata": {"path": str(folder)}},
            watch=watch,
        )
    except papermill.PapermillExecutionError as error:
        hint = " (notebooks run in the Python of workbench: install it there)"
        return "failed", f"{error.ename}: {error.evalue}{hint if error.ename == 'ModuleNotFoundError' else ''}"
    except CellTimeoutError:
        return "timeout", f"the run took longer than {watch.timeout:g} s; it was in cell {_last_cell(output)}"
    except DeadKernelError:
        peak = f"; its peak memory was {watch.peak_memory:,.0f} MiB" if watch.peak_memory else ""
        reason = cause(watch.exits[-1] if watch.exits else 0)
        return "died", f"the kernel died in cell {_last_cell(output)}, {reason}{peak}"
    except RuntimeError as error:
        return "died", f"the kernel does not respond: {error}"
    return "ok", None


def _last_cell(output: Path) -> str:
    """Return the number and the id of the cell that ran last, not counting the cell that papermill inserts."""
    cells = [c for c in read(output).cells if "injected-parameters" not in c.metadata.get("tags", [])]
    started = [i for i, c in enumerate(cells) if c.metadata.get("papermill", {}).get("start_time")]
    return f"{started[-1] + 1} ({cells[started[-1]].id})" if started else "1"


def _key(nb: NotebookNode, notebook: Path, values: Mapping[str, Any]) -> str:
    cells = [(cell.cell_type, cell.source) for cell in nb.cells]
    parts = [cells, sorted(_recorded(values).items()), _source_digest(), versions()]
    if sources := _own_code(nb, notebook):
        parts.append(sorted(sources.items()))
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def _own_code(nb: NotebookNode, notebook: Path) -> dict[str, str]:
    """Return the texts of the user's files that the cells import, by name; cells with magics that are no Python are left out."""
    sources: dict[str, str] = {}
    for cell in nb.cells:
        if cell.cell_type == "code":
            lines = [line for line in cell.source.splitlines() if not line.lstrip().startswith(("%", "!"))]
            with contextlib.suppress(SyntaxError, UnicodeDecodeError):
                sources |= imported("\n".join(lines), notebook)
    sources.pop(notebook.resolve().name, None)
    return sources


def _recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters whose values can be recorded, without those computed by the notebook or of other types, such as bytes."""
    plain_values = {name: plain(value) for name, value in values.items()}
    return {name: value for name, value in plain_values.items() if is_json(value)}


def _same_data(data: Mapping[str, str]) -> bool:
    if not data:
        return True
    from ..data.provenance import checksum

    try:
        return all(checksum(name) == digest for name, digest in data.items())
    except ValueError:  # a data set that this version does not have
        return False


def stamp_of(path: Path) -> Run | None:
    """Return the run stored in a file's metadata; None if the file is missing, damaged or not ours."""
    try:
        return Run(**load_notebook(path).metadata["workbench"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def read(path: Path) -> NotebookNode:
    """Read a notebook from a file."""
    return require("nbformat").read(path, as_version=4)


def write(nb: NotebookNode, run: Run) -> None:
    """Store the run in the notebook's metadata, write the file atomically, and sign it."""
    import nbformat
    from nbformat.sign import NotebookNotary

    nb.metadata["workbench"] = asdict(run)
    if "papermill" in nb.metadata:  # papermill ran the output in place; restore the paths that people expect
        nb.metadata["papermill"] |= {"input_path": run.notebook, "output_path": run.output}
    atomic.write(Path(run.output), nbformat.writes(nb) + "\n")
    # without a home directory for signatures, JupyterLab asks before it trusts the file
    with contextlib.suppress(OSError):
        NotebookNotary().sign(nb)
