"""Small trainings for the tests of trackers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from workbench import compose
from workbench.training import fit

quiet = functools.partial(fit, progress=False, batch_size=20)


def rows(n: int = 60) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


def made(wrapper: Any = None) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        return (wrapper or compose())(net)


def weights(wrapped: Any) -> list[Tensor]:
    return [value for value in wrapped.state_dict().values() if isinstance(value, Tensor)]
