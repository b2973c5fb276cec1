"""Small networks and rows for tests of laplace, in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS, FEATURES = 60, 4


def net(outputs: int = 2, hidden: int = 8, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
