"""The ``workbench compare`` command: `grid` on the command line, and a printed summary of its results."""

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

DEFAULT_METRICS = {
    "regression": ("rmse", "nll", "picp90", "aurc", "passes", "fit_seconds"),
    "classification": ("accuracy", "mean_iou", "nll", "ece", "error_auroc", "aurc", "passes", "fit_seconds"),
}
OTHER_METRICS = (
    *("mae", "mixture_nll", "crps", "calibration_error", "mpiw90", "sharpness", "brier"),
    *("risk_error_correlation", "aleatoric", "epistemic", "vacuitic"),
)
COSTS = ("passes", "fit_seconds", "predict_seconds", "peak_memory", "parameters")  # shown without standard errors
LABELS = {
    "picp90": "in 90%",
    "risk_error_correlation": "corr.",
    "fit_seconds": "fit (s)",
    "peak_memory": "memory (MiB)",
}
IDEAL = {"picp90": 0.9}  # metrics that are best near a value
AXES = ("data", "wrapper", "seed", "model")
SMOKE = {"epochs": 2, "rows": 200}


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of a parser."""
    parser = commands.add_parser(
        "compare",
        help="train and compare wrappers: models x wrappers x data x seeds",
        description="Train every model in every wrapper on every data set with every seed, each in its own process, save the results to a "
        "table, and print a summary. Cells whose results are in the table already are not run again.",
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
        help="linear, mlp, cnn or tabular, with arguments if needed, as in mlp(width=100); or path/to/file.py:factory (default: auto, which is "
        "tabular for a table of numbers and mlp for anything else)",
    )
    add_parameter(parser, "argument of workbench.fit, such as lr 0.003; repeatable")
    parser.add_argument("--epochs", type=int, metavar="N", help="training epochs (default: 100)")
    parser.add_argument("--metrics", metavar="A,B", help="metrics to print; the file has all of them")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("compare.csv"),
        metavar="FILE",
        help="file for the results, .csv or .parquet (default: compare.csv)",
    )
    parser.add_argument(
        "-j", "--jobs", type=int, default=1, metavar="N", help="number of cells run in parallel (default: 1)"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads per cell (default: 1)")
    parser.add_argument("--timeout", type=float, metavar="S", help="time limit per cell in seconds (default: none)")
    parser.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="address of a dask.distributed scheduler whose workers run the cells, such as tcp://host:8786",
    )
    add_log_to(parser, "each cell")
    parser.add_argument("--fresh", action="store_true", help="discard existing results of these cells and rerun them")
    parser.add_argument(
        "--smoke", action="store_true", help="run 2 epochs on 200 rows with one seed, to check that it works"
    )
    parser.set_defaults(command=compare)


def compare(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code: 0 if all cells have results, 1 if some have none or the connection to the scheduler was lost.
    """
    from .sweep import grid

    axes, options = _axes(arguments), _options(arguments)
    shown = _metrics_to_show(arguments.metrics)
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
    """Return one text table per data set, with a row per wrapper: mean and standard error over the seeds, the best mean of each column marked.

    Only means over all seeds are marked, and interval widths only where the intervals reach their coverage.

    Args:
        frame: result of `grid`.
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
    from .sweep import ARGUMENTS, OPTIONS

    arguments = (ARGUMENTS.get(name, name) for name in OPTIONS)
    setting = [name for name in ("data", "model", "epochs", *arguments, "source") if name in frame]
    tables = []
    for values, group in frame.groupby(setting, sort=False, dropna=False):
        values_by_name = dict(zip(setting, values, strict=True))
        columns = _metric_columns(metrics or DEFAULT_METRICS[group["task"].iloc[0]], group)
        names = [name for name in columns if group[name].notna().any()]
        tables.append("\n".join([_title(values_by_name, group), _table(group, names)]))
    repeated = frame.groupby([*setting, "wrapper"], dropna=False).size().max() > 1
    legend = "mean ± standard error over seeds; " if repeated else ""
    return "\n\n".join([*tables, f"{legend}* the best {'mean ' if repeated else ''}of its column"])


def _metric_columns(metrics: Sequence[str], group: pd.DataFrame) -> list[str]:
    """Return the columns of the metrics; a metric that is measured per target has several."""
    return [
        column
        for name in metrics
        for column in map(str, group)
        if column == name or (metric_of(column) == (column.removeprefix(f"{name}_"), name) and column != name)
    ]


def _title(setting: dict[str, Any], group: pd.DataFrame) -> str:
    seeds = group["seed"].nunique()
    options = [
        f"{name.removeprefix('fit_')} {value:g}"
        if isinstance(value, int | float) and not isinstance(value, bool)
        else f"{name.removeprefix('fit_')} {value}"
        for name, value in setting.items()
        if name not in ("data", "model", "epochs", "source") and value == value
    ]
    counts = group.groupby("wrapper")["seed"].nunique()
    incomplete = " at most (some are missing)" if counts.nunique() > 1 else ""
    parts = [
        str(group["network"].iloc[0] if setting["model"] == "auto" and "network" in group else setting["model"]),
        f"{setting['epochs']} epoch{'s' if setting['epochs'] > 1 else ''}",
        *options,
        f"{seeds} seed{'s' if seeds > 1 else ''}{incomplete}",
    ]
    return f"{setting['data']}: {', '.join(parts)}"


def _table(group: pd.DataFrame, names: Sequence[str]) -> str:
    import pandas as pd

    # a metric may be None in some cells
    grouped = group.astype(dict.fromkeys(names, float)).groupby("wrapper", sort=False)[list(names)]
    means, errors = grouped.mean(), grouped.sem()
    errors[[name for name in names if name in COSTS]] = math.nan
    columns = {}
    for name in names:
        largest = float(means[name].abs().max())
        digits = 0 if name == "parameters" else max(0, 2 - math.floor(math.log10(largest))) if largest > 0 else 2
        texts = [_text(mean, error, min(digits, 5)) for mean, error in zip(means[name], errors[name], strict=True)]
        best = _best(_comparable(means, grouped.count(), group, name))
        marks = [" *" if wrapper in best else "  " for wrapper in means.index]
        columns[f"{LABELS.get(name, name)}  "] = [text + mark for text, mark in zip(texts, marks, strict=True)]
    lines = pd.DataFrame(columns, index=means.index).rename_axis(None)
    return "\n".join(line.rstrip() for line in lines.to_string(justify="right").splitlines())


def _comparable(means: pd.DataFrame, counts: pd.DataFrame, group: pd.DataFrame, name: str) -> pd.Series:
    """Return the means of a column, with NaN for those that can't be best: not over all seeds, or widths of intervals that undercover."""
    import pandas as pd

    numbers = group.select_dtypes("number").groupby(group["wrapper"], sort=False).mean()
    complete = counts[name] == counts[name].max()
    covers = pd.Series({wrapper: may_be_best(name, numbers.loc[wrapper]) for wrapper in means.index})
    return means[name].where(complete & covers)


