"""Wrappers grouped by what they take over from a model, and a training loop as users write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from workbench import compose, sample, sculpt, vote

# wrappers that replace parameters of the given model, so that an optimizer made for it does not train them
TAKING: dict[str, Callable[[], Any]] = {
    "vote": lambda: vote.Wrapper(3),
    "vote rank1": lambda: vote.Wrapper(3, share="rank1"),
    "vote last": lambda: vote.Wrapper(3, share=1),
    "vote of sculpt": lambda: compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1)),
}
ADDING: dict[str, Callable[[], Any]] = {"sculpt": lambda: sculpt.Wrapper(n_layers=1)}
# wrappers that train only the given model's own parameters
SHARING: dict[str, Callable[[], Any]] = {"plain": compose, "sample": lambda: sample.Wrapper(3)}
ALL = {**TAKING, **ADDING, **SHARING, "sample learned": lambda: sample.Wrapper(3, trainable=True)}


def data(rows: int = 9) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3), torch.randn(rows, 1)


def steps(wrapped: Any, *opts: torch.optim.Optimizer, n: int = 3) -> None:
    """Run a training loop as users write it."""
    for _ in range(n):
        x, y = data()
        for opt in opts:
            opt.zero_grad()
        wrapped.loss(nn.MSELoss(), x, y).backward()
        for opt in opts:
            opt.step()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)
