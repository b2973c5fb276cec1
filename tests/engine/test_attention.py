"""Attention of all branches at once equals that of each branch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench import sculpt, vote
from workbench.core.wrapper import compose
from workbench.engine.executors.attention import attention

N = 3


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)


Q, K, V = (2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 7)  # rows, heads, positions, features
CASES: dict[str, tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], tuple[int | None, ...], dict[str, Any]]] = {
    "all differ": ((numbers(N, *Q), numbers(N, *K), numbers(N, *V), None), (0, 0, 0, None), {}),
    "other axes": ((numbers(2, N, 4, 5, 8), numbers(*K), numbers(2, 4, 6, N, 7), None), (1, None, 3, None), {}),
    "shared mask": ((numbers(N, *Q), numbers(*K), numbers(*V), numbers(5, 6)), (0, None, None, None), {}),
    "mask of rows": ((numbers(N, *Q), numbers(*K), numbers(*V), numbers(2, 1, 5, 6)), (0, None, None, None), {}),
    "mask of branches": ((numbers(N, *Q), numbers(*K), numbers(*V), numbers(N, 5, 6)), (0, None, None, 0), {}),
    "all masks": ((numbers(N, *Q), numbers(*K), numbers(*V), numbers(N, 2, 1, 5, 6)), (0, None, None, 0), {}),
    "only masks": ((numbers(*Q), numbers(*K), numbers(*V), numbers(N, 5, 6) > 0), (None, None, None, 0), {}),
    "no heads": ((numbers(N, 5, 8), numbers(N, 6, 8), numbers(6, 7), numbers(5, 6)), (0, 0, None, None), {}),
    "no rows": ((numbers(N, 4, 5, 8), numbers(4, 6, 8), numbers(N, 4, 6, 7), None), (0, None, 0, None), {}),
    "causal, grouped heads, scaled": (
        (numbers(N, 2, 4, 6, 8), numbers(N, 2, 2, 6, 8), numbers(N, 2, 2, 6, 7), None),
        (0, 0, 0, None),
        {"is_causal": True, "enable_gqa": True, "scale": 0.3},
    ),
}


def of_branch(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dims: tuple[int | None, ...], i: int, **options: Any
) -> Tensor:
    """Return the attention of one branch."""
    q, k, v = (t if d is None else t.select(d, i) for t, d in zip((q, k, v), dims[:3], strict=True))
    mask = mask if mask is None or dims[3] is None else mask.select(dims[3], i)
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


@pytest.mark.parametrize("name", CASES)
def test_attention_under_vmap_is_that_of_each_branch(name: str) -> None:
    tensors, dims, options = CASES[name]
    attended = torch.vmap(lambda *parts: attention(*parts, **options), dims)(*tensors)
    expected = torch.stack([of_branch(*tensors, dims, i, **options) for i in range(N)])
    torch.testing.assert_close(attended, expected)
    learned = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    weight = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad((out * weight).sum(), learned) for out in (attended, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_attention_under_two_vmaps_is_that_of_each_branch() -> None:
    q, k, v, mask = numbers(3, 5, *Q), numbers(5, *K), numbers(3, *V), numbers(5, 5, 6)
    attended = torch.vmap(torch.vmap(attention, (0, 0, None, 0)), (0, None, 0, None))(q, k, v, mask)
    expected = torch.stack(
        [
            torch.stack([F.scaled_dot_product_attention(q[i, j], k[j], v[i], mask[j]) for j in range(5)])
            for i in range(3)
        ]
    )
    torch.testing.assert_close(attended, expected)


def test_dropout_differs_between_branches_and_keeps_the_mean() -> None:
    q, k, v = numbers(400, 1, 1, 5, 8), numbers(1, 1, 6, 8), numbers(1, 1, 6, 7)
    q = q[:1].expand(400, -1, -1, -1, -1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        attended = torch.vmap(lambda q: attention(q, k, v, dropout_p=0.1), randomness="different")(q)
    assert not torch.equal(attended[0], attended[1])
    torch.testing.assert_close(attended.mean(0), F.scaled_dot_product_attention(q[0], k, v), atol=0.1, rtol=0)


class Attending(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 12), nn.Linear(4, 3)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.embed(x).chunk(3, -1)
        p = self.dropout if self.training else 0.0
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p).mean(-2))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("strategy", ["vmap", "rescue"])
def test_voters_learn_under_autocast_as_copies_do(strategy: str, dropout: float) -> None:
    """The softmax inside must not give gradients of another dtype than its inputs have."""
    wrapped = vote.Wrapper(3, strategy=strategy)(Attending(dropout)).train()
    x, y = torch.randn(6, 5, 8), torch.randn(6, 3)
    copies = [copy.deepcopy(voter).train() for voter in wrapped.voters()]
    with torch.autocast("cpu", torch.bfloat16):
        loss = wrapped.loss(F.mse_loss, x, y)
        expected = torch.stack([F.mse_loss(voter(x), y) for voter in copies]).sum()
    loss.backward()
    expected.backward()
    gradient = dict(wrapped.named_parameters())["embed.weight@vote"].grad
    assert gradient is not None
    assert gradient.isfinite().all()
    if not dropout:
        gradients = [voter.embed.weight.grad for voter in copies]
        torch.testing.assert_close(gradient / loss, torch.stack(gradients) / expected, rtol=0.1, atol=0.01)


@pytest.mark.parametrize("strategy", ["rescue", "loop"])
def test_heads_on_voters_with_attention_answer_as_copies_do(strategy: str) -> None:
    wrapped = compose(vote.Wrapper(3, strategy=strategy), sculpt.Wrapper(n_layers=1))(Attending()).double().eval()
    x = torch.randn(6, 5, 8, dtype=torch.float64)
    y, risk = wrapped(x, return_risk=True)
    answers = torch.stack([voter(x) for voter in wrapped.voters()])
    torch.testing.assert_close(y, answers.mean(0))
    torch.testing.assert_close(risk.epistemic, answers.std(0, correction=0))
