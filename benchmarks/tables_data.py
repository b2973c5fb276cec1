"""Tables of the benchmark `tables`: UCI tables with their standard splits, and others with random splits."""

from __future__ import annotations

import numpy as np
import torch

from workbench.data import Data, load

UCI = ("boston", "concrete", "energy", "wine-red", "yacht", "kin8nm", "naval", "power", "protein")
OTHERS = ("diabetes", "adult age", "oil of transformers", "friedman1", "friedman2", "friedman3", "robot arm")
# maximum numbers of training and test rows, so that an exact Gaussian process is possible
MOST_ROWS, MOST_TEST = (
    2000,
    1000,
)


def rows_of(name: str, split: int, most: int = MOST_ROWS) -> Data:
    """Return a table with a maximum number of training rows, drawn by the split.

    Args:
        name: one of `UCI` or `OTHERS`.
        split: number of the standard split, or seed of the random one.
        most: maximum number of training rows.
    """
    if name in UCI or name == "diabetes":
        data = load(name, split=split)
        train, test = (data.train.x, data.train.y), (data.test.x, data.test.y)
    else:
        x, y = _drawn(name, split)
        tested = min(MOST_TEST, len(x) // 5)
        train, test = (x[tested:], y[tested:]), (x[:tested], y[:tested])
    draw = torch.Generator().manual_seed(split)
    (x, y), (x_test, y_test) = (
        (x[chosen], y[chosen])
        for (x, y), limit in ((train, most), (test, MOST_TEST))
        for chosen in [torch.randperm(len(x), generator=draw)[:limit].sort().values]
    )
    return Data.from_arrays(x, y, test=(x_test, y_test), name=name)


def _drawn(name: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of a table without standard splits, in random order."""
    from sklearn import datasets

    draw = np.random.default_rng(seed)
    if name == "adult age":  # predicted from the other thirteen columns
        adult = load("adult")
        column = [one.name for one in adult.features].index("age")
        x, y = np.delete(adult.train.x.numpy(), column, 1), adult.train.x[:, column].numpy()
        x = np.concatenate([x, adult.train.y.numpy()[:, None]], 1)
    elif name == "oil of transformers":  # oil temperature, predicted from the loads of the same hour
        one = load("ett-h1", input_length=1, horizon=1).train.x[:, :, 0].numpy()
        x, y = one[:, :6], one[:, 6]
    elif name == "robot arm":  # distance of the hand from eight joint angles: smooth, with sensor noise only
        angles = draw.uniform(-np.pi / 2, np.pi / 2, (4000, 8))
        bent = angles.cumsum(1) * 0.5
        distance = np.hypot(np.cos(bent).sum(1), np.sin(bent).sum(1)) / 8
        x, y = angles, distance + draw.normal(0, 0.01 + 0.03 * (angles[:, 0] > 0), len(angles))
    else:
        make = getattr(datasets, f"make_{name}")
        noise = {"friedman1": 1.0, "friedman2": 100.0, "friedman3": 0.1}[name]
        x, y = make(n_samples=1000, noise=noise, random_state=seed)
    order = draw.permutation(len(x))[: MOST_ROWS + MOST_TEST]
    return torch.as_tensor(x[order]).float(), torch.as_tensor(y[order]).float().reshape(-1, 1)
