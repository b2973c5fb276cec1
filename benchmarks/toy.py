"""Known truths on synthetic data: is the noise estimated correctly, and does risk rise where there are no training rows?

`noise`: `data.toy.cubic`, whose standard deviation is known everywhere, so that the expected negative log-likelihood of a prediction under the
true density has a closed form. `unseen`: `data.toy.sine_gap`, which has no training rows in a gap and on two far sides. Everything else is
`workbench.fit` with its defaults; nothing is chosen by these scores. Tasks named after a curve: do 90 % bands of epistemic risk cover the truth
where there are no training rows? They compare voters without a prior, with one prior scale for all curves, and with a scale chosen by each
curve's training rows, and a Gaussian process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench import compose, data, fit, neo, sample, sculpt, vote
from workbench.experiments.bench import table
from workbench.metrics import auroc, rmse
from workbench.plots import COLOURS
from workbench.training import prior_scale

if TYPE_CHECKING:
    import pandas as pd

TASKS = {
    "noise": ("plain", "sculpt", "vote of sculpt"),
    "unseen": ("plain", "sculpt", "sample", "vote", "vote of sculpt", "neo"),
}
WRAPPERS = {
    "plain": (),
    "sculpt": (sculpt.Wrapper(),),
    "sample": (sample.Wrapper(n_samples=20),),
    "vote": (vote.Wrapper(5),),
    "vote of sculpt": (vote.Wrapper(5), sculpt.Wrapper()),
    "neo": (neo.Wrapper(),),
}
# the risk that is evaluated; for all other methods, epistemic
KIND = {"plain": "total", "sculpt": "aleatoric", "neo": "vacuitic"}

VOTERS, PRIOR = 10, 300.0
BANDS = ("vote without prior", "vote with prior", "vote with chosen prior", "Gaussian process")
# layout of the rows, and the true curve (None for the layout's default)
CURVES: dict[str, tuple[str, Callable[[Tensor], Tensor] | None]] = {
    "cubic": ("ends", None),
    "line": ("ends", lambda x: x),
    "sine": ("gap", None),
    "fast sine": ("gap", lambda x: torch.sin(3 * x)),
    "step": ("gap", lambda x: torch.tanh(2 * x)),
}
MAX_ROWS = 1000  # maximum number of rows of a Gaussian process, drawn at random
NINETY = 1.6448536269514722  # 95 % quantile of the standard normal distribution


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each task, method, number of training rows and seed."""
    return [
        {"task": task, "method": method, "n_train": n_train, "epochs": 3 if smoke else 100, "seed": seed}
        for seed in range(1 if smoke else 5)
        for task, methods in TASKS.items()
        for n_train in ((60,) if smoke else (200, 2000))
        for method in methods
    ] + [
        {"task": curve, "method": method, "n_train": n_train, "epochs": 3 if smoke else 100, "seed": seed}
        for seed in range(5, 6 if smoke else 10)
        for curve in CURVES
        for n_train in ((60,) if smoke else (200, 2000) if curve in ("cubic", "sine") else (200,))
        for method in BANDS
    ]


