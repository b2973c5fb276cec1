"""Risks of models small enough to have closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.models import mlp
from torch import nn

from workbench import Risk, compose, sample, sculpt, vote


def linear(slope: float = 2.0, offset: float = 1.0) -> nn.Linear:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(slope)
        model.bias.fill_(offset)
    return model


def set_biases(wrapped: Any, values: list[float]) -> None:
    """Voters that all have the weight of the given model, and these biases."""
    wrapped.set_risk_parameters({**dict(wrapped.named_risk_parameters()), "bias@vote": torch.tensor(values)[:, None]})


def softplus(raw: float) -> float:
    return float(torch.nn.functional.softplus(torch.tensor(raw)))


@pytest.mark.parametrize("share", [None, "rank1", 1])
def test_one_voter_equals_itself_with_no_risk(share: Any) -> None:
    wrapped: Any = vote.Wrapper(1, share=share)(mlp()).eval()
    x = torch.randn(5, 3)
    y, risk = wrapped(x, return_risk=True)
    torch.testing.assert_close(y, wrapped.voters()[0](x))  # a batch of one weight may take another kernel
    assert torch.equal(risk, torch.zeros(5, 1))


def test_one_voter_at_the_given_weights_equals_the_model() -> None:
    model = mlp()
    wrapped: Any = vote.Wrapper(1, finetune=True)(model).eval()
    x = torch.randn(5, 3)
    assert torch.equal(wrapped(x), model(x))


def test_voters_that_differ_by_constants_give_their_mean_and_deviation() -> None:
    wrapped: Any = vote.Wrapper(3, finetune=True)(linear()).eval()
    set_biases(wrapped, [0.0, 3.0, 9.0])
    x = torch.tensor([[0.0], [1.0]])
    y, risk = wrapped(x, return_risk=True)
    assert torch.allclose(y, torch.tensor([[4.0], [6.0]]))
    assert torch.allclose(risk, torch.full((2, 1), 14.0**0.5))  # mean of 16, 1 and 25


def test_dropout_on_the_weights_has_the_variance_of_a_bernoulli() -> None:
    p, n = 0.25, 4000
    wrapped: Any = sample.Wrapper(n, sample.Bernoulli(p), where="inputs", strategy="vmap")(linear(slope=2.0)).eval()
    x = torch.tensor([[3.0]])
    y, risk = wrapped(x, return_risk=True)
    deviation = 6.0 * (p / (1 - p)) ** 0.5
    assert y.item() == pytest.approx(7.0, abs=4 * deviation / n**0.5)
    assert risk.item() == pytest.approx(deviation, rel=0.1)


@pytest.mark.parametrize("where", ["activations", "weights", "inputs"])
def test_noise_of_size_zero_leaves_the_prediction_alone(where: str) -> None:
    model = mlp()
    x = torch.randn(5, 3)
    for distribution in (sample.Bernoulli(0.0), sample.Normal(0.0)):
        wrapped: Any = sample.Wrapper(3, distribution, where=where)(model).eval()
        y, risk = wrapped(x, return_risk=True)
        assert torch.allclose(y, model(x), atol=1e-6)
        assert float(risk.detach().max()) < 1e-6


def test_the_total_of_vote_and_sculpt_follows_the_law_of_total_variance() -> None:
    wrapped: Any = compose(vote.Wrapper(2, finetune=True), sculpt.Wrapper())(linear()).eval()
    raw = torch.tensor([[0.5], [2.0]])
    names = dict(wrapped.named_risk_parameters())
    heads = {name: torch.zeros_like(p) for name, p in names.items() if "sculpt" in name and "weight" in name}
    heads |= {name: raw for name in names if "sculpt" in name and "bias" in name}
    assert len(heads) == 2
    wrapped.set_risk_parameters({**names, **heads, "bias@vote": torch.tensor([[0.0], [4.0]])})
    y, risk = wrapped(torch.tensor([[1.0]]), return_risk=True)
    aleatoric = (softplus(0.5) ** 2 + softplus(2.0) ** 2) / 2
    assert isinstance(risk, Risk)
    assert y.item() == pytest.approx(4.0)
    assert risk.epistemic.item() == pytest.approx(2.0)
    assert risk.aleatoric.item() == pytest.approx(aleatoric**0.5)
    assert risk.total.item() == pytest.approx((aleatoric + 4.0) ** 0.5)


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
@pytest.mark.parametrize("level", [1e6, -1e6])
def test_large_values_give_no_negative_variance_and_no_nan(level: float, strategy: str) -> None:
    wrapped: Any = compose(vote.Wrapper(3, finetune=True, strategy=strategy), sculpt.Wrapper())(
        linear(slope=1e-3)
    ).eval()
    set_biases(wrapped, [level, level, level])
    x = torch.randn(64, 1)
    _, risk = wrapped(x, return_risk=True)
    for name in risk:
        assert bool((risk[name] >= 0).all()), name
    assert float(risk.epistemic.detach().max()) <= 0.1  # the rounding of float32 at 1e6
    set_biases(wrapped, [level, level + 8, level + 16])
    _, risk = wrapped(x, return_risk=True)
    assert torch.allclose(risk.epistemic, torch.full((64, 1), (2 * 64 / 3) ** 0.5), rtol=0.02)


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
def test_gradients_are_finite_where_voters_agree_exactly(strategy: str) -> None:
    wrapped: Any = vote.Wrapper(3, finetune=True, strategy=strategy)(mlp())
    _, risk = wrapped(torch.randn(5, 3), return_risk=True)
    assert torch.equal(risk, torch.zeros(5, 1))
    risk.sum().backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in wrapped.parameters())
