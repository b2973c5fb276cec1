"""The command ``workbench compare``: a grid on the command line, and the table of its results."""

from __future__ import annotations

import argparse
import ast
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.settings import hint
from .directions import higher_is_better, may_be_best, metric_of
from .options import FAILED, OK, add_grid, add_log_to, add_parameter, axis

if TYPE_CHECKING:
    import pandas as pd

SHOWN = {
    "regression": ("rmse", "nll", "picp90", "aurc", "passes", "fit_seconds"),
    "classification": ("accuracy", "mean_iou", "nll", "ece", "error_auroc", "aurc", "passes", "fit_seconds"),
}
MORE = (
    *("mae", "mixture_nll", "crps", "calibration_error", "mpiw90", "sharpness", "brier"),
    *("risk_error_correlation", "aleatoric", "epistemic", "vacuitic"),
)
COSTS = ("passes", "fit_seconds", "predict_seconds", "peak_memory", "parameters")  # means are enough
LABELS = {
    "picp90": "in 90%",
    "risk_error_correlation": "corr.",
    "fit_seconds": "fit (s)",
    "peak_memory": "memory (MiB)",
}
NEAREST = {"picp90": 0.9}
AXES = ("data", "wrapper", "seed", "model")
SMOKE = {"epochs": 2, "rows": 200}


def add_parser(commands: Any) -> None:
    """Add the command to a parser of commands."""
    parser = commands.add_parser(
        "compare",
        help="train and measure wrappers side by side: models x wrappers x data x seeds",
        description="Train every model in every wrapper on every data set with every seed, each in a process of its own, keep the results in a "
        "table, and print what came out. What the table has already is not run again.",
        epilog='example: workbench compare -g data=concrete,yacht -g wrapper="plain, sculpt, vote(n_voters=5) + sculpt" -g seed=0,1,2 -j 4',
    )
    add_grid(
        parser,
        "values of data, wrapper, seed or model; repeatable (default: data=diabetes, wrapper=plain,sculpt,vote,vote + sculpt, seed=0,1,2)",
    )
    parser.add_argument(
        "-m",
        "--model",
        metavar="A,B",
        help="linear, mlp, cnn, tabular, such as mlp(width=100), or path/to/file.py:factory (default: auto, which is tabular for a table of "
        "numbers and mlp for anything else)",
    )
    add_parameter(parser, "of fit, such as lr 0.003; repeatable")
    parser.add_argument("--epochs", type=int, metavar="N", help="of each training (default: 100)")
    parser.add_argument("--metrics", metavar="A,B", help="what the printed table shows; the file has all")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("compare.csv"),
        metavar="FILE",
        help=".csv or .parquet (default: compare.csv)",
    )
    parser.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="cells at a time (default: 1)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads of each (default: 1)")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds that one cell may take (default: no limit)")
    parser.add_argument(
        "--scheduler", metavar="ADDRESS", help="run on the workers of this dask.distributed scheduler, tcp://host:8786"
    )
    add_log_to(parser, "each cell")
    parser.add_argument(
        "--fresh", action="store_true", help="drop the results of these cells first, and run them again"
    )
    parser.add_argument("--smoke", action="store_true", help="2 epochs on 200 rows with one seed, to see that it runs")
    parser.set_defaults(command=compare)


