"""Networks, voters and rows for the tests of cross-fitting."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from workbench import compose, fit, sculpt, vote

quiet = functools.partial(fit, progress=False, epochs=4, batch_size=8)


def net(outputs: int = 1, seed: int = 0, hidden: int = 6) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def wrapped(voters: int = 6, seed: int = 1, strategy: str = "auto", head: bool = True, **kwargs: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parts = [vote.Wrapper(voters, strategy=strategy), *([sculpt.Wrapper(n_layers=1)] if head else [])]
        return compose(*parts)(net(**kwargs))


def plane(n: int = 60, noise: float = 0.3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    return x, 5 + 3 * (x @ torch.tensor([[1.0], [-2.0]])) + noise * torch.randn(n, 1, generator=generator)


def classes(n: int = 60) -> tuple[Tensor, Tensor]:
    x, y = plane(n)
    return x, (y[:, 0] > 5).long() + (y[:, 0] > 9).long()
