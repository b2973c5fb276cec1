"""Cross-fitting and risk heads take a prediction for the middle of the targets, so that losses of which that is not the optimum are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.fold_models import net, plane, quiet
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, sculpt, vote

Criterion = Callable[[Tensor, Tensor], Tensor]


def pinball(*levels: float) -> Criterion:
    """The loss of Koenker & Bassett (1978), whose optimum is a quantile: one level for each column."""

    def loss(prediction: Tensor, target: Tensor) -> Tensor:
        tau, error = torch.tensor(levels), target - prediction
        return torch.maximum(tau * error, (tau - 1) * error).mean()

    return loss


def expectile(prediction: Tensor, target: Tensor) -> Tensor:
    """The loss of Newey & Powell (1987) at 0.8."""
    error = target - prediction
    return (torch.where(error > 0, 0.8, 0.2) * error.square()).mean()


@pytest.mark.parametrize("criterion", [pinball(0.9), pinball(0.4), expectile])
@pytest.mark.parametrize(("heads", "folds"), [(False, 2), (True, 2), (True, None)])
def test_losses_of_one_side_are_refused(criterion: Criterion, heads: bool, folds: int | None) -> None:
    """Beside a likelihood, the prediction would be neither the quantile nor the mean: with a level of 0.9, 58 % of targets were below it."""
    wrapped: Any = compose(vote.Wrapper(4), *([sculpt.Wrapper(n_layers=1)] if heads else []))(net())
    before = {name: value.clone() for name, value in wrapped.state_dict().items()}
    with pytest.raises(ValueError, match=r"pulls predictions to one side.*sculpt.Quantiles"):
        quiet(wrapped, plane(), folds=folds, criterion=criterion)
    assert all(torch.equal(value, wrapped.state_dict()[name]) for name, value in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("family", [None, sculpt.Quantiles])
def test_a_quantile_is_learned_where_no_likelihood_pulls_at_it(family: Any) -> None:
    """Offsets of quantile heads from the prediction may be of any size."""
    x, y = plane(400, noise=3.0)
    wrapped: Any = compose(*([] if family is None else [sculpt.Wrapper(family)]))(net(hidden=16))
    quiet(wrapped, (x, y), epochs=40, criterion=pinball(0.9))
    assert float((y <= wrapped(x)).double().mean()) == pytest.approx(0.9, abs=0.06)


def test_each_column_counts() -> None:
    x, y = plane()
    with pytest.raises(ValueError, match="pulls predictions to one side"):
        quiet(vote.Wrapper(4)(net(3)), (x, y.expand(-1, 3)), folds=2, criterion=pinball(0.1, 0.5, 0.9))


def test_predictions_of_another_shape_are_refused_before_the_training() -> None:
    with pytest.raises(ValueError, match=r"y: targets are \[n, 1\], but the model gives \[n, 3\]"):
        quiet(vote.Wrapper(4)(net(3)), plane(), folds=2, criterion=pinball(0.1, 0.5, 0.9))


@pytest.mark.parametrize(
    "criterion",
    [
        pinball(0.5),
        nn.HuberLoss(),
        nn.L1Loss(reduction="sum"),
        lambda y, t: (y - t).abs().max(),
        lambda y, t: F.gaussian_nll_loss(y, t, torch.ones_like(y)),
        lambda y, t: torch.log(torch.cosh(y - t)).mean() + 1e-4 * y.square().mean(),
    ],
)
def test_losses_of_both_sides_are_trained_by(criterion: Criterion) -> None:
    before = torch.random.get_rng_state()
    quiet(sculpt.Wrapper()(net()), plane(), criterion=criterion)
    history = quiet(vote.Wrapper(4)(net()), plane(), folds=2, criterion=criterion)
    assert history.out_of_fold.risk.aleatoric.isfinite().all()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_likelihood_whose_optimum_is_the_mean_is_trained_by() -> None:
    """Though it is not symmetric."""
    x, y = plane()
    rates = net().append(nn.Softplus())
    quiet(vote.Wrapper(4)(rates), (x, y.abs()), folds=2, criterion=nn.PoissonNLLLoss(log_input=False))


@pytest.mark.slow
def test_quantile_heads_are_cross_fitted() -> None:
    """The remedy that the refusal names."""
    x, y = plane(400, noise=3.0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        wrapped: Any = compose(vote.Wrapper(4), sculpt.Wrapper(sculpt.Quantiles((0.1, 0.5, 0.9))))(net(hidden=16))
    quiet(wrapped, (x, y), folds=2, epochs=40)
    below = (y <= wrapped.quantiles(x)).double().mean((1, 2))
    torch.testing.assert_close(below, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), atol=0.06, rtol=0)
