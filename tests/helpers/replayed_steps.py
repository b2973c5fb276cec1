"""Trainings whose steps are replayed from a graph early, and the comparison of two."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import traced_models
from workbench import fit
from workbench.errors import WorkbenchWarning
from workbench.training import traced_step
from workbench.training.traced_step import TracedStep


def replay_early(monkeypatch: pytest.MonkeyPatch) -> list[TracedStep]:
    """Make graphs from the fourth step on, used even where they are slower; return the list of what replays the steps of each training."""
    made: list[TracedStep] = []
    init = TracedStep.__init__

    def noted(self: TracedStep, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(TracedStep, "__init__", noted)
    monkeypatch.setattr(traced_step, "MIN_STEPS", 2)
    monkeypatch.setattr(traced_step, "MIN_LONG_STEPS", 2)
    monkeypatch.setattr(traced_step, "_faster", lambda recorded: True)
    return made


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[TracedStep]:
    return replay_early(monkeypatch)


def waves(n: int = 100) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(1))
    return x, torch.sin(2 * x.sum(1, keepdim=True))


def train(build: Callable[[], nn.Module], wrapper: Any, data: Any = None, **options: Any) -> tuple[Any, ...]:
    """Weights and buffers, losses, and the global random states afterwards."""
    torch.manual_seed(0)
    traced_models.NOISE = np.random.default_rng(0)
    wrapped = wrapper(build())
    settings = {"epochs": 6, "batch_size": 16, "progress": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkbenchWarning)
        history = fit(wrapped, data or waves(), **settings)
    state = {name: value for name, value in wrapped.state_dict().items() if isinstance(value, Tensor)}
    return state, [record[:4] for record in history.records], torch.get_rng_state()


def assert_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert one[0].keys() == other[0].keys()
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name
    assert str(one[1]) == str(other[1])  # where there is no validation, its loss is NaN
    assert torch.equal(one[2], other[2])
