"""Segmentation of road scenes (CamVid): how well does each risk detect wrong pixels, and people, who have no label in training?

A small U-Net learns nine classes at 240 x 180 pixels. Pedestrians and bicyclists have no label in training and count neither as errors nor as
hits; they are the unknown pixels, to be told from those of the nine classes. neo is fitted on the third of the training scenes in which they are
rarest. Nothing was chosen by these scores; the temperature is fitted on validation scenes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from camvid_models import CLASSES, CROP, FIRST, LAST, UNKNOWN, VOID, VOTERS, WIDTHS, UNet, scenes, trained
from speed_clock import cost_in_passes
from torch import Tensor

from workbench import augment, metrics, neo
from workbench.calibration.scaling import fit_temperature
from workbench.experiments.bench import table

if TYPE_CHECKING:
    import pandas as pd

METHODS = ("plain", "augment", "neo", "sculpt", "sample", "vote last", "vote rank1", "vote whole")
EPOCHS = 6
SEEDS = 1
ROWS = 8  # scenes for which the cost is measured
Maps = dict[str, Tensor]  # risk of each pixel [n, h, w], by kind of risk
Predict = Callable[[Tensor], tuple[Tensor, Maps]]


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each seed and method."""
    return [
        {"method": method, "seed": seed, "epochs": 1 if smoke else EPOCHS, "rows": 24 if smoke else 0}
        for seed in range(1 if smoke else SEEDS)
        for method in (METHODS if not smoke else ("plain", "neo", "vote last"))
    ]


def run(method: str, seed: int, epochs: int, rows: int) -> list[dict[str, Any]]:
    """Return one row for each risk of the method."""
    parts = scenes(rows)
    x, y, unknown = parts["test"]
    plain = trained("plain", seed, epochs, rows).unwrap().eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        predict = _predictor(method, seed, epochs, rows)
        validation = parts["validation"]
        labelled = validation[1] != VOID
        temperature = float(
            fit_temperature(_in_batches(predict, validation[0])[0].movedim(1, -1)[labelled], validation[1][labelled])
        )
        scores, risks = _in_batches(predict, x)
        cost = cost_in_passes(plain, predict, x[:ROWS], 2 if rows else 15)
    probs, tempered = scores.softmax(1), (scores / temperature).softmax(1)
    options = {"dim": 1, "void": VOID}
    quality = {
        "miou": metrics.mean_iou(scores, y, **options),
        "accuracy": metrics.accuracy(scores, y, **options),
        "nll": metrics.categorical_nll(probs, y, **options),
        "ece": metrics.ece(probs, y, **options),
        "nll_tempered": metrics.categorical_nll(tempered, y, **options),
        "ece_tempered": metrics.ece(tempered, y, **options),
    }
    common = {**{name: value.item() for name, value in quality.items()}, "temperature": temperature, "cost": cost}
    known = y != VOID
    wrong = (scores.argmax(1) != y).double()
    return [
        {
            **common,
            "risk": name,
            "error_auroc": metrics.error_auroc(risk, wrong, mask=known).item(),
            "ause": metrics.ause(risk, wrong, "random", mask=known).item(),
            "unknown_auroc": metrics.auroc(risk[known], risk[unknown]).item(),
        }
        for name, risk in risks.items()
    ]


