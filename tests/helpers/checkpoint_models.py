"""A network, every kind of wrapper for it and comparisons, for the tests of checkpoints."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, neo, sample, sculpt, vote
from workbench.methods.densities import Flow

MAKERS: dict[str, Callable[[], Any]] = {
    "vote": lambda: vote.Wrapper(3),
    "rank1": lambda: vote.Wrapper(3, share="rank1"),
    "last": lambda: vote.Wrapper(3, share=1),
    "sample": lambda: sample.Wrapper(3),
    "learned": lambda: sample.Wrapper(3, trainable=True),
    "sculpt": lambda: sculpt.Wrapper(n_layers=1),
    "neo": lambda: neo.Wrapper(),
    "flow": lambda: neo.Wrapper(density=Flow(hidden=4)),
    "vote_sculpt": lambda: compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1)),
    "all": lambda: compose(vote.Wrapper(3, share=1), sample.Wrapper(2), sculpt.Wrapper(n_layers=1), neo.Wrapper()),
    "none": lambda: compose(),
}
every_wrapper = pytest.mark.parametrize("name", MAKERS)
X = torch.linspace(-2, 2, 180).reshape(60, 3)[torch.arange(59, -1, -1) * 7 % 60]


class Net(nn.Module):
    """A network with batch statistics and, between its layers, a weight that has two names."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width)
        self.again = nn.Linear(width, width, bias=False)
        self.again.weight = self.middle.weight
        self.last = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.again(self.middle(torch.tanh(self.norm(self.first(x)))))))


def net(seed: int, width: int = 4) -> Net:
    """Return a network with weights and statistics drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Net(width)
        model(torch.randn(32, 3) + seed)
    return model.eval()


def wrapped_net(name: str, seed: int = 1, fit: bool = True) -> Any:
    return copy.deepcopy(_wrapped_net(name, seed, fit))


@functools.cache
def _wrapped_net(name: str, seed: int, fit: bool) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 100)
        wrapped: Any = MAKERS[name]()(net(seed)).eval()
    return wrapped.fit(X) if fit and "neo" in wrapped.methods else wrapped


def answers(wrapped: Any, x: Tensor = X[:6]) -> list[Tensor]:
    """Return the prediction and every risk, always from the same noise."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        y, risk = wrapped(x, return_risk=True) if wrapped.methods else (wrapped(x), ())
    return [y, risk] if isinstance(risk, Tensor) else [y, *(risk[part] for part in risk)]


def assert_same(left: Any, right: Any, x: Tensor = X[:6]) -> None:
    for a, b in zip(answers(left, x), answers(right, x), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def facts(wrapped: Any) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in wrapped.state_dict().items()}


def assert_reads_as(wrapped: Any, plain: nn.Module, name: str) -> None:
    """Assert that all tensors of the model itself equal those of a plain model loaded by hand."""
    with torch.no_grad():
        voters = wrapped.voters()
        assert len(voters) == (3 if "vote" in wrapped.methods else 1)
        for model in [*voters, wrapped.unwrap()]:
            assert type(model) is type(plain)
            for key, tensor in plain.state_dict().items():
                if name != "rank1" or key.endswith("bias") or "running" in key:
                    assert torch.equal(model.state_dict()[key], tensor), key
            if name != "rank1":  # which keeps its factors: every voter is a product with them
                assert torch.equal(model(X), plain(X))
        for key, parameter in wrapped.named_base_parameters():
            assert torch.equal(parameter, plain.get_parameter(key)), key