def run(task: str, method: str, n_train: int, epochs: int, seed: int) -> dict[str, float]:
    """Train one model and compare its risk with the truth."""
    if task in CURVES:
        return _bands(task, method, n_train, epochs, seed)
    load = {"noise": data.toy.cubic, "unseen": data.toy.sine_gap}[task]
    rows = load(n_train=n_train, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
        wrapped = compose(*WRAPPERS[method])(net)
        fit(wrapped, rows, epochs=epochs, seed=seed, progress=False)
        wrapped.eval()
        with torch.no_grad():
            return {"noise": _noise, "unseen": _unseen}[task](wrapped, method, rows, seed)


def _noise(wrapped: nn.Module, method: str, rows: data.Data, seed: int) -> dict[str, float]:
    """Compare prediction and noise with the truth, at inputs distributed like the training rows."""
    fresh = data.toy.cubic(n_train=5000, seed=10_000 + seed).train
    assert fresh.sigma is not None
    truth, sigma = (fresh.x.double() ** 3 / 6, fresh.sigma.double())
    y, risks = _predict(wrapped, method, fresh.x, rows)
    noise = risks.get("aleatoric", risks["total"])
    ratio = noise / sigma
    # expectation of -log N(target; y, total) under the true density of the target, minus the entropy of that density
    total = risks["total"]
    excess = (total / sigma).log() + (sigma**2 + (y - truth) ** 2) / (2 * total**2) - 0.5
    entropy = sigma.log() + 0.5 * math.log(2 * math.pi * math.e)
    return {
        "rmse": float(rmse(y, truth)),
        "sigma_error": float((ratio - 1).abs().median()),
        "sigma_bias": float(ratio.median() - 1),
        "nll": float((entropy + excess).mean()),
        "nll_true": float(entropy.mean()),
    }


def _unseen(wrapped: nn.Module, method: str, rows: data.Data, seed: int) -> dict[str, float]:
    """Compare the risk in the gap and on the far sides with the risk at the training rows."""
    y, risks = _predict(wrapped, method, rows.test.x, rows)
    risk = risks[KIND.get(method, "epistemic")].flatten()
    seen, gap, far = (rows.test.regions[name] for name in ("data", "gap", "outside"))
    scores = {"rmse": float(rmse(y[seen], rows.test.y[seen].double()))}
    for name, region in (("gap", gap), ("far", far)):
        scores[f"auroc_{name}"] = float(auroc(risk[seen], risk[region]))
        if method != "neo":  # vacuitic risk has mean 0 on the data, which allows no ratio
            scores[f"ratio_{name}"] = float(risk[region].median() / risk[seen].median())
    return scores


def _bands(curve: str, method: str, n_train: int, epochs: int, seed: int) -> dict[str, float]:
    """Evaluate 90 % bands around the prediction, by epistemic risk alone, against the noise-free truth."""
    layout, other = CURVES[curve]
    rows = (data.toy.cubic if layout == "ends" else data.toy.sine_gap)(n_train=n_train, seed=seed)
    default: Callable[[Tensor], Tensor] = _cubic if layout == "ends" else torch.sin
    truth, x = other or default, rows.test.x
    train_x, train_y = rows.train.x, truth(rows.train.x) + (rows.train.y - default(rows.train.x))
    if method == "Gaussian process":
        y, risk = _gaussian_process(train_x, train_y, x, seed)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
            settings: dict[str, Any] = {"epochs": epochs, "seed": seed, "progress": False}
            scale = None if method == "vote without prior" else PRIOR
            if method == "vote with chosen prior":
                scale = prior_scale(vote.Wrapper(VOTERS, prior=PRIOR), net, (train_x, train_y), **settings)
            wrapped = vote.Wrapper(VOTERS, prior=scale)(net)
            fit(wrapped, (train_x, train_y), **settings)
            wrapped.eval()
            with torch.no_grad():
                y, risk = (answer.double() for answer in wrapped(x, return_risk=True))
    error, width = (y - truth(x)).abs(), NINETY * risk
    seen, unseen = rows.test.regions["data"], rows.test.regions["outside" if layout == "ends" else "gap"]
    return {
        "rmse": float(rmse(y[seen], truth(x[seen]).double())),
        "coverage_seen": float((error <= width)[seen].double().mean()),
        "coverage_unseen": float((error <= width)[unseen].double().mean()),
        "width": float(width[unseen].mean()),
        # all widths divided by this would cover the truth at 90 % of the inputs
        "times_needed": float(1 / torch.quantile((error / width)[unseen], 0.9)),
    }


def _cubic(x: Tensor) -> Tensor:
    return x**3 / 6


def _gaussian_process(x: Tensor, y: Tensor, at: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return mean and noise-free standard deviation, with an RBF kernel whose length, height and noise are fitted by likelihood."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    if len(x) > MAX_ROWS:
        chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:MAX_ROWS]
        x, y = x[chosen], y[chosen]
    kernel = ConstantKernel(1.0, (1e-3, 1e5)) * RBF(1.0, (1e-2, 1e3)) + WhiteKernel(0.1)
    model = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed).fit(x.numpy(), y.numpy().ravel())
    mean, total = model.predict(at.numpy(), return_std=True)
    noise = model.kernel_.k2.noise_level * float(y.std(correction=0)) ** 2
    risk = torch.from_numpy(total).square().sub(noise).clamp_min(1e-12).sqrt()
    return torch.from_numpy(mean)[:, None], risk[:, None]


