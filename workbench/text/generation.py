"""Generation with a wrapped language model, with risks from the passes that generate the text."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.core.additions import extra
from workbench.core.crossfit import committee_of
from workbench.core.members import next_token_probabilities
from workbench.core.wrapped import copied, is_wrapped
from workbench.engine.clone import eager
from workbench.errors import as_count
from workbench.risk import Risk
from workbench.text.pieces import words_of
from workbench.text.prompts import check_ids, check_padding, features, padded
from workbench.text.result import Generation

MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
# names of the caches that transformers models pass from step to step, in addition to state=
CACHES = (("cache",), ("past_key_values",), ("cache_params",), ("state",), ("mems",))
OPTIONS = {
    *("min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("num_beams", "num_return_sequences", "length_penalty", "early_stopping"),
    *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "logits_processor"),
    *("eos_token_id", "pad_token_id", "use_cache"),
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
}
# settings of a model's generation_config with which passes and tokens do not correspond one to one, or rows end without an end token
UNSUPPORTED = ("guidance_scale", "stop_strings", "prefill_chunk_size", "cache_implementation", "watermarking_config")


def generate(
    model: Any,
    prompts: Tensor | Sequence[int] | Sequence[Sequence[int]] | str | Sequence[str],
    *,
    tokenizer: Any = None,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 20,
    n_alternatives: int = 5,
    seed: int | None = None,
    **options: Any,
) -> Generation:
    """Generate text from prompts by the mean of all voters or samples, with the risk of every token.

    Tokens are chosen by transformers' own `generate` from the members' mean probabilities (Malinin & Gales 2021): it gets their logarithms plus
    the mean of the members' logsumexp, so that a single member writes what the plain model does. Each member has its own cache, and
    log-probabilities and risks come from the same passes that generate the text, without a second run. The members' probabilities of all
    steps are kept until the end: members x rows (x beams) x steps x vocabulary numbers.

    Args:
        model: wrapped decoder or encoder-decoder of transformers, in evaluation mode, with class scores,
            `output={"logits": Logits(dim=-1)}`. Its cache needs no `state=` here.
        prompts: token ids [n, t]; or lists of ids or texts of any lengths, which are padded on the left (for an encoder on the right); or the
            inputs of an encoder that takes no tokens (pixel_values, input_values), with one row per text.
        tokenizer: tokenizer of transformers; needed for prompts that are texts, and for texts in the result. Its padding and end tokens are
            used if neither the options nor `model.generation_config` name any.
        attention_mask: mask [n, t], 0 for padding, which must be on the left for a decoder. By default it is derived from `pad_token_id`, as in
            transformers; if that is also the end token, prompts that begin (for an encoder, end) with different numbers of it are refused.
        max_new_tokens: maximum number of tokens per sequence; a forced first token, such as a language, is part of the prompt.
        n_alternatives: number of most probable tokens to keep for each position.
        seed: seed of sampling, with which the global random state stays unchanged. None draws from torch's global generator, as transformers
            does.
        options: options of transformers' `generate` for greedy search, sampling and beams: do_sample, temperature, top_k, top_p, min_p,
            typical_p, num_beams, num_return_sequences, length_penalty, early_stopping, repetition_penalty, no_repeat_ngram_size, bad_words_ids,
            suppress_tokens, logits_processor, min_new_tokens, eos_token_id, pad_token_id, decoder_start_token_id, forced_bos_token_id,
            forced_eos_token_id (which ends a truncated text, and does not count), use_cache.

    Returns:
        Tokens [n, steps] with their log-probabilities and risks, and scores of the sequences. In a notebook, the texts are shown coloured by
        risk.

    Raises:
        TypeError: if the model is not a wrapped language model of transformers or defines its own `generate`, or for other options.
        ValueError: in training mode; if the output is not declared as class scores; for padding on the right; for prompts of unequal lengths
            if the model does not ignore padding; if no token would be left to choose; and for other generation strategies.

    Example:
        >>> import pytest; transformers = pytest.importorskip("transformers")
        >>> from workbench import vote
        >>> from workbench.outputs import Logits
        >>> config = transformers.GPT2Config(vocab_size=20, n_layer=1, n_head=2, n_embd=8, bos_token_id=1, eos_token_id=None)
        >>> model = vote.Wrapper(3, output={"logits": Logits(dim=-1)})(transformers.GPT2LMHeadModel(config)).eval()
        >>> written = generate(model, [[1, 2, 3], [4]], max_new_tokens=5)
        >>> written.tokens.shape, written.risk.epistemic.shape, written.mean_log_prob.shape
        (torch.Size([2, 5]), torch.Size([2, 5]), torch.Size([2]))
    """
    model = eager(model)
    _check_model(model)
    _check_options(model, options, max_new_tokens, n_alternatives)
    if tokenizer is not None:
        # the model's generation_config takes precedence, as it may have several end tokens
        for name in ("pad_token_id", "eos_token_id"):
            if _setting(model, options, name) is None and getattr(tokenizer, name, None) is not None:
                options[name] = getattr(tokenizer, name)
    setting = functools.partial(_setting, model, options)
    if max_new_tokens == 1 and setting("forced_eos_token_id") is not None:
        raise ValueError(
            "max_new_tokens=1: the only token would be the forced end, which the model does not choose; give 2 or more, or set "
            "model.generation_config.forced_eos_token_id to None"
        )
    encoder = model.config.is_encoder_decoder
    if encoder and model.main_input_name != "input_ids":
        inputs = features(model, prompts, attention_mask)
    else:
        ids, mask = padded(model, prompts, tokenizer, attention_mask, setting("pad_token_id"), setting("eos_token_id"))
        check_ids(model, ids, mask, max_new_tokens)
        check_padding(model, ids, mask, max_new_tokens, options)
        inputs = {"input_ids": ids, "attention_mask": mask}
    start = 1 if encoder else inputs["input_ids"].shape[1]
    # a first token that is forced, such as a language, is not chosen by the model and counts as part of the prompt
    n_forced = int(start == 1 and setting("forced_bos_token_id") is not None)
    output, steps = _recorded(model, inputs, seed, max_new_tokens=n_forced + max_new_tokens, **options)
    start, steps = start + n_forced, steps[n_forced:]
    tokens = output.sequences[:, start:]
    beams = getattr(output, "beam_indices", None)
    beams = None if beams is None else beams[:, n_forced:]
    if len(steps) != tokens.shape[1] and (beams is None or len(steps) < tokens.shape[1]):
        raise RuntimeError(
            f"transformers called the model {n_forced + len(steps)} times for {n_forced + tokens.shape[1]} tokens, so that passes and tokens "
            "do not correspond one to one: use greedy search, sampling or beams without other strategies in model.generation_config"
        )
    mask = _token_mask(tokens, beams, setting("eos_token_id"))
    if setting("forced_eos_token_id") is not None:
        mask[:, max_new_tokens - 1 :] = False  # the text is truncated there, whatever the model predicts
    length = int(mask.sum(1).max())
    rows = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
    if beams is not None:
        rows = beams[:, : tokens.shape[1]].clamp_min(0)
    return Generation(
        sequences=output.sequences[:, : start + length],
        **_token_risks(steps[:length], rows, tokens[:, :length], mask[:, :length], n_alternatives),
        **_texts(tokenizer, tokens, mask),
        n_return=int(setting("num_return_sequences") or 1),
        sampled=bool(setting("do_sample")) and beams is None,
    )


# ---- checks
def _check_model(model: Any) -> None:
    if not is_wrapped(model) or not callable(getattr(model, "generate", None)):
        raise TypeError(
            f"model: expected a wrapped language model of transformers, found {'a plain ' if not is_wrapped(model) else 'a wrapped '}"
            f"{type(model).__name__}: give vote.Wrapper(5, output={{'logits': Logits(dim=-1)}})(model).eval()"
        )
    module = getattr(model.generate, "__module__", "")
    if model.config.is_encoder_decoder and not module.startswith(("transformers.generation.", "peft.")):
        raise TypeError(
            f"model: {type(model).__name__} defines its own generate ({module}), whose passes and tokens may not correspond one to one: "
            "generate with model.generate(...), without risks, and compute the risks of its text by "
            "model(..., decoder_input_ids=..., return_risk=True)"
        )
    if model.training:
        raise ValueError("model is in training mode, where dropout differs at each step: call model.eval()")
    for method in model._workbench.methods:
        if method.own_pass:
            raise ValueError(
                f"{method.name} gives a risk of whole inputs, not of tokens: wrap the model without it for generate, and use "
                "model(input_ids, return_risk=True) with it for that risk"
            )
        method.check_ready(model)
    if extra(model, "scaling") is not None or committee_of(model) is not None:
        raise ValueError(
            "generate does not support standardized units or cross-fitted members: call model.unscale(), or train without folds"
        )


def _check_options(model: Any, options: dict[str, Any], max_new_tokens: int, n_alternatives: int) -> None:
    if unknown := sorted(options.keys() - OPTIONS):
        raise TypeError(
            f"{', '.join(unknown)}: not among the supported options, {', '.join(sorted(OPTIONS))}; use model.generate for others, without risks"
        )
    counts = {name: options[name] for name in ("num_beams", "num_return_sequences") if options.get(name) is not None}
    for name, value in {"max_new_tokens": max_new_tokens, "n_alternatives": n_alternatives, **counts}.items():
        as_count(name, value)
    config = copy.deepcopy(model.generation_config)
    config.update(**{name: value for name, value in options.items() if name != "logits_processor"})
    mode = str(getattr(config.get_generation_mode(), "value", config.get_generation_mode()))
    unsupported = [name for name in UNSUPPORTED if getattr(config, name, None) not in (None, 1, 1.0)]
    if mode not in MODES or unsupported:
        strategy = f"{unsupported[0]}={getattr(config, unsupported[0])!r}" if unsupported else mode.replace("_", " ")
        raise ValueError(
            f"model.generation_config asks for {strategy}, with which passes and tokens do not correspond one to one, or rows end without an "
            "end token: use greedy search, sampling or beams, and set it to None"
        )


def _setting(model: Any, options: dict[str, Any], name: str) -> Any:
    return options.get(name, getattr(model.generation_config, name, None))


# ---- passes
def _recorded(model: Any, inputs: dict[str, Tensor], seed: int | None, **options: Any) -> tuple[Any, list[Tensor]]:
    """Return what transformers generates, and all members' log-probabilities of each step."""
    steps: list[Tensor] = []
    recorder: Any = copied(model)  # so that the user's model stays unchanged
    recorder.__dict__["forward"] = _recording(model, steps)
    devices = {value.device for value in inputs.values() if value.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices) if seed is not None else contextlib.nullcontext():
        if seed is not None:
            torch.manual_seed(seed)
        output = recorder.generate(
            **inputs,
            return_dict_in_generate=True,
            output_scores=True,  # required for beam_indices
            **options,
        )
    return output, steps


