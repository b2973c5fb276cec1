"""Values whose squares float32 cannot hold, in models without standardization."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from workbench import vote
from workbench.errors import WorkbenchWarning


class InUnits(nn.Module):
    def __init__(self, unit: float) -> None:
        super().__init__()
        self.layer, self.unit = nn.Linear(2, 1), unit

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.unit


@pytest.mark.parametrize(("unit", "says"), [(1e-22, "0 or inaccurate"), (1e22, "infinite")])
def test_a_spread_that_would_be_none_or_infinite_is_told_and_right_in_float64(unit: float, says: str) -> None:
    wrapped = vote.Wrapper(3)(InUnits(unit)).eval()
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), pytest.warns(WorkbenchWarning, match=f"whose squares float32 can't hold, .* become {says}"):
        wrapped(x, return_risk=True)
    wrapped.double()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        risk = wrapped(x.double(), return_risk=True)[1]
        voters = torch.stack([voter(x.double()) for voter in wrapped.voters()])
    torch.testing.assert_close(risk / unit, voters.div(unit).std(0, correction=0))


@pytest.mark.parametrize("unit", [1e-16, 1.0, 1e15])
def test_what_float32_holds_is_right_without_a_word(unit: float) -> None:
    wrapped = vote.Wrapper(3)(InUnits(unit)).eval()
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        risk = wrapped(x, return_risk=True)[1]
        voters = torch.stack([voter(x).double() for voter in wrapped.voters()])
    torch.testing.assert_close(risk.double() / unit, voters.div(unit).std(0, correction=0), rtol=1e-4, atol=1e-6)