def _predict(wrapped: nn.Module, method: str, x: Tensor, rows: data.Data) -> tuple[Tensor, dict[str, Tensor]]:
    """Return prediction and all risks, in float64; the plain model has one noise for all rows, from its training residuals."""
    if method == "plain":
        residual = (wrapped(rows.train.x) - rows.train.y).double().square().mean().sqrt()
        y = wrapped(x).double()
        return y, {"total": residual.expand_as(y)}
    y, risk = wrapped(x, return_risk=True)
    if isinstance(risk, Tensor):
        return y.double(), dict.fromkeys((KIND.get(method, "epistemic"), "total"), risk.double())
    return y.double(), {name: getattr(risk, name).double() for name in risk.names()}


def summary(frame: pd.DataFrame, images: Path) -> str:
    """Return three tables and a figure."""
    bands = frame[frame["task"].isin(CURVES)]
    frame = frame[~frame["task"].isin(CURVES)]
    frame = frame.assign(method=frame["method"].astype("category").cat.set_categories(list(WRAPPERS)))
    noise, unseen = (frame[frame["task"] == task] for task in TASKS)
    noise = noise.assign(percent=100 * noise["sigma_error"], excess=noise["nll"] - noise["nll_true"])
    columns = {
        "percent": ("error of the noise (%)", 1),
        "excess": ("NLL above that of the truth (nats)", 3),
        "rmse": ("RMSE to the true curve", 3),
    }
    ratios = {
        "auroc_gap": ("AUROC, gap", 3),
        "auroc_far": ("AUROC, far", 3),
        "ratio_gap": ("ratio, gap", 1),
        "ratio_far": ("ratio, far", 1),
    }
    seeds = frame["seed"].nunique()
    _draw(noise, unseen, images / "toy-truth.png")
    return f"""Means and standard errors over {seeds} seeds of data and model.

Estimated noise, at inputs distributed like the training rows. *Error of the noise*: median over rows of |sigma / true sigma - 1|. *NLL above
that of the truth*: expected NLL, under the true density and in closed form, of a normal distribution with the predicted mean and total risk,
minus that of the true density; 0 is perfect. The plain model has one sigma for all rows, the root mean square of its training residuals.

{_table(noise, columns)}

Risk where there are no training rows: in a *gap* between them, and *far* from them on both sides. *AUROC*: probability that a row there has a
higher risk than a row among the training rows; 0.5 is chance. *Ratio*: median risk there divided by the median risk among the training rows;
below 1, risk falls where there are no training rows. Vacuitic risk has mean 0 among the training rows and so no ratio. The risk of the plain
model is constant; for sculpt it is aleatoric, which is not meant to rise here, for neo vacuitic, and for all others epistemic.

{_table(unseen, ratios)}

![Error of the noise, NLL above that of the truth, and risk in the gap divided by risk at the data; a dot for each seed](images/toy-truth.png)

{_of_bands(bands)}"""


