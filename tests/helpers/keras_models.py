"""Keras models on the torch backend, and their plain copies; Keras is imported by the first test that needs it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

X = np.linspace(-1, 1, 48, dtype="float32").reshape(12, 4)
Y = np.sin(X.sum(1, keepdims=True)).astype("float32")


@functools.cache
def _keras() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        module = pytest.importorskip("keras")
    assert module.backend.backend() == "torch", "another test imported Keras with another backend"
    return module


class _Lazy:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for marks of fixtures in every object of a module
            raise AttributeError(name)
        return getattr(_keras(), name)


k: Any = _Lazy()


@pytest.fixture(autouse=True)
def seeded_keras() -> None:
    """Seed the random numbers before each test of a module that imports this fixture by name."""
    k.utils.set_random_seed(0)


def sequential(*extra: Any) -> Any:
    return k.Sequential([k.Input((4,)), k.layers.Dense(8, activation="tanh"), *extra, k.layers.Dense(1)])


def functional() -> Any:
    inputs = k.Input((4,))
    hidden = k.layers.Dense(8, activation="tanh")(inputs)
    return k.Model(inputs, k.layers.Dense(1)(hidden))


def subclassed(build: bool = True) -> Any:
    model = net_class()()
    if build:
        model(X)
    return model


_NETS: list[Any] = []


def net_class() -> Any:
    if not _NETS:

        class Net(k.Model):
            def __init__(self) -> None:
                super().__init__()
                self.hidden = k.layers.Dense(8, activation="tanh")
                self.out = k.layers.Dense(1)

            def call(self, x: Any, training: Any = None) -> Any:
                return self.out(self.hidden(x))

        _NETS.append(Net)
    return _NETS[0]


KINDS: list[Callable[[], Any]] = [sequential, functional, subclassed]


def by_hand(wrapped: Any, plain: Any, n: int) -> list[Any]:
    """Return plain copies of a layered model, with the weights of each voter from the state of the wrapped module."""
    state, copies = wrapped.as_torch().state_dict(), []
    names = [name for name in state if name.endswith("@vote")]
    for i in range(n):
        copied = k.models.clone_model(plain) if not isinstance(plain, net_class()) else subclassed()
        assert len(names) == len(copied.weights)
        for name, variable in zip(sorted(names, key=lambda name: order(name, plain)), copied.weights, strict=True):
            variable.assign(state[name][i])
        copies.append(copied)
    return copies


def order(name: str, plain: Any) -> int:
    layer, _, rest = name.partition(".")
    layers = [each for each in plain.layers if each.weights]
    stems = {}
    for each in layers:
        base = each.name.rstrip("0123456789").rstrip("_")
        count = sum(s == base or s.rpartition("_")[0] == base for s in stems)
        stems[f"{base}_{count}" if count else base] = each
    if layer not in stems:  # attributes of subclassed models
        raise KeyError(layer, list(stems))
    position = list(stems).index(layer)
    return position * 10 + [v.name for v in stems[layer].weights].index(rest.partition("@")[0])


def nll(y: Any, y_hat: Any, risk: Any) -> float:
    return float(-torch.distributions.Normal(y_hat, risk).log_prob(torch.as_tensor(y)).mean())
