"""Forecast intervals under drift: the oil temperature of two electricity transformers a day ahead, over the year after training.

Forecasts of ETTh1 and ETTh2 (Zhou et al. 2021) for the next 24 hours are made every 6 hours. Models are trained once, on the first 288 days, or
again every quarter of a year on all days before it; the latest tenth of the training windows chooses the best epoch. Split conformal prediction
takes its quantile, for each hour of the horizon, from the 72 days after the first training, and online methods start there; all are evaluated on
the 365 days that follow. The sets have 726 days, so that there is only one such year. Intervals aim at a coverage of 90 %. Nothing was chosen by
these scores: options have their defaults, except the learning rate of the networks, which is chosen by the same windows as the epoch.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from drift_rival import intervals
from sequences import readings
from torch import Tensor, nn

from workbench import compose, fit, metrics, sculpt, vote
from workbench.calibration import OnlineConformal
from workbench.experiments.bench import table

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

PAST, AHEAD, EVERY = 96, 24, 6  # hours
TRAINED, HELD_OUT, JUDGED, COVERAGE = 288 * 24, 360 * 24, 365 * 24, 0.9
QUARTER = JUDGED // 4
RATES = (0.01, 0.003, 0.001)  # the default of `fit` is too large for 672 inputs in some trainings
METHODS = ("split", "aci", "dtaci", "pid", "enbpi", "darts")
FORECASTERS = ("seasonal naive", "linear", "network", "vote + sculpt")


class Change(nn.Module):
    """Readings [n, 7, hours] -> change of the last channel from its latest value [n, steps].

    The latest value is added outside the network; inside, it would be added to the outputs of the risk heads as well.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - x[..., -1:]).flatten(1))


