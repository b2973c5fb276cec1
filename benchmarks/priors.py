"""Extrapolation on tables: do 90 % bands cover rows at both ends of a column that are left out of training, with and without a prior?

The column is the one whose ranks correlate most with those of the target; the lowest and highest 15 % of its values are never trained on. A
fifth of the rows between is held out to measure what the prior costs there.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench import compose, fit, sculpt, vote
from workbench.data import load
from workbench.experiments.bench import table
from workbench.training import prior_scale

if TYPE_CHECKING:
    import pandas as pd

TABLES = ("concrete", "energy", "kin8nm")
MAX_ROWS = 1000
SHARE = 0.15  # share of the values left out at each end
VOTERS, PRIOR = 10, 300.0
WITHOUT, WITH, CHOSEN = "without a prior", f"prior={PRIOR:g}", "chosen prior"
NINETY = 1.6448536269514722  # 95 % quantile of the standard normal distribution


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each table, method and seed."""
    return [
        {"data": name, "method": method, "epochs": 2 if smoke else 100, "seed": seed}
        for seed in range(1 if smoke else 2)
        for name in (("diabetes",) if smoke else TABLES)
        for method in (WITHOUT, WITH, CHOSEN)
    ]


def run(data: str, method: str, epochs: int, seed: int) -> dict[str, float]:
    """Return scores of voters with a noise each, on rows at the ends and between them.

    Args:
        data: name of the table.
        method: how the scale of the prior is chosen: `WITHOUT`, `WITH` or `CHOSEN`.
        epochs: epochs of each training.
        seed: seed of rows, initial weights and trainings.
    """
    start, (x, y) = time.process_time(), _rows(data, seed)
    ends = ends_of(x, y)
    between = (~ends).nonzero()[:, 0]
    between = between[torch.randperm(len(between), generator=torch.Generator().manual_seed(seed))]
    tested, trained = between[: len(between) // 5], between[len(between) // 5 :]
    settings: dict[str, Any] = {"epochs": epochs, "seed": seed, "progress": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
        scale = None if method == WITHOUT else PRIOR
        if method == CHOSEN:
            scale = prior_scale(wrapper(PRIOR), net, (x[trained], y[trained]), **settings)
        wrapped = wrapper(scale)(net)
        fit(wrapped, (x[trained], y[trained]), **settings)
    with torch.no_grad():
        mean, risk = wrapped(x, return_risk=True)
    error, width = (y - mean).abs(), NINETY * risk.total
    return {
        "held_ends": float((error <= width)[ends].double().mean()),
        "held_between": float((error <= width)[tested].double().mean()),
        "times_needed": float(1 / torch.quantile((error / width)[ends].double(), 0.9)),
        "rmse_between": float(error[tested].double().square().mean().sqrt()),
        "scale": float(scale or 0),
        "cost": time.process_time() - start,
    }


def wrapper(scale: float | None) -> Any:
    """Return a wrapper for voters with a noise each."""
    return compose(vote.Wrapper(VOTERS, prior=scale), sculpt.Wrapper())


def _rows(name: str, seed: int) -> tuple[Tensor, Tensor]:
    rows = load(name).train
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:MAX_ROWS]
    return rows.x[chosen].float(), rows.y[chosen].float()


def ends_of(x: Tensor, y: Tensor) -> Tensor:
    """Return which rows [n] lie at the ends of the column that correlates most with the target by rank."""
    ranks = torch.cat([x, y], 1).double().argsort(0).argsort(0).double()
    correlations = torch.corrcoef(ranks.mT)[:-1, -1].abs().nan_to_num()
    for column in correlations.argsort(descending=True):
        values = x[:, column].double()
        ends = (values < values.quantile(SHARE)) | (values > values.quantile(1 - SHARE))
        # a column with few distinct values may have no rows beyond its quantiles
        if float(ends.double().mean()) > SHARE / 2:
            return ends
    raise ValueError("no column has rows at its ends")


def summary(frame: pd.DataFrame, images: Path) -> str:
    """Return a table with a line for each table and method."""
    import pandas as pd

    shown = {
        "held_ends": ("coverage at the ends (%)", 100, 0),
        "times_needed": ("width / needed width at the ends", 1, 2),
        "held_between": ("coverage between (%)", 100, 0),
        "rmse_between": ("RMSE between", 1, 3),
        "scale": ("prior scale", 1, 0),
        "cost": ("processor time (s)", 1, 0),
    }
    rows = []
    for (name, method), group in frame.groupby(["data", "method"], sort=False):
        row = {"table": str(name), "method": str(method), "seeds": str(len(group))}
        for column, (label, factor, digits) in shown.items():
            row[label] = f"{factor * group[column].mean():.{digits}f}"
        rows.append(row)
    return f"""Bands that aim at 90 %, by the total risk of {VOTERS} voters with a noise each, on networks with two layers of 50 units, trained
by `fit` with its defaults on {MAX_ROWS:,} rows at most; means over seeds. *Coverage*: share of rows whose target is in its band, *at the ends*
that were left out and *between* them. *Width / needed width*: the factor by which all bands could be narrower and still cover 90 % at the
ends; below 1 they are too narrow. *Chosen prior*: the scale is chosen by `training.prior_scale`, from the ends of the training rows. *Prior
scale*: 0 is no prior.

{table(pd.DataFrame(rows))}"""
