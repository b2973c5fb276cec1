"""Rows shared by the tests of densities, and how they are fitted and trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workbench.methods.densities import Density
from workbench.methods.densities.likelihood import Likelihood

Build = Callable[..., Likelihood]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(n: int, d: int = 5, seed: int = 0) -> Tensor:
    return draw(n, d, seed=seed) @ draw(d, d, seed=99) + 3


def banana(n: int, seed: int = 0) -> Tensor:
    a = draw(n, 2, seed=seed)
    return torch.stack([a[:, 0], 0.3 * a[:, 1] + a[:, 0].square()], 1)


def layers(n: int, seed: int = 0, shift: float = 0.0) -> list[Tensor]:
    """Features of a small ReLU network: 120 and 100 units (some dead), and its 10 inputs."""
    x = draw(n, 10, seed=seed) + shift
    first = torch.relu(x @ draw(10, 120, seed=97))
    second = torch.relu(first @ draw(120, 100, seed=98) / 11 - 1)
    second[:, :7] = 0
    return [first, second, x]


def fitted(build: Build, features: Tensor | list[Tensor], **settings: object) -> Likelihood:
    density = build(**settings)
    density.fit(features)
    return density.eval()


def train(density: Density, batches: Sequence[Tensor | list[Tensor]], lr: float) -> None:
    optimizer = torch.optim.Adam(density.parameters(), lr=lr)  # created before the first batch
    for batch in batches:
        optimizer.zero_grad()
        density(batch).mean().backward()
        optimizer.step()
