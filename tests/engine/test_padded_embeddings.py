"""Embeddings with padding, where voters look up different tokens: gradients are those of plain copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import fit, vote

TOKENS = 7


class Net(nn.Module):
    """Looks up the tokens that follow from its own scores; the first token is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, TOKENS)
        self.embedding = nn.Embedding(TOKENS, 4, padding_idx=0)
        self.last = nn.Linear(4, 2)

    def look_up(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.look_up(self.score(x).argmax(-1)).tanh())


class ByFunction(Net):
    def look_up(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding.weight, padding_idx=0)


class Negative(Net):
    def look_up(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding.weight, padding_idx=-TOKENS)


class Operation(Net):
    def look_up(self, tokens: Tensor) -> Tensor:
        return torch.embedding(self.embedding.weight, tokens, 0)


class Frequent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 4, padding_idx=0, scale_grad_by_freq=True)


def assert_gradients_of_copies(wrapped: Any, x: Tensor) -> None:
    copies = wrapped.voters()
    answers = torch.stack([copy(x) for copy in copies])
    torch.testing.assert_close(wrapped(x, tile_and_reduce=True), answers.mean(0))
    wrapped(x, tile_and_reduce=True).square().sum().backward()
    answers.mean(0).square().sum().backward()
    for name, parameter in wrapped.named_parameters():
        grads = [copy.get_parameter(name.partition("@")[0]).grad for copy in copies]
        if "score" not in name:
            torch.testing.assert_close(parameter.grad, torch.stack(grads))


@pytest.mark.parametrize("share", [None, "rank1"])
@pytest.mark.parametrize("build", [Net, ByFunction, Negative, Operation, Frequent])
def test_padding_gets_no_gradient_in_any_voter(build: type[Net], share: Any) -> None:
    wrapped = vote.Wrapper(3, share=share)(build().double())
    x = torch.randn(40, 6, dtype=torch.float64)
    if share is None:
        assert_gradients_of_copies(wrapped, x)
    wrapped.zero_grad()
    wrapped(x, tile_and_reduce=True).sum().backward()
    for name, parameter in wrapped.named_parameters():
        if "embedding" in name and parameter.shape[-2:] == (TOKENS, 4):
            assert not parameter.grad[..., 0, :].any()


@pytest.mark.parametrize("build", [Net, Frequent])
def test_a_layer_with_padding_runs_at_once(build: type[Net]) -> None:
    assert_gradients_of_copies(vote.Wrapper(3, strategy="vmap")(build().double()), torch.randn(40, 6).double())


@pytest.mark.parametrize("share", [None, "rank1"])
@pytest.mark.parametrize("build", [ByFunction, Negative, Operation])
def test_a_function_with_padding_is_refused_at_once(build: type[Net], share: Any) -> None:
    wrapped = vote.Wrapper(3, share=share, strategy="vmap")(build())
    with pytest.raises(RuntimeError, match="vmap differentiates embedding with padding"):
        wrapped(torch.randn(40, 6), tile_and_reduce=True)


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
@pytest.mark.parametrize("options", [{}, {"folds": 2}], ids=str)
def test_training_leaves_padding_as_it_is(options: dict[str, Any], strategy: str) -> None:
    model = nn.Sequential(nn.Embedding(TOKENS, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 2))
    x = torch.randint(0, TOKENS, (60, 3))
    wrapped = vote.Wrapper(4, strategy=strategy, output="logits")(model)
    fit(wrapped, (x, x[:, 0] % 2), epochs=2, batch_size=10, progress=False, **options)
    weight = dict(wrapped.named_parameters())["0.weight@vote"]
    assert not weight[:, 0].any()
    assert weight[:, 1:].all()
