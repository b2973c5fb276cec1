"""Data with several targets per row, such as maps of classes or values, and a model of the latter."""

from __future__ import annotations

import torch
from torch import nn

from workbench.data import Data


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def class_maps() -> Data:
    """Return maps of three classes, in which a fifth of the positions has no class."""
    x = torch.randn(40, 3, 6, 8, generator=rng(0))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    y[torch.rand(y.shape, generator=rng(1)) < 0.2] = 255
    return Data.from_arrays(x, y, classes=["road", "sky", "tree"], void=255)


def value_maps() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(40, 1, 6, 8, generator=rng(5))
    return x, x[:, 0] * 2


def two_targets() -> Data:
    x = torch.randn(60, 3, generator=rng(3))
    y = torch.stack([x[:, 0], 100 * x[:, 1] + 10 * torch.randn(60, generator=rng(4))], 1)
    return Data.from_arrays(x, y, target="cold, hot")


class Depth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[:, 0]
