"""User-written loops with gradients from a graph end with the weights of `wrapped.loss(...).backward()`, to the last bit."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from helpers import traced_models
from helpers.default_suite import one_in
from helpers.traced_models import EAGER, TRACED, TRACED_STEPS, mlp
from torch import Tensor
from torch.nn import functional as F

from workbench import compose, sculpt, vote
from workbench.errors import WorkbenchWarning
from workbench.training import Backward, backward, traced_step

STEPS = 30


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made early, and used even where they are slower."""
    monkeypatch.setattr(traced_step, "MIN_STEPS", 2)
    monkeypatch.setattr(traced_step, "MIN_LONG_STEPS", 2)
    monkeypatch.setattr(traced_step, "_faster", lambda recorded: True)


def _batches() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(STEPS, 16, 3, generator=torch.Generator().manual_seed(1))
    return [(rows, torch.sin(2 * rows.sum(1, keepdim=True))) for rows in x]


def _train(build: Any, wrapper: Any, by_graph: bool, accumulate: int = 1) -> tuple[list[Tensor], int]:
    """Losses, weights, buffers and the random state afterwards; and how many steps a graph has taken."""
    torch.manual_seed(0)
    traced_models.NOISE = np.random.default_rng(0)
    wrapped = wrapper(build()).train()
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.05, momentum=0.9)
    step, losses = Backward(wrapped, F.mse_loss), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkbenchWarning)
        for i, (x, y) in enumerate(_batches()):
            if i % accumulate == 0:
                optimizer.zero_grad()
            if by_graph:
                losses.append(step(x, y))
            else:
                loss = wrapped.loss(F.mse_loss, x, y)
                loss.backward()
                losses.append(loss.detach())
            if (i + 1) % accumulate == 0:
                torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
                optimizer.step()
    state = [value for value in wrapped.state_dict().values() if isinstance(value, Tensor)]
    return [*losses, *state, torch.get_rng_state()], step._traced.replays


@pytest.mark.parametrize("name", one_in(4, [*TRACED, *TRACED_STEPS]))
def test_a_loop_ends_with_the_same_weights(name: str) -> None:
    build, wrapper = {**TRACED, **TRACED_STEPS}[name]
    ours, replays = _train(build, wrapper, True)
    expected, _ = _train(build, wrapper, False)
    assert all(map(torch.equal, ours, expected))
    assert replays > 20


@pytest.mark.parametrize("name", one_in(4, EAGER))
def test_what_is_not_sure_to_repeat_is_left_alone(name: str) -> None:
    build, wrapper = EAGER[name], vote.Wrapper(3, strategy="loop")
    try:
        expected, _ = _train(build, wrapper, False)
    except Exception as error:
        with pytest.raises(type(error)):
            _train(build, wrapper, True)
        return
    ours, replays = _train(build, wrapper, True)
    assert all(map(torch.equal, ours, expected))
    assert replays == 0


def test_gradients_add_up() -> None:
    """Of the batches between two steps of the optimizer, the first is taken by the graph."""
    wrapper = compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1))
    ours, replays = _train(mlp, wrapper, True, accumulate=3)
    assert all(map(torch.equal, ours, _train(mlp, wrapper, False, accumulate=3)[0]))
    assert replays > 5


def test_a_loss_that_is_no_number_has_its_gradients_and_blames_nobody() -> None:
    torch.manual_seed(0)
    wrapped = vote.Wrapper(3)(mlp()).train()
    step, (x, y) = Backward(wrapped, F.mse_loss), _batches()[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(STEPS):
            target = y if i < STEPS // 2 else y / 0
            gradients = []
            for take in (step, lambda x, target: wrapped.loss(F.mse_loss, x, target).backward()):
                wrapped.zero_grad()
                take(x, target)
                gradients.append([p.grad for p in wrapped.parameters()])
            for ours, expected in zip(*gradients, strict=True):
                torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    assert step._traced.replays > 20


def test_evaluation_between_steps_changes_nothing() -> None:
    torch.manual_seed(0)
    wrapped = vote.Wrapper(3)(mlp(torch.nn.Dropout(0.3))).train()
    step, (x, y) = Backward(wrapped, F.mse_loss), _batches()[0]
    for i in range(STEPS):
        wrapped.train(i % 5 > 0)
        wrapped.zero_grad()
        torch.manual_seed(i)
        loss = step(x, y)
        torch.manual_seed(i)
        assert torch.equal(loss, wrapped.loss(F.mse_loss, x, y).detach())


def test_short_loops_make_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_STEPS", "MIN_LONG_STEPS"):  # a busy machine makes long steps
        monkeypatch.setattr(traced_step, name, 200)
    assert _train(mlp, vote.Wrapper(3), True)[1] == 0
    monkeypatch.setattr(backward, "PER_STEP", 50)
    assert _train(mlp, vote.Wrapper(3), True)[1] > 20
