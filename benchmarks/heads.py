"""How many of the last layers should sculpt's risk heads copy? Quality and cost with one, two and three layers.

The tasks are a curve with noise of known standard deviation (`data.toy.cubic`), small UCI sets, and classes of images (Fashion-MNIST). For each
seed all three depths start from the same network and use the same rows or split; everything else is `workbench.fit` with its defaults.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from speed_clock import middle, operations, timed
from torch import Tensor, nn

from workbench import compose, data, fit, sculpt
from workbench.distributions import LogitNormal
from workbench.experiments.bench import table
from workbench.metrics import auroc, categorical_nll

if TYPE_CHECKING:
    import pandas as pd

DEPTHS = (1, 2, 3)  # last layer, last block, three layers
NAMES = {1: "last layer", 2: "last two", 3: "three (default)"}
SETS = ("boston", "concrete", "energy", "wine-red", "yacht")
IMAGES = 4000  # training images, and test images
EPOCHS = {"toy": 100, "images": 5}
UCI_EPOCHS = 100
BATCH = 64  # batch size at which the cost is measured


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each seed and task; a cell trains all depths, one after another."""
    if smoke:
        return [{"task": "toy", "seed": 0, "epochs": 2}]
    tasks = ("toy", *SETS, "images")
    return [{"task": task, "seed": seed, "epochs": EPOCHS.get(task, UCI_EPOCHS)} for seed in range(5) for task in tasks]


def run(task: str, seed: int, epochs: int) -> list[dict[str, Any]]:
    """Return one row for each depth.

    Args:
        task: "toy", "images", or a UCI set.
        seed: seed of weights, order and rows; for a UCI set also the number of the split.
        epochs: epochs of training.
    """
    rows = _rows(task, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _network(task, rows.train.x.shape[1])
        out = []
        for depth in DEPTHS:
            heads = sculpt.Wrapper(LogitNormal, n_layers=depth, output="logits") if task == "images" else None
            wrapped: Any = compose(heads or sculpt.Wrapper(n_layers=depth))(copy.deepcopy(net))
            x = rows.train.x[:BATCH]
            plain = copy.deepcopy(net).eval()
            fit(wrapped, rows, epochs=epochs, seed=seed, progress=False)
            wrapped.eval()
            with torch.no_grad():
                score = _classes if task == "images" else _values
                out.append({"layers": depth, **score(wrapped, rows, seed), **_cost(wrapped, plain, x, depth)})
    return out


@functools.cache
def _images() -> data.Data:
    return data.load("fashion-mnist", n_train=IMAGES, n_test=IMAGES)


def _rows(task: str, seed: int) -> data.Data:
    if task == "toy":
        return data.toy.cubic(n_train=1000, seed=seed)
    return _images() if task == "images" else data.load(task, split=seed)


def _network(task: str, inputs: int) -> nn.Sequential:
    """Return a network with four layers: three of 50 units and the output, or two convolutions, one of 50 units and the output."""
    if task != "images":
        return nn.Sequential(
            nn.Linear(inputs, 50),
            nn.ReLU(),
            nn.Linear(50, 50),
            nn.ReLU(),
            nn.Linear(50, 50),
            nn.ReLU(),
            nn.Linear(50, 1),
        )
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(784, 50), nn.ReLU(), nn.Linear(50, 10)),
    )


def _values(wrapped: Any, rows: data.Data, seed: int) -> dict[str, float]:
    """Return the test NLL in original units and the AUROC for large errors; if the noise is known, use new rows and add its error."""
    known = rows.train.sigma is not None
    test = data.toy.cubic(n_train=5000, seed=10_000 + seed).train if known else rows.test
    predictive = wrapped.predictive(test.x)
    error = (predictive.mean - test.y).abs()
    row = {
        "nll": float(-predictive.log_prob(test.y).double().mean()),
        "errors": _large_error_auroc(predictive.stddev, error),
    }
    return {**row, "sigma_error": float((predictive.stddev / test.sigma - 1).abs().median())} if known else row


def _large_error_auroc(risk: Tensor, error: Tensor) -> float:
    """Return the AUROC of the risk for errors above the median."""
    large = error > error.median()
    return float(auroc(risk[~large].flatten(), risk[large].flatten()))


def _classes(wrapped: Any, rows: data.Data, seed: int) -> dict[str, float]:
    """Return the test NLL and the AUROC of aleatoric risk for wrong answers."""
    scores, risk = wrapped(rows.test.x, return_risk=True)
    wrong = scores.argmax(1) != rows.test.y
    return {
        "nll": float(categorical_nll(scores.softmax(1), rows.test.y)),
        "errors": float(auroc(risk.aleatoric[~wrong], risk.aleatoric[wrong])),
    }


def _cost(wrapped: Any, plain: nn.Module, x: Tensor, depth: int) -> dict[str, float]:
    """Return the cost of a prediction with its risk relative to a plain pass: by operations, and by time."""
    counts = operations(plain, x, backward=False)
    layers = [path for path, module in plain.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    again = sum(counts[path] for path in layers[-depth:])
    times = timed({"wrapped": lambda: wrapped(x, return_risk=True), "plain": lambda: plain(x)}, "cpu")
    ratios = [ours / theirs for ours, theirs in zip(times["wrapped"], times["plain"], strict=True)]
    return {"operations": 1 + again / counts[""], "passes": middle(ratios)[0]}


def summary(frame: pd.DataFrame, images: Path) -> str:
    """Return a table: quality of each depth, the paired difference to three layers, and costs."""
    import pandas as pd

    rows = []
    significant: dict[int, list[str]] = {depth: [] for depth in DEPTHS[:-1]}
    for task, runs in frame.groupby("task", sort=False):
        by_seed = runs.pivot(index="seed", columns="layers", values="nll")
        for depth, group in runs.groupby("layers"):
            difference = by_seed[depth] - by_seed[DEPTHS[-1]]
            if depth in significant and abs(difference.mean()) > 2 * difference.sem():
                significant[depth].append(f"{task} ({'better' if difference.mean() < 0 else 'worse'})")
            rows.append(
                {
                    "task": str(task),
                    "layers of the heads": NAMES[int(depth)],
                    "NLL": f"{group['nll'].mean():.3f}",
                    "NLL minus that of three": "" if depth == DEPTHS[-1] else _spread(difference, 3),
                    "large errors, AUROC": _spread(group["errors"], 3),
                    "error of the noise (%)": _spread(100 * group["sigma_error"].dropna(), 1),
                    "operations": f"{group['operations'].mean():.2f}",
                    "time": f"{group['passes'].median():.2f}",
                }
            )
    differing = "; ".join(f"{NAMES[depth]}: {', '.join(tasks) or 'none'}" for depth, tasks in significant.items())
    return f"""Means and standard errors over {frame["seed"].nunique()} seeds; all networks have four layers with weights. *NLL*: of test rows,
in nats and original units. *NLL minus that of three*: difference to the default of three layers, with the same initial weights and rows;
differences within two standard errors are noise. *Large errors*: AUROC of aleatoric risk for detecting rows with an error above the median
(for images, wrong answers). *Error of the noise*: median of |sigma / true sigma - 1|. *Operations* and *time*: cost of a prediction of {BATCH}
rows with its risk, relative to a pass of the plain network; passes this short take mostly the fixed time of a call.

{table(pd.DataFrame(rows))}

Tasks in which the NLL differs from that of three layers by more than two standard errors: {differing}."""


def _spread(values: pd.Series, digits: int) -> str:
    if values.empty:
        return ""
    return f"{values.mean():.{digits}f}" + (f" ± {values.sem():.{digits}f}" if len(values) > 1 else "")
