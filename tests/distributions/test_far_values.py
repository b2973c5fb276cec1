"""Densities of heavy-tailed distributions where squares overflow: compared with float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from workbench.distributions import Cauchy, StudentT


@pytest.mark.parametrize(
    "family", [Cauchy(), StudentT(df=2.5), StudentT(df=4.0), StudentT(df=torch.tensor(300.0))], ids=repr
)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_log_densities_far_out_are_those_of_float64(family: Any, scale: float) -> None:
    z = torch.tensor([[0.0, 1e-8, 0.3, 1.0, 20.0, 1e10, 1e17, 1.1e18, 1.2e18, 1e19, 1e25, 1e30]], dtype=torch.float64)
    z = torch.cat([z, -z])
    exact = [t.requires_grad_() for t in (z * scale, torch.zeros_like(z), torch.full_like(z, scale))]
    single = [t.detach().float().requires_grad_() for t in exact]
    wanted, found = family.log_prob(*exact), family.log_prob(*single)
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    for gradients in zip(
        torch.autograd.grad(found.sum(), single), torch.autograd.grad(wanted.sum(), exact), strict=True
    ):
        torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=1e-4, atol=1e-30)


def test_what_does_not_overflow_is_as_it_was() -> None:
    z = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 12, 1000)
    zero, one = torch.zeros_like(z), torch.ones_like(z)
    assert torch.equal(Cauchy.log_prob(z, zero, one), -torch.log1p(z**2) - math.log(math.pi) - one.log())
