"""Regression on nine UCI sets with the standard 20 splits (protein 5): test NLL and RMSE in original units, compared with published numbers.

Standard track: one hidden layer of 50 ReLU units (protein 100), one configuration for all sets. Open track: two layers of 100 SiLU units on
periodic inputs, one configuration for all sets. All splits of a cell train at once, as voters of one wrapped model; all choices are made by
training rows that a network has not seen, never by test rows.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from workbench.distributions.mixture import Mixture

SETS = {
    "boston": 20,
    "concrete": 20,
    "energy": 20,
    "kin8nm": 20,
    "naval": 20,
    "power": 20,
    "protein": 5,
    "wine-red": 20,
    "yacht": 20,
}
SMALL = ("boston", "concrete", "energy", "wine-red", "yacht")
FEW = 5  # number of splits of the small sets for methods that train one split at a time
COVERAGE = 0.9
MOST_STEPS = 12_000
LONG = "recommended for 30k steps"
LONG_ON = {"naval": 2}  # set that gains from more steps, and number of splits


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Training recipe of a method.

    Args:
        lr, weight_decay: one value for each setting; the weight decay is for 1,440 rows or fewer, and falls as 1 / rows beyond.
        folds: number of folds of the rows.
        held: number of folds that are held out in turn; 1 is a plain validation set.
        repeats: networks for each held-out fold and setting.
        noise: whether a second output predicts the noise.
        dropout: dropout rate in training.
        draws: draws of dropout at prediction.
        laplace: whether the last layer gets a Laplace posterior after training.
        conformal: share of the training rows that is held out for split conformal intervals.
        open: whether to use the network of the open track.
        embedding: embedding of the network `workbench.models.tabular`, which is used if this is given; its bins are those of one split.
        epochs: maximum number of epochs.
        steps: maximum number of steps.
    """

    lr: tuple[float, ...] = (0.01,)
    weight_decay: tuple[float, ...] = (0.01,)
    folds: int = 10
    held: int = 1
    repeats: int = 1
    noise: bool = True
    dropout: float = 0.0
    draws: int = 1
    laplace: bool = False
    conformal: float = 0.0
    open: bool = False
    embedding: str = ""
    epochs: int = 400
    steps: int = MOST_STEPS


METHODS = {
    "plain": Recipe(noise=False),
    "vote": Recipe(noise=False, repeats=5),
    "sample": Recipe(noise=False, dropout=0.05, draws=50),
    "sculpt": Recipe(),
    "vote + sculpt": Recipe(repeats=5),
    "laplace": Recipe(noise=False, laplace=True),
    "vote + sculpt (conformal)": Recipe(repeats=5, conformal=0.1),
    "recommended": Recipe((0.01, 0.03, 0.01), (0.01, 0.03, 0.2), folds=5, held=5, repeats=2),
    LONG: Recipe((0.01, 0.03, 0.01), (0.01, 0.03, 0.2), folds=5, held=5, repeats=2, epochs=1000, steps=30_000),
    "recommended (open)": Recipe(
        (0.01, 0.003, 0.01), (0.05, 0.01, 0.2), folds=5, held=5, repeats=1, open=True, epochs=200
    ),
    "tabular": Recipe(
        (0.01, 0.003, 0.01), (0.05, 0.01, 0.2), folds=5, held=5, repeats=1, embedding="piecewise", epochs=200
    ),
}


class Layer(nn.Linear):
    """A linear layer initialized to map inputs of variance one to outputs of variance one (LeCun et al. 1998)."""

    def reset_parameters(self) -> None:
        bound = math.sqrt(3 / self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound / math.sqrt(3), bound / math.sqrt(3))


class Periodic(nn.Module):
    """Inputs, and their sines and cosines with learned frequencies (Gorishniy et al. 2022).

    Args:
        features: number of inputs.
        frequencies: number of frequencies for each input.
        spread: standard deviation of the initial frequencies, in periods per standard deviation of the input.
    """

    def __init__(self, features: int, frequencies: int = 6, spread: float = 0.5) -> None:
        super().__init__()
        self.spread = spread
        self.frequency = nn.Parameter(torch.empty(features, frequencies))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.frequency, std=self.spread)

    def forward(self, x: Tensor) -> Tensor:
        angle = (2 * math.pi * x[..., None] * self.frequency).flatten(-2)
        return torch.cat([x, angle.sin(), angle.cos()], -1)


