"""The commands ``workbench report`` and ``workbench diff``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..experiments.options import DOUBTED, FAILED, INTERRUPTED, OK, add_grid, add_log_to, add_parameter, axis


def add_report(commands: Any) -> None:
    """Add ``report`` to a parser's commands."""
    report = commands.add_parser(
        "report",
        help="run a notebook, over a grid of parameters if you like, and write HTML reports",
        description="Run a notebook, once for each combination of the grid, and write each run as one HTML file, and an index of "
        "all of them. Each run has a process of its own. A run that ended well and of which nothing has changed since "
        "(notebook, parameters, this package, versions, data) is not repeated: an interrupted report goes on.",
        epilog="example: workbench report notebooks/compare.ipynb -p epochs 40 -g data=concrete,energy -g seed=0,1 -j 2. "
        "Exit code: 0 if all runs ended well and all their checks hold, 1 if a run did not end well, 2 for bad input, "
        "3 if all ended well but a check (record_check) does not hold, 130 after Ctrl-C or SIGTERM.",
    )
    report.add_argument("notebook", type=Path, nargs="?", help="the .ipynb file; it stays as it is")
    report.add_argument(
        "--from",
        dest="store",
        metavar="STORE",
        help="instead of running a notebook, write an index of the runs in a store of MLflow: a folder such as mlruns, a file such as "
        "mlflow.db, or a tracking URI",
    )
    report.add_argument(
        "--experiment", action="append", metavar="NAME", help="with --from: runs of this experiment only; repeatable"
    )
    add_parameter(report, "a value instead of the one in the notebook's cell of parameters; repeatable")
    add_grid(report, "one run for each value; repeatable")
    report.add_argument("-o", "--output", type=Path, metavar="DIR", help="default: reports, with --from reports/mlflow")
    report.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    report.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds that one run may take, all its cells together (default: no limit)",
    )
    again = report.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="take what has been run already (the default)")
    again.add_argument("--fresh", action="store_true", help="run even what has been run already")
    add_log_to(report, "each run")
    report.add_argument("--pdf", action="store_true", help="print each report as PDF too; needs Chromium or Chrome")
    report.set_defaults(command=run_report)


def add_diff(commands: Any) -> None:
    """Add ``diff`` to a parser's commands."""
    diff = commands.add_parser(
        "diff",
        help="compare what two reports recorded, value by value",
        description="Compare two folders of reports, or two executed notebooks: every recorded number, text, table and check.",
        epilog="example: workbench diff reports/before reports/after --tolerance 0.01. "
        "Exit code: 0 if all is the same within the tolerance, 1 if not, 2 for bad input.",
    )
    diff.add_argument("first", type=Path, metavar="A")
    diff.add_argument("second", type=Path, metavar="B")
    diff.add_argument(
        "--tolerance",
        type=float,
        metavar="REL",
        help="relative difference up to which numbers count as the same (default: 1e-6)",
    )
    diff.set_defaults(command=run_diff)


def run_report(arguments: argparse.Namespace) -> int:
    """Do ``workbench report``; the exit code."""
    from .grid import run_grid
    from .record import failed_checks

    if arguments.store is not None:
        return _report_store(arguments)
    if arguments.notebook is None:
        raise ValueError("which notebook? give the .ipynb file, or --from with a store of MLflow")
    if arguments.experiment:
        raise ValueError("--experiment chooses among runs of MLflow: give it with --from")
    parameters, grid = parse(arguments.notebook, arguments.parameter, arguments.grid)
    folder = (arguments.output or Path("reports")).resolve()
    try:
        runs = run_grid(
            arguments.notebook,
            folder,
            parameters,
            grid,
            jobs=arguments.jobs,
            timeout=arguments.timeout,
            resume=not arguments.fresh,
            pdf=arguments.pdf,
            log_to=arguments.log_to,
        )
    except KeyboardInterrupt:
        _print_page("index", folder / "index.html")
        return INTERRUPTED
    if len(runs) == 1:
        _print_page("report", Path(runs[0].output).with_suffix(".html"))
    else:
        _print_page("index", folder / "index.html")
    if not all(run.status == "ok" and not run.error for run in runs):
        return FAILED
    return DOUBTED if any(failed_checks(run.records.checks) for run in runs) else OK


def _report_store(arguments: argparse.Namespace) -> int:
    from .mlflow_runs import report_mlflow

    if arguments.notebook or arguments.parameter or arguments.grid or arguments.log_to or arguments.pdf:
        raise ValueError("--from reads runs that are there: give no notebook, -p, -g, --log-to or --pdf with it")
    folder = arguments.output or Path("reports", "mlflow")
    _print_page("index", report_mlflow(arguments.store, folder, arguments.experiment))
    return OK


def run_diff(arguments: argparse.Namespace) -> int:
    """Do ``workbench diff``; the exit code."""
    from .diff import TOLERANCE, compare_reports

    tolerance = TOLERANCE if arguments.tolerance is None else arguments.tolerance
    comparison = compare_reports(arguments.first, arguments.second, tolerance)
    print(comparison)
    return FAILED if comparison.differences else OK


def _print_page(what: str, page: Path) -> None:
    if page.is_file():
        print(f"{what}: {page}\n{' ' * len(what)}  {page.as_uri()}", flush=True)


def parse(
    notebook: Path, parameters: Sequence[tuple[str, str]], axes: Sequence[str]
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Parameters and grid of the command line, as values of the types that the notebook's defaults have.

    Raises:
        ValueError: for a name that the notebook does not have, a value that is none of its type, a name that is there twice.
    """
    from .parameters import declared_parameters, load_notebook, parse_parameter, split_values

    declared = declared_parameters(load_notebook(notebook))
    fixed: dict[str, Any] = {}
    grid: dict[str, list[Any]] = {}
    for name, text in parameters:
        _once(name, fixed)
        fixed[name] = parse_parameter(declared, name, text, notebook.name)
    for name, pieces in (axis(item, split_values) for item in axes):
        _once(name, {**fixed, **grid})
        grid[name] = [parse_parameter(declared, name, piece, notebook.name) for piece in pieces]
    return fixed, grid


def _once(name: str, known: dict[str, Any]) -> None:
    if name in known:
        raise ValueError(f"parameter {name} is given twice")
