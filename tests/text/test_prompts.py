"""Prompts of generated text: their padding is ignored or refused, and what is no prompt is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from workbench.text import generate

transformers = pytest.importorskip("transformers")
from helpers.generated_texts import (  # noqa: E402  # it needs transformers
    PROMPTS,
    TOKENS,
    assert_those_of_plain_voters,
    gpt,
    llama,
    wrapped_as,
)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 1}, {"num_beams": 3}])
@pytest.mark.parametrize("build", [gpt, llama])
def test_prompts_of_unequal_lengths_are_continued_as_each_alone(build: Any, options: Any) -> None:
    wrapped, prompts = wrapped_as(build), [[3, 4, 5, 6, 7], [8], [7, 9, 4], [6, 6]]
    written = generate(wrapped, prompts, max_new_tokens=8, **options)
    assert_those_of_plain_voters(written, wrapped, prompts)
    if "do_sample" not in options:
        for row, prompt in enumerate(prompts):
            alone = generate(wrapped, [prompt], max_new_tokens=8, **options)
            assert torch.equal(written.tokens[row], alone.tokens[0])


def test_padding_on_the_left_is_seen_and_elsewhere_refused() -> None:
    wrapped = wrapped_as(llama)
    ids = torch.tensor([[3, 4, 5, 6], [0, 0, 7, 8]])
    listed = generate(wrapped, PROMPTS[:2], max_new_tokens=4)
    torch.testing.assert_close(generate(wrapped, ids, max_new_tokens=4).risk.total, listed.risk.total)
    with pytest.raises(ValueError, match="pad on the left"):
        generate(wrapped, ids.flip(1))
    with pytest.raises(ValueError, match="attention_mask"):
        generate(wrapped, ids, attention_mask=torch.ones(2, 3))


def opt(eos: Any = None) -> Any:
    """Learned positions that the mask moves."""
    sizes = {
        "hidden_size": 8,
        "word_embed_proj_dim": 8,
        "ffn_dim": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.OPTConfig(**sizes, max_position_embeddings=32, eos_token_id=eos, **TOKENS)
    return transformers.OPTForCausalLM(config).double().eval()


def trocr(eos: Any = None) -> Any:
    """Learned positions that count padding."""
    sizes = {"d_model": 8, "decoder_ffn_dim": 16, "decoder_layers": 1, "decoder_attention_heads": 2}
    config = transformers.TrOCRConfig(**sizes, max_position_embeddings=32, eos_token_id=eos, **TOKENS)
    return transformers.TrOCRForCausalLM(config).double().eval()


def rwkv(eos: Any = None) -> Any:
    """A recurrence that reads padding."""
    sizes = {"hidden_size": 8, "attention_hidden_size": 8, "num_hidden_layers": 2, "context_length": 32}
    config = transformers.RwkvConfig(**sizes, eos_token_id=eos, **TOKENS)
    return transformers.RwkvForCausalLM(config).double().eval()


class CountingLater(transformers.GPT2LMHeadModel):  # type: ignore[misc, name-defined]
    """Positions count padding from the second token on."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        if input_ids.shape[1] == 1 and isinstance(attention_mask, torch.Tensor):
            position_ids = torch.full_like(input_ids, attention_mask.shape[1] - 1)
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)


