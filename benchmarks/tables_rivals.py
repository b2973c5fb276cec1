"""Methods that the benchmark `tables` compares with: other packages with their defaults, or plain torch. None sees test targets.

Each takes standardized rows x [n, features], y [n], and test inputs, as float64 arrays, and a seed, and returns `Said` for the test rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.errors import require

GP_ROWS = 800  # rows that the Gaussian process fits its hyperparameters on; its posterior uses all rows
MOST_LENGTHS = 40  # maximum number of length scales of its kernel; with more columns, all share one
HELD_OUT = 0.1  # share of the rows that is held out to stop a training or correct a scale


@dataclasses.dataclass
class Said:
    """Predictive distributions of test rows: a mixture of normal distributions for each.

    Args:
        mean, scale: means and standard deviations [members, n].
        low, high: ends of a 90 % interval [n], if the method has its own.
    """

    mean: np.ndarray
    scale: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


Rival = Callable[[np.ndarray, np.ndarray, np.ndarray, int], Said]


def gaussian_process(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, seed: int) -> Said:
    """Fit scikit-learn's Gaussian process, with the kernel (RBF or Matern 5/2) of the larger marginal likelihood on `GP_ROWS` rows, and with
    a length scale for each column, or one for more than `MOST_LENGTHS` columns."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel

    some = np.random.default_rng(seed).permutation(len(x))[:GP_ROWS]
    lengths = np.full(x.shape[1] if x.shape[1] <= MOST_LENGTHS else 1, float(x.shape[1]) ** 0.5)
    fitted = []
    for smooth in (RBF(lengths, (1e-2, 1e4)), Matern(lengths, (1e-2, 1e4), nu=2.5)):
        kernel = ConstantKernel(1.0, (1e-3, 1e4)) * smooth + WhiteKernel(0.1, (1e-7, 1e1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # length scales at their bounds, for irrelevant columns
            fitted.append(GaussianProcessRegressor(kernel).fit(x[some], y[some]))
    best = max(fitted, key=lambda one: one.log_marginal_likelihood_value_)
    whole = GaussianProcessRegressor(best.kernel_, optimizer=None).fit(x, y)
    mean, scale = whole.predict(x_test, return_std=True)
    return Said(mean[None], scale[None])


def ngboost(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, seed: int) -> Said:
    """Fit NGBoost (Duan et al. 2020) with its defaults, except for up to 2,000 trees, stopped by held-out rows."""
    train, held = _parted(len(x), seed)
    model = require("ngboost").NGBRegressor(n_estimators=2000, verbose=False, random_state=seed)
    model.fit(x[train], y[train], X_val=x[held], Y_val=y[held], early_stopping_rounds=50)
    said = model.pred_dist(x_test)
    return Said(np.asarray(said.loc)[None], np.asarray(said.scale)[None])


def boosted_quantiles(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, seed: int) -> Said:
    """Fit scikit-learn's histogram gradient boosting for the mean and for the 5 and 95 % quantiles. The standard deviation of the normal
    distribution combines the distance of the quantiles and a constant, each with a factor chosen by held-out rows."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    train, held = _parted(len(x), seed)

    def said(**loss: Any) -> tuple[np.ndarray, np.ndarray]:
        model = HistGradientBoostingRegressor(
            **loss, learning_rate=0.05, max_iter=1000, early_stopping=True, n_iter_no_change=20, random_state=seed
        ).fit(x[train], y[train])
        return model.predict(x[held]), model.predict(x_test)

    mean, low, high = (
        said(loss="squared_error"),
        said(loss="quantile", quantile=0.05),
        said(loss="quantile", quantile=0.95),
    )
    # quantiles may cross, so a constant is added to the width
    left = y[held] - mean[0]
    widths = [np.maximum(up - down, 0) / (2 * 1.6449) for up, down in zip(high, low, strict=True)]
    even = float(np.sqrt(np.mean(left**2)))
    best, width = np.inf, widths[1]
    for factor in (0.0, *np.geomspace(0.3, 4, 16)):
        for share in np.geomspace(0.05, 1.5, 16):
            scales = [np.sqrt((factor * one) ** 2 + (share * even) ** 2) for one in widths]
            cost = np.mean(np.log(scales[0]) + 0.5 * (left / scales[0]) ** 2)
            if cost < best:
                best, width = cost, scales[1]
    return Said(mean[1][None], width[None], low[1], high[1])


def deep_ensemble(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, seed: int) -> Said:
    """Fit five networks with two layers of 100 units that predict mean and variance (Lakshminarayanan et al. 2017), stopped by held-out rows."""
    members, width, size, epochs, patience = 5, 100, 64, 300, 30
    train, held = _parted(len(x), seed)
    draw = torch.Generator().manual_seed(seed)
    sizes = [x.shape[1], width, width, 2]
    weights: list[Tensor] = []
    for before, after in itertools.pairwise(sizes):
        for shape in ((members, before, after), (members, 1, after)):
            weights.append(nn.Parameter((torch.rand(shape, generator=draw) * 2 - 1) / before**0.5))

    def forward(rows: Tensor, values: list[Tensor]) -> tuple[Tensor, Tensor]:
        for i in range(0, len(values), 2):
            rows = torch.baddbmm(values[i + 1], rows, values[i])
            rows = rows.relu() if i + 2 < len(values) else rows
        return rows[..., 0], F.softplus(rows[..., 1]) + 1e-6

    def cost(rows: Tensor, targets: Tensor, values: list[Tensor]) -> Tensor:
        mean, variance = forward(rows, values)
        return 0.5 * (variance.log() + (targets - mean) ** 2 / variance)

    inputs, targets = torch.as_tensor(x).float(), torch.as_tensor(y).float()
    each = [t[held][None].expand(members, *t[held].shape) for t in (inputs, targets)]
    optimizer = torch.optim.Adam(weights, lr=1e-3, fused=True)
    best = [w.detach().clone() for w in weights]
    least, since = torch.full((members,), torch.inf), 0
    size = min(size, len(train))
    for _ in range(epochs):
        order = torch.stack(
            [torch.as_tensor(train)[torch.randperm(len(train), generator=draw)] for _ in range(members)]
        )
        for rows in order[:, : len(train) // size * size].split(size, 1):
            optimizer.zero_grad()
            cost(inputs[rows], targets[rows], weights).mean(1).sum().backward()
            optimizer.step()
        with torch.no_grad():
            now = cost(*each, weights).mean(1)
            better = now < least
            for kept, weight in zip(best, weights, strict=True):
                kept[better] = weight[better]
            least, since = now.minimum(least), 0 if bool(better.any()) else since + 1
        if since >= patience:
            break
    with torch.no_grad():
        mean, variance = forward(torch.as_tensor(x_test).float().expand(members, *x_test.shape), best)
    return Said(mean.double().numpy(), variance.double().sqrt().numpy())


def _parted(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices of the training rows and of the held-out rows."""
    order = np.random.default_rng(seed).permutation(n)
    held = max(1, round(HELD_OUT * n))
    return order[held:], order[:held]


RIVALS: dict[str, Rival] = {
    "Gaussian process": gaussian_process,
    "NGBoost": ngboost,
    "boosted quantiles": boosted_quantiles,
    "deep ensemble": deep_ensemble,
}
