"""Python objects: attributes, properties, classes, hooks and functions."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .core import Base, case


@case("lambda_attr", "captures_self")
class LambdaAttr(Base):
    def __init__(self) -> None:
        super().__init__()
        self.act = lambda x: torch.tanh(self.b(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.act(self.a(x)))


@case("partial_attr")
class PartialAttr(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = functools.partial(self.head, self.c, scale=2.0)

    @staticmethod
    def head(layer: nn.Module, x: Tensor, scale: float) -> Tensor:
        return layer(x) * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.trunk(x))


@case("partial_weight")
class PartialWeight(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head = functools.partial(F.linear, weight=self.c.weight, bias=self.c.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


@case("bound_method_attr")
class BoundMethodAttr(Base):
    def __init__(self) -> None:
        super().__init__()
        self.encode = self.trunk

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.encode(x))


@case("plain_list_of_modules")
class PlainListOfModules(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [self.a, self.b]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.c(x)


def double_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(2 * x for x in args)


def add_one(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + 1


@case("hooks_user")
def hooks_user() -> nn.Module:
    model = Base()
    model.b.register_forward_pre_hook(double_input)
    model.c.register_forward_hook(add_one)
    return model


@case("hooks_root")
def hooks_root() -> nn.Module:
    model = Base()
    model.register_forward_pre_hook(double_input)
    model.register_forward_hook(add_one)
    return model


class Registered(Base):
    registry: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, key: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registered.registry[key] = cls


@case("custom_init_subclass")
class CustomInitSubclass(Registered, key="custom"):
    """A subclass of this class must name its key, or Python refuses to create it."""


@case("init_with_args_class")
def init_with_args() -> nn.Module:
    return InitWithArgs(5, hidden=8, out=2)


class InitWithArgs(nn.Module):
    def __init__(self, features: int, *, hidden: int, out: int) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(features, hidden), nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.a(x)))


@case("slots_bare", "not_copyable")
class SlotsBare(Base):
    __slots__ = ("temperature",)

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.trunk(x)) * self.temperature


@case("slots_and_property")
class SlotsAndProperty(SlotsBare):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "temperature": self.temperature}  # nn.Module leaves out values in slots

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        temperature = state.pop("temperature")
        super().__setstate__(state)
        self.temperature = temperature

    @property
    def norm(self) -> Tensor:
        return self.b.weight.norm()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.norm


@case("other_methods")
class OtherMethods(Base):
    def helper(self, x: Tensor) -> Tensor:
        return self.c(self.trunk(x)) * 5

    def add_3_and_call(self, x: Tensor) -> Tensor:
        return self.forward(x + 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)


@case("name_clash", "name_clash")
class NameClash(Base):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.voters = nn.Linear(8, 8), 7

    def loss(self, h: Tensor) -> Tensor:
        return h.square().mean(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.base(self.trunk(x)) / self.voters
        return self.c(h) - self.loss(h)


@case("getattr_override")
class GetattrOverride(nn.Module):
    """Forwards missing attributes to the net inside, as many adapters and compilers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Base()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("net"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.trunk(x))


@case("closure", "function")
def closure() -> Callable[[Tensor], Tensor]:
    net, scale = Base(), 2.0

    def predict(x: Tensor) -> Tensor:
        return torch.tanh(net(x)) * scale

    return predict


@case("closure_two", "function")
def closure_two() -> Callable[[Tensor], Tensor]:
    encoder, decoder = nn.Linear(5, 8), nn.Linear(8, 2)
    return lambda x: decoder(torch.relu(encoder(x)))


@case("lock_attr", "not_copyable")
class LockAttr(Base):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.c(self.trunk(x))


@functools.lru_cache(maxsize=8)
def positions(size: int) -> Tensor:
    return torch.linspace(0, 1, size)


@case("lru_cache_helpers")
class LruCacheHelpers(Base):
    """A cached function, and a cached method whose key includes the model itself."""

    @functools.lru_cache(maxsize=8)  # noqa: B019 - users do
    def scale(self, size: int) -> float:
        return size**-0.5

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        return self.c(h * self.scale(h.shape[1]) + positions(h.shape[1]).to(h))


@case("cached_property", "mutates_attribute")
class CachedProperty(Base):
    @functools.cached_property
    def width(self) -> int:
        return self.c.in_features

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.trunk(x)) / self.width


@case("forward_on_instance", "captures_self")
def forward_on_instance() -> nn.Module:
    model = Base()
    model.forward = lambda x: model.c(model.trunk(x)) + 1  # type: ignore[method-assign]
    return model