def network(features: int, name: str, recipe: Recipe) -> nn.Sequential:
    """Return the network of a track."""
    if recipe.open:
        wide = features * 13
        return nn.Sequential(Periodic(features), Layer(wide, 100), nn.SiLU(), Layer(100, 100), nn.SiLU(), Layer(100, 1))
    width = 100 if name == "protein" else 50
    hidden = [nn.Dropout(recipe.dropout)] if recipe.dropout else []
    return nn.Sequential(Layer(features, width), nn.ReLU(), *hidden, Layer(width, 1))


def tabular_network(data: Any, recipe: Recipe) -> nn.Sequential:
    """Return the network `tabular` without its standardization, for rows that are already standardized in the same way."""
    from workbench.models import tabular

    return tabular(data, embedding=recipe.embedding, dropout=recipe.dropout)[1:]


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each method and group of splits of a set; a cell has at most about 300 networks on small sets and 150 on large ones."""
    if smoke:
        splits = {"plain": "0-1", "recommended": "0-1", "tabular": "0-0"}
        return [{"data": "yacht", "method": name, "splits": part, "epochs": 3} for name, part in splits.items()]
    out = []
    for names in (SMALL, [name for name in SETS if name not in SMALL]):
        for method, recipe in METHODS.items():
            for name in names:
                if recipe.embedding or method == LONG:
                    few = LONG_ON.get(name, 0) if method == LONG else FEW if name in SMALL else 0
                    out += [{"data": name, "method": method, "splits": f"{first}-{first}"} for first in range(few)]
                    continue
                most = (300 if name in SMALL else 75 if recipe.open else 150) // (
                    len(recipe.lr) * recipe.held * recipe.repeats
                )
                size = next(n for n in (20, 10, 5) if n <= max(5, most) and SETS[name] % n == 0)
                for first in range(0, SETS[name], size):
                    out.append({"data": name, "method": method, "splits": f"{first}-{first + size - 1}"})
    return out


def run(data: str, method: str, splits: str, epochs: int = 0) -> list[dict[str, Any]]:
    """Return one row for each split.

    Args:
        data: name of the set.
        method: one of `METHODS`.
        splits: numbers of the first and the last split, such as "0-9".
        epochs: maximum number of epochs; 0 for that of the method.
    """
    from workbench import compose, sculpt, vote
    from workbench.calibration.conformal import conformal_quantile
    from workbench.core.batches.rows import TensorRows
    from workbench.data import load
    from workbench.distributions import Normal
    from workbench.training.cross_fitting import CrossFit
    from workbench.training.defaults import one_cycle
    from workbench.training.fold_layout import FoldedRows, Layout, assign_folds
    from workbench.training.standardization import moments

    start, recipe = time.perf_counter(), METHODS[method]
    numbers = range(int(splits.split("-")[0]), int(splits.split("-")[1]) + 1)
    if recipe.embedding and len(numbers) > 1:
        raise ValueError(
            f"splits: found {splits!r}, but the bins of {method} are those of one split: give one split, such as '0-0'"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sets = [load(data, split=number) for number in numbers]
    rows, parts, tests, set_aside = [], [], [], []
    count = 0
    for number, one in zip(numbers, sets, strict=True):
        (x_mean, x_scale), (y_mean, y_scale) = moments(one.train.x), moments(one.train.y)
        rows.append([((one.train.x - x_mean) / x_scale).float(), ((one.train.y - y_mean) / y_scale).float()])
        tests.append(
            (((one.test.x - x_mean) / x_scale).float(), ((one.test.y - y_mean) / y_scale).float(), float(y_scale))
        )
        n = len(one.train)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(number))
        used = order[round(recipe.conformal * n) :].sort().values
        set_aside.append(order[: round(recipe.conformal * n)])
        parts.append(FoldedRows(count + used, assign_folds(len(used), recipe.folds, None, seed=number)))
        count += n
    pool = TensorRows(torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows])).to(device, torch.float32)
    layout = Layout(len(sets), len(recipe.lr), recipe.held, recipe.repeats)
    voters = len(list(layout))
    with torch.random.fork_rng():
        torch.manual_seed(numbers[0])
        wrappers = [
            vote.Wrapper(voters, strategy="vmap"),
            *([sculpt.Wrapper(Normal(beta=0.5), n_layers=1)] if recipe.noise else []),
        ]
        net = tabular_network(sets[0], recipe) if recipe.embedding else network(pool.args[0].shape[1], data, recipe)
        wrapped = compose(*wrappers)(net).to(device)
    each = min(len(part.rows) for part in parts)
    trained = each * (recipe.folds - 1) // recipe.folds
    size = min(max(32, math.ceil(trained / 16)), max(256, trained // 64))
    fitted = CrossFit(
        wrapped=wrapped,
        rows=pool,
        parts=parts,
        layout=layout,
        lr=recipe.lr,
        weight_decay=[decay * min(1.0, 1440 / each) for decay in recipe.weight_decay],
        criterion=None if recipe.noise else nn.functional.mse_loss,
        whole=True,
        epochs=epochs or min(recipe.epochs, max(1, recipe.steps // max(1, trained // size))),
        batch_size=size,
        schedule=one_cycle,
        seed=numbers[0],
        progress=False,
    )
    fitted.run()
    decisions = [fitted.decide(p) for p in range(len(parts))]
    fitted.settle(decisions)
    seconds = (time.perf_counter() - start) / len(sets)
    answers = _tested(fitted, [x for x, _, _ in tests], recipe)
    if recipe.laplace:
        answers = _posterior(fitted, decisions, [x for x, _, _ in tests])
    calibration = (
        _tested(fitted, [x[places] for (x, _), places in zip(rows, set_aside, strict=True)], recipe)
        if recipe.conformal
        else None
    )
    each = voters // len(sets)
    out = []
    for p, (number, (_, y, unit)) in enumerate(zip(numbers, tests, strict=True)):
        members = slice(p * each, (p + 1) * each)
        mixture = _mixture(answers[0][members, :, : len(y)], answers[1][members, :, : len(y)], fitted, decisions[p])
        row = {"split": number, **_scores(mixture, y.double(), unit, decisions[p], sets[p].repeats())}
        if recipe.held > 1:
            low, high = _cv_plus(mixture, fitted, decisions[p], p)
        elif calibration is not None:
            target = rows[p][1][set_aside[p]].double()
            before = _mixture(*(value[members, :, : len(target)] for value in calibration), fitted, decisions[p])
            q = conformal_quantile((target - before.mean).abs() / before.stddev, COVERAGE)
            low, high = mixture.mean - q * mixture.stddev, mixture.mean + q * mixture.stddev
        if recipe.held > 1 or calibration is not None:
            row["calibrated_coverage"] = float(((y >= low) & (y <= high)).double().mean())
            row["calibrated_width"] = float((high - low).mean()) * unit
        out.append({**row, "seconds_a_split": round(seconds, 2)})
    return out


@torch.no_grad()
def _tested(fitted: Any, inputs: list[Tensor], recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return predictions and noise [voters, draws, rows, 1] of all voters for the test rows of their splits, in float64."""
    most = max(map(len, inputs))
    padded = [torch.cat([x, x[:1].expand(most - len(x), *x.shape[1:])]) for x in inputs]
    of = torch.cat([padded[p] for p, *_ in fitted.layout]).to(fitted.rows.y.device)
    fitted.wrapped.train(recipe.draws > 1)  # training mode keeps dropout active
    with torch.random.fork_rng():
        torch.manual_seed(fitted.seed)
        said = [fitted.predict_voters((of,), most) for _ in range(recipe.draws)]
    loc = torch.stack([y for y, _ in said], 1).double().cpu()
    risk = [noise for _, noise in said if noise is not None]
    return loc, torch.stack(risk, 1).double().cpu() if risk else torch.ones_like(loc)


