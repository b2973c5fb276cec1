"""Training throughput (rows per second) of `fit` for each wrapper, compared with a hand-written loop for the plain network, and quality of both.

Fashion-MNIST with a LeNet-5 and CIFAR-10 (JPEG copies) with a small CNN; on a GPU also a ResNet-18 in bfloat16 autocast, with random crops and
mirror images. Both trainings use the same rows, batches and learning rates, and are timed in full: from rows in CPU memory to the last step.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import speed_models
import torch
from ood_models import LeNet5, images
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, fit, metrics, neo, sample, sculpt, vote
from workbench.distributions import LogitNormal
from workbench.experiments.bench import table
from workbench.experiments.environment import processor

if TYPE_CHECKING:
    import pandas as pd

BATCH, LR, RESNET_LR = 256, 0.003, 0.002
EPOCHS = {"lenet5": 4, "cnn": 4, "resnet18": 30}
DATA = {"lenet5": "fashion-mnist", "cnn": "cifar10-jpeg", "resnet18": "cifar10-jpeg"}
SEEDS = 3
WRAPPERS: dict[str, Callable[[], Any]] = {
    "plain": compose,
    "vote": lambda: vote.Wrapper(5, output="logits"),
    "vote last": lambda: vote.Wrapper(5, share=1, output="logits"),
    "vote rank1": lambda: vote.Wrapper(5, share="rank1", output="logits"),
    "sculpt 1": lambda: sculpt.Wrapper(LogitNormal, n_layers=1),
    "sample": lambda: sample.Wrapper(5, output="logits"),
    "neo": lambda: neo.Wrapper(output="logits"),
    "vote of sculpt last": lambda: compose(
        vote.Wrapper(5, share=1, output="logits"), sculpt.Wrapper(LogitNormal, n_layers=1)
    ),
}
NETWORKS = {"vote": 5}  # number of plain networks with the same total number of parameters
QUALITY = ("vote last", "vote")  # methods with the ResNet-18


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each seed, model and wrapper; those of the ResNet-18, on a GPU with one seed, come last."""
    if smoke:
        return [_cell("lenet5", method, 0, "cpu", 1, 640) for method in ("vote", "sculpt 1")]
    small = [
        _cell(model, method, seed, on)
        for on in ("cuda", "cpu")
        for seed in range(SEEDS)
        for model in ("lenet5", "cnn")
        for method in WRAPPERS
    ]
    return small + [_cell("resnet18", method, 0, "cuda") for method in QUALITY]


def _cell(model: str, method: str, seed: int, on: str, epochs: int = 0, rows: int = 0) -> dict[str, Any]:
    return {
        **{"seed": seed, "data": DATA[model], "model": model, "method": method},
        **{"epochs": epochs or EPOCHS[model], "rows": rows, "on": on},
    }


def possible(cell: dict[str, Any]) -> str:
    """Return why a cell can't run here, "" if it can."""
    from workbench.data.files import is_local

    if cell["on"] == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA device"
    return "" if is_local(cell["data"]) else f"{cell['data']} is not on this machine"


class Shifted(nn.Module):
    """Augmentation in training mode: shift each image [n, c, h, w] by up to four pixels and mirror half of them."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        n, _, height, width = x.shape
        padded = F.pad(x, (4, 4, 4, 4))
        top, left = torch.randint(9, (2, n, 1), device=x.device)
        across = torch.arange(width, device=x.device).expand(n, width)
        across = torch.where(torch.rand(n, 1, device=x.device) < 0.5, width - 1 - across, across) + left
        down = torch.arange(height, device=x.device) + top
        rows = torch.arange(n, device=x.device)[:, None, None]
        return padded[rows, :, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)


def build(model: str, seed: int) -> nn.Module:
    """Return a freshly initialized network on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if model == "lenet5":
            return LeNet5()
        entry, body, head = speed_models.MODELS[model](True)
        return nn.Sequential(*([Shifted()] if model == "resnet18" else []), entry, body, head)


@dataclass(frozen=True)
class Rows:
    """Standardized images [n, c, h, w] and class numbers [n], on the CPU."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@functools.lru_cache(maxsize=1)
def rows_of(name: str, n: int) -> Rows:
    """Return standardized rows of a data set; n of each part, 0 for all."""
    loaded = images(name, n)
    mean, scale = loaded.train.x.mean((0, 2, 3), keepdim=True), loaded.train.x.std((0, 2, 3), keepdim=True)
    train, test = ((part.x - mean) / scale for part in (loaded.train, loaded.test))
    return Rows(train, loaded.train.y, test, loaded.test.y)


def run(seed: int, data: str, model: str, method: str, epochs: int, rows: int, on: str) -> dict[str, Any]:
    """Train by `fit` and by hand, and return one row of times and scores."""
    split = rows_of(data, rows)
    low = torch.autocast(on, torch.bfloat16) if model == "resnet18" else contextlib.nullcontext()
    lr = RESNET_LR if model == "resnet18" else LR
    with low, torch.random.fork_rng():
        few = Rows(split.x[: 4 * BATCH], split.y[: 4 * BATCH], split.test_x, split.test_y)
        for start in (few, split):  # the first training is a warm-up
            wrapped = WRAPPERS[method]()(build(model, seed)).to(on)
            seconds = timed(lambda start=start, wrapped=wrapped: fitted(wrapped, start, epochs, lr, seed), on)
            network = build(model, seed).to(on)
            torch.manual_seed(seed)
            hand = timed(lambda start=start, network=network: by_hand(network, start, epochs, lr, on), on)
        row = {
            "hardware": torch.cuda.get_device_name() if on == "cuda" else processor(),
            "rows_s": epochs * len(split.x) / seconds,
            "hand_rows_s": epochs * len(split.x) / hand,
            "ratio": hand / seconds,
            **scores(network, split, on, "hand_"),
            **scores(wrapped, split, on),
        }
        if on == "cuda":
            row["waits"] = waits(
                lambda part: fitted(WRAPPERS[method]()(build(model, seed)).to(on), part, 1, lr, seed), split
            )
    return row


def timed(training: Callable[[], object], device: str) -> float:
    """Return wall-clock seconds."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    training()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def fitted(wrapped: Any, rows: Rows, epochs: int, lr: float, seed: int) -> None:
    """Train by `fit`, with nothing that the loop does not do."""
    options: dict[str, Any] = {"validation": 0, "standardize": False, "progress": False}
    fit(wrapped, (rows.x, rows.y), epochs=epochs, batch_size=BATCH, lr=lr, seed=seed, **options)


