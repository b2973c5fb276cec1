"""Generated text: tokens, log-probabilities and risks equal those of plain copies of the voters that reread all tokens at every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from workbench import compose, neo, sample, sculpt, vote
from workbench.outputs import Logits
from workbench.text import generate

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("seeded")

TOKENS = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1}
SCORES = {"logits": Logits(dim=-1)}
ENDS = [2, 5, 9, 13, 14]
PROMPTS = [[3, 4, 5, 6], [7, 8]]


def gpt(eos: Any = None) -> Any:
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=32, eos_token_id=eos, **TOKENS)
    return transformers.GPT2LMHeadModel(config).double().eval()


def llama(eos: Any = None) -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=32, eos_token_id=eos, **TOKENS)
    return transformers.LlamaForCausalLM(config).double().eval()


def wrapped_as(build: Any, eos: Any = None, **settings: Any) -> Any:
    """Voters whose scores differ, so that tokens are not chosen by rounding."""
    wrapped = vote.Wrapper(3, output=SCORES, **settings)(build(eos)).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return wrapped


def plain_steps(wrapped: Any, prompt: Any, tokens: list[int]) -> torch.Tensor:
    """The probabilities [voters, steps, vocabulary] from which each token was chosen, without padding and without a cache.

    Of a prompt of tokens, or of a function that gives a voter's scores after the tokens that are written.
    """
    voters = [copy.deepcopy(voter).eval() for voter in wrapped.voters()]
    steps = []
    with torch.no_grad():
        for t in range(len(tokens)):
            if callable(prompt):
                scores = [prompt(voter, tokens[:t]) for voter in voters]
            else:
                scores = [voter(torch.tensor([[*prompt, *tokens[:t]]]), use_cache=False).logits for voter in voters]
            steps.append(torch.stack([logits[0, -1].softmax(-1) for logits in scores]))
    return torch.stack(steps, 1)


def entropy(probs: torch.Tensor) -> torch.Tensor:
    return -(probs * probs.log()).sum(-1)


def assert_those_of_plain_voters(written: Any, wrapped: Any, prompts: Any) -> None:
    for row in range(len(written.tokens)):
        n = int(written.lengths[row])
        tokens = written.tokens[row, :n].tolist()
        each = plain_steps(wrapped, prompts[row // written.n_return], tokens)
        mean, at = each.mean(0), torch.tensor(tokens)[:, None]
        expected = {
            "log_probs": mean.gather(-1, at)[:, 0].log(),
            "total": entropy(mean),
            "aleatoric": entropy(each).mean(0),
            "epistemic": entropy(mean) - entropy(each).mean(0),
            "alternatives": mean.sort(-1, descending=True).values[:, :5],
        }
        measured = {
            "log_probs": written.log_probs,
            **{name: written.risk[name] for name in ("total", "aleatoric", "epistemic")},
            "alternatives": written.alternative_probs,
        }
        for name, values in expected.items():
            torch.testing.assert_close(measured[name][row, :n], values, rtol=1e-5, atol=1e-6, msg=name)
        assert written.member_alternative_probs is not None
        of_members = each.gather(-1, written.alternatives[row, :n].expand(3, -1, -1))
        torch.testing.assert_close(written.member_alternative_probs[:, row, :n], of_members, rtol=1e-5, atol=1e-6)
        members = each.gather(-1, at.expand(3, -1, -1))[..., 0].log()
        torch.testing.assert_close(written.member_log_probs[:, row, :n], members, rtol=1e-5, atol=1e-6)
        assert written.log_probs[row, n:].isnan().all()
        assert written.risk.total[row, n:].isnan().all()
        # scores of the sequence, by hand
        logs = expected["log_probs"]
        assert written.mean_log_prob[row].item() == pytest.approx(sum(logs.tolist()) / n, rel=1e-5)
        assert written.perplexity[row].item() == pytest.approx(2.718281828459045 ** (-sum(logs.tolist()) / n), rel=1e-5)
        assert written.max_entropy[row].item() == pytest.approx(max(expected["total"].tolist()), rel=1e-5)
        assert written.mean_entropy[row].item() == pytest.approx(sum(expected["total"].tolist()) / n, rel=1e-5)
        own = [(-voter.sum() / n).exp().item() for voter in members]
        middle = sum(own) / 3
        by_hand = (sum((value - middle) ** 2 for value in own) / 3) ** 0.5
        assert written.perplexity_spread[row].item() == pytest.approx(by_hand, rel=1e-4)


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


def test_the_first_token_of_a_decoder_may_be_an_option() -> None:
    wrapped = wrapped_as(bart)
    expected = generate(wrapped, PROMPTS, max_new_tokens=3)
    wrapped.generation_config.decoder_start_token_id = wrapped.generation_config.bos_token_id = None
    written = generate(wrapped, PROMPTS, max_new_tokens=3, decoder_start_token_id=int(expected.sequences[0, 0]))
    assert torch.equal(written.sequences, expected.sequences)


def test_a_single_token_that_is_a_forced_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_new_tokens=1: .*forced_eos_token_id to None"):
        generate(wrapped_as(bart, eos=2), PROMPTS, max_new_tokens=1, forced_eos_token_id=2)


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


def test_greedy_search_in_bfloat16_writes_the_most_probable_token_of_the_mean() -> None:
    wrapped = wrapped_as(gpt).to(torch.bfloat16)
    written = generate(wrapped, [[a, b] for a in range(3, 20) for b in range(3, 20)], max_new_tokens=4)
    assert torch.equal(written.tokens, written.alternatives[..., 0])
    torch.testing.assert_close(written.log_probs.exp(), written.alternative_probs[..., 0])


def test_every_step_is_one_pass_of_each_voter() -> None:
    wrapped = wrapped_as(gpt, strategy="loop")
    generate(wrapped, PROMPTS[:1], max_new_tokens=1)  # at the first call the engine looks at the model
    widths: list[int] = []
    wrapped.transformer.wte.register_forward_hook(lambda module, args, output: widths.append(args[0].shape[1]))
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


def test_prompts_are_integers_of_any_kind() -> None:
    wrapped = wrapped_as(gpt)
    expected = generate(wrapped, [PROMPTS[0]], max_new_tokens=2).tokens
    for prompt in (PROMPTS[0], [*np.array(PROMPTS[0])], [np.array(PROMPTS[0])], [torch.tensor(PROMPTS[0])]):
        assert torch.equal(generate(wrapped, prompt, max_new_tokens=2).tokens, expected)
    for prompt in ([[3.5, 4.0]], [[]], [[[3]]]):
        with pytest.raises(ValueError, match="lists of token ids, which are integers"):
            generate(wrapped, prompt)


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
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8]])
    object.__setattr__(written, "tokens", tokens[:, : int(written.lengths[0])])
    assert "<span style" in written.html("epistemic")
    shown = written.html("epistemic").replace("<span ", "").replace("</span>", "")
    assert ">&lt;" in shown
    assert ">&amp;" in shown
    assert "<<" not in shown
    with pytest.raises(ValueError, match="kind"):
        written.html("vacuitic")  # type: ignore[arg-type]
