"""Forward may keep a parameter, also in an object such as a cached distribution: in each branch it stays that of the branch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import vote

X = torch.randn(5, 4)


class Kept:
    def __init__(self, *values: Any) -> None:
        self.values = [*values]


class Caching(nn.Module):
    """Keeps its weight, or an object with it, until its mode changes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.head, self.how = nn.Linear(4, 4), nn.Linear(4, 2), how
        self.memo: dict[str, Any] = {}

    def train(self, mode: bool = True) -> Caching:
        self.memo = {}
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        if not self.memo:
            self.memo["weight"] = {
                "tensor": lambda: weight,
                "distribution": lambda: torch.distributions.Normal(weight, 1.0),
                "object": lambda: Kept(weight),
                "nested": lambda: Kept(Kept(weight)),
            }[self.how]()
        kept = self.memo["weight"]
        if self.how == "distribution":
            return self.head(x @ kept.mean)
        while isinstance(kept, Kept):
            kept = kept.values[0]
        return self.head(x @ kept)


def answers_and_voters(wrapped: Any) -> tuple[Tensor, Tensor]:
    """Return the answers of two calls, and those of plain voters that have kept nothing."""
    voters = [voter.train().eval()(X) for voter in wrapped.voters()]
    return torch.stack([wrapped(X), wrapped(X)]), torch.stack(voters).mean(0).expand(2, -1, -1)


CASES = [
    (share, how, change)
    for share in (None, 1, 2, "rank1")
    for how in ("tensor", "distribution", "object", "nested")
    for change in ("nothing", "attribute", "weights", "copy", "pickle")
    if share != "rank1" or how == "tensor" or change not in ("copy", "pickle")  # see limitations.md
]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("share", "how", "change"), CASES)
def test_voters_keep_weights_of_their_own(share: Any, how: str, change: str, gradients: bool) -> None:
    wrapped: Any = vote.Wrapper(3, share=share)(Caching(how)).eval()
    with torch.set_grad_enabled(gradients):
        wrapped(X)
        if change == "attribute":
            wrapped.note = "changed"
        elif change == "weights":
            with torch.no_grad():
                for parameter in wrapped.parameters():
                    parameter.mul_(1.5)
        elif change == "copy":
            wrapped = copy.deepcopy(wrapped)
        elif change == "pickle":
            wrapped = pickle.loads(pickle.dumps(wrapped))
        torch.testing.assert_close(*answers_and_voters(wrapped))


@pytest.mark.parametrize("how", ["tensor", "object"])
def test_voters_taken_out_keep_their_own_parameter(how: str) -> None:
    wrapped: Any = vote.Wrapper(3)(Caching(how)).eval()
    with torch.no_grad():
        wrapped(X)
        for voter in wrapped.voters():
            kept = voter.memo["weight"] if how == "tensor" else voter.memo["weight"].values[0]
            assert kept is voter.inner.weight
