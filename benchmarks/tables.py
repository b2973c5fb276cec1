"""Regression and classification of tables, compared in the same run with a Gaussian process, NGBoost, boosted trees and a deep ensemble.

There are nine UCI tables and seven others with values as targets, with 2,000 training rows at most; one of them also with 30,000; and one table
with classes, with all its rows. All methods get the same rows and have their defaults: nothing is tuned on a table, and rows that stop a
training or correct a scale are held out of the training rows. NLL and RMSE are those of test rows, in the units of the table.
"""

from __future__ import annotations

import importlib.util
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tables_classes
import torch
from tables_classes import CLASSES, run_classes
from tables_data import MOST_ROWS, OTHERS, UCI, rows_of
from tables_rivals import MOST_LENGTHS, RIVALS

from workbench import compose, fit, models, sculpt, vote
from workbench.distributions import Normal
from workbench.distributions.mixture import Mixture
from workbench.experiments.bench import table

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

    from workbench.data import Data

SMALL = ("boston", "concrete", "energy", "wine-red", "yacht", "diabetes", "friedman1", "friedman2", "friedman3")
SPLITS = {name: 3 if name in SMALL else 2 for name in (*UCI, *OTHERS)}
LARGE, MANY_ROWS = "protein", 30_000
MANY_EPOCHS = 20  # epochs of our trainings on many rows, instead of the 100 of `fit`
COVERAGE = 0.9
FOLDS = 5
DECAYS = (0.02, 0.5)  # a weak and a strong weight decay, weighted by out-of-fold rows
LENGTHS = (100, 300, 900)  # numbers of epochs that out-of-fold rows choose from
CHOSEN_ON = ("friedman1", "kin8nm", "concrete", "power")  # out-of-fold rows of their first splits

INTRODUCTION = f"""Means and standard errors over the splits that all methods were run on. *Tabular* is `models.tabular(data)` with its
defaults and ten voters with a noise each, trained by `fit(..., folds={FOLDS}, weight_decay={DECAYS})`. *Epochs chosen* is the same with
`epochs={LENGTHS}`, from which out-of-fold rows choose. Activation, weight decays and the rules by which `tabular` chooses its embedding and
weighs columns were chosen on training rows of {", ".join(CHOSEN_ON)}, the rules also on training rows of other tables; test rows were not
used. The *Gaussian process* has a length scale for each column (a single one for more than {MOST_LENGTHS} columns) and the more likely of
an RBF and a Matern 5/2 kernel. *NGBoost* is stopped by held-out rows. *Boosted quantiles* are the mean and the 5 and 95 % quantiles of
scikit-learn's histogram boosting: the NLL is that of a normal distribution whose width is corrected by held-out rows, and the interval is
given by the quantiles. *Deep ensemble* is five networks with two layers of 100 units and a variance, written in plain torch, each stopped by
held-out rows (`benchmarks/tables_rivals.py`). A table has {MOST_ROWS:,} training rows at most, which a Gaussian process can fit in seconds.

In the first table, *first* is the number of tables on which a method has the best score. It and the *mean rank* compare a method with those of
other packages and by hand, and of ours only with *tabular*; each of our methods is ranked without our other ones. *Coverage off by*: mean
distance of the coverage of 90 % intervals from 90 %. *Processor time*: median over tables, of training and prediction."""
OTHERS_OF_OURS = {
    "tabular, rank-one": "*Tabular, rank-one*: 16 voters as in TabM on the same network, `fit` with its defaults.",
    "vote + sculpt": "*Vote + sculpt*: five voters on standardized columns, `fit` with its defaults.",
}


def plain(data: Data) -> nn.Module:
    """Return a network with two hidden layers of 100 units, without embeddings."""
    return models.tabular(data, embedding="none")


def voters_and_noise(data: Data, seed: int, epochs: int) -> Any:
    wrapped = compose(vote.Wrapper(5), sculpt.Wrapper())(plain(data))
    fit(wrapped, data, seed=seed, progress=False, **epochs_of(epochs))
    return wrapped


def rank_one(data: Data, seed: int, epochs: int) -> Any:
    wrapped = compose(vote.Wrapper(16, share="rank1"), sculpt.Wrapper())(models.tabular(data))
    fit(wrapped, data, seed=seed, progress=False, **epochs_of(epochs))
    return wrapped


def cross_fitted(data: Data, seed: int, epochs: int | tuple[int, ...]) -> Any:
    """Train as recommended."""
    wrapped = compose(vote.Wrapper(2 * FOLDS), sculpt.Wrapper(Normal(beta=0.5)))(models.tabular(data))
    fit(wrapped, data, seed=seed, folds=FOLDS, weight_decay=DECAYS, progress=False, **epochs_of(epochs))
    return wrapped


