"""How many of the last layers should sculpt's risk heads have of their own? What one, two and three give, and what they cost.

Noise whose standard deviation is known (`data.toy.cubic`), small UCI sets, and classes of images (Fashion-MNIST). Each seed draws the weights
of one network, from which all three start, and rows or a split of its own; everything else is `workbench.fit` with its defaults.
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
IMAGES = 4000  # of each part
EPOCHS = {"toy": 100, "images": 5}
UCI_EPOCHS = 100
BATCH = 64  # rows of a pass whose cost is measured


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Every seed and task; a cell trains all depths, one after another."""
    if smoke:
        return [{"task": "toy", "seed": 0, "epochs": 2}]
    tasks = ("toy", *SETS, "images")
    return [{"task": task, "seed": seed, "epochs": EPOCHS.get(task, UCI_EPOCHS)} for seed in range(5) for task in tasks]


def run(task: str, seed: int, epochs: int) -> list[dict[str, Any]]:
    """One row for each depth.

    Args:
        task: "toy", "images", or a set of UCI.
        seed: of weights, order and rows; of a set of UCI the number of the split.
        epochs: of training.
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
    """Four layers with weights: three of 50 units and the output, or two convolutions, a layer of 50 units and the output."""
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
    """Test NLL in original units, and what the risk says of large errors; where the noise is known, of new rows, how far off it is as well."""
    known = rows.train.sigma is not None
    test = data.toy.cubic(n_train=5000, seed=10_000 + seed).train if known else rows.test
    said = wrapped.predictive(test.x)
    error = (said.mean - test.y).abs()
    row = {"nll": float(-said.log_prob(test.y).double().mean()), "errors": _tells(said.stddev, error)}
    return {**row, "sigma_error": float((said.stddev / test.sigma - 1).abs().median())} if known else row


def _tells(risk: Tensor, error: Tensor) -> float:
    """AUROC of errors above the median by the risk."""
    large = error > error.median()
    return float(auroc(risk[~large].flatten(), risk[large].flatten()))


def _classes(wrapped: Any, rows: data.Data, seed: int) -> dict[str, float]:
    """Test NLL of the mean probabilities, and what aleatoric risk says of wrong answers."""
    scores, risk = wrapped(rows.test.x, return_risk=True)
    wrong = scores.argmax(1) != rows.test.y
    return {
        "nll": float(categorical_nll(scores.softmax(1), rows.test.y)),
        "errors": float(auroc(risk.aleatoric[~wrong], risk.aleatoric[wrong])),
    }


def _cost(wrapped: Any, plain: nn.Module, x: Tensor, depth: int) -> dict[str, float]:
    """A prediction with its risk in passes of the plain network: by operations, and by time."""
    counts = operations(plain, x, backward=False)
    layers = [path for path, module in plain.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    again = sum(counts[path] for path in layers[-depth:])
    times = timed({"wrapped": lambda: wrapped(x, return_risk=True), "plain": lambda: plain(x)}, "cpu")
    ratios = [ours / theirs for ours, theirs in zip(times["wrapped"], times["plain"], strict=True)]
    return {"operations": 1 + again / counts[""], "passes": middle(ratios)[0]}


def summary(frame: pd.DataFrame, images: Path) -> str:
    """A table: quality of each depth, the paired difference to three layers, and costs."""
    import pandas as pd

    rows = []
    beyond: dict[int, list[str]] = {depth: [] for depth in DEPTHS[:-1]}
    for task, of in frame.groupby("task", sort=False):
        by_seed = of.pivot(index="seed", columns="layers", values="nll")
        for depth, some in of.groupby("layers"):
            behind = by_seed[depth] - by_seed[DEPTHS[-1]]
            if depth in beyond and abs(behind.mean()) > 2 * behind.sem():
                beyond[depth].append(f"{task} ({'better' if behind.mean() < 0 else 'worse'})")
            rows.append(
                {
                    "task": str(task),
                    "own layers": NAMES[int(depth)],
                    "NLL": f"{some['nll'].mean():.3f}",
                    "above three layers": "" if depth == DEPTHS[-1] else _spread(behind, 3),
                    "large errors, AUROC": _spread(some["errors"], 3),
                    "error of the noise (%)": _spread(100 * some["sigma_error"].dropna(), 1),
                    "operations": f"{some['operations'].mean():.2f}",
                    "time": f"{some['passes'].median():.2f}",
                }
            )
    told = "; ".join(f"{NAMES[depth]}: {', '.join(tasks) or 'none'}" for depth, tasks in beyond.items())
    return f"""Mean and standard error over {frame["seed"].nunique()} seeds. *NLL*: of test rows, in nats and original units. *Above three
layers*: the difference to the default, with the same weights at the start and the same rows; what lies within two standard errors is noise.
*Large errors*: chance that a row with an error above the median (images: a wrong answer) has a higher aleatoric risk than another. *Error of
the noise*: median of |sigma / true sigma - 1|. *Operations* and *time*: of a prediction of {BATCH} rows with its risk, in passes of the plain
network; of passes as short as these, time is mostly what is done once a call. Networks have four layers with weights.

{table(pd.DataFrame(rows))}

Tasks in which the NLL differs from that of three layers by more than two standard errors: {told}."""


def _spread(values: pd.Series, digits: int) -> str:
    if values.empty:
        return ""
    return f"{values.mean():.{digits}f}" + (f" ± {values.sem():.{digits}f}" if len(values) > 1 else "")
