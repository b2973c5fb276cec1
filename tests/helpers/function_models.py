"""Functions of tensors that refer to models in every possible way, each with the models that it uses."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.models import mlp


def fill(function: Callable[[], Any]) -> Callable[[], Any]:
    """Decorate a builder to draw from a fixed seed, so that each call returns an equal function, together with its own new models."""

    @functools.wraps(function)
    def built() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return function()

    return built


@fill
def closure() -> Any:
    net = mlp()
    return (lambda x: 2 * net(x) + 1), [net]


@fill
def several() -> Any:
    first, second = nn.Linear(3, 4), nn.Linear(4, 1)

    def model(x: Tensor, *, gain: float = 1.0) -> Tensor:
        x = F.relu(first(x - x.mean()))  # computation before, between and after
        return second(x).sigmoid() * gain

    return model, [first, second]


@fill
def containers() -> Any:
    used = [nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(1, 1), nn.Linear(1, 1)]
    layers: Any = [used[0], (used[1], {"last": [used[2]]})]
    Pair = namedtuple("Pair", "scale net")
    pair = Pair(2.0, used[3])
    table = OrderedDict(a=used[4])

    def model(x: Tensor) -> Tensor:
        first, (second, rest) = layers
        for layer in (first, second, *rest["last"]):
            x = layer(x)
        return sum((layer(x) for layer in table.values()), pair.net(x) * pair.scale)

    return model, used


@fill
def defaults() -> Any:
    first, second = nn.Linear(3, 1), nn.Linear(1, 1)

    def model(x: Tensor, net: nn.Module = first, *, head: nn.Module = second) -> Tensor:
        return head(net(x))

    return model, [first, second]


@fill
def helpers() -> Any:
    net, head = nn.Linear(3, 4), nn.Linear(4, 1)

    def quietly(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        @functools.wraps(function)
        def inner(x: Tensor) -> Tensor:
            return function(x) + 0

        return inner

    @quietly
    def trunk(x: Tensor) -> Tensor:
        return net(x)

    def countdown(x: Tensor, n: int) -> Tensor:  # recursive
        return head(x) if n == 0 else countdown(x, n - 1)

    def model(x: Tensor) -> Tensor:
        return countdown(trunk(x), 2)

    return model, [net, head]


@fill
def namespaces() -> Any:
    config = SimpleNamespace(net=nn.Linear(3, 4), inner=SimpleNamespace(head=nn.Linear(4, 1)), rate=0.5)

    def model(x: Tensor) -> Tensor:
        return config.inner.head(config.net(x)) * config.rate

    return model, [config.net, config.inner.head]


class Pipeline:
    """An object with a model, and another model that no method uses."""

    def __init__(self) -> None:
        self.net = nn.Linear(3, 1)
        self.idle = nn.Linear(3, 1)
        self.calls = 0

    def scaled(self, x: Tensor) -> Tensor:
        return 2 * self.net(x)

    def predict(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.scaled(x)

    def __call__(self, x: Tensor) -> Tensor:
        return self.predict(x)


@fill
def an_objects_method() -> Any:
    pipeline = Pipeline()
    return pipeline.predict, [pipeline.net]


@fill
def a_callable_object() -> Any:
    pipeline = Pipeline()
    return pipeline, [pipeline.net]


@fill
def an_object_in_a_closure() -> Any:
    pipeline = Pipeline()
    return (lambda x: pipeline(x) + pipeline.predict(x)), [pipeline.net]


@fill
def a_bound_method_of_a_model() -> Any:
    net = mlp()
    call = net.forward
    return (lambda x: call(x)), [net]


@fill
def partial_of_a_function() -> Any:
    net, last = mlp(), nn.Linear(1, 1)

    def model(x: Tensor, gain: float, other: nn.Module) -> Tensor:
        return other(net(x)) * gain

    return functools.partial(model, gain=3.0, other=last), [net, last]


@fill
def partial_of_a_model() -> Any:
    net = mlp()
    return functools.partial(net), [net]


@dataclass
class Settings:
    net: nn.Module
    rate: float = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return self.net(x) * self.rate


@fill
def a_dataclass() -> Any:
    settings = Settings(nn.Linear(3, 1))
    return settings, [settings.net]


@fill
def same_names() -> Any:
    def helper_of(net: nn.Module) -> Any:
        return lambda x: net(x)

    net, forward, inner = nn.Linear(3, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    helper = helper_of(inner)
    return (lambda x: forward(helper(net(x)))), [net, forward, inner]


@fill
def without_gradients() -> Any:
    net, head = nn.Linear(3, 4), nn.Linear(4, 1)

    @torch.no_grad()
    def trunk(x: Tensor) -> Tensor:
        return net(x)

    return (lambda x: head(trunk(x))), [net, head]


WAYS: dict[str, Callable[[], Any]] = {
    "closure": closure,
    "several": several,
    "containers": containers,
    "defaults": defaults,
    "helpers": helpers,
    "namespaces": namespaces,
    "an object's method": an_objects_method,
    "a callable object": a_callable_object,
    "an object in a closure": an_object_in_a_closure,
    "a bound method of a model": a_bound_method_of_a_model,
    "a partial of a function": partial_of_a_function,
    "a partial of a model": partial_of_a_model,
    "a dataclass": a_dataclass,
    "same names": same_names,
    "without gradients": without_gradients,
}
