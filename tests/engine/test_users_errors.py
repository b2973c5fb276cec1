"""Errors raised by the user's own model under every strategy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from workbench import vote


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = nn.Linear(3, 1), 0
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.norm(x)
        if x.shape[0] == 5:
            raise KeyError("five rows are refused by the model itself")
        if x.shape[0] == 6:
            return self.fc(x) * float(x.sum())  # what vmap refuses
        return self.fc(x)


@pytest.mark.parametrize("strategy", ["vmap", "rescue", "loop", "auto"])
@pytest.mark.parametrize("earlier", [False, True], ids=["first", "later"])
def test_the_users_own_error_comes_as_it_is_and_changes_nothing(strategy: str, earlier: bool) -> None:
    wrapped = vote.Wrapper(3, share=1, strategy=strategy)(Picky())
    if earlier:
        wrapped(torch.randn(4, 3), return_risk=True)
    before = {name: value.clone() for name, value in wrapped.state_dict().items() if isinstance(value, Tensor)}
    calls, draws = wrapped.calls, torch.get_rng_state()
    with pytest.raises(KeyError, match="five rows are refused by the model itself"):
        wrapped(torch.zeros(5, 3), return_risk=True)
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|running_mean|expected|size") as caught:
        wrapped(torch.zeros(4, 2), return_risk=True)
    assert "is not possible" not in str(caught.value)
    assert wrapped.calls == calls
    assert torch.equal(draws, torch.get_rng_state())
    assert all(torch.equal(value, wrapped.state_dict()[name]) for name, value in before.items())


def test_what_only_vmap_refuses_is_still_told_as_that() -> None:
    wrapped = vote.Wrapper(3, share=1, strategy="vmap")(Picky())
    before = {name: value.clone() for name, value in wrapped.state_dict().items() if isinstance(value, Tensor)}
    with pytest.raises(RuntimeError, match=r'strategy="vmap" is not possible .*Use strategy="auto"'):
        wrapped(torch.zeros(6, 3), return_risk=True)
    assert wrapped.calls == 0
    assert all(torch.equal(value, wrapped.state_dict()[name]) for name, value in before.items())