def _posterior(fitted: Any, decisions: list[Any], inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """As `_tested`, for networks with a Laplace posterior of the last layer; in units of the noise that was estimated on held-out rows."""
    from workbench import laplace

    loc, risk = [], []
    for (p, *_), voter in zip(fitted.layout, fitted.wrapped.voters(), strict=True):
        seen = fitted.rows.take(fitted.train[len(loc)])
        noise = decisions[p].factor[0]
        with_posterior = laplace.Wrapper(noise=noise)(voter).eval().fit([(seen.x, seen.y)])
        with torch.no_grad():
            y, epistemic = with_posterior(inputs[p].to(seen.y.device), return_risk=True)
        loc.append(y.double().cpu()[None])
        risk.append((1 + (epistemic.double().cpu()[None] / noise).square()).sqrt())
    return torch.stack(loc), torch.stack(risk)


def _mixture(loc: Tensor, risk: Tensor, fitted: Any, decisions: Any) -> Mixture:
    """Return the predictive distribution of a split from its networks' predictions and noise, [voters, draws, rows, 1] each."""
    from workbench.distributions import Normal, StudentT
    from workbench.distributions.mixture import Mixture

    settings, draws = fitted.layout.settings, loc.shape[1]
    factor = torch.tensor(decisions.factor, dtype=torch.float64)
    counts = torch.tensor(decisions.weights, dtype=torch.float64)
    each = len(loc) // settings
    risk = risk * factor.repeat_interleave(each).reshape(-1, 1, 1, 1)
    weights = counts.repeat_interleave(each * draws) / (each * draws)
    family = Normal() if math.isinf(decisions.df) else StudentT(decisions.df)
    return Mixture(family, loc.flatten(0, 1), risk.flatten(0, 1), weights)


def _scores(mixture: Mixture, y: Tensor, unit: float, decisions: Any, repeats: Tensor) -> dict[str, float]:
    """Return test scores of a split, also without the rows that repeat training rows, and out-of-fold scores."""
    tail = (1 - COVERAGE) / 2
    low, high = mixture.icdf(tail), mixture.icdf(1 - tail)
    nll, squared = math.log(unit) - mixture.log_prob(y), (mixture.mean - y).square()
    return {
        "nll": float(nll.mean()),
        "rmse": float(squared.mean().sqrt()) * unit,
        "nll_unrepeated": float(nll[~repeats].mean()),
        "rmse_unrepeated": float(squared[~repeats].mean().sqrt()) * unit,
        "coverage": float(((y >= low) & (y <= high)).double().mean()),
        "width": float((high - low).mean()) * unit,
        "out_of_fold_nll": float(-decisions.log_prob.mean()) + math.log(unit),
        "df": decisions.df,
        "factor": sum(w * f for w, f in zip(decisions.weights, decisions.factor, strict=True)),
        "weights": " ".join(f"{weight:.2f}" for weight in decisions.weights),
    }


def _cv_plus(mixture: Mixture, fitted: Any, decisions: Any, p: int) -> tuple[Tensor, Tensor]:
    """Return CV+ intervals of a split, the same as those of `workbench.calibrate(wrapped, history)`."""
    from workbench.calibration.cross import cv_plus

    settings, folds = fitted.layout.settings, fitted.layout.folds
    loc, risk = (t.unflatten(0, (settings, folds, -1)) for t in (mixture.loc, mixture.risk))
    at = torch.tensor(decisions.weights, dtype=torch.float64).reshape(-1, 1, 1, 1)
    seen = fitted.summarize(decisions, p)
    middle = (at * loc.mean(2)).sum(0)  # [folds, rows, 1]
    spread = (at[..., None] * (risk.square() + (loc - middle[:, None]).square())).sum(0).mean(1).sqrt()
    scores = (seen.target - seen.prediction).abs().double() / seen.risk.total.double()
    return cv_plus(middle, spread, scores.cpu(), seen.fold, COVERAGE)


def summary(frame: Any, images: Path) -> str:
    """Return a table for each score and track, and one of the coverage of intervals."""
    from uci_page import page

    return page(frame, METHODS, SETS, MOST_STEPS, LONG)
