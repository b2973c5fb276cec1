"""Networks, wrappers, rows and comparisons for the tests of `fit`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from workbench import compose, neo, sample, sculpt, vote
from workbench.training import checkpoint, fit

quiet = functools.partial(fit, progress=False)
WRAPPERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: compose(),
    "sculpt": lambda: sculpt.Wrapper(n_layers=1),
    "sample": lambda: sample.Wrapper(n_samples=2),
    "vote": lambda: vote.Wrapper(n_voters=2),
    "neo": lambda: neo.Wrapper(),
    "vote of sculpt": lambda: compose(vote.Wrapper(2), sculpt.Wrapper(n_layers=1)),
    "vote and neo": lambda: compose(vote.Wrapper(2), neo.Wrapper()),
}


def net(inputs: int = 2, outputs: int = 1, seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, outputs))


def plain(**kwargs: Any) -> Any:
    return compose()(net(**kwargs))


def plane(n: int = 80, noise: float = 0.1, scale: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0]]) + noise * torch.randn(n, 1, generator=generator)
    return x, scale * y


def options(**kwargs: Any) -> dict[str, Any]:
    return {"epochs": 2, **kwargs}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Interrupt:
    """A criterion that raises at its n-th call."""

    def __init__(self, call: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.calls, self.call, self.error = 0, call, error

    def __call__(self, prediction: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call:
            raise self.error
        return F.mse_loss(prediction, y)


class Stream(IterableDataset):
    """Iterable rows without indices or length."""

    def __iter__(self) -> Any:
        return iter(list(zip(*plane(20), strict=True)))


def interrupt_after(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise KeyboardInterrupt once a number of checkpoints is written."""
    written, write = itertools.count(1), checkpoint.Checkpoint.write

    def stop(self: Any, state: Any, force: bool = False) -> None:
        write(self, state, force)
        if next(written) == epochs:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.Checkpoint, "write", stop)
