"""The ``workbench report`` and ``workbench diff`` commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..experiments.options import DOUBTED, FAILED, INTERRUPTED, OK, add_grid, add_log_to, add_parameter, axis


def add_report(commands: Any) -> None:
    """Add ``report`` to the subparsers of a parser."""
    report = commands.add_parser(
        "report",
        help="run a notebook, optionally over a grid of parameters, and write HTML reports",
        description="Run a notebook once per combination of the grid, and write an HTML file for each run and an index of "
        "all runs. Each run has its own process. Runs that succeeded and are unchanged since "
        "(notebook, parameters, this package, versions, data) are not repeated, so that an interrupted report can be resumed.",
        epilog="example: workbench report notebooks/compare.ipynb -p epochs 40 -g data=concrete,energy -g seed=0,1 -j 2. "
        "Exit code: 0 if all runs succeeded and all their checks hold, 1 if a run failed, 2 for bad input, "
        "3 if all runs succeeded but a check (record_check) does not hold, 130 after Ctrl-C or SIGTERM.",
    )
    report.add_argument("notebook", type=Path, nargs="?", help="the .ipynb file, which is not changed")
    report.add_argument(
        "--from",
        dest="store",
        metavar="STORE",
        help="instead of running a notebook, write an index of the runs in an MLflow store: a folder such as mlruns, a file such as "
        "mlflow.db, or a tracking URI",
    )
    report.add_argument(
        "--experiment", action="append", metavar="NAME", help="with --from: only runs of this experiment; repeatable"
    )
    add_parameter(report, "value of a parameter, instead of the notebook's default; repeatable")
    add_grid(report, "one run per value of a parameter; repeatable")
    report.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for the reports (default: reports; reports/mlflow with --from)",
    )
    report.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="number of parallel runs (default: 1)")
    report.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="time limit per run in seconds, for all its cells together (default: none)",
    )
    repetition = report.add_mutually_exclusive_group()
    repetition.add_argument("--resume", action="store_true", help="reuse finished runs (the default)")
    repetition.add_argument("--fresh", action="store_true", help="repeat finished runs")
    add_log_to(report, "each run")
    report.add_argument(
        "--pdf", action="store_true", help="also print each report as PDF; needs Chromium, Chrome, Edge or Brave"
    )
    report.set_defaults(command=run_report)


def add_diff(commands: Any) -> None:
    """Add ``diff`` to the subparsers of a parser."""
    diff = commands.add_parser(
        "diff",
        help="compare the recorded values of two reports",
        description="Compare two folders of reports, or two executed notebooks: every recorded number, text, table and check.",
        epilog="example: workbench diff reports/before reports/after --tolerance 0.01. "
        "Exit code: 0 if all values are equal within the tolerance, 1 if not, 2 for bad input.",
    )
    diff.add_argument("first", type=Path, metavar="A", help="folder of reports, or an executed notebook")
    diff.add_argument("second", type=Path, metavar="B", help="what to compare it with")
    diff.add_argument(
        "--tolerance",
        type=float,
        metavar="REL",
        help="relative difference up to which numbers count as equal (default: 1e-6)",
    )
    diff.set_defaults(command=run_diff)


def run_report(arguments: argparse.Namespace) -> int:
    """Run ``workbench report`` and return the exit code."""
    from .grid import run_grid
    from .parameters import skip_iri_grammars
    from .record import failed_checks

    skip_iri_grammars()
    if arguments.store is not None:
        return _report_store(arguments)
    if arguments.notebook is None:
        raise ValueError("no notebook given: give an .ipynb file, or --from with an MLflow store")
    if arguments.experiment:
        raise ValueError("--experiment selects runs of an MLflow store: use it with --from")
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
        raise ValueError("--from reads existing runs: it can't be combined with a notebook, -p, -g, --log-to or --pdf")
    folder = arguments.output or Path("reports", "mlflow")
    _print_page("index", report_mlflow(arguments.store, folder, arguments.experiment))
    return OK


def run_diff(arguments: argparse.Namespace) -> int:
    """Run ``workbench diff`` and return the exit code."""
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
    """Parse parameters and grid of the command line into values of the types of the notebook's defaults.

    Raises:
        ValueError: the notebook has no such parameter, a value can't be read as its type, or a name is given twice.
    """
    from .parameters import declared_parameters, load_notebook, parse_parameter, split_values, unquoted

    declared = declared_parameters(load_notebook(notebook))
    fixed: dict[str, Any] = {}
    grid: dict[str, list[Any]] = {}
    for name, text in parameters:
        _check_new(name, fixed)
        fixed[name] = parse_parameter(declared, name, text, notebook.name)
    for name, pieces in (axis(item, split_values) for item in axes):
        _check_new(name, {**fixed, **grid})
        if isinstance(declared.get(name), str):
            pieces = [unquoted(piece) for piece in pieces]  # quotes keep the commas of a text together
        grid[name] = [parse_parameter(declared, name, piece, notebook.name) for piece in pieces]
    return fixed, grid


def _check_new(name: str, known: dict[str, Any]) -> None:
    if name in known:
        raise ValueError(f"parameter {name} is given twice")
