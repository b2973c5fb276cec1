"""Objects that forward makes or fills: each branch has its own, kept while the first branch's is alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import vote


class Cache:
    """Keeps what forward has computed."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []


class Caching(nn.Module):
    """Sums what it computes and what its cache holds, which it fills and gives back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        cache = Cache() if cache is None else cache
        cache.values.append(self.layer(x))
        return torch.stack(cache.values).sum(0), cache


@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_objects_of_all_branches_die_with_the_first_ones(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Cache]] = []
    build = Cache.__init__

    def noted(self: Cache) -> None:
        build(self)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Cache, "__init__", noted)
    wrapped = vote.Wrapper(3, strategy=strategy)(Caching()).eval()
    voters = wrapped.voters()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(4):
        _, cache = wrapped(x)
        y, cache = wrapped(2 * x, cache)  # remembered while it is alive
        expected = torch.stack([voter(2 * x, voter(x)[1])[0] for voter in voters]).mean(0)
        torch.testing.assert_close(y, expected)
    del cache
    gc.collect()
    assert made
    assert not [cache for reference in made if (cache := reference()) is not None]
