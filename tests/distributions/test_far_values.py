"""Densities where squares or quotients overflow or underflow: compared with float64, or with scipy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats

from workbench.distributions import Cauchy, Censored, FromTorch, Laplace, LogNormal, Normal, StudentT


@pytest.mark.parametrize(
    "family", [Cauchy(), StudentT(df=2.5), StudentT(df=4.0), StudentT(df=torch.tensor(300.0))], ids=repr
)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_log_densities_far_out_are_those_of_float64(family: Any, scale: float) -> None:
    z = torch.tensor([[0.0, 1e-8, 0.3, 1.0, 20.0, 1e10, 1e17, 1.1e18, 1.2e18, 1e19, 1e25, 1e30]], dtype=torch.float64)
    z = torch.cat([z, -z])
    exact = [t.requires_grad_() for t in (z * scale, torch.zeros_like(z), torch.full_like(z, scale))]
    single = [t.detach().float().requires_grad_() for t in exact]
    wanted, log_prob = family.log_prob(*exact), family.log_prob(*single)
    assert log_prob.isfinite().all()
    torch.testing.assert_close(log_prob.double(), wanted, rtol=1e-5, atol=1e-5)
    for gradients in zip(
        torch.autograd.grad(log_prob.sum(), single), torch.autograd.grad(wanted.sum(), exact), strict=True
    ):
        torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=1e-4, atol=1e-30)


def test_what_does_not_overflow_is_as_it_was() -> None:
    z = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 12, 1000)
    zero, one = torch.zeros_like(z), torch.ones_like(z)
    assert torch.equal(Cauchy.log_prob(z, zero, one), -torch.log1p(z**2) - math.log(math.pi) - one.log())


@pytest.mark.parametrize(("family", "order"), [(Cauchy(), 1.0), (StudentT(df=4.0), 4.0)], ids=repr)
def test_heavy_tails_have_right_numbers_and_gradients_where_the_quotient_overflows(family: Any, order: float) -> None:
    y, risk = torch.tensor([[3e38, -1e38, math.inf]]), torch.tensor([[1e-3, 0.3, 2.0]], requires_grad=True)
    loc = torch.zeros_like(y).requires_grad_()
    log_prob = family.log_prob(y, loc, risk)
    wanted = family.log_prob(y.double(), loc.double(), risk.double())
    torch.testing.assert_close(log_prob.double(), wanted, rtol=1e-6, atol=0)
    slope_loc, slope_risk = torch.autograd.grad(family.loss_function(y, loc, risk, reduction="sum"), (loc, risk))
    # -log p -> (order + 1) log|y - loc| - order log(risk)
    torch.testing.assert_close(slope_risk, -order / risk.detach())
    assert bool((slope_loc.abs() < 1e-37).all())


@pytest.mark.parametrize("family", [Normal(), Laplace(), Cauchy(), StudentT()], ids=repr)
def test_a_target_of_1e300_has_the_right_density_or_minus_infinity(family: Any) -> None:
    y, zero, one = (torch.full((1, 1), value, dtype=torch.float64) for value in (1e300, 0.0, 1.0))
    closed = {"Laplace": -math.sqrt(2) * 1e300, "Cauchy": -math.log(math.pi) - 600 * math.log(10), "Normal": -math.inf}
    df = 5.0
    far = (
        stats.t.logpdf(1e30 / math.sqrt((df - 2) / df), df)
        - 0.5 * math.log((df - 2) / df)
        - 270 * (df + 1) * math.log(10)
    )
    wanted = closed.get(type(family).__name__, far)
    torch.testing.assert_close(family.log_prob(y, zero, one), torch.full_like(y, wanted), rtol=1e-12, atol=0)
    assert bool(family.log_prob(y.float(), zero.float(), one.float()).isneginf())  # which float32 holds as inf


@pytest.mark.parametrize(("y", "loc", "risk"), [(1.0, 1e-30, 1e10), (2.0, 1.0, 1e25), (1e12, 1e12, 1e-9)])
def test_a_log_normal_whose_risk_is_far_from_its_mean(y: float, loc: float, risk: float) -> None:
    single = [torch.tensor([[value]], requires_grad=True) for value in (y, loc, risk)]
    ratio = math.log1p((risk / loc) ** 2) if risk > 1e-15 * loc else (risk / loc) ** 2
    wanted = stats.norm.logpdf(math.log(y), math.log(loc) - ratio / 2, math.sqrt(ratio)) - math.log(y)
    log_prob = LogNormal.log_prob(*single)
    assert log_prob.dtype == torch.float32
    assert log_prob.item() == pytest.approx(wanted, rel=1e-6)
    gradients = torch.autograd.grad(LogNormal.loss_function(*single), single[1:])
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    for function in (LogNormal.cdf, LogNormal.crps):
        value = function(*(t.detach() for t in single))
        assert value.dtype == torch.float32
        assert bool(value.isfinite())


@pytest.mark.parametrize(("y", "scale", "concentration"), [(1e-30, 0.05, 20.0), (1e6, 1e5, 3e2), (0.3, 2.0, 1.5)])
def test_weibull_densities_are_those_of_scipy_where_the_power_leaves_float64(
    y: float, scale: float, concentration: float
) -> None:
    wide: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
    loc, heads = torch.tensor([[math.log(scale)]], **wide), torch.tensor([[[math.log(concentration)]]], **wide)
    time, event = torch.tensor([[y]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    wanted = stats.weibull_min(concentration, scale=scale).logpdf(y)
    log_prob = FromTorch("Weibull").log_prob(time, loc, heads)
    assert log_prob.item() == pytest.approx(wanted, rel=1e-5)
    loss = Censored("Weibull").loss_function(torch.cat([time, event], -1), loc, heads)
    assert loss.item() == pytest.approx(-wanted, rel=1e-5)
    assert all(bool(gradient.isfinite().all()) for gradient in torch.autograd.grad(loss, (loc, heads)))
