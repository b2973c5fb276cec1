"""Wrapped models whose calls are recorded early, and what their answers are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import traced_models
from workbench import vote
from workbench.core.calls import recorded_calls
from workbench.core.calls.recorded_calls import RecordedCalls

CALLS = 20


def record_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made early, and used even where they are slower."""
    monkeypatch.setattr(recorded_calls, "MIN_CALLS", 2)
    monkeypatch.setattr(recorded_calls, "MIN_FROZEN_CALLS", 1)
    monkeypatch.setattr(recorded_calls, "MAX_MISSES", 3)
    monkeypatch.setattr(recorded_calls, "_is_faster", lambda recorded: True)
    monkeypatch.setattr(recorded_calls, "MAX_SECONDS", 1e9)


def batches(n: int = CALLS) -> list[Tensor]:
    return list(torch.randn(n, 5, 3, generator=torch.Generator().manual_seed(1)))


def wrapped_as(build: Callable[[], nn.Module], wrapper: Any = None) -> Any:
    torch.manual_seed(0)
    traced_models.NOISE = np.random.default_rng(0)
    wrapped = (wrapper or vote.Wrapper(3))(build()).eval()
    return wrapped.fit(torch.randn(100, 3)) if wrapped.needs_fit else wrapped


def calls_of(wrapped: Any) -> RecordedCalls:
    return wrapped.__dict__["_engine"].recorded


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other), strict=True):
        assert a.shape == b.shape
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


def as_ever(wrapped: Any, *args: Tensor, **options: Any) -> Any:
    """What a copy answers, which has no graphs."""
    return copy.deepcopy(wrapped)(*args, **options)
