"""Run a notebook with papermill, and report how it ended."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import atomic
from ..errors import require
from ..experiments.environment import cause, environment, versions
from ..experiments.environment import source_digest as _source_digest
from ..trackers.base import Tracker
from ..trackers.delivery import Delivery, tracker_of
from .client import ENGINE, WHOLE, Watch, kernel_manager_class, register
from .parameters import COMPUTED, check_parameters, check_syntax, declared_parameters, load_notebook
from .record import Records, read_records

if TYPE_CHECKING:
    from nbformat import NotebookNode

CLOCK = "%Y-%m-%dT%H:%M:%S"
ENDED_BADLY = ("failed", "timeout", "died")
ENDED_FROM_OUTSIDE = "the run was ended from outside before the notebook was through"


@dataclass
class Run:
    """One run of a notebook, as it is also stamped into the executed notebook's metadata (key ``workbench``).

    Attributes:
        name: the output's name without its ending.
        notebook: path of the notebook that was run.
        output: path of the executed notebook.
        status: ``ok``, ``failed`` (a cell raised), ``timeout``, ``died`` (the kernel did), ``interrupted``, or ``waiting``
            (it has not begun).
        seconds: wall time.
        parameters: name -> value, the notebook's defaults included.
        error: what went wrong, None if nothing did.
        key: hash of what decides the result: see `run_key`.
        environment: versions, machine and git state: see `environment`.
        started: local time at which the run began, ISO 8601.
        cached: whether an earlier run was found and taken as it is.
        peak_memory: MiB that the kernel held at most; None where the system does not tell.
        peak_device_memory: MiB of the GPU that torch held at most; None without one.
        data: name -> sha256 of the data sets that `workbench.data.load` gave to the notebook.
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
        """What the notebook has recorded: see `workbench.notebook.read_records`."""
        return read_records(self.output)


def run_key(notebook: Path | str, parameters: Mapping[str, Any] | None = None) -> str:
    """Hash of what decides a run's result, as far as it is known before, so that a run is repeated only when that changed.

    Hashed are the notebook's cells, the parameters (defaults included, so that spelling one out changes nothing), the
    source of this package and the versions of the packages under it. The data that a run loaded by `workbench.data` are
    compared besides. Other files that the notebook reads are not: where those change, ask for a fresh run.

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
    timeout: float | None = None,
    resume: bool = False,
    progress: bool = False,
    log_to: str | Tracker | None = None,
) -> Run:
    """Run a notebook from top to bottom in a kernel of its own, and keep what it showed.

    The kernel is this Python, its folder the notebook's, as in JupyterLab. `output` is written as cells finish and says
    ``interrupted`` until the run has ended, so that it never claims more than happened. It is signed: JupyterLab trusts
    it and shows its widgets and tables. Of what one cell prints, a million characters are kept.

    Args:
        notebook: path of the .ipynb file.
        output: path to write the executed notebook to.
        parameters: name -> value for the notebook's ``parameters`` cell; checked before anything runs.
        timeout: seconds that the whole run may take, from its first cell on; None: no limit.
        resume: take an earlier `output` as it is if it ended well with the same `run_key` and the same data.
        progress: show a progress bar.
        log_to: "tensorboard", "mlflow", "wandb" or a `workbench.trackers.Tracker`, which is given the parameters, the numbers and checks that
            were recorded, and how the run ended, in its active run or in one of its own; not what was taken from an earlier `output`.

    Returns:
        How it went. A notebook that fails is a result, not an exception: look at `Run.status`.

    Raises:
        FileNotFoundError, ValueError, TypeError: for a notebook or parameters that can't be run; nothing is written.
        ModuleNotFoundError: the package of `log_to` is not installed.
        OSError: if `output` can't be written.
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
    notebook = Path(notebook).resolve()
    nb = load_notebook(notebook)
    run, values = plan(nb, notebook, output, parameters)
    check_timeout(timeout)
    log = None if log_to is None else Delivery(tracker_of(log_to))
    if resume and (earlier := finished(run)) is not None:
        return earlier
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
    """A run that waits, and the parameters it is given; all that can be checked before is checked here.

    Raises:
        ValueError, TypeError: for a notebook or parameters that can't be run.
    """
    output = Path(output)
    output = output.parent.resolve() / output.name  # a link there is replaced, and what it leads to stays as it is
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
        parameters={name: value for name, value in values.items() if value is not COMPUTED},
        key=_key(nb, values),
    )
    return run, checked


def check_timeout(timeout: float | None) -> None:
    """Raise a ValueError for what is no limit."""
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, or None for no limit, not {timeout!r}")


def finished(run: Run) -> Run | None:
    """An earlier run that ended well and of which nothing has changed, or None."""
    earlier = stamp_of(Path(run.output))
    if earlier is None or (earlier.key, earlier.status) != (run.key, "ok") or not _same_data(earlier.data):
        return None
    return replace(earlier, output=run.output, cached=True)


