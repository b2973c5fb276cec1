"""The noise of sample, and its interplay with the model's own random draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.models import mlp
from torch import Tensor, nn

from workbench import sample


def test_sample_draws_one_noise_a_call_in_training_mode() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    wrapped: Any = sample.Wrapper(8, sample.Bernoulli(0.5), where="weights")(model).train()
    x = torch.ones(64, 1)
    seen = {tuple(wrapped(x).unique().tolist()) for _ in range(20)}
    assert seen == {(0.0,), (2.0,)}  # all rows of a call share the one weight that was drawn
    y, risk = wrapped(x, return_risk=True)
    assert risk.shape == (64, 1)
    assert 0 < y[0].item() < 2


class Noisy(nn.Module):
    """Draws random numbers of its own, in evaluation mode as well."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + torch.randn(x.shape[0], 1)


def test_different_randomness_spreads_the_models_own_draws() -> None:
    wrapped: Any = sample.Wrapper(6, sample.Bernoulli(0.0), where="weights")(Noisy()).eval()
    assert bool((wrapped(torch.randn(5, 3), return_risk=True)[1] > 0.05).all())


def test_same_randomness_repeats_the_models_own_draws_but_not_the_noise() -> None:
    x = torch.randn(5, 3)
    still: Any = sample.Wrapper(6, sample.Bernoulli(0.0), where="weights", randomness="same")(Noisy()).eval()
    assert float(still(x, return_risk=True)[1].detach().max()) < 1e-6
    noisy: Any = sample.Wrapper(6, sample.Bernoulli(0.5), where="weights", randomness="same")(Noisy()).eval()
    assert bool((noisy(x, return_risk=True)[1] > 1e-3).all())
    assert not torch.equal(still(x), still(x))  # the next call draws anew


def test_error_refuses_the_models_own_draws_and_allows_the_noise() -> None:
    x = torch.randn(5, 3)
    wrapped: Any = sample.Wrapper(6, where="weights", randomness="error")(Noisy()).eval()
    with pytest.raises(RuntimeError, match=r'"different".*"same"'):
        wrapped(x, return_risk=True)
    fine: Any = sample.Wrapper(6, sample.Bernoulli(0.5), where="weights", randomness="error")(mlp()).eval()
    assert bool((fine(x, return_risk=True)[1] > 0).any())


@pytest.mark.parametrize("where", ["activations", "weights", "inputs"])
@pytest.mark.parametrize("noise", [sample.Bernoulli(0.3), sample.Normal(0.3)])
def test_a_seed_repeats_the_noise(where: str, noise: Any) -> None:
    wrapped: Any = sample.Wrapper(3, noise, where=where)(mlp()).train()
    x = torch.randn(5, 3)
    torch.manual_seed(4)
    first = wrapped(x)
    second = wrapped(x)
    torch.manual_seed(4)
    assert torch.equal(wrapped(x), first)
    assert not torch.equal(first, second)


def test_noise_never_touches_buffers() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.register_buffer("table", torch.eye(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) @ self.table

    wrapped: Any = sample.Wrapper(3, sample.Bernoulli(0.5))(Table()).train()
    wrapped(torch.randn(4, 3))
    wrapped(torch.randn(4, 3), return_risk=True)
    assert torch.equal(wrapped.table, torch.eye(3))
