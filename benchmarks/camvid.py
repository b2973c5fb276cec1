"""Road scenes (CamVid), a class for each pixel: what each risk says of errors, and of people whom no training label shows.

A small U-Net at 240 x 180 learns nine classes; pedestrians and bicyclists are without a label in training and
count neither as errors nor as hits. They are the unknown pixels, to be told from those of the nine classes. neo is fitted on the third of
the training scenes in which they are rarest. Nothing was chosen by these scores; the temperature is that of the validation scenes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from camvid_models import CLASSES, CROP, FIRST, LAST, UNKNOWN, VOID, VOTERS, WIDTHS, UNet, scenes, trained
from sequences import cost_in_passes
from torch import Tensor

from workbench import augment, metrics, neo
from workbench.calibration.scaling import fit_temperature
from workbench.experiments.bench import table

if TYPE_CHECKING:
    import pandas as pd

METHODS = ("plain", "augment", "neo", "sculpt", "sample", "vote last", "vote rank1", "vote whole")
EPOCHS = 6
SEEDS = 1
ROWS = 8  # scenes of which the cost is measured
Maps = dict[str, Tensor]  # a number for each pixel [n, h, w], by kind of risk
Ask = Callable[[Tensor], tuple[Tensor, Maps]]


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Every seed and method."""
    return [
        {"method": method, "seed": seed, "epochs": 1 if smoke else EPOCHS, "rows": 24 if smoke else 0}
        for seed in range(1 if smoke else SEEDS)
        for method in (METHODS if not smoke else ("plain", "neo", "vote last"))
    ]


def run(method: str, seed: int, epochs: int, rows: int) -> list[dict[str, Any]]:
    """One row for each risk of the method."""
    parts = scenes(rows)
    x, y, unknown = parts["test"]
    plain = trained("plain", seed, epochs, rows).unwrap().eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ask = _ask(method, seed, epochs, rows)
        held = parts["validation"]
        counts = held[1] != VOID
        temperature = float(fit_temperature(_everywhere(ask, held[0])[0].movedim(1, -1)[counts], held[1][counts]))
        scores, risks = _everywhere(ask, x)
        cost = cost_in_passes(plain, ask, x[:ROWS], 2 if rows else 15)
    probs, calm = scores.softmax(1), (scores / temperature).softmax(1)
    of = {"dim": 1, "void": VOID}
    quality = {
        "miou": metrics.mean_iou(scores, y, **of),
        "accuracy": metrics.accuracy(scores, y, **of),
        "nll": metrics.categorical_nll(probs, y, **of),
        "ece": metrics.ece(probs, y, **of),
        "nll_tempered": metrics.categorical_nll(calm, y, **of),
        "ece_tempered": metrics.ece(calm, y, **of),
    }
    same = {**{name: value.item() for name, value in quality.items()}, "temperature": temperature, "cost": cost}
    known = y != VOID
    wrong = (scores.argmax(1) != y).double()
    return [
        {
            **same,
            "risk": name,
            "error_auroc": metrics.error_auroc(risk, wrong, mask=known).item(),
            "ause": metrics.ause(risk, wrong, "random", mask=known).item(),
            "unknown_auroc": metrics.auroc(risk[known], risk[unknown]).item(),
        }
        for name, risk in risks.items()
    ]


def _ask(method: str, seed: int, epochs: int, rows: int) -> Ask:
    """What gives class scores and risks of scenes."""
    wrapped = trained(method if method not in ("augment", "neo") else "plain", seed, epochs, rows)
    if method == "plain":
        return functools.partial(_of_scores, wrapped)
    if method == "augment":
        wrapped = augment.Wrapper("flip", output=CLASSES)(wrapped.unwrap()).eval()
    elif method == "neo":
        x, _, unknown = scenes(rows)["train"]
        rarest = unknown.flatten(1).sum(1).argsort(stable=True)[: len(x) // 3]
        wrapped = neo.Wrapper(output=CLASSES)(wrapped.unwrap()).eval().fit(x[rarest])

    def ask(x: Tensor) -> tuple[Tensor, Maps]:
        scores, risk = wrapped(x, return_risk=True)
        return scores, {"vacuitic": risk} if isinstance(risk, Tensor) else {name: risk[name] for name in risk.names()}

    return ask


def _of_scores(net: Any, x: Tensor) -> tuple[Tensor, Maps]:
    """What the class scores of one network say of its doubt."""
    scores = net(x)
    probs = scores.softmax(1)
    entropy = torch.special.entr(probs).sum(1)
    return scores, {"entropy": entropy, "1 - confidence": 1 - probs.amax(1), "- largest score": -scores.amax(1)}


@torch.no_grad()
def _everywhere(ask: Ask, x: Tensor) -> tuple[Tensor, Maps]:
    scores, risks = zip(*(ask(batch) for batch in x.split(16)), strict=True)
    return torch.cat(scores), {name: torch.cat([maps[name] for maps in risks]) for name in risks[0]}


def summary(frame: pd.DataFrame, pictures: Path) -> str:
    """A table of the predictions and one of the risks."""
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
    seeds = "One network a row" if n == 1 else f"Mean of {n} seeds"
    with torch.device("meta"):  # for its shapes alone
        size = sum(p.numel() for p in UNet().parameters())
    widths, crop = ", ".join(map(str, WIDTHS)), f"{CROP[1]} x {CROP[0]}"
    people = " and ".join(f"{name}s" for name in UNKNOWN)
    return f"""{seeds}: a U-Net ({UNet.__name__} of benchmarks/camvid_models.py) of {size:,} parameters for scenes of 240 x 180 pixels, the
stored size. Two convolutions of stride 2 come first, with {FIRST} and {WIDTHS[0]} channels; then {widths} channels at 1/4, 1/8, 1/16 and
1/32, skips that are added, and class scores at 1/4, which are interpolated. {EPOCHS} passes over the 367 training scenes in crops of
{crop}, half of them mirrored: a minute on one core, and not to be held against published numbers, which are of 480 x 360 pixels,
eleven classes and longer training. Every number is of every third test scene, 78 of 233. *Tempered*: after division of the scores by the
temperature that every second validation scene, 51 of 101, chose. *Cost*: processor time of prediction and risk in passes of the plain
network, {ROWS} scenes at a time.

`vote` has {VOTERS} voters: the last {LAST} layers on a shared trunk, rank-one factors on shared weights, or whole networks.
`sample` is dropout in training and {VOTERS} noisy passes, `augment` the scene as it is and mirrored; `augment` and `neo` are
wrapped around the plain network. torch-uncertainty is not beside them: it imports torchvision, whose packaged build is one for CUDA and does
not load with the CPU build of torch that this was measured with.

{_table(first, ["method"], quality)}

Wrong pixels, and those of {people}, which have no label in training. *AUROC*: chance that a wrong (unknown)
pixel is given a higher number than a right (known) one. *AUSE*: area between the curve of errors that remain when the
riskiest pixels are left out and the best possible one; 0 is the best, 1 that of random order.

{_table(frame, ["method", "risk"], ranking)}"""


def _table(frame: pd.DataFrame, by: list[str], columns: dict[str, tuple[str, int]]) -> str:
    import pandas as pd

    rows = []
    for key, group in frame.groupby(by, sort=False):
        row = dict(zip(by, map(str, key), strict=True))
        rows.append(row | {label: f"{group[name].mean():.{digits}f}" for name, (label, digits) in columns.items()})
    return table(pd.DataFrame(rows))