def _text(mean: float, error: float, digits: int) -> str:
    if mean != mean:
        return "–"
    return f"{mean:.{digits}f}" if error != error else f"{mean:.{digits}f} ± {error:.{digits}f}"


def _best(means: pd.Series) -> set[str]:
    """Return the wrappers with the best mean; none if all means are equal or the metric has no direction."""
    name = str(means.name)
    higher = higher_is_better(name)
    if name in IDEAL:
        distance = (means - IDEAL[name]).abs()
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
            raise ValueError(f"-g has no {name!r}: {hint(name, AXES)}; give arguments of fit as -p NAME VALUE")
        if name in axes:
            raise ValueError(f"{name} is given twice")
        axes[name] = values
    try:
        axes["seed"] = [int(seed) for seed in axes.get("seed", ["0"] if arguments.smoke else ["0", "1", "2"])]
    except ValueError as error:
        raise ValueError(
            f"-g seed: seeds are whole numbers, such as -g seed=0,1,2; found {', '.join(axes['seed'])}"
        ) from error
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
        if name not in (known := ("epochs", *OPTIONS)):
            raise ValueError(f"-p has no {name!r}: {hint(name, known)}")
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = {"true": True, "false": False, "none": None}.get(text.lower(), text)
    if arguments.epochs is not None:
        options["epochs"] = arguments.epochs
    return options


def _metrics_to_show(text: str | None) -> list[str] | None:
    if text is None:
        return None
    known = list(
        dict.fromkeys([*DEFAULT_METRICS["regression"], *DEFAULT_METRICS["classification"], *OTHER_METRICS, *COSTS])
    )
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ValueError(f"--metrics: there is no {name!r}: {hint(name, known)}")
    return names


def _command(arguments: argparse.Namespace) -> str:
    """Return the command line to record with the results."""
    words = ["workbench compare", *(f'-g "{item}"' if " " in item else f"-g {item}" for item in arguments.grid)]
    words += [f"-m {arguments.model}"] if arguments.model else []
    words += [f"-p {name} {value}" for name, value in arguments.parameter]
    words += [f"--epochs {arguments.epochs}"] if arguments.epochs is not None else []
    words += [
        f"{option} {value}" for option, value in (("-j", arguments.jobs), ("--threads", arguments.threads)) if value > 1
    ]
    return " ".join([*words, *(["--smoke"] if arguments.smoke else [])])
