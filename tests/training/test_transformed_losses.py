"""Losses that take a prediction for a logarithm or logit are refused where it is compared with targets as it is."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from workbench import compose, fit, sculpt, vote

X = torch.randn(48, 2, generator=torch.Generator().manual_seed(0))
COUNTS = torch.poisson(X[:, :1].exp(), generator=torch.Generator().manual_seed(1))
LABELS = (X[:, :1] > 0).float()

LOG = {
    "class": nn.PoissonNLLLoss(),
    "function": F.poisson_nll_loss,
    "partial": functools.partial(F.poisson_nll_loss, full=True),
}
RATE = [nn.PoissonNLLLoss(log_input=False), functools.partial(F.poisson_nll_loss, log_input=False)]


def _net(*end: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 1), *end)


def _voters_with_heads() -> Any:
    return compose(vote.Wrapper(2), sculpt.Wrapper())


@pytest.mark.parametrize("criterion", LOG.values(), ids=LOG)
@pytest.mark.parametrize(("wrapper", "folds"), [(_voters_with_heads, None), (_voters_with_heads, 2), (vote.Wrapper, 2)])
def test_logarithms_of_rates_are_not_compared_with_counts(criterion: Any, wrapper: Any, folds: int | None) -> None:
    wrapped = (wrapper(2) if wrapper is vote.Wrapper else wrapper())(_net())
    before = [parameter.clone() for parameter in wrapped.parameters()]
    with pytest.raises(ValueError, match="takes the prediction for the logarithm of a rate"):
        fit(wrapped, (X, COUNTS), epochs=1, criterion=criterion, folds=folds)
    torch.testing.assert_close(list(wrapped.parameters()), before)


def test_an_own_loop_refuses_them_too() -> None:
    wrapped = sculpt.Wrapper()(_net())
    with pytest.raises(ValueError, match="takes the prediction for the logarithm of a rate"):
        wrapped.loss(nn.PoissonNLLLoss(), X, COUNTS)


def test_logits_need_the_option_that_says_so() -> None:
    with pytest.raises(ValueError, match=r'logit of a probability.*output="binary"'):
        fit(vote.Wrapper(2)(_net()), (X, LABELS), epochs=1, criterion=nn.BCEWithLogitsLoss(), folds=2)
    wrapped = vote.Wrapper(2, output="binary")(_net())
    history = fit(wrapped, (X, LABELS), epochs=1, criterion=nn.BCEWithLogitsLoss(), folds=2)
    assert 0 <= history.out_of_fold.prediction.min() <= history.out_of_fold.prediction.max() <= 1


@pytest.mark.parametrize("criterion", RATE)
def test_rates_are_in_the_units_of_counts(criterion: Any) -> None:
    wrapped = vote.Wrapper(2)(_net(nn.Softplus()))
    history = fit(wrapped, (X, COUNTS), epochs=30, lr=0.1, criterion=criterion, folds=2)
    assert history.out_of_fold.decisions.mean_at[0] > 0


@pytest.mark.parametrize("criterion", LOG.values(), ids=LOG)
def test_voters_alone_spread_in_the_units_of_their_prediction(criterion: Any) -> None:
    wrapped = vote.Wrapper(2)(_net())
    fit(wrapped, (X, COUNTS), epochs=30, lr=0.1, criterion=criterion)
    voters = torch.stack([voter(X) for voter in wrapped.voters()])
    y, risk = wrapped(X, return_risk=True)
    torch.testing.assert_close(y, voters.mean(0))
    torch.testing.assert_close(risk, voters.std(0, correction=0), rtol=1e-4, atol=1e-6)