@functools.cache
def windows(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return all windows [n, 7, 96], the temperature in the 24 hours after each [n, 24], and its unit, the training rows' deviation."""
    hours = readings(name)
    unit = hours[:TRAINED].std(0)
    rows = (hours / unit).unfold(0, PAST + AHEAD, 1)
    return rows[:, :, :PAST].contiguous(), rows[:, -1, PAST:].contiguous(), unit[-1]


@functools.cache
def forecasts(name: str, forecaster: str, refit: str, epochs: int) -> tuple[Tensor, Tensor | None]:
    """Return predictions [n, 24] for all windows and, for voters, their risk; each uses only readings from before its forecast."""
    x, _, _ = windows(name)
    if forecaster == "seasonal naive":
        return x[:, -1, -AHEAD:], None
    starts = [TRAINED, *(range(HELD_OUT, HELD_OUT + JUDGED, QUARTER) if refit == "quarterly" else ())]
    parts = []
    for start, end in zip(starts, [*starts[1:], len(x) + PAST], strict=True):
        parts.append(trained(name, forecaster, start, epochs)(x[0 if not parts else start - PAST : end - PAST]))
    predictions, risks = zip(*parts, strict=True)
    return torch.cat(predictions), torch.cat(risks) if "vote" in forecaster else None


def trained(name: str, forecaster: str, known: int, epochs: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a forecaster trained on the first `known` hours: a function from windows to predictions and risks."""
    x, y, _ = windows(name)
    n = known - PAST - AHEAD
    change = y - x[:, -1, -1:]
    if forecaster == "linear":
        past = _flat(x[:n])
        weights = torch.linalg.solve(past.T @ past + 100 * torch.eye(past.shape[1]), past.T @ change[:n].double())
        return lambda rows: ((_flat(rows) @ weights).float() + rows[:, -1, -1:], torch.empty(0))
    late, seen = slice(n - n // 10, n), slice(n - n // 10 - AHEAD)  # the gap keeps their targets apart
    trainings = []
    for lr in RATES:
        torch.manual_seed(0)
        model = Change(nn.Sequential(nn.Linear(7 * PAST, 64), nn.ReLU(), nn.Linear(64, AHEAD)))
        wrapped = compose(vote.Wrapper(5), sculpt.Wrapper())(model) if "vote" in forecaster else vote.Wrapper(1)(model)
        rows, held_out = ((x[part], change[part]) for part in (seen, late))
        history = fit(wrapped, rows, epochs=epochs, lr=lr, validation=held_out, progress=False)
        trainings.append((history.frame["validation_loss"].min(), wrapped))
    wrapped = min(trainings, key=lambda training: training[0])[1]

    @torch.no_grad()
    def answer(rows: Tensor) -> tuple[Tensor, Tensor]:
        answers = [wrapped(batch, return_risk=True) for batch in rows.split(1000)]
        return torch.cat([y for y, _ in answers]) + rows[:, -1, -1:], torch.cat(
            [getattr(risk, "total", risk) for _, risk in answers]
        )

    return answer


def _flat(x: Tensor) -> Tensor:
    return torch.cat([(x - x[..., -1:]).flatten(1), torch.ones(len(x), 1)], 1).double()


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each set, forecaster, schedule of training and method for intervals."""
    names, forecasters = ("ETTh1", "ETTh2")[: 1 if smoke else 2], FORECASTERS[: 1 if smoke else None]
    return [
        {"data": name, "forecaster": forecaster, "refit": refit, "method": method, "epochs": 1 if smoke else 10}
        for name in names
        for forecaster in forecasters
        for refit in ("never", "quarterly")[: 1 if forecaster == "seasonal naive" else 2]
        for method in (METHODS[:4:3] if smoke else METHODS)
        if method in ("split", "dtaci", "enbpi") or refit == "never"
    ]


def possible(cell: dict[str, Any]) -> str:
    """Return why a cell can't run here (darts is not installed), or ""."""
    lacking = cell["method"] == "darts" and importlib.util.find_spec("darts") is None
    return "the package darts is not installed" if lacking else ""


def run(data: str, forecaster: str, refit: str, method: Any, epochs: int) -> dict[str, Any]:
    """Return error, coverage and width of the intervals over the year after the held-out days."""
    prediction, risk = forecasts(data, forecaster, refit, epochs)
    _, y, unit_of_y = windows(data)
    # every sixth window of the held-out days and of the year that is evaluated
    chosen = slice(TRAINED - PAST, HELD_OUT - PAST + JUDGED, EVERY)
    prediction, y, risk = prediction[chosen], y[chosen], None if risk is None else risk[chosen]
    first = (HELD_OUT - TRAINED) // EVERY
    if method == "split":
        unit = torch.ones_like(prediction) if risk is None else risk
        score = ((y - prediction).abs() / unit)[: first - AHEAD // EVERY].sort(0).values
        bound = score[int((len(score) + 1) * COVERAGE)] * unit
        lower, upper = prediction - bound, prediction + bound
    elif method == "darts":
        lower, upper = intervals(prediction, y, EVERY, COVERAGE, scores=first - AHEAD // EVERY + 1)
    else:
        lower, upper = OnlineConformal(COVERAGE, method).replay(prediction, y, risk, EVERY)
    lower, upper, y, prediction = (part[first:] * unit_of_y for part in (lower, upper, y, prediction))
    inside = ((lower <= y) & (y <= upper)).double()
    months = inside.mean(1).unfold(0, 30 * 24 // EVERY, 24 // EVERY).mean(1)
    width = upper - lower
    return {
        "rmse": metrics.rmse(prediction, y).item(),
        "coverage": inside.mean().item(),
        "worst_step": inside.mean(0).min().item(),
        "worst_month": months.min().item(),
        "width": width[width.isfinite()].mean().item(),
        "infinite": width.isinf().double().mean().item(),
        "package": f"darts {importlib.metadata.version('darts')}" if method == "darts" else "",
    }


def summary(frame: pd.DataFrame, pictures: Path) -> str:
    """Return a table for each set."""
    import pandas as pd

    parts = []
    for name, of in frame.groupby("data", sort=False):
        rows = [
            {
                "forecaster": row["forecaster"],
                "trained": {"never": "once", "quarterly": "quarterly"}[row["refit"]],
                "RMSE": f"{row['rmse']:.2f}",
                "intervals": row["package"] if isinstance(row["package"], str) and row["package"] else row["method"],
                "coverage": f"{100 * row['coverage']:.1f} %",
                "worst hour": f"{100 * row['worst_step']:.1f} %",
                "worst 30 days": f"{100 * row['worst_month']:.1f} %",
                "width": f"{row['width']:.1f}",
                "infinite": f"{100 * row['infinite']:.1f} %",
            }
            for _, row in of.iterrows()
        ]
        parts.append(f"### {name}\n\n{table(pd.DataFrame(rows))}")
    return (
        "Intervals aim at a coverage of 90 %. *Trained*: once, or again every quarter of a year. *RMSE*: in degrees Celsius. *Coverage*: over "
        "the whole year and all 24 hours ahead; *worst hour*: for the hour ahead with the lowest coverage; *worst 30 days*: for the 30 "
        "consecutive days with the lowest. *Width*: mean width of the finite intervals in degrees Celsius; *infinite*: share of infinite "
        "intervals. *Vote + sculpt* scales its conformity scores by its risk, except for darts. *enbpi* takes the quantile of the scores of the "
        "latest 1000 hours, without the bagging of its paper, since all methods get the same forecasts. *darts* is that package's "
        "`ConformalNaiveModel` on the same forecasts, with the scores of the latest 71 days.\n\n" + "\n\n".join(parts)
    )