def _of_bands(frame: pd.DataFrame) -> str:
    """Return a table of the bands where there are no training rows, "" if none were run."""
    if frame.empty:
        return ""
    import pandas as pd

    columns = {
        "coverage_unseen": ("coverage, unseen (%)", 100, 0),
        "times_needed": ("width / needed width", 1, 2),
        "coverage_seen": ("coverage, seen (%)", 100, 0),
        "rmse": ("RMSE, seen", 1, 3),
    }
    rows = []
    for curve, (layout, _) in CURVES.items():
        groups = frame[frame["task"] == curve].groupby(["n_train", "method"], sort=False)
        for (n_train, method), group in groups:
            row = {"curve": f"{curve}, {layout}", "training rows": str(n_train), "method": str(method)}
            for name, (label, factor, digits) in columns.items():
                values = factor * group[name]
                spread = f" ± {values.sem():.{digits}f}" if len(values) > 1 else ""
                row[label] = f"{values.mean():.{digits}f}{spread}"
            row["seeds under 80 %"] = f"{int((group['coverage_unseen'] < 0.8).sum())} of {len(group)}"
            rows.append(row)
    return f"""Bands of 90 % (1.645 standard deviations) by epistemic risk alone, where there are no training rows (*unseen*) and among them
(*seen*). The methods are {VOTERS} voters without a prior, with `prior={PRIOR:g}`, and with a scale that `training.prior_scale` chooses by the
ends of the curve's training rows (15 % on each side, which are then trained on as well), and a Gaussian process (RBF kernel, fitted by
likelihood on at most {MAX_ROWS} rows). *Coverage*: share of inputs where the band contains the true curve; the target is 80 % or more where
unseen, and the last column counts the seeds that miss it. *Width / needed width*: the factor by which all bands of a seed could be narrower
and still cover 90 % of the unseen inputs; the target is at most 2, and below 1 they are too narrow. Unseen inputs are at the `ends`, 4 < |x| <
6, with data on [-4, 4], or in a `gap`, |x| < pi, with data on both sides. That priors are near zero at the training rows, and the scale
{PRIOR:g}, were chosen on 200 rows of the curves with seeds 0 and 1; these results are for seeds 5 to 9.

{table(pd.DataFrame(rows))}"""


def _table(frame: pd.DataFrame, columns: dict[str, tuple[str, int]]) -> str:
    import pandas as pd

    rows = []
    for (n_train, method), group in frame.groupby(["n_train", "method"], observed=True):
        row = {"method": str(method), "training rows": str(n_train)}
        for name, (label, digits) in columns.items():
            values = group[name].dropna()
            shown = f"{values.mean():.{digits}f} ± {values.sem():.{digits}f}" if len(values) > 1 else ""
            row[label] = shown
        rows.append(row)
    return table(pd.DataFrame(rows))


def _draw(noise: pd.DataFrame, unseen: pd.DataFrame, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(3, 3, 5))
    panels = (
        (noise, "percent", "error of the noise (%)"),
        (noise, "excess", "NLL above the truth's (nats)"),
        (unseen, "ratio_gap", "risk in the gap / at the data"),
    )
    for ax, (frame, column, label) in zip(axes, panels, strict=True):
        frame = frame.dropna(subset=column)
        methods = [name for name in WRAPPERS if name in set(frame["method"])]
        sizes = sorted(frame["n_train"].unique())
        for size, shift, marker in zip(sizes, (-0.14, 0.14), ("o", "s"), strict=False):
            same_size = frame[frame["n_train"] == size]
            places = [methods.index(name) + shift for name in same_size["method"]]
            colours = [COLOURS[KIND.get(name, "epistemic")] for name in same_size["method"]]
            ax.scatter(places, same_size[column], c=colours, marker=marker, s=28, alpha=0.7, linewidths=0)
            ax.scatter([], [], c="#444444", marker=marker, s=28, label=f"{size} rows")
        ax.set_yscale("log")
        ax.set_xticks(range(len(methods)), methods)
        ax.set_ylabel(label)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", linewidth=0.6, alpha=0.35)
    axes[2].axhline(1, color="#444444", linestyle=(0, (4, 2)), linewidth=1)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=80, metadata={"Software": None})
