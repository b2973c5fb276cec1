"""Encoders of torch leave out padding steps by nested tensors without gradients: wrapped ones give what plain copies give there."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workbench import neo, sculpt, vote

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class Sentences(nn.Module):
    """The mean over all steps, padding included, of an encoder's output."""

    def __init__(self, norm: bool, nested: bool = True) -> None:
        super().__init__()
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words = nn.Embedding(20, 8)
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            last = nn.LayerNorm(8) if norm else None
            self.encoder = nn.TransformerEncoder(layer, 2, norm=last, enable_nested_tensor=nested)
            self.head = nn.Linear(8, 1)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(words), src_key_padding_mask=words == 0).mean(1))


def sentences(n: int, left: bool = False) -> Tensor:
    words = torch.randint(1, 20, (n, 6), generator=torch.Generator().manual_seed(0))
    words[::2, 4:] = 0
    return words.flip(1) if left else words


WRAPPERS: dict[str, Any] = {
    "vote": vote.Wrapper(3),
    "vote, last layer": vote.Wrapper(3, share=1),
    "rank-one": vote.Wrapper(3, share="rank1"),
    "sculpt": sculpt.Wrapper(),
    "sculpt, last layer": sculpt.Wrapper(n_layers=1),
    "neo": neo.Wrapper(per="row"),
}


def mean_of_copies(wrapped: Any, words: Tensor) -> Tensor:
    return torch.stack([voter(words) for voter in wrapped.voters()]).mean(0)


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("norm", [False, True])
def test_padding_has_the_part_in_a_prediction_that_it_has_in_plain_copies(name: str, norm: bool) -> None:
    wrapped: Any = WRAPPERS[name](Sentences(norm).eval()).eval()
    if name == "neo":
        wrapped.fit(sentences(40))
    for words in (sentences(5), sentences(1), sentences(5, left=True)):
        with torch.no_grad():
            expected = mean_of_copies(wrapped, words)
            for _ in range(2):
                torch.testing.assert_close(wrapped(words, return_risk=True)[0], expected)
        torch.testing.assert_close(wrapped(words, return_risk=True)[0], mean_of_copies(wrapped, words))


def test_torch_itself_gives_something_else_without_nested_tensors() -> None:
    words = sentences(5)
    with torch.no_grad():
        assert not torch.allclose(
            Sentences(False).eval()(words), Sentences(False, nested=False).eval()(words), atol=1e-2
        )


class Mode(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_a_function_mode_of_the_user_has_the_effect_that_it_has_on_plain_copies() -> None:
    wrapped: Any = sculpt.Wrapper()(Sentences(False).eval()).eval()
    words = sentences(5)
    with torch.no_grad(), Mode():
        expected = mean_of_copies(wrapped, words)
        torch.testing.assert_close(wrapped(words, return_risk=True)[0], expected)
