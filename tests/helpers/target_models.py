"""Models with several methods and parts, for the tests of wrapping methods, parts and classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.wrapped_models import MAKERS

every_wrapper = pytest.mark.parametrize("name", [name for name in MAKERS if name != "learned"])


class Coder(nn.Module):
    """An encoder and a decoder in one module, whose forward calls both methods."""

    norm: nn.BatchNorm1d

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.code = nn.Linear(8, 2)
        self.decoder = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.gain = nn.Parameter(torch.ones(1))

    def encode(self, x: Tensor, shift: float = 0.0) -> Tensor:
        """Return the code of x."""
        return self.code(torch.tanh(self.hidden(x))) + shift

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z) * self.gain

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class Outer(nn.Module):
    """A model that calls a method of one of its parts, and a property."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Coder()
        self.head = nn.Linear(2, 1)
        self.parts: list[Any] = [self.backbone, self.head]

    @property
    def rate(self) -> Tensor:
        return self.head.bias.exp()

    def features(self, x: Tensor) -> Tensor:
        return self.backbone.encode(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.parts[0].encode(x)) * self.rate


def used(wrapped: Any) -> set[str]:
    """Return the names of the model's parameters and buffers that the methods use."""
    return set(wrapped._workbench.slots)


def answers(wrapped: Any, call: Callable[[Any], Any]) -> Tensor:
    return torch.stack([call(voter) for voter in wrapped.voters()])


def ready(name: str, model: nn.Module, **where: Any) -> Any:
    wrapped: Any = MAKERS[name]()(model, **where).eval()
    return wrapped
