"""A network, every kind of wrapper for it and its answers, for the tests of wrapped objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, neo, sample, sculpt, vote

MAKERS: dict[str, Callable[[], Any]] = {
    "vote": lambda: vote.Wrapper(3),
    "rank1": lambda: vote.Wrapper(3, share="rank1"),
    "last": lambda: vote.Wrapper(3, share=1),
    "sample": lambda: sample.Wrapper(3),
    "learned": lambda: sample.Wrapper(3, trainable=True),
    "sculpt": lambda: sculpt.Wrapper(n_layers=1),
    "neo": lambda: neo.Wrapper(),
    "composed": lambda: compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1)),
}
every_wrapper = pytest.mark.parametrize("name", MAKERS)


class Net(nn.Module):
    """A small network with attributes, a norm, a method and a tied weight."""

    kind = "small"

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.fc1 = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.fc2 = nn.Linear(width, 1)
        self.layers = [self.fc1, self.fc2]
        self.tags = {"a": 1}

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        """Predict from x."""
        return self.fc2(torch.tanh(self.norm(self.fc1(x)))) * gain

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * self(x)

    @property
    def size(self) -> int:
        return self.width


def wrap(name: str, model: nn.Module) -> Any:
    wrapped: Any = MAKERS[name]()(model).eval()
    if name == "neo":
        wrapped.fit(torch.randn(60, 3))
    return wrapped


def answer(wrapped: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Return the prediction and every risk, always from the same noise."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        y, risk = wrapped(x, return_risk=True)
    return (y, risk) if isinstance(risk, Tensor) else (y, *(risk[part] for part in risk))


def equal(a: Any, b: Any, x: Tensor) -> bool:
    return all(torch.equal(p, q) for p, q in zip(answer(a, x), answer(b, x), strict=True))
