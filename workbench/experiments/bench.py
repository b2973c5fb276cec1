"""Benchmarks: modules with ``cells``, ``run`` and ``summary`` in the repository's folder benchmarks, and the page made of their results."""

from __future__ import annotations

import ast
import json
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
    """The folder benchmarks of the repository that this package is run from.

    Raises:
        FileNotFoundError: the package was installed without its repository.
    """
    for root in (Path(__file__).parents[2], Path.cwd()):
        if (root / "pyproject.toml").is_file() and (root / "benchmarks").is_dir():
            return root / "benchmarks"
    raise FileNotFoundError(
        "the benchmarks are part of the repository and not of the installed package: run this in a clone of it, or give the "
        "path of a benchmark's .py file"
    )


def names(folder: Path) -> dict[str, Path]:
    """The benchmarks of a folder, by name: its modules that define cells, run and summary. Nothing is imported."""
    return {path.stem: path for path in sorted(folder.glob("*.py")) if not _lacks(path)}


def find(name: str) -> Path:
    """The module of a benchmark.

    Args:
        name: its name, or the path of a .py file.

    Raises:
        ValueError: there is none of this name (the nearest names are in the message), or the file is no benchmark.
        FileNotFoundError: there is no such file, or no folder of benchmarks.
    """
    path = Path(name) if name.endswith(".py") else benchmarks_folder() / f"{name}.py"
    if not path.is_file():
        if name.endswith(".py"):
            raise FileNotFoundError(f"there is no file {name}")
        raise ValueError(f"there is no benchmark {name!r}: {hint(name, names(path.parent))}")
    if lacking := _lacks(path):
        raise ValueError(
            f"{path.name} is no benchmark: it must define {', '.join(FUNCTIONS)}, and lacks {', '.join(lacking)}"
        )
    return path.resolve()


def _lacks(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"), path.name)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return [name for name in FUNCTIONS if name not in defined]


def description(path: Path) -> str:
    """The first paragraph of a benchmark's docstring, as one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def cells_of(path: Path, smoke: bool = False, axes: Sequence[tuple[str, Sequence[str]]] = ()) -> list[dict[str, Any]]:
    """The cells of a benchmark, restricted to some values of some arguments.

    Args:
        path: its module.
        smoke: whether the tiny version is meant.
        axes: pairs of an argument and the values, as texts, that are wanted of it.

    Raises:
        ValueError: no cell has such an argument or such a value; what there is is in the message.

    Example:
        >>> from workbench.experiments.bench import benchmarks_folder
        >>> cells = cells_of(benchmarks_folder() / "toy.py", axes=[("method", ["vote"]), ("seed", ["0"])])
        >>> {(cell["method"], cell["seed"]) for cell in cells}
        {('vote', 0)}
    """
    cells: list[dict[str, Any]] = load_file(path).cells(smoke=smoke)
    for name, wanted in axes:
        arguments = dict.fromkeys(argument for cell in cells for argument in cell)
        if name not in arguments:
            raise ValueError(f"{path.stem} has no argument {name!r}: {hint(name, arguments)}")
        values = dict.fromkeys(text(cell[name]) for cell in cells if name in cell)
        for value in wanted:
            if value not in values:
                raise ValueError(f"{path.stem} has no cell with {name}={value}: {hint(value, values)}")
    chosen = [cell for cell in cells if all(name in cell and text(cell[name]) in wanted for name, wanted in axes)]
    if not chosen:
        raise ValueError(
            f"no cell of {path.stem} has all of {' '.join(f'{n}={chr(44).join(w)}' for n, w in axes)} at once"
        )
    return chosen


def possible(path: Path, cells: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The cells that can run here, and why the others can't, by the benchmark's own word.

    Args:
        path: its module; if it has a function `possible(cell)`, that gives the reason why a cell can't run, "" if it can.
        cells: keyword arguments of its `run`.

    Returns:
        The cells that can run, and for each reason the number of those that can't.

    Example:
        >>> possible(benchmarks_folder() / "toy.py", [{"seed": 0}])
        ([{'seed': 0}], {})
    """
    why_not = getattr(load_file(path), "possible", lambda cell: "")
    here, reasons = [], Counter[str]()
    for cell in cells:
        if reason := why_not(cell):
            reasons[reason] += 1
        else:
            here.append(cell)
    return here, dict(reasons)


def table(frame: pd.DataFrame) -> str:
    """A Markdown table of a frame of texts, without its index; columns are aligned right but for the first.

    Example:
        >>> import pandas as pd
        >>> print(table(pd.DataFrame({"method": ["vote"], "rmse": ["0.50"]})))
        | method | rmse |
        |:---|---:|
        | vote | 0.50 |
    """
    lines = [list(map(str, frame.columns)), [":---", *["---:"] * (frame.shape[1] - 1)]]
    lines += [[str(value) for value in row] for row in frame.itertuples(index=False)]
    return "\n".join(f"|{'|'.join(line)}|" if line[0] == ":---" else f"| {' | '.join(line)} |" for line in lines)


def page(folder: Path, docs: Path) -> Path:
    """Write benchmarks.md and its pictures from the files of results; rows of cells that a benchmark no longer has are left out.

    Args:
        folder: the benchmarks; their results are in its folder results.
        docs: where benchmarks.md goes; pictures go into its folder images.

    Returns:
        Path of the page.

    Raises:
        ValueError: a benchmark's results are too few, or of another form, for its summary.
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
            if frame.empty:  # a run has begun
                continue
            try:
                summary = module.summary(frame, images).strip()
            except (KeyError, ValueError, IndexError) as error:
                raise ValueError(
                    f"{path.name} can't sum up the {len(frame)} rows of {results.name} ({type(error).__name__}: {error}): run the rest of it "
                    f"(workbench bench {name}), or mend its summary"
                ) from error
            sections += [f"## {name}", description(path), summary]
            origins += [f"### Made by: {name}", _made_by(frame, results.with_suffix(".json"))]
    if origins:
        sections += ["## Appendix: commands, machines, versions", *origins]
    target = docs / "benchmarks.md"
    target.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return target


def _made_by(frame: pd.DataFrame, record: Path) -> str:
    """Under which command, when, on what and for how long the results were made; and by which versions of the code."""
    lines = []
    for run in json.loads(record.read_text(encoding="utf-8"))["runs"]:
        here = run["environment"]
        versions = ", ".join(f"{name} {here[name]}" for name in ("python", "torch", "numpy", "workbench"))
        dates = " to ".join(dict.fromkeys((run["started"][:10], run["ended"][:10])))
        lines.append(
            f"`{run['command']}`, {dates}: {run['cells']} cells, {_duration(run['seconds'])} of work, {run['jobs']} at a time with "
            f"{run['threads']} thread{'s' if run['threads'] > 1 else ''} each, on {here['device']}; {versions}."
        )
    cells = frame.drop_duplicates("cell")["version"].value_counts(sort=False).sort_index()
    if len(cells) > 1:
        lines.append(f"Versions of the code: {', '.join(f'{version} ({n} cells)' for version, n in cells.items())}.")
    else:
        lines.append(f"Version of the code: {cells.index[0]}.")
    return "\n".join(f"- {line}" for line in lines)


def _duration(seconds: float) -> str:
    """Example:
    >>> _duration(42.4), _duration(600), _duration(7300)
    ('42 s', '10 min', '2.0 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
