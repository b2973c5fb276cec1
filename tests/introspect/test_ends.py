"""Ends of models are read from their source only where calls do what the source says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, exp, nn, relu

from workbench.introspect.ends import End, ends_of

Function = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A network whose last layer's result goes through a function that has the name of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return exp(self.last(x))


def enclosed() -> nn.Module:
    exp: Function = torch.sin

    class Enclosed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return exp(self.last(x))

    return Enclosed()


class Keyword(Net):
    def forward(self, x: Tensor, *, exp: Function = torch.sin) -> Tensor:
        return exp(self.last(x))


class Forgotten(Net):
    def forward(self, x: Tensor) -> Tensor:
        exp: Function = torch.sin
        x = x.clone()
        x += 1
        return exp(self.last(x))


class Called(Net):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) - 3


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Called()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class WithIdentity(Net):
    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Identity()
        self.same.register_forward_pre_hook(lambda module, args: (args[0] - 3,))

    def forward(self, x: Tensor) -> Tensor:
        return self.same(super().forward(x))


class InPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Hardtanh(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = exp(self.last(x))
        bounded = self.between(y)
        assert bounded is y
        return y


def moved(y: Tensor) -> Tensor:
    y -= 3
    return y.sum()


class ByHelper(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = exp(self.last(x))
        total = moved(y)
        assert total.dim() == 0
        return y


class ByMethod(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = exp(self.last(x))
        total = self.moved(y)
        assert total.dim() == 0
        return y

    def moved(self, y: Tensor) -> Tensor:
        return moved(y)


class Reversed(Net):
    def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
        y = self.last(x)
        outputs = [exp(y), y.sin()]
        nothing = outputs.reverse()
        assert nothing is None
        return outputs


@dataclass
class Moved:
    y: Tensor

    def __post_init__(self) -> None:
        self.y = self.y - 3


class Filled(Net):
    def forward(self, x: Tensor) -> Moved:  # type: ignore[override]
        return Moved(super().forward(x))


@pytest.mark.parametrize(
    "model",
    [
        enclosed(),
        Keyword(),
        Forgotten(),
        Called(),
        Outer(),
        WithIdentity(),
        InPlace(),
        ByHelper(),
        ByMethod(),
        Reversed(),
        Filled(),
    ],
    ids=lambda model: type(model).__name__,
)
def test_what_looks_like_an_end_is_none(model: nn.Module) -> None:
    assert ends_of(Net()) == {"": End("exp", "last")}
    assert ends_of(model) == {}


class Read(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = exp(self.last(x))
        spread, total = torch.var(y, -1), y.sum()
        assert len(y) == len(spread)
        assert float(total) > 0
        return y


def test_an_end_that_other_computations_read_stays_one() -> None:
    assert ends_of(Read()) == {"": End("exp", "last")}


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return relu(self.last(self.last(x)))


def test_a_layer_whose_result_it_takes_again_is_not_alone() -> None:
    assert ends_of(Twice()) == {"": End("relu", None)}