def by_hand(network: nn.Module, rows: Rows, epochs: int, lr: float, device: str) -> None:
    """Train by the usual loop, made fast: rows on the device, a fused optimizer, and no reading of the loss."""
    x, y = rows.x.to(device), rows.y.to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=0.0, fused=True)
    steps = epochs * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, total_steps=steps, pct_start=0.05, cycle_momentum=False
    )
    network.train()
    for _ in range(epochs):
        for part in torch.randperm(len(x), device=device).split(BATCH):
            loss = F.cross_entropy(network(x[part]), y[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def scores(model: Any, rows: Rows, device: str, prefix: str = "") -> dict[str, float]:
    """Return accuracy, negative log-likelihood, and AUROC of the entropy for wrong answers, on the test rows."""
    model.eval()
    with torch.no_grad():
        answers = [model(part.to(device)).float().softmax(1).cpu() for part in rows.test_x.split(1000)]
    probs = torch.cat(answers)
    risks = torch.special.entr(probs).sum(1)
    right = probs.argmax(1) == rows.test_y
    both = bool(right.any()) and not bool(right.all())
    return {
        f"{prefix}accuracy": metrics.accuracy(probs, rows.test_y).item(),
        f"{prefix}nll": metrics.categorical_nll(probs, rows.test_y).item(),
        f"{prefix}auroc_wrong": metrics.auroc(risks[right], risks[~right]).item() if both else float("nan"),
    }


def waits(training: Callable[[Rows], None], rows: Rows) -> float:
    """Return how often a step waits for the GPU, from the warnings of torch that twice as many rows add."""
    counts = []
    for batches in (8, 16):
        part = Rows(rows.x[: batches * BATCH], rows.y[: batches * BATCH], rows.test_x, rows.test_y)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                training(part)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(warning.message) for warning in caught))
    return (counts[1] - counts[0]) / 8


# ---- the page
INTRODUCTION = f"""*To the loop*: rows per second of `fit`, as a share of those of the loop, which trains one plain network; the number after the
slash is the share that as many plain networks as voters would have, trained one after another. *Wrong*: AUROC of the entropy of the prediction
for detecting wrong answers. *Waits*: number of times a step waits for the GPU. Batches have {BATCH} rows; means over seeds."""


def summary(frame: pd.DataFrame, images: Path) -> str:
    """Return a table for each model and device."""
    sections = [INTRODUCTION]
    for (model, _, hardware), part in frame.groupby(["model", "on", "hardware"], sort=False):
        seeds, epochs = part["seed"].nunique(), part["epochs"].iloc[0]
        sections.append(
            f"### {model}, {DATA[str(model)]}, {hardware}: {epochs} epochs, {seeds} seed{'s' * (seeds > 1)}"
        )
        sections.append(_section(part))
    return "\n\n".join(sections)


def _section(part: pd.DataFrame) -> str:
    import pandas as pd

    names = ["rows_s", "ratio", "accuracy", "nll", "auroc_wrong", *(["waits"] if "waits" in part else [])]
    means = part.groupby("method", sort=False)[names].mean()
    hand = part[["hand_rows_s", "hand_accuracy", "hand_nll", "hand_auroc_wrong"]].mean()
    lines = [
        ["the loop", f"{hand['hand_rows_s']:,.0f}", "1", *_quality(hand, "hand_"), "0"],
        *(
            [
                *(str(method), f"{row['rows_s']:,.0f}"),
                f"{row['ratio']:.2f}" + (f" / {1 / NETWORKS[str(method)]:.2f}" if method in NETWORKS else ""),
                *_quality(row),
                f"{row['waits']:.2g}" if row.get("waits") == row.get("waits") and "waits" in row else "",
            ]
            for method, row in means.iterrows()
        ),
    ]
    columns = ["method", "rows per second", "to the loop", "accuracy", "NLL", "wrong", "waits"]
    return table(pd.DataFrame(lines, columns=columns))


def _quality(row: Any, prefix: str = "") -> list[str]:
    return [
        f"{row[f'{prefix}{name}']:.{digits}f}" for name, digits in (("accuracy", 3), ("nll", 3), ("auroc_wrong", 3))
    ]