def compare(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code: 0 if all cells have results, 1 if some have none or the scheduler was lost.
    """
    from .sweep import grid

    axes, options = _axes(arguments), _options(arguments)
    shown = _shown(arguments.metrics)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", file=sys.stderr)
        try:
            frame = grid(
                axes["model"],
                axes["wrapper"],
                axes["data"],
                axes["seed"],
                path=arguments.output,
                jobs=arguments.jobs,
                threads=arguments.threads,
                timeout=arguments.timeout,
                scheduler=arguments.scheduler,
                resume=not arguments.fresh,
                command=_command(arguments),
                log_to=arguments.log_to,
                **options,
            )
        except ConnectionAbortedError as error:
            print(f"workbench: {error}", file=sys.stderr)
            return FAILED
        except ModuleNotFoundError as error:
            raise ValueError(str(error)) from error
    if len(frame):
        print(f"\n{summary(frame, shown)}\n")
    failed = frame.attrs["failed"]
    print(f"{len(frame)} of {len(frame) + len(failed)} cells: {arguments.output}")
    if failed:
        print(f"{len(failed)} without results: {arguments.output.with_suffix('.failed.txt')}")
    return FAILED if failed else OK


def summary(frame: pd.DataFrame, metrics: Sequence[str] | None = None) -> str:
    """A table for each data set: a row for each wrapper, mean and standard error over the seeds, the best mean of each column marked.

    Marked are means over all seeds, and widths only of intervals that cover.

    Args:
        frame: what `grid` gave.
        metrics: columns to show; None: the main scores and costs of the task.

    Example:
        >>> import pandas as pd
        >>> rows = [("plain", 0, 2.0), ("plain", 1, 4.0), ("vote", 0, 1.0), ("vote", 1, 2.0)]
        >>> frame = pd.DataFrame(rows, columns=["wrapper", "seed", "rmse"])
        >>> print(summary(frame.assign(model="mlp", data="yacht", task="regression", epochs=9), ["rmse"]))
        yacht: mlp, 9 epochs, 2 seeds
                      rmse
        plain  3.00 ± 1.00
        vote   1.50 ± 0.50 *
        <BLANKLINE>
        mean ± standard error over seeds; * the best mean of its column
    """
    setting = [
        name
        for name in ("data", "model", "epochs", "rows", "lr", "weight_decay", "batch_size", "folds", "source")
        if name in frame
    ]
    tables = []
    for values, group in frame.groupby(setting, sort=False, dropna=False):
        chosen = dict(zip(setting, values, strict=True))
        wanted = _of_targets(metrics or SHOWN[group["task"].iloc[0]], group)
        names = [name for name in wanted if group[name].notna().any()]
        tables.append("\n".join([_title(chosen, group), _table(group, names)]))
    several = frame.groupby([*setting, "wrapper"], dropna=False).size().max() > 1
    legend = "mean ± standard error over seeds; " if several else ""
    return "\n\n".join([*tables, f"{legend}* the best {'mean ' if several else ''}of its column"])


def _of_targets(metrics: Sequence[str], group: pd.DataFrame) -> list[str]:
    """The columns of metrics, and for those that are measured for each of several targets these."""
    return [
        column
        for name in metrics
        for column in map(str, group)
        if column == name or (metric_of(column) == (column.removeprefix(f"{name}_"), name) and column != name)
    ]


def _title(setting: dict[str, Any], group: pd.DataFrame) -> str:
    seeds = group["seed"].nunique()
    more = [
        f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {value}"
        for name, value in setting.items()
        if name not in ("data", "model", "epochs", "source") and value == value
    ]
    counts = group.groupby("wrapper")["seed"].nunique()
    uneven = " at most (some are missing)" if counts.nunique() > 1 else ""
    what = [
        str(group["network"].iloc[0] if setting["model"] == "auto" and "network" in group else setting["model"]),
        f"{setting['epochs']} epoch{'s' if setting['epochs'] > 1 else ''}",
        *more,
        f"{seeds} seed{'s' if seeds > 1 else ''}{uneven}",
    ]
    return f"{setting['data']}: {', '.join(what)}"


def _table(group: pd.DataFrame, names: Sequence[str]) -> str:
    import pandas as pd

    # a metric may have given None in some cells
    by = group.astype(dict.fromkeys(names, float)).groupby("wrapper", sort=False)[list(names)]
    means, errors = by.mean(), by.sem()
    errors[[name for name in names if name in COSTS]] = math.nan
    columns = {}
    for name in names:
        largest = float(means[name].abs().max())
        digits = 0 if name == "parameters" else max(0, 2 - math.floor(math.log10(largest))) if largest > 0 else 2
        texts = [_text(mean, error, min(digits, 5)) for mean, error in zip(means[name], errors[name], strict=True)]
        best = _best(_comparable(means, by.count(), group, name))
        marks = [" *" if wrapper in best else "  " for wrapper in means.index]
        columns[f"{LABELS.get(name, name)}  "] = [text + mark for text, mark in zip(texts, marks, strict=True)]
    lines = pd.DataFrame(columns, index=means.index).rename_axis(None)
    return "\n".join(line.rstrip() for line in lines.to_string(justify="right").splitlines())


def _comparable(means: pd.DataFrame, counts: pd.DataFrame, group: pd.DataFrame, name: str) -> pd.Series:
    """The means of a column that may be the best: those over all seeds, and widths only of intervals that cover."""
    import pandas as pd

    numbers = group.select_dtypes("number").groupby(group["wrapper"], sort=False).mean()
    whole = counts[name] == counts[name].max()
    covers = pd.Series({wrapper: may_be_best(name, numbers.loc[wrapper]) for wrapper in means.index})
    return means[name].where(whole & covers)


def _text(mean: float, error: float, digits: int) -> str:
    if mean != mean:
        return "–"
    return f"{mean:.{digits}f}" if error != error else f"{mean:.{digits}f} ± {error:.{digits}f}"


def _best(means: pd.Series) -> set[str]:
    """The wrappers with the best mean, none where all are alike or nothing is better than another."""
    name = str(means.name)
    higher = higher_is_better(name)
    if name in NEAREST:
        distance = (means - NEAREST[name]).abs()
    elif higher is not None:
        distance = -means if higher else means
    else:
        return set()
    known = distance.dropna()
    return set() if known.nunique() < 2 else set(known.index[known == known.min()])


def _axes(arguments: argparse.Namespace) -> dict[str, list[Any]]:
    from .specs import split

    models = [] if arguments.model is None else [f"model={arguments.model}"]
    axes: dict[str, list[Any]] = {}
    for item in (*arguments.grid, *models):
        name, values = axis(item, split)
        if name not in AXES:
            raise ValueError(f"-g has no {name!r}: {hint(name, AXES)}; what fit takes is given by -p NAME VALUE")
        if name in axes:
            raise ValueError(f"{name} is given twice")
        axes[name] = values
    try:
        axes["seed"] = [int(seed) for seed in axes.get("seed", ["0"] if arguments.smoke else ["0", "1", "2"])]
    except ValueError as error:
        raise ValueError(f"-g seed: seeds are whole numbers ({error})") from error
    default: dict[str, list[Any]] = {
        "model": ["auto"],
        "data": ["diabetes"],
        "wrapper": ["plain", "sculpt", "vote", "vote + sculpt"],
    }
    return {**default, **axes}


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    from .sweep import OPTIONS

    options: dict[str, Any] = dict(SMOKE) if arguments.smoke else {}
    for name, text in arguments.parameter:
        if name not in OPTIONS:
            raise ValueError(f"-p has no {name!r}: {hint(name, OPTIONS)}")
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
    if arguments.epochs is not None:
        options["epochs"] = arguments.epochs
    return options


def _shown(text: str | None) -> list[str] | None:
    if text is None:
        return None
    known = list(dict.fromkeys([*SHOWN["regression"], *SHOWN["classification"], *MORE, *COSTS]))
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ValueError(f"--metrics: there is no {name!r}: {hint(name, known)}")
    return names


def _command(arguments: argparse.Namespace) -> str:
    """The command as others would give it."""
    words = ["workbench compare", *(f'-g "{item}"' if " " in item else f"-g {item}" for item in arguments.grid)]
    words += [f"-m {arguments.model}"] if arguments.model else []
    words += [f"-p {name} {value}" for name, value in arguments.parameter]
    words += [f"--epochs {arguments.epochs}"] if arguments.epochs is not None else []
    words += [
        f"{option} {value}" for option, value in (("-j", arguments.jobs), ("--threads", arguments.threads)) if value > 1
    ]
    return " ".join([*words, *(["--smoke"] if arguments.smoke else [])])
