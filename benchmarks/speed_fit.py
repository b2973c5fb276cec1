"""Whole trainings: `workbench.fit` with and without graphs of its steps, beside a loop by hand over copies of the model."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from speed_clock import middle
from torch import Tensor, nn

from workbench import compose, fit, sculpt, vote

ROWS, BATCH, EPOCHS, ROUNDS = 2048, 64, 32, 3  # 1024 steps


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# what is trained -> the sizes of the layers, voters, and the wrapper of the risk heads
TRAININGS: dict[str, tuple[tuple[int, ...], int, Any]] = {
    "vote, 5 x 1-16-1": ((1, 16, 1), 5, None),
    "vote, 16 x 1-16-1": ((1, 16, 1), 16, None),
    "vote, 5 x 8-50-50-1": ((8, 50, 50, 1), 5, None),
    "vote, 16 x 8-50-50-1": ((8, 50, 50, 1), 16, None),
    "vote of sculpt, last layer, 5 x 8-50-50-1": ((8, 50, 50, 1), 5, sculpt.Wrapper(n_layers=1)),
    "vote of sculpt, three layers, 5 x 8-50-50-1": ((8, 50, 50, 1), 5, sculpt.Wrapper()),
}


def trained(training: str, on: str) -> dict[str, Any]:
    """Seconds of each way to train, taken in turn, and their ratios to the loops by hand."""
    sizes, n, heads = TRAININGS[training]
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, sizes[0], generator=draw)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(ROWS, 1, generator=draw)
    wrapper = vote.Wrapper(n) if heads is None else compose(vote.Wrapper(n), heads)

    def ours(strategy: str | None) -> Callable[[], None]:
        def run() -> None:
            wrapped = wrapper(_mlp(*sizes))
            options: dict[str, Any] = {"epochs": EPOCHS, "batch_size": BATCH, "validation": 0, "standardize": False}
            fit(wrapped, (x, y), strategy=strategy, progress=False, **options)

        return run

    ways = {
        "fit": ours(None),
        "eager": ours("eager"),
        "loop": lambda: _by_hand(_mlp(*sizes[:-1], 1 if heads is None else 2), n, x, y, heads is not None, fused=False),
        "loop_fused": lambda: _by_hand(
            _mlp(*sizes[:-1], 1 if heads is None else 2), n, x, y, heads is not None, fused=True
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(-1, ROUNDS):  # the first one is to get warm
        for name, run in ways.items():
            start = time.process_time_ns()
            run()
            if round_ >= 0:
                seconds[name].append((time.process_time_ns() - start) / 1e9)
    row: dict[str, Any] = {f"{name}_s": middle(values)[0] for name, values in seconds.items()}
    for name in ("eager", "loop", "loop_fused"):
        ratios = [ours / other for ours, other in zip(seconds["fit"], seconds[name], strict=True)]
        row |= dict(zip((f"fit_{name}", f"fit_{name}_low", f"fit_{name}_high"), middle(ratios), strict=True))
    return {"steps": EPOCHS * ROWS // BATCH, **row}


def _by_hand(model: nn.Module, n: int, x: Tensor, y: Tensor, two_heads: bool, fused: bool) -> None:
    """Deep copies, each with its optimizer; with two heads mean and standard deviation, trained as `fit` does."""
    models = [copy.deepcopy(model) for _ in range(n)]
    optimizers = [torch.optim.Adam(each.parameters(), fused=fused or None) for each in models]
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            inputs, targets = x[rows], y[rows]
            for each, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                answer = each(inputs)
                if two_heads:
                    mean, std = answer[:, :1], F.softplus(answer[:, 1:])
                    loss = F.mse_loss(mean, targets) + F.gaussian_nll_loss(mean, targets, std.square())
                else:
                    loss = F.mse_loss(answer, targets)
                loss.backward()
                optimizer.step()


__all__ = ["TRAININGS", "trained"]
