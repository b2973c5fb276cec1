"""The command ``workbench``: notebook reports, benchmarks, data sets and a demo.

Heavy modules are imported only when a command runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from workbench.experiments.compare import add_parser as add_compare
from workbench.experiments.options import BAD_INPUT, FAILED, INTERRUPTED, OK, add_grid, add_log_to, axis
from workbench.notebook.commands import add_diff, add_report
from workbench.version import __version__
from workbench.widgets.demo import add_demo


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: command-line arguments without the program name; None for `sys.argv[1:]`.

    Returns:
        Exit code: 0 on success, 1 if a run failed, 2 for bad input, 3 if a check does not hold, 130 after Ctrl-C.
    """
    arguments, unknown = _parser().parse_known_args(argv)
    if unknown:  # argparse would show how to call workbench instead of the subcommand
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    for stream in (sys.stdout, sys.stderr):  # None if it is closed
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character, such as ±, must not end a run
    try:
        code: int = arguments.command(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough; at exit Python would flush what is left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        print(f"workbench: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("workbench: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("workbench", description="Find out when not to trust a PyTorch model.")
    parser.add_argument("--version", action="version", version=f"workbench {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    add_report(commands)
    add_diff(commands)

    add_compare(commands)
    add_demo(commands)

    bench = commands.add_parser(
        "bench",
        help="run or resume a benchmark",
        description="Run the cells of a benchmark that have no results yet, each in its own process. "
        "Without a name, list the benchmarks.",
        epilog="example: workbench bench toy -j 2 -g method=vote,sculpt",
    )
    bench.add_argument("name", nargs="?", help="name of a module in benchmarks/, or path of a .py file")
    add_grid(bench, "only cells with these values; repeatable")
    bench.add_argument(
        "-j", "--jobs", type=int, default=1, metavar="N", help="number of cells run in parallel (default: 1)"
    )
    bench.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads per cell (default: 1)")
    bench.add_argument("--timeout", type=float, metavar="S", help="time limit per cell in seconds (default: none)")
    add_log_to(bench, "each cell")
    bench.add_argument("--fresh", action="store_true", help="discard existing results of these cells and rerun them")
    bench.add_argument("--smoke", action="store_true", help="run a tiny version, to check that it works")
    bench.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="output folder (default: results next to the benchmark, results/smoke with --smoke)",
    )
    bench.add_argument(
        "--page", action="store_true", help="write docs/benchmarks.md from all results (after the run, if any)"
    )
    bench.set_defaults(command=_bench)

    data = commands.add_parser("data", help="list, show or download the data sets")
    actions = data.add_subparsers(metavar="ACTION")
    data.set_defaults(command=_data_list)
    actions.add_parser("list", help="names of all data sets (the default)").set_defaults(command=_data_list)
    for action, text, command in (
        ("show", "describe a data set and its source", _data_show),
        ("fetch", "download a data set, unless it is already on this machine", _data_fetch),
    ):
        sub = actions.add_parser(action, help=text)
        sub.add_argument("name", metavar="NAME", help="one of the names of `workbench data list`")
        sub.set_defaults(command=command)
    for sub in (*commands.choices.values(), *actions.choices.values()):
        sub.set_defaults(parser=sub)
    return parser


def _bench(arguments: argparse.Namespace) -> int:
    from workbench.experiments import bench

    code = OK
    if arguments.name is not None:
        code = _bench_cells(arguments)
    elif not arguments.page:
        for name, path in bench.names(bench.benchmarks_folder()).items():
            print(f"{name:<8} {bench.description(path)}")
    if arguments.page:
        folder = bench.benchmarks_folder()
        print(f"page: {bench.page(folder, folder.parent / 'docs')}")
    return code


def _bench_cells(arguments: argparse.Namespace) -> int:
    import warnings

    from workbench.experiments import bench, run_cells

    path = bench.find(arguments.name)
    cells, reasons = bench.possible(path, bench.cells_of(path, arguments.smoke, _axes(arguments.grid)))
    for reason, number in reasons.items():
        print(f"{number} cell{'s' if number > 1 else ''} left out: {reason}")
    if not cells:
        return OK
    output = arguments.output or path.parent / "results" / ("smoke" if arguments.smoke else "")
    results = output / f"{path.stem}.csv"
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", file=sys.stderr)
        frame = run_cells(
            f"{path}:run",
            cells,
            results,
            jobs=arguments.jobs,
            threads=arguments.threads,
            timeout=arguments.timeout,
            resume=not arguments.fresh,
            command=_command(arguments, path.stem),
            log_to=arguments.log_to,
        )
    print(f"{frame['cell'].nunique()} of {len(cells)} cells: {results}")
    if frame.attrs["failed"]:
        print(f"{len(frame.attrs['failed'])} without results: {results.with_suffix('.failed.txt')}")
        return FAILED
    return OK


def _axes(items: Sequence[str]) -> list[tuple[str, list[str]]]:
    from workbench.notebook.parameters import split_values, unquoted

    # quotes keep the commas of a text together, and are no part of it
    return [axis(item, lambda text: [unquoted(value) for value in split_values(text)]) for item in items]


def _command(arguments: argparse.Namespace, name: str) -> str:
    """Return the command line in a portable form, without paths of this machine."""
    parts = ["workbench bench", name, *(f"-g {item}" for item in arguments.grid)]
    parts += [
        f"{option} {value}" for option, value in (("-j", arguments.jobs), ("--threads", arguments.threads)) if value > 1
    ]
    return " ".join([*parts, *(["--smoke"] if arguments.smoke else [])])


def _data_list(arguments: argparse.Namespace) -> int:
    from workbench import data

    available = set(data.names(available=True))
    width = max(map(len, data.names()))
    for name in data.names():
        print(f"{name:<{width}}  {data.card(name).description}{'' if name in available else ' *'}")
    if available != set(data.names()):
        print("\n* not on this machine: workbench data fetch NAME, or set WORKBENCH_DATA to the folder that holds it")
    return OK


def _data_show(arguments: argparse.Namespace) -> int:
    from workbench import data
    from workbench.data.registry import resolve

    name = resolve(arguments.name)
    if name in data.names(available=True):
        print(data.load(name))
        return OK
    card = data.card(name)
    for field in ("description", "source", "licence", "citation"):
        print(f"{field:<12} {getattr(card, field)}")
    print(f"{'file':<12} not on this machine: workbench data fetch {name}")
    return OK


def _data_fetch(arguments: argparse.Namespace) -> int:
    from workbench import data

    for path in data.fetch(arguments.name):
        print(path)
    return OK
