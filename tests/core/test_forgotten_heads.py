"""Risk heads that no loss reaches: a warning at the eighth step, unless they are trained separately."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.models import mlp
from helpers.training_loops import ADDING, TAKING, adam, data, sgd, steps
from torch import Tensor, nn

from workbench import compose, fit, sculpt, vote


@pytest.mark.parametrize(("name", "parts"), [("sculpt", 1), ("sculpt", 2), ("vote of sculpt", 1)])
def test_risk_heads_that_no_loss_reaches_are_reported_once_by_name(name: str, parts: int) -> None:
    wrapped: Any = (ADDING | TAKING)[name]()(mlp())
    opts = (
        [adam(wrapped.parameters())]
        if parts == 1
        else [adam(wrapped.base_parameters()), adam(wrapped.risk_parameters())]
    )
    told = []
    for i in range(40):
        x, y = data()
        for opt in opts:
            opt.zero_grad()
        nn.functional.mse_loss(wrapped(x), y).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for opt in opts:
                opt.step()
        told += [(i, str(w.message), w.filename) for w in caught if "stay alike" not in str(w.message)]
    [(step, message, filename)] = told
    assert step == 7  # before, it may be one of the steps that come before the risk enters a loss
    assert "2.bias@sculpt" in message
    assert "wrapped.loss(criterion, x, y)" in message
    assert filename == __file__


@pytest.mark.parametrize("turn", [2, 3, 5, 7])
@pytest.mark.parametrize("parts", [1, 2])
def test_risk_heads_that_are_trained_in_turn_with_something_else_are_silent(parts: int, turn: int) -> None:
    wrapped: Any = sculpt.Wrapper()(mlp())
    whole = sgd(wrapped.parameters())
    heads = whole if parts == 1 else sgd(wrapped.risk_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(1, 40):
            x, y = data()
            optimizer = whole if i % turn else heads
            (wrapped(x).square().mean() if i % turn else wrapped.loss(None, x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_layers_without_a_part_in_the_output_are_silent() -> None:
    """As the last backcast of an N-BEATS."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.forecast, self.backcast = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.trunk(x).relu()
            rest = x - self.backcast(h)
            return self.forecast(h) + 0 * rest.detach().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(compose(vote.Wrapper(2), sculpt.Wrapper())(Blocks()), data(), epochs=20)


def test_risk_heads_that_were_trained_before_are_silent() -> None:
    wrapped: Any = sculpt.Wrapper()(mlp())
    fit(wrapped, data(), epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(wrapped, adam(wrapped.parameters()), n=20)


@pytest.mark.parametrize("when", ["late", "frozen", "in parts", "kept"])
def test_risk_heads_whose_turn_comes_later_are_silent(when: str) -> None:
    wrapped: Any = sculpt.Wrapper(n_layers=1)(mlp())
    if when == "frozen":
        for p in wrapped.risk_parameters():
            p.requires_grad_(False)
    opt = adam(wrapped.base_parameters() if when == "in parts" else wrapped.parameters())
    for i in range(20):
        x, y = data()
        opt.zero_grad(set_to_none=when != "kept")
        likelihood = {"late": i >= 6, "kept": i == 6}.get(when, False)
        (wrapped.loss(nn.MSELoss(), x, y) if likelihood else nn.functional.mse_loss(wrapped(x), y)).backward()
        opt.step()


def test_a_model_that_was_wrapped_in_inference_mode_is_no_one_elses_concern() -> None:
    with torch.inference_mode():
        serving: Any = sculpt.Wrapper(n_layers=1)(mlp())
    steps(trained := sculpt.Wrapper(n_layers=1)(mlp()), adam(trained.parameters()), n=9)
    assert all(p.is_inference() for p in serving.risk_parameters())
