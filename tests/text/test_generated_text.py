"""Generated text: tokens, log-probabilities and risks equal those of plain copies of the voters that reread all tokens at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from workbench import compose, neo, sample, sculpt, vote
from workbench.text import generate

transformers = pytest.importorskip("transformers")
from helpers.generated_texts import (  # noqa: E402  # it needs transformers
    ENDS,
    PROMPTS,
    SCORES,
    TOKENS,
    assert_those_of_plain_voters,
    gpt,
    llama,
    plain_steps,
    wrapped_as,
)


@pytest.mark.parametrize("settings", [{}, {"share": 1}, {"state": "past_key_values"}])
@pytest.mark.parametrize("build", [gpt, llama])
def test_greedy_search_of_unequal_prompts(build: Any, settings: dict[str, Any]) -> None:
    wrapped = wrapped_as(build, **settings)
    written = generate(wrapped, PROMPTS, max_new_tokens=4)
    for row, prompt in enumerate(PROMPTS):
        tokens = written.tokens[row].tolist()
        assert plain_steps(wrapped, prompt, tokens).mean(0).argmax(-1).tolist() == tokens
    assert_those_of_plain_voters(written, wrapped, PROMPTS)
    assert written.risk.epistemic.max() > 1e-3


@pytest.mark.parametrize(
    "options", [{"do_sample": True}, {"num_beams": 3, "length_penalty": -3.0}, {"num_beams": 4, "do_sample": True}]
)
@pytest.mark.parametrize("build", [gpt, llama])
def test_samples_and_beams_with_an_end(build: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(3)  # with which texts end after different numbers of tokens
    wrapped = wrapped_as(build, eos=ENDS)
    written = generate(wrapped, PROMPTS, max_new_tokens=6, num_return_sequences=2, seed=1, **options)
    assert len(written.tokens) == 4
    assert len(set(written.lengths.tolist())) > 1
    ends = torch.isin(written.tokens, torch.tensor(ENDS)) & written.mask
    for row in range(4):  # nothing belongs to a text after its end
        assert not ends[row, : int(written.lengths[row]) - 1].any()
    assert_those_of_plain_voters(written, wrapped, PROMPTS)


# ---- encoders with decoders ------------------------------------------------------------------------------------------

SIDES = (("layers", 1), ("attention_heads", 2), ("ffn_dim", 8))


def t5(eos: Any = None) -> Any:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    config = transformers.T5Config(**sizes, pad_token_id=0, eos_token_id=eos, decoder_start_token_id=1)
    return transformers.T5ForConditionalGeneration(config).double().eval()


def bart(eos: Any = None) -> Any:
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIDES}
    config = transformers.BartConfig(
        **sizes, **TOKENS, d_model=8, max_position_embeddings=16, eos_token_id=eos, decoder_start_token_id=1
    )
    return transformers.BartForConditionalGeneration(config).double().eval()


def image_reader(eos: Any = None) -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    encoder = transformers.ViTConfig(**sizes, image_size=4, patch_size=2)
    decoder = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=32, add_cross_attention=True, **TOKENS)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 1, 0, eos
    return transformers.VisionEncoderDecoderModel(config=config).double().eval()


def reading(prompt: Any, start: list[int]) -> Callable[[Any, list[int]], torch.Tensor]:
    """How a plain voter scores the token after the written ones, from the prompt alone, without padding and without a cache."""
    inputs = (
        {"pixel_values": prompt[None]} if isinstance(prompt, torch.Tensor) else {"input_ids": torch.tensor([prompt])}
    )
    return lambda voter, tokens: (
        voter(**inputs, decoder_input_ids=torch.tensor([[*start, *tokens]]), use_cache=False).logits
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "num_return_sequences": 2},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": -3.0},
    ],
    ids=["greedy", "samples", "beams"],
)
@pytest.mark.parametrize("settings", [{}, {"share": 1}, {"state": "past_key_values"}])
@pytest.mark.parametrize("build", [t5, bart, image_reader])
def test_every_voter_reads_and_writes_by_itself(build: Any, settings: Any, options: Any) -> None:
    torch.manual_seed(3)
    wrapped = wrapped_as(build, eos=ENDS, **settings)
    prompts: Any = torch.randn(2, 3, 4, 4, dtype=torch.float64) if build is image_reader else PROMPTS
    written = generate(wrapped, prompts, max_new_tokens=5, seed=1, **options)
    assert_those_of_plain_voters(written, wrapped, [reading(prompt, [1]) for prompt in prompts])
    assert written.risk.epistemic[written.mask].max() > 1e-3
    if not options:
        for row, prompt in enumerate(prompts):
            tokens = written.tokens[row, : int(written.lengths[row])].tolist()
            assert plain_steps(wrapped, reading(prompt, [1]), tokens).mean(0).argmax(-1).tolist() == tokens


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_tokens_that_are_forced_are_none_of_the_voters(options: Any) -> None:
    """A language in front, as translators have it, and the end of a text that is cut."""
    wrapped = wrapped_as(bart, eos=2)
    written = generate(wrapped, PROMPTS, max_new_tokens=4, forced_bos_token_id=7, forced_eos_token_id=2, **options)
    assert (written.sequences[:, 1] == 7).all()
    assert written.lengths.max() <= 3  # the fourth would be the end, whatever the voters say
    assert torch.equal(written.sequences[:, 2:], written.tokens)
    assert_those_of_plain_voters(written, wrapped, [reading(prompt, [1, 7]) for prompt in PROMPTS])


@pytest.mark.slow
def test_the_first_token_of_a_decoder_may_be_an_option() -> None:
    wrapped = wrapped_as(bart)
    expected = generate(wrapped, PROMPTS, max_new_tokens=3)
    wrapped.generation_config.decoder_start_token_id = wrapped.generation_config.bos_token_id = None
    written = generate(wrapped, PROMPTS, max_new_tokens=3, decoder_start_token_id=int(expected.sequences[0, 0]))
    assert torch.equal(written.sequences, expected.sequences)


def test_a_single_token_that_is_a_forced_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_new_tokens=1: .*forced_eos_token_id to None"):
        generate(wrapped_as(bart, eos=2), PROMPTS, max_new_tokens=1, forced_eos_token_id=2)


@pytest.mark.slow
def test_padding_of_an_encoder_is_on_the_right_and_must_be_ignored() -> None:
    wrapped = wrapped_as(bart)
    listed = generate(wrapped, PROMPTS, max_new_tokens=4)
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]])
    torch.testing.assert_close(generate(wrapped, ids, max_new_tokens=4).risk.total, listed.risk.total)
    # its positions are counted from the left
    with pytest.raises(ValueError, match=r"does not ignore padding.* after prompt 1"):
        generate(wrapped, torch.tensor([[3, 4, 5, 6], [0, 0, 7, 8]]), max_new_tokens=4)
    with pytest.raises(ValueError, match="all padding"):
        generate(wrapped, torch.tensor([[3, 4, 5, 6], [0, 0, 0, 0]]), max_new_tokens=4)
    with pytest.raises(ValueError, match=r"takes pixel_values.*found torch.int64"):
        generate(wrapped_as(image_reader), ids)


def test_tokens_are_those_of_transformers() -> None:
    wrapped = wrapped_as(gpt, state="past_key_values")
    ids, before = torch.tensor(PROMPTS[:1]), torch.random.get_rng_state()
    for options in ({"num_beams": 3}, {"do_sample": True, "top_k": 5, "temperature": 0.7}):
        written = generate(wrapped, ids, max_new_tokens=6, seed=3, **options)
        assert torch.equal(torch.random.get_rng_state(), before)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            assert torch.equal(wrapped.generate(ids, max_new_tokens=6, **options), written.sequences)
    assert "forward" not in wrapped.__dict__


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3}], ids=["greedy", "samples", "beams"])
def test_repeated_tokens_are_penalized_at_the_level_of_the_logits(options: dict[str, Any]) -> None:
    """The penalty multiplies logits below 0 and divides those above, so that it is another one of log-probabilities."""
    torch.manual_seed(0)
    penalized = {"max_new_tokens": 12, "repetition_penalty": 1.5, **options}
    ids = torch.tensor(PROMPTS[:1])
    model = gpt()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    written = generate(vote.Wrapper(1, output=SCORES, finetune=True)(model).eval(), ids, seed=3, **penalized)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        assert torch.equal(model.generate(ids, **penalized), written.sequences)


def test_several_voters_are_penalized_at_their_mean_level() -> None:
    wrapped = wrapped_as(llama)
    with torch.no_grad():
        next(p for name, p in wrapped.named_parameters() if name.startswith("lm_head")).mul_(4)  # sure of some tokens
    ids = list(PROMPTS[0])
    written = generate(wrapped, [ids], max_new_tokens=12, repetition_penalty=1.3)
    assert written.tokens.unique().numel() < 12  # in spite of the penalty
    voters = [voter.eval() for voter in wrapped.voters()]
    for token in written.tokens[0].tolist():
        with torch.no_grad():
            logits = torch.stack([voter(torch.tensor([ids])).logits[0, -1] for voter in voters])
        scores = logits.softmax(-1).mean(0).log() + logits.logsumexp(-1).mean()
        for repeated in set(ids):
            scores[repeated] *= 1.3 if scores[repeated] < 0 else 1 / 1.3
        assert int(scores.argmax()) == token
        ids.append(token)


def test_a_compiled_model_writes_as_the_eager_one() -> None:
    wrapped = wrapped_as(gpt)
    written = generate(torch.compile(wrapped, backend="eager"), PROMPTS, max_new_tokens=3)
    assert torch.equal(written.tokens, generate(wrapped, PROMPTS, max_new_tokens=3).tokens)


def test_greedy_search_in_bfloat16_writes_the_most_probable_token_of_the_mean() -> None:
    wrapped = wrapped_as(gpt).to(torch.bfloat16)
    written = generate(wrapped, [[a, b] for a in range(3, 20) for b in range(3, 20)], max_new_tokens=4)
    assert torch.equal(written.tokens, written.alternatives[..., 0])
    torch.testing.assert_close(written.log_probs.exp(), written.alternative_probs[..., 0])


def test_every_step_is_one_pass_of_each_voter() -> None:
    wrapped, widths = wrapped_as(gpt, strategy="loop"), list[int]()
    wrapped.transformer.wte.register_forward_hook(lambda module, args, output: widths.append(args[0].shape[1]))
    generate(wrapped, PROMPTS[:1], max_new_tokens=1)  # at the first call the engine looks at the model
    widths.clear()
    generate(wrapped, PROMPTS[:1], max_new_tokens=4)
    assert sorted(widths, reverse=True) == [4] * 3 + [1] * 9


def test_samples_of_noise_and_risk_heads() -> None:
    noisy = sample.Wrapper(4, output=SCORES)(gpt()).eval()
    assert generate(noisy, PROMPTS, max_new_tokens=3).member_log_probs.shape == (4, 2, 3)
    heads = compose(vote.Wrapper(2, output=SCORES), sculpt.Wrapper(sculpt.LogitNormal, n_layers=1))(gpt()).eval()
    written = generate(heads, PROMPTS, max_new_tokens=3)
    assert written.member_log_probs.shape == (2, 2, 3)
    torch.testing.assert_close(written.risk.total, written.risk.aleatoric + written.risk.epistemic)


REFUSED = {
    "plain": (lambda: gpt(), {}, TypeError, r"vote\.Wrapper"),
    "training": (lambda: wrapped_as(gpt).train(), {}, ValueError, r"model\.eval\(\)"),
    "values": (lambda: vote.Wrapper(3)(gpt()).eval(), {}, ValueError, r"Logits\(dim=-1\)"),
    "neo": (lambda: compose(vote.Wrapper(2), neo.Wrapper(), output=SCORES)(gpt()).eval(), {}, ValueError, "neo"),
    "assistant": (lambda: wrapped_as(gpt), {"assistant_model": None}, TypeError, "assistant_model"),
    "stops": (lambda: wrapped_as(gpt), {"stop_strings": ["a"]}, TypeError, "stop_strings"),
    "no tokens": (lambda: wrapped_as(gpt), {"max_new_tokens": 0}, ValueError, "max_new_tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    make, options, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        generate(make(), PROMPTS, **{"max_new_tokens": 2, **options})


def test_a_generation_config_with_another_strategy_is_refused() -> None:
    wrapped = wrapped_as(gpt)
    wrapped.generation_config.guidance_scale = 2.0
    with pytest.raises(ValueError, match="guidance_scale"):
        generate(wrapped, PROMPTS)
    wrapped.generation_config.guidance_scale = None
    wrapped.generation_config.prompt_lookup_num_tokens = 3
    with pytest.raises(ValueError, match="assisted"):
        generate(wrapped, PROMPTS)


def whisper() -> Any:
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIDES}
    config = transformers.WhisperConfig(
        **sizes, **TOKENS, d_model=8, num_mel_bins=4, decoder_start_token_id=1, eos_token_id=2
    )
    return transformers.WhisperForConditionalGeneration(config)


def test_a_generate_of_the_models_own_is_refused() -> None:
    wrapped: Any = vote.Wrapper(2, output=SCORES)(whisper()).eval()
    with pytest.raises(TypeError, match="WhisperForConditionalGeneration defines its own generate"):
        generate(wrapped, torch.randn(1, 4, 3000))


class Letters:
    """A tokenizer of single characters."""

    pad_token_id, eos_token_id = 0, 2
    signs = "_^$<&>\"'abcdefghijkl"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [self.signs.index(sign) for sign in text]}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.signs[i] for i in ids]

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool = False) -> str:
        return "".join(self.signs[i] for i in ids.tolist() if i > 2 or not skip_special_tokens)


def test_texts_and_their_scores() -> None:
    wrapped = wrapped_as(gpt)
    written = generate(
        wrapped, ["abc", "d"], tokenizer=Letters(), max_new_tokens=5, do_sample=True, num_return_sequences=3, seed=0
    )
    assert written.texts is not None
    assert len(written.texts) == 6
    entropies = written.semantic_entropy(lambda a, b: a == b, discrete=True)
    for i, value in enumerate(entropies):
        texts = written.texts[3 * i : 3 * i + 3]
        shares = torch.tensor([texts.count(text) / 3 for text in set(texts)])
        assert value == pytest.approx(float(-(shares * shares.log()).sum()), abs=1e-6)
    assert len(written.lexical_similarity()) == len(written.self_consistency()) == 2
    with pytest.raises(ValueError, match="do_sample=True"):
        generate(wrapped, ["abc"], tokenizer=Letters(), max_new_tokens=2).lexical_similarity()
    with pytest.raises(ValueError, match="tokenizer="):
        generate(wrapped, PROMPTS, max_new_tokens=2, do_sample=True, num_return_sequences=2).self_consistency()


def test_html_shows_every_token_and_escapes_it() -> None:
    written = generate(wrapped_as(gpt), ["abc"], tokenizer=Letters(), max_new_tokens=6)
    html = written._repr_html_()
    assert html.count("<span") == int(written.lengths[0])
    assert html.count("title=") == html.count("<span")
    highest = float(written.risk.epistemic.nan_to_num().max()) / 1e4
    object.__setattr__(written.risk, "epistemic", written.risk.epistemic / 1e4)
    assert f"up to {highest:.3g} nats" in written.html("epistemic")  # rather than 0.00
    assert f"epistemic {float(written.risk.epistemic[0, 0]):.3g}" in written.html("epistemic")
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8]])
    object.__setattr__(written, "tokens", tokens[:, : int(written.lengths[0])])
    assert "<span style" in written.html("epistemic")
    shown = written.html("epistemic").replace("<span ", "").replace("</span>", "")
    assert ">&lt;" in shown
    assert ">&amp;" in shown
    assert "<<" not in shown
    with pytest.raises(ValueError, match="kind"):
        written.html("vacuitic")  # type: ignore[arg-type]
