"""Generation with a wrapped language model, whose risks come from the passes that write the text."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.core.crossfit import committee_of
from workbench.core.members import next_token_probabilities
from workbench.core.ownership import extra
from workbench.core.wrapped import copied, is_wrapped
from workbench.risk import Risk
from workbench.text.pieces import words_of
from workbench.text.prompts import check_padding, features, padded
from workbench.text.result import Generation

MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
# what transformers' models hand on from step to step, where nobody named it
CACHES = (("cache",), ("past_key_values",), ("cache_params",), ("state",), ("mems",))
OPTIONS = {
    *("min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("num_beams", "num_return_sequences", "length_penalty", "early_stopping"),
    *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "logits_processor"),
    *("eos_token_id", "pad_token_id", "use_cache"),
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
}
# settings of a model's generation_config under which passes and tokens are not one to one, or rows end without a token of end
UNFIT = ("guidance_scale", "stop_strings", "prefill_chunk_size", "cache_implementation", "watermarking_config")


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
    """Write on from prompts by the mean of all voters or samples, with the risk of every token.

    Text is chosen by transformers' own `generate` from the members' mean probabilities (Malinin & Gales 2021). Each member has a cache of its
    own, and log-probabilities and risks are those of the very passes that wrote the text: there is no second run. The members' probabilities
    of all steps are kept until the end, members x rows (x beams) x steps x vocabulary numbers.

    Args:
        model: a wrapped decoder of transformers, or encoder with a decoder, in evaluation mode, with class scores,
            `output={"logits": Logits(dim=-1)}`. Its cache needs no `state=` here.
        prompts: token ids [n, t], or lists of ids or texts of any lengths, which are padded on the left, for an encoder on the right; what an
            encoder reads that takes no tokens (pixel_values, input_values), with a row for each text.
        tokenizer: of transformers; needed for prompts that are texts, and for texts in the result. Its tokens of padding and of end count
            where neither options nor `model.generation_config` name one.
        attention_mask: [n, t], 0 for padding, which must be on the left for a decoder. By default that of `pad_token_id`, as in transformers;
            where that is the token of end as well, prompts that begin (for an encoder, end) with it unlike often are refused.
        max_new_tokens: at most so many tokens a sequence; a first token that is forced, such as a language, is part of the prompt.
        n_alternatives: the most probable tokens that are kept at each place.
        seed: of sampling; the global random state is then left as it is. None draws from torch's global generator, as transformers does.
        options: those of transformers' `generate` for greedy search, sampling and beams: do_sample, temperature, top_k, top_p, min_p, typical_p,
            num_beams, num_return_sequences, length_penalty, early_stopping, repetition_penalty, no_repeat_ngram_size, bad_words_ids,
            suppress_tokens, logits_processor, min_new_tokens, eos_token_id, pad_token_id, decoder_start_token_id, forced_bos_token_id,
            forced_eos_token_id (which ends a text that is cut, and does not count), use_cache.

    Returns:
        Tokens [n, steps] with their log-probabilities and risks, and scores of the sequences. In a notebook it shows the texts coloured by risk.

    Raises:
        TypeError: for what is no wrapped language model of transformers, or has a `generate` of its own, and for other options.
        ValueError: in training mode, for class scores that nobody said, padding on the right, prompts of unequal lengths where the model does
            not ignore padding, and ways to generate that are not those above.

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
    _check_model(model)
    _check_options(model, options, max_new_tokens, n_alternatives)
    if tokenizer is not None:
        # those of the model's generation_config first: it may know several ends
        for name in ("pad_token_id", "eos_token_id"):
            if _setting(model, options, name) is None and getattr(tokenizer, name, None) is not None:
                options[name] = getattr(tokenizer, name)
    setting = functools.partial(_setting, model, options)
    encoder = model.config.is_encoder_decoder
    if encoder and model.main_input_name != "input_ids":
        inputs = features(model, prompts, attention_mask)
    else:
        ids, mask = padded(model, prompts, tokenizer, attention_mask, setting("pad_token_id"), setting("eos_token_id"))
        check_padding(model, ids, mask)
        inputs = {"input_ids": ids, "attention_mask": mask}
    start = 1 if encoder else inputs["input_ids"].shape[1]
    # the first token after a single one may be forced, such as a language: nobody chose it, so that it is part of the prompt
    n_forced = int(start == 1 and setting("forced_bos_token_id") is not None)
    steps: list[Tensor] = []
    host: Any = copied(model)  # the user's own object stays as it is
    host.__dict__["forward"] = _recording(model, steps)
    devices = {value.device for value in inputs.values() if value.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices) if seed is not None else contextlib.nullcontext():
        if seed is not None:
            torch.manual_seed(seed)
        output = host.generate(
            **inputs,
            max_new_tokens=n_forced + max_new_tokens,
            return_dict_in_generate=True,
            output_scores=True,  # without which transformers does not tell from which beam a token came
            **options,
        )
    start, steps = start + n_forced, steps[n_forced:]
    tokens = output.sequences[:, start:]
    beams = getattr(output, "beam_indices", None)
    beams = None if beams is None else beams[:, n_forced:]
    if len(steps) != tokens.shape[1] and (beams is None or len(steps) < tokens.shape[1]):
        raise RuntimeError(
            f"transformers called the model {n_forced + len(steps)} times for {n_forced + tokens.shape[1]} tokens, so that passes and tokens "
            "are not one to one: use greedy search, sampling or beams without other strategies in model.generation_config"
        )
    there = _there(tokens, beams, setting("eos_token_id"))
    if setting("forced_eos_token_id") is not None:
        there[:, max_new_tokens - 1 :] = False  # the text is cut there, whatever the model says
    length = int(there.sum(1).max())
    rows = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
    if beams is not None:
        rows = beams[:, : tokens.shape[1]].clamp_min(0)
    return Generation(
        sequences=output.sequences[:, : start + length],
        **_measured(steps[:length], rows, tokens[:, :length], there[:, :length], n_alternatives),
        **_texts(tokenizer, tokens, there),
        n_return=int(setting("num_return_sequences") or 1),
        sampled=bool(setting("do_sample")) and beams is None,
    )