def _recording(model: Any, steps: list[Tensor]) -> Callable[..., Any]:
    """Return a forward for `generate` that records all members' log-probabilities of the next token in `steps`."""
    state = tuple(dict.fromkeys((*(model._workbench.state or ()), *CACHES)))

    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output, probs = next_token_probabilities(model, args, kwargs, state)
        steps.append(probs.log())
        return output

    return forward


def _token_mask(tokens: Tensor, beams: Tensor | None, eos: Any) -> Tensor:
    """Return a mask [n, t] of the tokens that belong to their sequence, up to and including its first end token."""
    mask = torch.ones_like(tokens, dtype=torch.bool) if beams is None else beams[:, : tokens.shape[1]] >= 0
    if eos is None:
        return mask
    ends = torch.isin(tokens, torch.as_tensor(eos, device=tokens.device).reshape(-1))
    return mask & (ends.cumsum(1) - ends.long() == 0)


def _token_risks(
    steps: list[Tensor], rows: Tensor, tokens: Tensor, mask: Tensor, n_alternatives: int
) -> dict[str, Any]:
    """Compute log-probabilities, risks and alternatives of tokens.

    Args:
        steps: log-probabilities of each step [m, rows, vocabulary].
        rows: row of each step that a token came from [n, t].
        tokens: token ids [n, t].
        mask: which tokens belong to their sequence [n, t].
        n_alternatives: number of alternatives per token.
    """
    columns: dict[str, list[Tensor]] = {}
    for t, step in enumerate(steps):
        logs = step[:, rows[:, t]]
        probs = logs.exp()
        mean = probs.mean(0)
        total, aleatoric = torch.special.entr(mean).sum(-1), torch.special.entr(probs).sum(-1).mean(0)
        best = mean.topk(min(n_alternatives, mean.shape[-1]), -1)
        at = tokens[:, t, None]
        for name, value in {
            "log_probs": mean.gather(-1, at)[:, 0].log(),
            "member_log_probs": logs.gather(-1, at.expand(len(logs), -1, -1))[..., 0],
            "total": total,
            "aleatoric": aleatoric,
            "epistemic": (total - aleatoric).clamp_min(0),
            "alternatives": best.indices,
            "alternative_probs": best.values,
            "member_alternative_probs": probs.gather(-1, best.indices.expand(len(logs), -1, -1)),
        }.items():
            columns.setdefault(name, []).append(value)
    table = {name: torch.stack(values, 2 if name.startswith("member_") else 1) for name, values in columns.items()}
    for name in ("log_probs", "member_log_probs", "total", "aleatoric", "epistemic"):
        table[name] = table[name].masked_fill(~mask, torch.nan)
    risk = Risk(**{name: table.pop(name) for name in ("total", "aleatoric", "epistemic")})
    return {**table, "risk": risk, "tokens": tokens, "mask": mask}


def _texts(tokenizer: Any, tokens: Tensor, mask: Tensor) -> dict[str, Any]:
    if tokenizer is None:
        return {}
    texts = [tokenizer.decode(row[kept], skip_special_tokens=True) for row, kept in zip(tokens, mask, strict=True)]
    return {"texts": texts, "words": functools.partial(_words, tokenizer)}


def _words(tokenizer: Any, tokens: Tensor) -> list[str]:
    return words_of(tokenizer, tokens.tolist())
