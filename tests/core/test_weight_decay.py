"""Optimizers of wrapped models: parameter groups for weight decay, warnings about others, steps that use whole tensors, and `fit`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.models import mlp
from helpers.training_loops import ALL, TAKING, data, steps
from torch import nn

from workbench import WorkbenchWarning, fit, is_wrapped, sample, vote


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(4, 1))


def by_dimension(wrapped: Any, decay: float = 0.1) -> list[dict[str, Any]]:
    """The rule as users write it for plain models."""
    return [
        {"params": [p for p in wrapped.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in wrapped.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("name", ALL)
def test_parameter_groups_keep_the_usual_rule_of_the_plain_model(name: str) -> None:
    wrapped: Any = ALL[name]()(convolutional())
    weights, rest = wrapped.parameter_groups(0.1)
    assert (weights["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    names = {id(p): key for key, p in wrapped.named_parameters()}
    decayed = {names[id(p)] for p in weights["params"]}
    assert decayed | {names[id(p)] for p in rest["params"]} == set(names.values())
    assert len(weights["params"]) + len(rest["params"]) == len(names)
    plain = {key for key, p in convolutional().named_parameters() if p.ndim > 1}
    assert {key.partition("@")[0] for key in decayed} == plain
    assert not any("vote_in" in key or "vote_out" in key or key.endswith("@sample") for key in decayed)


def test_a_decayed_step_is_that_of_plain_models() -> None:
    wrapped: Any = vote.Wrapper(3)(convolutional())
    plain = wrapped.voters()
    x, y = torch.randn(8, 3, 1), torch.randn(8, 1)
    optimizer = torch.optim.AdamW(wrapped.parameter_groups(0.5), lr=0.1)
    wrapped.loss(nn.MSELoss(), x, y).backward()
    optimizer.step()
    for voter, after in zip(plain, wrapped.voters(), strict=True):
        optimizer = torch.optim.AdamW(by_dimension(voter, 0.5), lr=0.1)
        (nn.functional.mse_loss(voter.train()(x), y) / 3).backward()
        optimizer.step()
        for (name, p), q in zip(voter.named_parameters(), after.parameters(), strict=True):
            if name != "0.bias":  # before a batch norm its gradient is rounding alone
                assert torch.allclose(p, q, atol=1e-5)


def test_parameters_that_are_frozen_are_in_no_group() -> None:
    wrapped: Any = vote.Wrapper(3)(mlp())
    wrapped.get_parameter("0.weight@vote").requires_grad_(False)
    assert sum(len(group["params"]) for group in wrapped.parameter_groups(0.1)) == 3


@pytest.mark.parametrize("name", TAKING)
def test_groups_that_decay_biases_of_voters_are_told_once(name: str) -> None:
    wrapped: Any = TAKING[name]()(mlp())
    optimizer = torch.optim.AdamW(by_dimension(wrapped), lr=0.01)
    with pytest.warns(WorkbenchWarning, match=r"@vote.*parameter_groups\(weight_decay\)") as caught:
        steps(wrapped, optimizer, n=3)
    assert len(caught) == 1
    assert caught[0].filename == steps.__code__.co_filename


@pytest.mark.parametrize("name", ALL)
def test_groups_that_are_meant_are_not_told(name: str) -> None:
    wrapped: Any = ALL[name]()(mlp())
    steps(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01))  # decays biases, as it does in a plain model
    steps(wrapped, torch.optim.AdamW(wrapped.parameter_groups(0.1), lr=0.01))
    halves = list(wrapped.parameters())
    steps(wrapped, torch.optim.AdamW([{"params": halves[:1]}, {"params": halves[1:], "lr": 0.1}], lr=0.01))
    steps(wrapped, torch.optim.Adam(by_dimension(wrapped, 0.0), lr=0.01))


def test_optimizers_that_look_at_whole_tensors_are_told_once() -> None:
    """One tensor holds the weights of all voters, so that a step is not that of plain models."""
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    wrapped: Any = vote.Wrapper(3)(mlp())
    adafactor = torch.optim.Adafactor(wrapped.parameters(), lr=0.1)
    with pytest.warns(WorkbenchWarning, match=r"Adafactor depends on .* a whole tensor.*@vote.*AdamW"):
        step(wrapped, adafactor, x, y)
    step(wrapped, adafactor, x, y)
    step(wrapped, torch.optim.Adafactor(wrapped.parameters(), lr=0.1), x, y)
    for model in (vote.Wrapper(1)(mlp()), sample.Wrapper()(mlp()), vote.Wrapper(3)(mlp()).voters()[0]):
        step(model, torch.optim.Adafactor(model.parameters(), lr=0.1), x, y)


@pytest.mark.parametrize(
    "optimizer", ["Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "SGD"]
)
def test_a_step_number_by_number_is_that_of_plain_models(optimizer: str) -> None:
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    wrapped: Any = vote.Wrapper(3)(mlp())
    plain = wrapped.voters()
    step(wrapped, getattr(torch.optim, optimizer)(wrapped.parameters(), lr=0.1), x, y)
    for voter, after in zip(plain, wrapped.voters(), strict=True):
        alone = getattr(torch.optim, optimizer)(voter.parameters(), lr=0.1)
        (nn.functional.mse_loss(voter.train()(x), y) / 3).backward()
        alone.step()
        for p, q in zip(voter.parameters(), after.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss = model.loss(nn.MSELoss(), x, y) if is_wrapped(model) else nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()


def test_fit_decays_weights_only() -> None:
    """A model whose gradients are zero moves by its decay alone."""
    wrapped: Any = vote.Wrapper(2)(mlp())
    before = {name: p.detach().clone() for name, p in wrapped.named_parameters()}
    x, _ = data(32)
    fit(
        wrapped,
        (x, torch.zeros(32, 1)),
        epochs=1,
        lr=0.1,
        weight_decay=0.5,
        criterion=lambda prediction, y: 0 * prediction.sum(),
        validation=0,
        progress=False,
    )
    for name, p in wrapped.named_parameters():
        moved = not torch.equal(p, before[name])
        assert moved == ("weight" in name), name
