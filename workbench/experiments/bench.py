"""Benchmarks: modules in the repository's folder benchmarks that define ``cells``, ``run`` and ``summary``, and the page of their results."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.settings import hint
from .store import key, read
from .tables import text
from .worker import load_file

if TYPE_CHECKING:
    import pandas as pd

FUNCTIONS = ("cells", "run", "summary")


def benchmarks_folder() -> Path:
    """Return the folder benchmarks of the repository that contains this package or the current folder.

    Raises:
        FileNotFoundError: there is no such repository.
    """
    for root in (Path(__file__).parents[2], Path.cwd()):
        if (root / "pyproject.toml").is_file() and (root / "benchmarks").is_dir():
            return root / "benchmarks"
    raise FileNotFoundError(
        "the benchmarks are in the repository, not in the installed package: run this in a clone of the repository, or give the "
        "path of a benchmark's .py file"
    )


def names(folder: Path) -> dict[str, Path]:
    """Return the benchmarks in a folder, name -> path: modules that define cells, run and summary. Nothing is imported."""
    return {path.stem: path for path in sorted(folder.glob("*.py")) if not _missing_functions(path)}


def find(name: str) -> Path:
    """Return the path of a benchmark's module.

    Args:
        name: name of the benchmark, or path of a .py file.

    Raises:
        ValueError: there is no benchmark of this name (the message suggests similar ones), or the file is not a benchmark.
        FileNotFoundError: there is no such file, or no folder of benchmarks.
    """
    path = Path(name) if name.endswith(".py") else benchmarks_folder() / f"{name}.py"
    if not path.is_file():
        if name.endswith(".py"):
            raise FileNotFoundError(f"there is no file {name}")
        raise ValueError(f"there is no benchmark {name!r}: {hint(name, names(path.parent))}")
    if missing := _missing_functions(path):
        raise ValueError(
            f"{path.name} is not a benchmark: it must define {', '.join(FUNCTIONS)}, and lacks {', '.join(missing)}"
        )
    return path.resolve()


def _missing_functions(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"), path.name)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return [name for name in FUNCTIONS if name not in defined]


def description(path: Path) -> str:
    """Return the first paragraph of a benchmark's docstring as one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def cells_of(path: Path, smoke: bool = False, axes: Sequence[tuple[str, Sequence[str]]] = ()) -> list[dict[str, Any]]:
    """Return the cells of a benchmark, optionally restricted to some values of some arguments.

    Args:
        path: module of the benchmark.
        smoke: whether to use the tiny version.
        axes: pairs of an argument and its selected values, as texts.

    Raises:
        ValueError: no cell has such an argument or value (the message lists the existing ones).

    Example:
        >>> from workbench.experiments.bench import benchmarks_folder
        >>> cells = cells_of(benchmarks_folder() / "toy.py", axes=[("method", ["vote"]), ("seed", ["0"])])
        >>> {(cell["method"], cell["seed"]) for cell in cells}
        {('vote', 0)}
    """
    cells: list[dict[str, Any]] = load_file(path).cells(smoke=smoke)
    for name, selected in axes:
        arguments = dict.fromkeys(argument for cell in cells for argument in cell)
        if name not in arguments:
            raise ValueError(f"{path.stem} has no argument {name!r}: {hint(name, arguments)}")
        values = dict.fromkeys(_shown(cell[name]) for cell in cells if name in cell)
        for value in selected:
            if value not in values:
                raise ValueError(f"{path.stem} has no cell with {name}={value}: {hint(value, values)}")
    chosen = [cell for cell in cells if all(name in cell and _shown(cell[name]) in selected for name, selected in axes)]
    if not chosen:
        raise ValueError(
            f"no cell of {path.stem} has all of {' '.join(f'{n}={chr(44).join(w)}' for n, w in axes)} at once"
        )
    return chosen


def _shown(value: Any) -> str:
    """Return the text by which a value is selected and listed."""
    return "None" if value is None else text(value)


