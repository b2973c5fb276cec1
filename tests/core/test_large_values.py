"""Variances of many values, by operations that are faster than torch.var, and of large maps, accumulated voter by voter."""

import pytest
import torch
from torch import nn

from workbench import vote
from workbench.core import method


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_variances_of_large_maps_are_those_of_small_ones(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = vote.Wrapper(3)(nn.Conv2d(1, 2, 3, padding=1).to(dtype)).eval()
    x = torch.randn(2, 1, 9, 8, dtype=dtype, generator=torch.Generator().manual_seed(0)) + 100
    with torch.no_grad():
        voters = torch.stack([voter(x) for voter in wrapped.voters()])
        whole, risk_at_once = wrapped(x, return_risk=True)
        monkeypatch.setattr(method, "LARGE", 10)
        monkeypatch.setattr(method, "PIECE", 7)
        y, risk = wrapped(x, return_risk=True)
    assert torch.equal(y, whole)
    close = {"rtol": 1e-5 if dtype is torch.float32 else 1e-12, "atol": 0.0}
    torch.testing.assert_close(risk, risk_at_once, **close)
    torch.testing.assert_close(risk, voters.std(0, correction=0), **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "dim"), [((5, 70), 0), ((3, 4, 100), 0), ((3, 4, 100), 1)])
def test_variances_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    offset = 1e4 if dtype is torch.float32 else 0.0  # the reference has float64, too
    y = (offset + torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).to(dtype)
    expected = y.double().var(dim, correction=0).to(dtype)
    y.requires_grad_()
    with_gradients = method.spread({"y": y}, dim)["epistemic"]
    with torch.no_grad():
        variance = method.spread({"y": y}, dim)["epistemic"]
    close = {"rtol": 1e-6 if dtype is torch.float32 else 1e-14, "atol": 0.0}
    torch.testing.assert_close(variance, expected, **close)
    assert torch.equal(with_gradients.detach(), variance)
    (slope,) = torch.autograd.grad(with_gradients.sum(), y)
    assert torch.allclose(
        slope, 2 / shape[dim] * (y - y.mean(dim, keepdim=True)), atol=(1 + offset) * torch.finfo(dtype).eps
    )


def test_voters_that_agree_have_no_variance() -> None:
    values = torch.rand(70, generator=torch.Generator().manual_seed(0)).expand(5, 70)
    assert not torch.equal(values.mean(0), values[0])  # rounded
    assert not method.spread({"y": values}, 0)["epistemic"].any()


def test_equal_voters_have_no_variance_and_what_is_not_finite_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method, "LARGE", 1)
    values = torch.tensor([[1e6, torch.inf, 3.0], [1e6, 1.0, torch.nan]])
    with torch.no_grad():
        variance = method.spread({"y": values}, 0)["epistemic"]
    assert torch.equal(variance.isnan(), torch.var(values, 0, correction=0).isnan())
    assert variance[0] == 0