# ---- what is refused
def _check_model(model: Any) -> None:
    if not is_wrapped(model) or not callable(getattr(model, "generate", None)):
        raise TypeError(
            f"model: expected a wrapped language model of transformers, found {'a plain ' if not is_wrapped(model) else 'a wrapped '}"
            f"{type(model).__name__}: give vote.Wrapper(5, output={{'logits': Logits(dim=-1)}})(model).eval()"
        )
    module = getattr(model.generate, "__module__", "")
    if model.config.is_encoder_decoder and not module.startswith(("transformers.generation.", "peft.")):
        raise TypeError(
            f"model: {type(model).__name__} has a generate of its own ({module}), whose passes and tokens may not be one to one: write with "
            "model.generate(...), without risks, and compute those of its text by model(..., decoder_input_ids=..., return_risk=True)"
        )
    if model.training:
        raise ValueError("model is in training mode, where dropout is drawn anew at each step: call model.eval()")
    for method in model._workbench.methods:
        if method.own_pass:
            raise ValueError(
                f"{method.name} has a risk of whole inputs and a pass of its own, which is no risk of a token: wrap the model without it and "
                "use model(input_ids, return_risk=True) for that risk"
            )
        method.check_ready(model)
    if extra(model, "scaling") is not None or committee_of(model) is not None:
        raise ValueError(
            "generate does not know units or cross-fitted weights of members: call model.unscale(), or train without folds"
        )


def _check_options(model: Any, options: dict[str, Any], max_new_tokens: int, n_alternatives: int) -> None:
    if unknown := sorted(options.keys() - OPTIONS):
        raise TypeError(
            f"{', '.join(unknown)}: not among the options whose risks are right, {', '.join(sorted(OPTIONS))}; use model.generate for others, "
            "without risks"
        )
    for name, value in (("max_new_tokens", max_new_tokens), ("n_alternatives", n_alternatives)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected a whole number from 1, found {value!r}")
    config = copy.deepcopy(model.generation_config)
    config.update(**{name: value for name, value in options.items() if name != "logits_processor"})
    mode = str(getattr(config.get_generation_mode(), "value", config.get_generation_mode()))
    unfit = [name for name in UNFIT if getattr(config, name, None) not in (None, 1, 1.0)]
    if mode not in MODES or unfit:
        what = f"{unfit[0]}={getattr(config, unfit[0])!r}" if unfit else mode.replace("_", " ")
        raise ValueError(
            f"model.generation_config asks for {what}, whose passes and tokens are not one to one, or which rows end without a token of end: "
            "use greedy search, sampling or beams, and set it to None"
        )


def _setting(model: Any, options: dict[str, Any], name: str) -> Any:
    return options.get(name, getattr(model.generation_config, name, None))


# ---- passes
def _recording(model: Any, steps: list[Tensor]) -> Callable[..., Any]:
    """A forward for `generate` that keeps what all members say about the next token."""
    state = tuple(dict.fromkeys((*(model._workbench.state or ()), *CACHES)))

    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output, probs = next_token_probabilities(model, args, kwargs, state)
        steps.append(probs.log())
        return output

    return forward


def _there(tokens: Tensor, beams: Tensor | None, eos: Any) -> Tensor:
    """Which tokens belong to their sequence: up to its first token of end."""
    there = torch.ones_like(tokens, dtype=torch.bool) if beams is None else beams[:, : tokens.shape[1]] >= 0
    if eos is None:
        return there
    ends = torch.isin(tokens, torch.as_tensor(eos, device=tokens.device).reshape(-1))
    return there & (ends.cumsum(1) - ends.long() == 0)


def _measured(steps: list[Tensor], rows: Tensor, tokens: Tensor, there: Tensor, n_alternatives: int) -> dict[str, Any]:
    """Log-probabilities, risks and alternatives of tokens [n, t], which came from these rows of each step [m, rows, vocabulary]."""
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
        table[name] = table[name].masked_fill(~there, torch.nan)
    risk = Risk(**{name: table.pop(name) for name in ("total", "aleatoric", "epistemic")})
    return {**table, "risk": risk, "tokens": tokens, "mask": there}


def _texts(tokenizer: Any, tokens: Tensor, there: Tensor) -> dict[str, Any]:
    if tokenizer is None:
        return {}
    texts = [tokenizer.decode(row[mask], skip_special_tokens=True) for row, mask in zip(tokens, there, strict=True)]
    return {"texts": texts, "words": functools.partial(_words, tokenizer)}


def _words(tokenizer: Any, tokens: Tensor) -> list[str]:
    return words_of(tokenizer, tokens.tolist())