def epochs_of(epochs: int | tuple[int, ...]) -> dict[str, Any]:
    """Return the argument `epochs` of `fit`, or nothing for its default."""
    return {"epochs": epochs} if epochs else {}


def epochs_chosen(data: Data, seed: int, epochs: int) -> Any:
    """Train as recommended, with the number of epochs chosen by out-of-fold rows."""
    return cross_fitted(data, seed, (epochs, 2 * epochs) if epochs else LENGTHS)


CHOSEN = "epochs chosen"
OURS = {
    "tabular": cross_fitted,
    CHOSEN: epochs_chosen,
    "tabular, rank-one": rank_one,
    "vote + sculpt": voters_and_noise,
}
METHODS = (*OURS, *RIVALS)
ON_MANY = ("tabular", "NGBoost", "boosted quantiles", "deep ensemble")
ON_MANY_TEXT = f"""As above, with up to {MANY_ROWS:,} training rows, which are too many for a Gaussian process. *Tabular* is trained for
{MANY_EPOCHS} epochs instead of the 100 of `fit`, to save time. *Width*: mean width of the 90 % intervals."""
PACKAGES = {"Gaussian process": "scikit-learn", "NGBoost": "ngboost", "boosted quantiles": "scikit-learn"}


def possible(cell: dict[str, Any]) -> str:
    """Return why a cell can't run here (NGBoost is not installed), or ""."""
    lacking = cell["method"] == "NGBoost" and importlib.util.find_spec("ngboost") is None
    return "the package ngboost is not installed" if lacking else ""


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each split of a table and method."""
    if smoke:
        return [
            {"data": "friedman1", "split": 0, "method": method, "epochs": 1, "rows": 60}
            for method in METHODS
            if method != "NGBoost"
        ]
    few = [
        {"data": data, "split": split, "method": method, "epochs": 0, "rows": MOST_ROWS}
        for split in range(max(SPLITS.values()))
        for data in SPLITS
        for method in METHODS
        if split < SPLITS[data]
    ]
    large = [(LARGE, method, MANY_EPOCHS, MANY_ROWS) for method in ON_MANY]
    large += [(CLASSES, method, tables_classes.EPOCHS, tables_classes.MOST_ROWS) for method in tables_classes.METHODS]
    return few + [
        {"data": data, "split": split, "method": method, "epochs": epochs, "rows": rows}
        for split in range(2)
        for data, method, epochs, rows in large
    ]


def run(data: str, split: int, method: str, epochs: int, rows: int) -> dict[str, Any]:
    """Return scores on test rows.

    Args:
        data: name of the table.
        split: number of the split.
        method: one of `METHODS`.
        epochs: epochs of our trainings; 0 for the default of `fit`.
        rows: maximum number of training rows.
    """
    if data == CLASSES:
        return run_classes(method, split, epochs, rows)
    start, dataset = time.process_time(), rows_of(data, split, rows)
    ends = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(split)
        if method in OURS:
            wrapped = OURS[method](dataset, split, epochs)
            with torch.no_grad():
                mixture = wrapped.predictive(dataset.test.x)
                mixture = Mixture(mixture.family, mixture.loc.double(), mixture.risk.double(), mixture.weights.double())
        else:
            mixture, ends = rival(method, dataset, split)
    return {
        **scores(mixture, dataset.test.y.double(), ends),
        "train": len(dataset.train),
        "cost": time.process_time() - start,
        **({"package": f"{PACKAGES[method]} {version(PACKAGES[method])}"} if method in PACKAGES else {}),
    }


def rival(method: str, dataset: Data, seed: int) -> tuple[Mixture, tuple[Tensor, Tensor] | None]:
    """Return a rival's predictive distribution of the test rows, in the units of the table, and its interval if it has its own."""
    x, y = dataset.train.x.double(), dataset.train.y.double()
    scale = x.std(0, correction=0)
    scale = scale.where(scale > 0, 1.0)
    middle, unit = float(y.mean()), float(y.std(correction=0))
    standard = [((values - x.mean(0)) / scale).numpy() for values in (x, dataset.test.x.double())]
    said = RIVALS[method](standard[0], ((y - middle) / unit)[:, 0].numpy(), standard[1], seed)
    loc, risk = (torch.as_tensor(values).double()[..., None] * unit for values in (said.mean, said.scale))
    mixture = Mixture(Normal(), loc + middle, risk, torch.full((len(loc),), 1 / len(loc)).double())
    if said.low is None or said.high is None:
        return mixture, None
    low, high = (torch.as_tensor(end).double()[:, None] * unit + middle for end in (said.low, said.high))
    return mixture, (low, high)