def possible(path: Path, cells: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the cells that can run on this machine, and the reasons why the others can't.

    Args:
        path: module of the benchmark. Its optional function `possible(cell)` returns the reason why a cell can't run, "" if it can.
        cells: keyword arguments of its `run`.

    Returns:
        The cells that can run, and the number of skipped cells for each reason.

    Example:
        >>> possible(benchmarks_folder() / "toy.py", [{"seed": 0}])
        ([{'seed': 0}], {})
    """
    reason_against = getattr(load_file(path), "possible", lambda cell: "")
    possible_cells, reasons = [], Counter[str]()
    for cell in cells:
        if reason := reason_against(cell):
            reasons[reason] += 1
        else:
            possible_cells.append(cell)
    return possible_cells, dict(reasons)


def table(frame: pd.DataFrame) -> str:
    """Return a DataFrame of texts as a Markdown table without its index; columns of numbers are right-aligned, the first never.

    Example:
        >>> import pandas as pd
        >>> print(table(pd.DataFrame({"method": ["vote"], "risk": ["total"], "rmse": ["0.50"]})))
        | method | risk | rmse |
        |:---|:---|---:|
        | vote | total | 0.50 |
    """
    columns = [list(map(str, frame.iloc[:, i])) for i in range(frame.shape[1])]
    is_text = [any(cells) and not any(re.match(r"\W*\d", cell) for cell in cells) for cells in columns]
    lines = [list(map(str, frame.columns)), [":---" if i == 0 or is_text[i] else "---:" for i in range(len(columns))]]
    lines += [[str(value) for value in row] for row in frame.itertuples(index=False)]
    return "\n".join(f"|{'|'.join(line)}|" if line[0] == ":---" else f"| {' | '.join(line)} |" for line in lines)


def page(folder: Path, docs: Path) -> Path:
    """Write benchmarks.md and its pictures from the saved results. Rows of cells that a benchmark no longer has are ignored.

    Args:
        folder: folder of the benchmarks, with the results in its subfolder results.
        docs: folder for benchmarks.md, with pictures in its subfolder images.

    Returns:
        Path of the page.

    Raises:
        ValueError: the summary of a benchmark fails on its results, say because some are missing.
    """
    images = docs / "images"
    images.mkdir(parents=True, exist_ok=True)
    sections = [
        "# Benchmarks",
        "Made by `workbench bench --page` from the files in [benchmarks/results](../benchmarks/results), which "
        "`workbench bench NAME` writes; do not edit it. The appendix says with which commands and versions, on what. "
        "How a benchmark is run, and how one is written: [benchmarks/README.md](../benchmarks/README.md).",
    ]
    origins: list[str] = []
    for name, path in names(folder).items():
        results = folder / "results" / f"{name}.csv"
        if results.is_file():
            module, frame = load_file(path), read(results)
            frame = frame[frame["cell"].isin([key(cell) for cell in module.cells()])].reset_index(drop=True)
            if frame.empty:  # no cell has ended yet
                continue
            try:
                summary = module.summary(frame, images).strip()
            except (KeyError, ValueError, IndexError) as error:
                raise ValueError(
                    f"{path.name} can't summarize the {len(frame)} rows of {results.name} ({type(error).__name__}: {error}): run its remaining "
                    f"cells (workbench bench {name}), or fix its summary"
                ) from error
            sections += [f"## {name}", description(path), summary]
            origins += [f"### Made by: {name}", _made_by(frame, results.with_suffix(".json"))]
    if origins:
        sections += ["## Appendix: commands, machines, versions", *origins]
    target = docs / "benchmarks.md"
    target.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return target


def _made_by(frame: pd.DataFrame, record: Path) -> str:
    """Return Markdown that lists the runs behind the results: command, dates, duration, machine and versions."""
    lines = []
    for run in json.loads(record.read_text(encoding="utf-8"))["runs"]:
        environment = run["environment"]
        versions = ", ".join(f"{name} {environment[name]}" for name in ("python", "torch", "numpy", "workbench"))
        dates = " to ".join(dict.fromkeys((run["started"][:10], run["ended"][:10])))
        lines.append(
            f"`{run['command']}`, {dates}: {run['cells']} cells, {_duration(run['seconds'])} of work, {run['jobs']} at a time with "
            f"{run['threads']} thread{'s' if run['threads'] > 1 else ''} each, on {environment['device']}; {versions}."
        )
    cells = frame.drop_duplicates("cell")["version"].value_counts(sort=False).sort_index()
    if len(cells) > 1:
        lines.append(f"Versions of the code: {', '.join(f'{version} ({n} cells)' for version, n in cells.items())}.")
    else:
        lines.append(f"Version of the code: {cells.index[0]}.")
    return "\n".join(f"- {line}" for line in lines)


def _duration(seconds: float) -> str:
    """Format a duration.

    Example:
        >>> _duration(42.4), _duration(600), _duration(7300)
        ('42 s', '10 min', '2.0 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