class CountingSlightly(transformers.GPT2LMHeadModel):  # type: ignore[misc, name-defined]
    """Padding changes scores by a ten-thousandth."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids, attention_mask=attention_mask, **kwargs)
        if isinstance(attention_mask, torch.Tensor):
            out.logits[..., 3:9] += 1e-4 * (attention_mask == 0).sum()
        return out


def counting_later(eos: Any = None) -> Any:
    return CountingLater(gpt(eos).config).double().eval()


def counting_slightly(eos: Any = None) -> Any:
    return CountingSlightly(gpt(eos).config).double().eval()


def test_prompts_of_unequal_lengths_where_the_mask_moves_positions() -> None:
    wrapped = wrapped_as(opt)
    assert_those_of_plain_voters(generate(wrapped, PROMPTS, max_new_tokens=4), wrapped, PROMPTS)


@pytest.mark.parametrize("build", [trocr, rwkv, counting_later, counting_slightly])
def test_padding_that_is_not_ignored_is_refused(build: Any) -> None:
    wrapped = wrapped_as(build)
    before = torch.random.get_rng_state()
    for prompts in (PROMPTS, torch.tensor([[3, 4, 5, 6], [0, 0, 7, 8]])):
        with pytest.raises(ValueError, match="does not ignore padding"):
            generate(wrapped, prompts, max_new_tokens=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    # transformers mixes the rows of several in RWKV's state
    equal = [prompt[:2] for prompt in PROMPTS[: 1 if build is rwkv else 2]]
    assert_those_of_plain_voters(generate(wrapped, equal, max_new_tokens=4), wrapped, equal)


@pytest.mark.slow
def test_padding_that_is_the_end_as_well_is_told_by_a_mask_alone() -> None:
    wrapped = wrapped_as(llama)
    ids, mask = torch.tensor([[3, 4, 5, 6], [2, 2, 7, 8]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    for options in ({"pad_token_id": 2, "eos_token_id": 2}, {"pad_token_id": 2, "eos_token_id": [2, 9]}):
        with pytest.raises(ValueError, match="attention_mask="):
            generate(wrapped, ids, max_new_tokens=3, **options)
        written = generate(wrapped, ids, attention_mask=mask, max_new_tokens=3, **options)
        assert_those_of_plain_voters(written, wrapped, PROMPTS)
        begun = torch.tensor([[2, 4], [2, 8]])  # with the token of the beginning, which is that of the end in GPT-2
        assert_those_of_plain_voters(generate(wrapped, begun, max_new_tokens=3, **options), wrapped, begun.tolist())


def test_prompts_are_integers_of_any_kind() -> None:
    wrapped = wrapped_as(gpt)
    expected = generate(wrapped, [PROMPTS[0]], max_new_tokens=2).tokens
    for prompt in (PROMPTS[0], [*np.array(PROMPTS[0])], [np.array(PROMPTS[0])], [torch.tensor(PROMPTS[0])]):
        assert torch.equal(generate(wrapped, prompt, max_new_tokens=2).tokens, expected)
    for prompt in ([[3.5, 4.0]], [[]], [[[3]]]):
        with pytest.raises(ValueError, match="lists of token ids, which are integers"):
            generate(wrapped, prompt)


@pytest.mark.parametrize("build", [gpt, opt], ids=lambda build: build.__name__)
def test_ids_and_positions_that_the_model_has_no_rows_for_are_refused(build: Any) -> None:
    wrapped = wrapped_as(build)
    for wrong in (20, -1):
        with pytest.raises(ValueError, match=rf"has embeddings of 20 tokens, 0 to 19, found id {wrong};"):
            generate(wrapped, [[3, wrong]], max_new_tokens=2)
    limit = wrapped.config.max_position_embeddings
    fits = limit - 1  # a prompt of two, and the last token is not read
    assert generate(wrapped, [[3, 4], [5]], max_new_tokens=fits).tokens.shape == (2, fits)
    with pytest.raises(ValueError, match=rf"positions for {limit}; give max_new_tokens of at most {fits},"):
        generate(wrapped, [[3, 4], [5]], max_new_tokens=fits + 1)


def test_a_text_may_be_longer_than_in_training_where_positions_are_computed() -> None:
    wrapped = wrapped_as(llama)
    assert generate(wrapped, [PROMPTS[0]], max_new_tokens=32).tokens.shape == (1, 32)


def test_no_prompts_and_no_beams_are_refused_by_name() -> None:
    wrapped: Any = wrapped_as(gpt)
    with pytest.raises(TypeError, match="prompts: expected texts or token ids, found NoneType"):
        generate(wrapped, None)  # type: ignore[arg-type]
    for name in ("num_beams", "num_return_sequences"):
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1; found 0"):
            generate(wrapped, [[3]], **{name: 0})


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (
            {"input_ids": torch.tensor([[3]]), "attention_mask": torch.tensor([[1]])},
            r"a dict of input_ids.*\['input_ids'\]",
        ),
        ([{"role": "user", "content": "hello"}], "apply_chat_template"),
    ],
    ids=["dict", "chat"],
)
def test_prompts_that_are_dicts_are_refused(prompts: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generate(wrapped_as(gpt), prompts)
