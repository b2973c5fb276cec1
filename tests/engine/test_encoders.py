"""Encoders of torch leave out padding steps by nested tensors without gradients: wrapped ones give what plain copies give there."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers.default_suite import one_in
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workbench import neo, sculpt, vote
from workbench.engine.encoder_layers import _padding, can_be_padded

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class Sentences(nn.Module):
    """The mean over all steps, padding included, of an encoder's output."""

    def __init__(self, norm: bool, nested: bool = True, check: bool = True) -> None:
        super().__init__()
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words = nn.Embedding(20, 8)
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            last = nn.LayerNorm(8) if norm else None
            self.encoder = nn.TransformerEncoder(layer, 2, last, nested, mask_check=check)
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
@pytest.mark.parametrize("norm", one_in(2, [False, True]))
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


@pytest.mark.parametrize("name", WRAPPERS)
def test_without_a_check_of_the_mask_torch_counts_words_and_takes_the_first_ones(name: str) -> None:
    wrapped: Any = WRAPPERS[name](Sentences(True, check=False).eval()).eval()
    if name == "neo":
        wrapped.fit(sentences(40))
    words = sentences(5, left=True)
    with torch.no_grad():
        expected = mean_of_copies(wrapped, words)
        for _ in range(2):
            torch.testing.assert_close(wrapped(words, return_risk=True)[0], expected)


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


@dataclass(frozen=True)
class Setting:
    """A call of an encoder; the defaults are those under which torch leaves out padding steps."""

    layer: dict[str, Any] = field(default_factory=dict)
    encoder: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], object] = lambda encoder: None
    around: Callable[[], Any] = torch.no_grad
    call: Callable[[Tensor], dict[str, Any]] = lambda x: {}
    padding: str = "right"


def without_fast_paths() -> Any:
    stack = contextlib.ExitStack()
    stack.enter_context(torch.no_grad())
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)
    return stack


def autocast_of_gpus() -> Any:
    """That of CPUs is no condition, and plain encoders fail in it."""
    stack = contextlib.ExitStack()
    stack.enter_context(torch.no_grad())
    stack.callback(torch.set_autocast_enabled, "cuda", torch.is_autocast_enabled("cuda"))
    torch.set_autocast_enabled("cuda", True)
    return stack


SETTINGS = {
    "default": Setting(),
    "norm first": Setting({"norm_first": True}),
    "gelu": Setting({"activation": "gelu"}),
    "another activation": Setting({"activation": torch.tanh}),
    "steps first": Setting({"batch_first": False}),
    "an odd number of heads": Setting({"nhead": 3}),
    "without biases": Setting({"bias": False}),
    "double precision": Setting({"dtype": torch.float64}),
    "norms of other precision": Setting(change=lambda encoder: setattr(encoder.layers[1].norm2, "eps", 1e-3)),
    "not asked for": Setting(encoder={"enable_nested_tensor": False}),
    "training": Setting(change=lambda encoder: encoder.train()),
    "training of the first layer": Setting(change=lambda encoder: encoder.layers[0].train()),
    "autocast": Setting(around=autocast_of_gpus),
    "no fast paths": Setting(around=without_fast_paths),
    "inference mode": Setting(around=torch.inference_mode),
    "gradients": Setting(around=torch.enable_grad),
    "gradients of nothing": Setting(change=lambda e: e.requires_grad_(False), around=torch.enable_grad),
    "a mask of steps": Setting(call=lambda x: {"mask": torch.zeros(x.shape[1], x.shape[1], dtype=torch.bool)}),
    "causal without a mask": Setting(call=lambda x: {"is_causal": False}),
    "padding on the left": Setting(padding="left"),
    "padding on the left, not checked": Setting(encoder={"mask_check": False}, padding="left"),
    "a mask to add": Setting(padding="added"),
    "padding nowhere": Setting(padding="nowhere"),
    "no mask": Setting(padding="none"),
    "a single sentence": Setting(padding="of one"),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:Support for mismatched")
def test_padding_is_filled_where_torch_fills_it(name: str) -> None:
    """In all settings that torch's encoder looks at: if its conditions change, so must ours."""
    setting = SETTINGS[name]
    options = {"nhead": 2, "batch_first": True, "dropout": 0.0, **setting.layer}
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, dim_feedforward=16, **options)
    encoder = nn.TransformerEncoder(layer, 2, **setting.encoder).eval()
    setting.change(encoder)
    x = torch.randn(4, 4, 12, dtype=options.get("dtype", torch.float32))
    padding = torch.zeros(4, 4, dtype=torch.bool)
    padding[1, 2:] = padding[3, 3:] = setting.padding != "nowhere"
    mask: Tensor | None = padding.flip(1) if setting.padding == "left" else padding
    if setting.padding == "added":
        mask = torch.zeros(4, 4).masked_fill(padding, -torch.inf)
    if setting.padding == "none":
        mask = None
    if setting.padding == "of one":
        x, mask = x[0], padding[1]
    arguments = {**setting.call(x), "src_key_padding_mask": mask}
    with setting.around():
        ours = _padding(encoder, x, **arguments) if can_be_padded(encoder) else None
        plain = encoder(x, **arguments)
    filled = (plain == 0).all(-1)
    assert torch.equal(torch.zeros_like(filled) if ours is None else ours, filled)
