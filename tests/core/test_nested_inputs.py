"""Nested tensors as inputs: rows of different length, which the model makes even itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, sample, sculpt, vote

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class MeanOfRows(nn.Module):
    """Embeds rows of different length, and takes the mean of each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row.mean(0) for row in self.last(self.embed(x).relu()).unbind()])


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_voters_are_plain_copies_in_repeated_calls(layout: torch.layout) -> None:
    wrapped: Any = vote.Wrapper(3)(MeanOfRows()).eval()
    voters = wrapped.voters()
    with torch.no_grad():
        for length in [2, 5] * 20:
            x = torch.nested.nested_tensor([torch.randn(length, 3), torch.randn(4, 3)], layout=layout)
            y, risk = wrapped(x, return_risk=True)
            plain = torch.stack([voter(x) for voter in voters])
            torch.testing.assert_close(y, plain.mean(0))
            torch.testing.assert_close(risk, plain.std(0, correction=0))


@pytest.mark.parametrize(
    "wrapper", [sample.Wrapper(20), sculpt.Wrapper(), compose(vote.Wrapper(2), sculpt.Wrapper())], ids=str
)
def test_other_wrappers_take_them(wrapper: Any) -> None:
    wrapped = wrapper(MeanOfRows()).eval()
    x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    y, risk = wrapped(x, return_risk=True)
    assert y.shape == (2, 1)
    total = risk if isinstance(risk, Tensor) else risk.total
    assert bool((total > 0).all())
