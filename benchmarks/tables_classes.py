"""Classification in the benchmark `tables`: who earns more than 50,000 $ a year (all rows of Adult), compared with trees and networks."""

from __future__ import annotations

import copy
import math
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, fit, models, vote
from workbench.data import Data, load
from workbench.metrics import accuracy, categorical_nll, ece

if TYPE_CHECKING:
    import pandas as pd

CLASSES = "adult income"
MOST_ROWS, EPOCHS = 32_561, 20  # all rows; epochs of our trainings
FOLDS = 5
DECAYS = (0.02, 0.5)  # as in the recipe of `tables`
BOOSTED = "boosted trees"
MEMBERS, BATCH, PATIENCE, HELD_OUT = 5, 256, 5, 0.1  # of the networks in plain torch

INTRODUCTION = f"""Whether a person in a census earns more than 50,000 $ a year (Adult), with the published split. *Tabular* is the recipe
above for classes: `models.tabular(data)`, ten voters, `fit(..., folds={FOLDS}, weight_decay={DECAYS})`. *One network* is the same network
without voters, trained by `fit` with its defaults. *Boosted trees* are scikit-learn's histogram boosting with its defaults, stopped by
held-out rows. *MLP* is a network with two layers of 100 units in plain torch, stopped by held-out rows, and *deep ensemble* is {MEMBERS} of
them (`benchmarks/tables_classes.py`). Our trainings have {EPOCHS} epochs instead of the 100 of `fit`, to save time. There are too many rows
for a Gaussian process. ECE has 15 bins."""


def ours(data: Data, method: str, epochs: int, seed: int) -> Tensor:
    """Return probabilities [rows, classes] of the test rows by our methods."""
    voters = method == "tabular"
    wrapper = vote.Wrapper(len(DECAYS) * FOLDS, output="logits") if voters else compose(output="logits")
    wrapped = wrapper(models.tabular(data))
    how: dict[str, Any] = {"folds": FOLDS, "weight_decay": DECAYS} if voters else {}
    fit(wrapped, data, epochs=epochs, seed=seed, progress=False, **how)
    with torch.no_grad():
        return torch.cat([wrapped(rows) for rows in data.test.x.split(2048)]).softmax(-1)


def boosted_trees(data: Data, seed: int) -> Tensor:
    """Return probabilities by scikit-learn's histogram gradient boosting with its defaults, stopped by held-out rows."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    model = HistGradientBoostingClassifier(early_stopping=True, max_iter=1000, random_state=seed)
    model.fit(data.train.x.numpy(), data.train.y.numpy())
    return torch.as_tensor(model.predict_proba(data.test.x.numpy()))


def by_hand(data: Data, seed: int, members: int) -> Tensor:
    """Return mean probabilities of networks with two layers of 100 units on standardized columns, each stopped by held-out rows."""
    mean, scale = data.train.x.mean(0), data.train.x.std(0)
    x, x_test = ((rows - mean) / scale.where(scale > 0, 1) for rows in (data.train.x, data.test.x))
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=draw)
    held, train = order[: round(HELD_OUT * len(x))], order[round(HELD_OUT * len(x)) :]
    probabilities = []
    for _ in range(members):
        net = nn.Sequential(nn.Linear(x.shape[1], 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 2))
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
        least, best, since = math.inf, copy.deepcopy(net.state_dict()), 0
        while since < PATIENCE:
            for rows in train[torch.randperm(len(train), generator=draw)].split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(net(x[rows]), data.train.y[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                now = float(F.cross_entropy(net(x[held]), data.train.y[held]))
            since = 0 if now < least else since + 1
            if now < least:
                least, best = now, copy.deepcopy(net.state_dict())
        net.load_state_dict(best)
        with torch.no_grad():
            probabilities.append(net(x_test).softmax(-1))
    return torch.stack(probabilities).mean(0)


METHODS = ("tabular", "one network", BOOSTED, "MLP", "deep ensemble")


def run_classes(method: str, seed: int, epochs: int, rows: int) -> dict[str, Any]:
    """Return scores on the test rows of Adult.

    Args:
        method: one of `METHODS`.
        seed: seed of all draws.
        epochs: epochs of our trainings.
        rows: maximum number of training rows.
    """
    start, adult = time.process_time(), load("adult")
    drawn = torch.randperm(len(adult.train), generator=torch.Generator().manual_seed(seed))[:rows].sort().values
    data = Data.from_arrays(
        adult.train.x[drawn],
        adult.train.y[drawn],
        test=(adult.test.x, adult.test.y),
        classes=adult.classes,
        name=CLASSES,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if method in ("MLP", "deep ensemble"):
            probabilities = by_hand(data, seed, 1 if method == "MLP" else MEMBERS)
        else:
            probabilities = boosted_trees(data, seed) if method == BOOSTED else ours(data, method, epochs, seed)
    return {
        **scores(probabilities, data.test.y),
        "train": len(data.train),
        "cost": time.process_time() - start,
        **({"package": f"scikit-learn {version('scikit-learn')}"} if method == BOOSTED else {}),
    }


def scores(probabilities: Tensor, y: Tensor) -> dict[str, float]:
    """Return scores of probabilities [rows, classes] for true classes [rows]."""
    return {
        "nll": float(categorical_nll(probabilities, y)),
        "accuracy": float(accuracy(probabilities, y)),
        "ece": float(ece(probabilities, y)),
    }


def lines(frame: pd.DataFrame) -> list[dict[str, str]]:
    """Return a line for each method, with means over seeds."""
    rows = []
    for method in METHODS:
        here = frame[frame["method"] == method]
        if len(here):
            score = {"NLL": "nll", "accuracy": "accuracy", "ECE": "ece"}
            rows.append(
                {
                    "method": method,
                    "rows": f"{int(here['train'].max()):,}",
                    "seeds": str(len(here)),
                    **{name: f"{here[column].mean():.4f}" for name, column in score.items()},
                    "processor time (s)": f"{here['cost'].median():.0f}",
                }
            )
    return rows
