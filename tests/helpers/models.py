"""Small models used by several test files."""

from __future__ import annotations

from torch import nn


def mlp(outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs))
