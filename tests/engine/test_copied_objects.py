"""Objects that modules hold are copied for the branches, those that cannot be copied are shared, and neither is half made."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import vote
from workbench.engine.effects.branch_values import duplicate


class Tracker:
    """Cannot be copied, since it holds a lock."""

    def __init__(self) -> None:
        self.lock, self.scale, self.calls = threading.Lock(), 2.0, [0]


class Tracked(nn.Module):
    """Holds a tracker directly, and in a list and a tuple next to objects that can be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.tracker = Tracker()
        self.trackers = [self.tracker]
        self.named = ("name", self.tracker, [1.0])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.trackers[0].scale * self.named[1].scale


class Counting(Tracked):
    """Changes an attribute as well, so that attributes are copied from branch to branch."""

    def __init__(self) -> None:
        super().__init__()
        self.state: list[Any] = [self.tracker, 0]

    def forward(self, x: Tensor) -> Tensor:
        self.state = [self.tracker, self.state[1] + 1]
        return super().forward(x) * self.state[0].scale


@pytest.mark.parametrize("model", [Tracked, Counting])
@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_what_cannot_be_copied_is_shared_wherever_it_is_held(model: type[nn.Module], strategy: Any) -> None:
    plain = model()
    wrapped = vote.Wrapper(3, strategy=strategy)(plain).eval()
    x = torch.randn(4, 3)
    layers = zip(wrapped.state_dict()["layer.weight@vote"], wrapped.state_dict()["layer.bias@vote"], strict=True)
    factor = 8 if model is Counting else 4
    outputs = torch.stack([factor * (x @ weight.T + bias) for weight, bias in layers])
    for _ in range(3):
        torch.testing.assert_close(wrapped(x, return_risk=True), (outputs.mean(0), outputs.std(0, correction=0)))
    assert wrapped.tracker is plain.tracker


def test_a_memo_keeps_alive_what_its_keys_stand_for() -> None:
    memo: dict[int, Any] = {}
    value = [nn.Linear(2, 2)]
    copied = duplicate(value, memo)
    keys = [key for key, other in memo.items() if type(other) is list and any(item is value for item in other)]
    assert keys == [id(memo)]  # of a list by `copy.deepcopy`; the id of a memo that is gone may become that of anything
    assert duplicate([value], memo)[0] is copied