def _predictor(method: str, seed: int, epochs: int, rows: int) -> Predict:
    """Return a function from scenes to class scores and risks."""
    wrapped = trained(method if method not in ("augment", "neo") else "plain", seed, epochs, rows)
    if method == "plain":
        return functools.partial(_score_risks, wrapped)
    if method == "augment":
        wrapped = augment.Wrapper("flip", output=CLASSES)(wrapped.unwrap()).eval()
    elif method == "neo":
        x, _, unknown = scenes(rows)["train"]
        rarest = unknown.flatten(1).sum(1).argsort(stable=True)[: len(x) // 3]
        wrapped = neo.Wrapper(output=CLASSES)(wrapped.unwrap()).eval().fit(x[rarest])

    def predict(x: Tensor) -> tuple[Tensor, Maps]:
        scores, risk = wrapped(x, return_risk=True)
        return scores, {"vacuitic": risk} if isinstance(risk, Tensor) else {name: risk[name] for name in risk.names()}

    return predict


def _score_risks(net: Any, x: Tensor) -> tuple[Tensor, Maps]:
    """Return the class scores of one network and the uncertainty measures that follow from them."""
    scores = net(x)
    probs = scores.softmax(1)
    entropy = torch.special.entr(probs).sum(1)
    return scores, {"entropy": entropy, "1 - confidence": 1 - probs.amax(1), "- largest score": -scores.amax(1)}


@torch.no_grad()
def _in_batches(predict: Predict, x: Tensor) -> tuple[Tensor, Maps]:
    scores, risks = zip(*(predict(batch) for batch in x.split(16)), strict=True)
    return torch.cat(scores), {name: torch.cat([maps[name] for maps in risks]) for name in risks[0]}


def summary(frame: pd.DataFrame, pictures: Path) -> str:
    """Return a table of the predictions and one of the risks."""
    quality = {
        "miou": ("mIoU", 3),
        "accuracy": ("accuracy", 3),
        "nll": ("NLL", 3),
        "ece": ("ECE", 3),
        "temperature": ("temperature", 2),
        "nll_tempered": ("NLL, tempered", 3),
        "ece_tempered": ("ECE, tempered", 3),
        "cost": ("cost", 1),
    }
    ranking = {"error_auroc": ("errors, AUROC", 3), "ause": ("errors, AUSE", 3), "unknown_auroc": ("unknown, AUROC", 3)}
    first = frame.drop_duplicates(["method", "seed"])
    n = frame["seed"].nunique()
    seeds = "One network per row" if n == 1 else f"Mean of {n} seeds"
    with torch.device("meta"):  # only shapes are needed
        size = sum(p.numel() for p in UNet().parameters())
    widths, crop = ", ".join(map(str, WIDTHS)), f"{CROP[1]} x {CROP[0]}"
    people = " and ".join(f"{name}s" for name in UNKNOWN)
    return f"""{seeds}: a U-Net ({UNet.__name__} in benchmarks/camvid_models.py) with {size:,} parameters for scenes of 240 x 180 pixels, the
stored size. Two convolutions of stride 2 come first, with {FIRST} and {WIDTHS[0]} channels, followed by {widths} channels at 1/4, 1/8, 1/16 and
1/32 of the resolution, with additive skips; class scores are computed at 1/4 and interpolated. Training takes {EPOCHS} passes over the 367
training scenes in crops of {crop}, half of them mirrored: a minute on one core. Do not compare with published numbers, which are for
480 x 360 pixels, eleven classes and longer training. All numbers are for every third test scene, 78 of 233. *Tempered*: scores divided by a
temperature that was fitted on every second validation scene, 51 of 101. *Cost*: processor time of prediction and risk, in forward passes of the
plain network, with batches of {ROWS} scenes.

`vote` has {VOTERS} voters: *last* gives each its own last {LAST} layers on a shared trunk, *rank1* its own rank-one factors on shared weights,
*whole* a whole network. `sample` trains with dropout and takes {VOTERS} noisy passes; `augment` averages over the scene and its mirror image;
`augment` and `neo` wrap the trained plain network. torch-uncertainty is not compared: it imports torchvision, whose packaged build needs CUDA
and does not load with the CPU build of torch that was used here.

{_table(first, ["method"], quality)}

How well each risk detects wrong pixels (*errors*) and pixels of {people}, which have no label in training (*unknown*). *AUROC*:
probability that a wrong (unknown) pixel has a higher risk than a right (known) one. *AUSE*: area between the curve of the error that remains
when the riskiest pixels are left out and the best possible such curve; 0 is perfect, 1 is random order.

{_table(frame, ["method", "risk"], ranking)}"""


def _table(frame: pd.DataFrame, by: list[str], columns: dict[str, tuple[str, int]]) -> str:
    import pandas as pd

    rows = []
    for key, group in frame.groupby(by, sort=False):
        row = dict(zip(by, map(str, key), strict=True))
        rows.append(row | {label: f"{group[name].mean():.{digits}f}" for name, (label, digits) in columns.items()})
    return table(pd.DataFrame(rows))
