"""Under autocast, branches that run at once have the dtypes of a branch that runs alone, or they run one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench import vote
from workbench.core.ownership import engine_of


class Tail(nn.Module):
    """A linear layer and what comes after it."""

    def __init__(self, tail: Any) -> None:
        super().__init__()
        self.linear, self.tail = nn.Linear(4, 6), tail

    def forward(self, x: Tensor) -> Any:
        return self.tail(self.linear(x))


TAILS: dict[str, Any] = {
    "linear": lambda y: F.linear(y, torch.linspace(-1, 1, 18).reshape(3, 6), torch.ones(3)),
    "three dimensions": lambda y: F.linear(y[:, None], torch.linspace(-1, 1, 18).reshape(3, 6), torch.ones(3))[:, 0],
    "conv1d": lambda y: F.conv1d(y[:, None], torch.linspace(-1, 1, 6).reshape(2, 1, 3), torch.ones(2)).flatten(1),
    "conv_transpose1d": lambda y: F.conv_transpose1d(y[:, None], torch.linspace(-1, 1, 3).reshape(1, 1, 3)).flatten(1),
    "addmm": lambda y: torch.addmm(torch.ones(3), y, torch.linspace(-1, 1, 18).reshape(6, 3)),
    "Tensor.addmm": lambda y: torch.ones(7, 3).addmm(y, torch.linspace(-1, 1, 18).reshape(6, 3)),
    "attention": lambda y: F.scaled_dot_product_attention(*[y.reshape(1, -1, 3)] * 3).reshape(-1, 6),
    "layer norm": nn.LayerNorm(6),
    "group norm": nn.GroupNorm(2, 6),
    "batch norm": nn.BatchNorm1d(6),
    "prelu": lambda y: F.prelu(y, torch.full((6,), 0.3)),
    "cross entropy": lambda y: F.cross_entropy(y, torch.arange(7) % 6, reduction="none")[:, None],
    "fft": lambda y: torch.fft.rfft(y).abs(),
    "softmax": lambda y: y.softmax(-1),
    "no autocast inside": lambda y: _without(y),
}


def _without(y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.linear(y.float(), torch.linspace(-1, 1, 18).reshape(3, 6), torch.ones(3))


def answers(model: Any, x: Tensor, strategy: str, share: int | None) -> tuple[Tensor, list[Tensor], Any]:
    """Mean, answers of single voters under autocast, and the decision about the call."""
    wrapped: Any = vote.Wrapper(4, share=share, strategy=strategy)(model).eval()
    voters = wrapped.voters()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = wrapped(x)
        alone = [voter(x) for voter in voters]
    (decision,) = (made for kind, made in engine_of(wrapped).dispatcher.decisions.items() if kind.autocast)
    return y, alone, decision


def rows() -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("share", [None, 1], ids=["all layers", "last layer"])
@pytest.mark.parametrize("tail", TAILS)
def test_what_vmap_takes_apart_has_the_dtype_of_a_branch_by_itself(tail: str, share: int | None) -> None:
    y, alone, decision = answers(Tail(TAILS[tail]), rows(), "vmap", share)
    assert decision.executor == "vmap"
    assert {y.dtype} == {voter.dtype for voter in alone}
    torch.testing.assert_close(y.float(), torch.stack(alone).float().mean(0), rtol=0.02, atol=0.03)


def test_another_dtype_is_found_out_and_the_next_rung_taken() -> None:
    def tail(y: Tensor) -> Tensor:  # to be computed in float32, which autocast does not see under vmap
        return F.poisson_nll_loss(y, torch.ones(()), reduction="none")

    y, alone, decision = answers(Tail(tail), rows(), "auto", 1)
    assert {y.dtype} == {voter.dtype for voter in alone} == {torch.float32}
    assert "autocast gives torch.bfloat16 where a branch by itself has torch.float32" in decision.refused["vmap"]
    torch.testing.assert_close(y, torch.stack(alone).mean(0), rtol=1e-5, atol=1e-6)


def test_numbers_are_those_of_half_precision_in_all_layers() -> None:
    """Not of float32 with a last cast: a sum that bfloat16 can't hold is lost."""
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(1.0)
            layer.bias.fill_(0.0)
    x = torch.tensor([[256.0, 1.0], [4.0, 0.5]])  # 257 is 256 in bfloat16
    wrapped: Any = vote.Wrapper(4, share=1, finetune=True, strategy="vmap")(model).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(wrapped(x).float(), torch.tensor([[256.0], [4.5]]), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(), (1,)], ids=["one number", "one per column"])
def test_original_units_are_those_of_float32(shape: tuple[int, ...]) -> None:
    wrapped = vote.Wrapper(2)(nn.Linear(4, 1)).eval()
    wrapped.scale(y_mean=torch.full(shape, 1e6), y_scale=torch.full(shape, 2.0))
    x = torch.randn(7, 4)
    expected, risk = wrapped(x, return_risk=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answers = wrapped(x), *wrapped(x, return_risk=True)
    for y in answers[:2]:  # next to 1e6, bfloat16 has steps of 4096
        torch.testing.assert_close(y, expected, rtol=0, atol=0.1)
    torch.testing.assert_close(answers[2], risk, rtol=0.02, atol=0.02)