def perform(
    nb: NotebookNode, run: Run, parameters: dict[str, Any], *, timeout: float | None = None, progress: bool = False
) -> Run:
    """Carry out a planned run: see `run_notebook`."""
    output = Path(run.output)
    run.status, run.error, run.started = "interrupted", ENDED_FROM_OUTSIDE, time.strftime(CLOCK)
    output.parent.mkdir(parents=True, exist_ok=True)
    write(nb, run)
    watch, start = Watch(timeout), time.perf_counter()
    try:
        run.status, run.error = _execute(output, parameters, Path(run.notebook).parent, watch, progress)
    finally:  # also on Ctrl-C, which is then on its way to the caller
        run.seconds = round(time.perf_counter() - start, 3)
        run.peak_memory, run.peak_device_memory, run.data = watch.peak_memory, watch.peak_device_memory, watch.data
        run.environment |= {"device": watch.device} if watch.device else {}
        write(read(output), run)
    return run


def log_run(log: Delivery, run: Run, group: str = "") -> None:
    """Give a tracker a run that has ended, as one of a group: parameters, recorded numbers, checks as 1 or 0, costs."""
    measured = {"seconds": run.seconds, "peak_memory_MiB": run.peak_memory}
    with contextlib.suppress(FileNotFoundError, ValueError):  # the disk was full, or a name is there twice
        records = run.records
        measured |= records | {f"check: {claim}": int(check.holds) for claim, check in records.checks.items()}
    log.run(run.name, run.parameters, [measured], "finished" if run.status == "ok" else run.status, group)


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
    run = stamp_of(Path(executed))
    if run is None:
        raise ValueError(f"{executed} holds no outcome of a run: run it with workbench.notebook.run_notebook first")
    return run


def _execute(
    output: Path, parameters: dict[str, Any], folder: Path, watch: Watch, progress: bool
) -> tuple[str, str | None]:
    """Run the notebook in place; papermill's own outcome calls timeouts and dead kernels "completed"."""
    papermill = require("papermill")
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    if not (logger := logging.getLogger("papermill")).handlers:
        # the outcome says it all; who configures logging still gets the messages
        logger.addHandler(logging.NullHandler())
    register()
    # papermill takes paths for templates
    path = WHOLE + str(output).replace("{", "{{").replace("}", "}}")
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
            kernel_manager_class=kernel_manager_class(watch),
            watch=watch,
        )
    except papermill.PapermillExecutionError as error:
        hint = " (notebooks run in the Python of workbench: install it there)"
        return "failed", f"{error.ename}: {error.evalue}{hint if error.ename == 'ModuleNotFoundError' else ''}"
    except CellTimeoutError:
        return "timeout", f"the run took longer than {watch.timeout:g} s; it was in cell {_last_cell(output)}"
    except DeadKernelError:
        most = f"; it held {watch.peak_memory:,.0f} MiB at most" if watch.peak_memory else ""
        how = cause(watch.exits[-1] if watch.exits else 0)
        return "died", f"the kernel died in cell {_last_cell(output)}, {how}{most}"
    except RuntimeError as error:
        return "died", f"the kernel does not answer: {error}"
    return "ok", None


def _last_cell(output: Path) -> str:
    """The cell that ran last, as a number (counted as in the notebook, without papermill's own) and its id."""
    cells = [c for c in read(output).cells if "injected-parameters" not in c.metadata.get("tags", [])]
    started = [i for i, c in enumerate(cells) if c.metadata.get("papermill", {}).get("start_time")]
    return f"{started[-1] + 1} ({cells[started[-1]].id})" if started else "1"


def _key(nb: NotebookNode, values: Mapping[str, Any]) -> str:
    cells = [(cell.cell_type, cell.source) for cell in nb.cells]
    known = {name: value for name, value in values.items() if value is not COMPUTED}
    parts = [cells, sorted(known.items()), _source_digest(), versions()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def _same_data(data: Mapping[str, str]) -> bool:
    if not data:
        return True
    from ..data.provenance import checksum

    try:
        return all(checksum(name) == known for name, known in data.items())
    except ValueError:  # a data set that this version does not have
        return False


def stamp_of(path: Path) -> Run | None:
    """The outcome in a file, None if there is no file, half a file, or none of ours."""
    try:
        return Run(**load_notebook(path).metadata["workbench"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def read(path: Path) -> NotebookNode:
    """The notebook in a file."""
    return require("nbformat").read(path, as_version=4)


def write(nb: NotebookNode, run: Run) -> None:
    """Stamp, sign and write the notebook in one step, so that there is never half a file."""
    import nbformat
    from nbformat.sign import NotebookNotary

    nb.metadata["workbench"] = asdict(run)
    if "papermill" in nb.metadata:  # it was given the output to run in place
        nb.metadata["papermill"] |= {"input_path": run.notebook, "output_path": run.output}
    atomic.write(Path(run.output), nbformat.writes(nb) + "\n")
    with contextlib.suppress(OSError):  # no home to keep signatures in: JupyterLab will ask before it trusts the file
        NotebookNotary().sign(nb)
