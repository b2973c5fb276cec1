"""Forward may keep a parameter in an object, such as a cached distribution: in each branch it stays that of the branch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import vote

pytestmark = pytest.mark.usefixtures("seeded")
X = torch.randn(5, 4)


class Kept:
    def __init__(self, *values: Any) -> None:
        self.values = [*values]


class Caching(nn.Module):
    """Keeps an object with its weight until its mode changes."""

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
                "distribution": lambda: torch.distributions.Normal(weight, 1.0),
                "object": lambda: Kept(weight),
                "nested": lambda: Kept(Kept(weight)),
            }[self.how]()
        kept = self.memo["weight"]
        if self.how == "distribution":
            return self.head(x @ kept.mean)
        return self.head(x @ (kept if self.how == "object" else kept.values[0]).values[0])


@pytest.mark.parametrize("change", ["nothing", "attribute", "weights"])
@pytest.mark.parametrize("how", ["distribution", "object", "nested"])
def test_rank_one_voters_keep_weights_of_their_own(how: str, change: str) -> None:
    wrapped: Any = vote.Wrapper(3, share="rank1")(Caching(how)).eval()
    with torch.no_grad():
        wrapped(X)
        if change == "attribute":
            wrapped.note = "changed"
        if change == "weights":
            for parameter in wrapped.parameters():
                parameter.mul_(1.5)
        answers = [wrapped(X), wrapped(X)]
        voters = [voter.train().eval()(X) for voter in wrapped.voters()]
    for answer in answers:
        torch.testing.assert_close(answer, torch.stack(voters).mean(0))