def scores(mixture: Mixture, y: Tensor, ends: tuple[Tensor, Tensor] | None = None) -> dict[str, float]:
    """Return scores of a predictive distribution on rows with targets y [n, 1]."""
    tail = (1 - COVERAGE) / 2
    low, high = ends or (mixture.icdf(tail), mixture.icdf(1 - tail))
    return {
        "nll": float(-mixture.log_prob(y).mean()),
        "rmse": float((mixture.mean - y).square().mean().sqrt()),
        "coverage": float(((y >= low) & (y <= high)).double().mean()),
        "width": float((high - low).mean()),
    }


def summary(frame: pd.DataFrame, images: Path) -> str:
    """Return a table for each score, one of ranks, one with many rows, and one of classes."""
    import pandas as pd

    many = frame["train"] > MOST_ROWS
    classes, large = frame[frame["data"] == CLASSES], frame[many & (frame["data"] != CLASSES)]
    frame = frame[~many & (frame["data"] != CLASSES)]
    methods = [method for method in METHODS if method in set(frame["method"])]
    packages = ", ".join(sorted(set(frame["package"].dropna()))) if "package" in frame else ""
    told = [INTRODUCTION, *(words for method, words in OTHERS_OF_OURS.items() if method in methods)]
    told += [f"Packages: {packages}."] if packages else []
    # otherwise methods would be compared on different splits
    complete = frame.groupby(["data", "split"])["method"].transform("nunique") == len(methods)
    partly = frame[~complete & ~frame["data"].isin(frame[complete]["data"])]
    if len(partly):
        told.append(
            f"Not all methods were run on {', '.join(dict.fromkeys(partly['data']))}: these tables do not count for *first* and *mean rank*."
        )
    frame = frame[complete]
    parts = [" ".join(told), table(pd.DataFrame(_counts(frame, methods)))]
    for score, name in (("nll", "NLL"), ("rmse", "RMSE")):
        parts += [f"### {name}", table(pd.DataFrame(_lines(pd.concat([frame, partly]), methods, score)))]
    if len(large):
        parts += [f"### {MANY_ROWS:,} rows", ON_MANY_TEXT, *_large(large)]
    if len(classes):
        parts += ["### Classes", tables_classes.INTRODUCTION, table(pd.DataFrame(tables_classes.lines(classes)))]
    return "\n\n".join(parts)


def _counts(frame: pd.DataFrame, methods: list[str]) -> list[dict[str, Any]]:
    """Return on how many tables each method is first, and its mean rank: ours among the rivals, rivals among each other and "tabular"."""
    means = {score: frame.groupby(["data", "method"])[score].mean().unstack()[methods] for score in ("nll", "rmse")}
    counts = []
    for method in methods:
        row: dict[str, Any] = {"method": method}
        for score, name in (("nll", "NLL"), ("rmse", "RMSE")):
            values = means[score]
            for label, part in (
                ("UCI", [n for n in UCI if n in values.index]),
                ("others", [n for n in OTHERS if n in values.index]),
            ):
                field = [m for m in methods if m not in OURS or m == (method if method in OURS else "tabular")]
                ranks = values.loc[part, field].rank(axis=1)[method]
                row[f"{name}, {label}: first"] = f"{int((ranks == 1).sum())} of {len(part)}"
                row[f"{name}, {label}: mean rank"] = f"{ranks.mean():.1f}" if len(part) else ""
        off = (frame[frame["method"] == method].groupby("data")["coverage"].mean() - COVERAGE).abs()
        row["coverage off by"] = f"{off.mean():.1%}"
        row["processor time (s)"] = f"{frame[frame['method'] == method]['cost'].median():.0f}"
        counts.append(row)
    return counts


def _lines(frame: pd.DataFrame, methods: list[str], score: str) -> list[dict[str, str]]:
    """Return a line for each table, with a score of each method."""
    rows = []
    for data in (*UCI, *OTHERS):
        here = frame[frame["data"] == data]
        if len(here):
            row = {"table": data, "rows": f"{int(here['train'].max()):,}", "splits": str(here["split"].nunique())}
            rows.append(row | {method: _cell(here[here["method"] == method][score]) for method in methods})
    return rows


def _large(frame: pd.DataFrame) -> list[str]:
    """Return a table of the scores of each method on many rows."""
    import pandas as pd

    names = {
        "nll": "NLL",
        "rmse": "RMSE",
        "coverage": "coverage of 90 % intervals",
        "width": "width",
        "cost": "processor time (s)",
    }
    rows = []
    for (data, method), here in frame.groupby(["data", "method"], sort=False):
        row = {"table": data, "method": method, "rows": f"{int(here['train'].max()):,}", "splits": str(len(here))}
        rows.append(row | {name: _cell(here[score]) for score, name in names.items()})
    return [table(pd.DataFrame(rows))]


def _cell(values: Any) -> str:
    """Return mean and standard error over splits."""
    if not len(values):
        return ""
    digits = 3 if values.abs().mean() > 0.05 else 5
    return f"{values.mean():.{digits}f}" + (f" ± {values.sem():.{digits}f}" if len(values) > 1 else "")
