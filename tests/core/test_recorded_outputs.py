"""Calls answered by a graph whose outputs are named tuples or dataclasses; classes that run code or hold state use no graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from helpers.recorded_calls import CALLS, as_ever, assert_same, batches, calls_of, record_early, wrapped_as
from helpers.traced_models import mlp
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    record_early(monkeypatch)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()


class Named(NamedTuple):
    mean: Tensor
    extra: Tensor


@dataclass
class Scaled:
    mean: Tensor
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Fixed:
    mean: Tensor
    extra: Tensor


@dataclass
class Counting:
    """Changes with each one that is made."""

    mean: Tensor
    made = 0

    def __post_init__(self) -> None:
        Counting.made += 1
        self.mean = self.mean * Counting.made


@dataclass
class Shifting:
    """Has code of the user's under a name that tensors have."""

    mean: Tensor
    made = 0

    @property
    def mH(self) -> Tensor:
        Shifting.made += 1
        return self.mean * Shifting.made


class ReturnsNamed(_Net):
    def forward(self, x: Tensor) -> Named:
        return Named(self.net(x), extra=self.net(x) + 1)


class ReturnsFixed(_Net):
    def forward(self, x: Tensor) -> Fixed:
        return Fixed(self.net(x), self.net(x) + 1)


class ReturnsCounting(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return Counting(self.net(x)).mean


class ReturnsShifting(_Net):
    def forward(self, x: Tensor) -> Tensor:
        return Shifting(self.net(x)).mH


class ReadsClass(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0  # a name that forward may read

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * Scaled.scale


@pytest.mark.parametrize("build", [ReturnsNamed, ReturnsFixed])
def test_outputs_in_named_tuples_and_dataclasses(build: Any) -> None:
    wrapped = wrapped_as(build)
    with torch.no_grad():
        for x in batches():
            answer, expected = wrapped(x, return_risk=True), as_ever(wrapped, x, return_risk=True)
            for part, wanted in zip(answer, expected, strict=True):  # the prediction and its risk
                assert type(part) is type(wanted)
                assert_same([part.mean, part.extra], [wanted.mean, wanted.extra])
    assert calls_of(wrapped).off == ""
    assert calls_of(wrapped).replays > 10


@pytest.mark.parametrize("build", [ReturnsCounting, ReturnsShifting, ReadsClass])
def test_classes_with_code_or_state_are_left_alone(build: Any) -> None:
    wrapped, x = wrapped_as(build), batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            wrapped(x, return_risk=True)
    assert calls_of(wrapped).replays == 0
    assert "uses" in calls_of(wrapped).off
