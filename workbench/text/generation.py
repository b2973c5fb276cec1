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
from workbench.text.result import Generation

MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
# what transformers' models hand on from step to step, where nobody named it
CACHES = (("past_key_values",), ("cache_params",), ("state",), ("mems",))
OPTIONS = {
    *("min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("num_beams", "num_return_sequences", "length_penalty", "early_stopping"),
    *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "logits_processor"),
    *("eos_token_id", "pad_token_id", "use_cache"),
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
        model: a wrapped decoder of transformers in evaluation mode, with class scores, `output={"logits": Logits(dim=-1)}`. Its cache needs
            no `state=` here.
        prompts: token ids [n, t], or lists of ids or texts of any lengths, which are padded on the left.
        tokenizer: of transformers; needed for prompts that are texts, and for texts in the result. Its tokens of padding and of end count
            where neither options nor `model.generation_config` name one.
        attention_mask: [n, t], 0 for padding, which must be on the left. By default that of `pad_token_id` in front, as in transformers; where
            that is the token of end as well, prompts that begin with it unlike often are refused.
        max_new_tokens: at most so many tokens a sequence.
        n_alternatives: the most probable tokens that are kept at each place.
        seed: of sampling; the global random state is then left as it is. None draws from torch's global generator, as transformers does.
        options: those of transformers' `generate` for greedy search, sampling and beams: do_sample, temperature, top_k, top_p, min_p, typical_p,
            num_beams, num_return_sequences, length_penalty, early_stopping, repetition_penalty, no_repeat_ngram_size, bad_words_ids,
            suppress_tokens, logits_processor, min_new_tokens, eos_token_id, pad_token_id, use_cache.

    Returns:
        Tokens [n, steps] with their log-probabilities and risks, and scores of the sequences. In a notebook it shows the texts coloured by risk.

    Raises:
        TypeError: for what is no wrapped decoder of transformers, and for other options.
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
        for name in (
            "pad_token_id",
            "eos_token_id",
        ):  # those of the model's generation_config first: it may know several ends
            if _setting(model, options, name) is None and getattr(tokenizer, name, None) is not None:
                options[name] = getattr(tokenizer, name)
    pad, end = (_setting(model, options, name) for name in ("pad_token_id", "eos_token_id"))
    ids, mask = _padded(model, prompts, tokenizer, attention_mask, pad, end)
    _check_padding(model, ids, mask)
    steps: list[Tensor] = []
    host: Any = copied(model)  # the user's own object stays as it is
    host.__dict__["forward"] = _recording(model, steps)
    devices = [ids.device] if ids.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices) if seed is not None else contextlib.nullcontext():
        if seed is not None:
            torch.manual_seed(seed)
        output = host.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            output_scores=True,  # without which transformers does not tell from which beam a token came
            **options,
        )
    tokens = output.sequences[:, ids.shape[1] :]
    beams = getattr(output, "beam_indices", None)
    if len(steps) != tokens.shape[1] and (beams is None or len(steps) < tokens.shape[1]):
        raise RuntimeError(
            f"transformers called the model {len(steps)} times for {tokens.shape[1]} tokens, so that passes and tokens are not one to one: "
            "use greedy search, sampling or beams without other strategies in model.generation_config"
        )
    there = _there(tokens, beams, end)
    length = int(there.sum(1).max())
    rows = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
    if beams is not None:
        rows = beams[:, : tokens.shape[1]].clamp_min(0)
    n_return = int(_setting(model, options, "num_return_sequences") or 1)
    return Generation(
        sequences=output.sequences[:, : ids.shape[1] + length],
        **_measured(steps[:length], rows, tokens[:, :length], there[:, :length], n_alternatives),
        **_texts(tokenizer, tokens, there),
        n_return=n_return,
        sampled=bool(_setting(model, options, "do_sample")) and beams is None,
    )


# ---- what is refused
def _check_model(model: Any) -> None:
    if not is_wrapped(model) or not callable(getattr(model, "generate", None)):
        raise TypeError(
            f"model: expected a wrapped language model of transformers, found {'a plain ' if not is_wrapped(model) else 'a wrapped '}"
            f"{type(model).__name__}: give vote.Wrapper(5, output={{'logits': Logits(dim=-1)}})(model).eval()"
        )
    if model.config.is_encoder_decoder:
        raise TypeError(
            f"model: {type(model).__name__} has an encoder, and risks are measured for decoders alone: write with model.generate(...), without "
            "risks, and compute those of the text that is there, model(input_ids, decoder_input_ids=..., return_risk=True)"
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


# ---- prompts
def _padded(
    model: Any, prompts: Any, tokenizer: Any, attention_mask: Tensor | None, pad: Any, end: Any
) -> tuple[Tensor, Tensor]:
    """Ids and mask [n, t], padded on the left."""
    device = next(model.parameters()).device
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(prompts, Tensor):
        if attention_mask is not None:
            raise ValueError("attention_mask belongs to ids that are one tensor; lists of any lengths are padded here")
        prompts = list(prompts)
        if any(isinstance(prompt, str) for prompt in prompts):
            if tokenizer is None:
                raise ValueError("prompts are texts: give tokenizer=, or their token ids")
            prompts = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        rows = [torch.as_tensor(prompt, dtype=torch.long, device=device) for prompt in prompts]
        if not rows or any(row.dim() != 1 or not len(row) for row in rows):
            raise ValueError("prompts: expected one or more lists of token ids, each with one id or more")
        longest = max(map(len, rows))
        ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0), value=_first(pad)) for row in rows])
        return ids, torch.stack([torch.arange(longest, device=device) >= longest - len(row) for row in rows]).long()
    if prompts.dim() != 2 or prompts.is_floating_point() or not prompts.numel():
        raise ValueError(f"prompts: expected token ids [n, t], found {prompts.dtype} of shape {list(prompts.shape)}")
    if attention_mask is None:
        padding = prompts.eq(_first(pad)) if pad is not None else torch.zeros_like(prompts, dtype=torch.bool)
        if pad is not None and _first(pad) in (end if isinstance(end, list | tuple) else [end]):
            if len(set(padding.long().cummin(1).values.sum(1).tolist())) > 1:
                raise ValueError(
                    f"prompts begin with different numbers of token {_first(pad)}, which is that of padding and of the end alike, so that "
                    "nobody can tell which of them count: give attention_mask=, or lists of ids without padding"
                )
            padding = torch.zeros_like(padding)
        attention_mask = (~padding).long()
    if attention_mask.shape != prompts.shape:
        raise ValueError(
            f"attention_mask: expected {list(prompts.shape)} as of prompts, found {list(attention_mask.shape)}"
        )
    attention_mask = attention_mask.to(prompts.device, torch.long)
    if bool((attention_mask.diff(dim=1) < 0).any()) or bool((attention_mask[:, -1] == 0).any()):
        raise ValueError(
            "prompts have padding behind or within a text, after which a decoder would write on: pad on the left (padding_side='left'), or "
            "give lists of ids; if an id that is pad_token_id is meant, give attention_mask="
        )
    return prompts, attention_mask


def _check_padding(model: Any, ids: Tensor, mask: Tensor) -> None:
    """Raise where padding changes what the plain model says: learned positions that count it, a recurrence that reads it."""
    row = int(mask.sum(1).argmin())
    if bool(mask[row].all()):
        return
    plain = model.unwrap().eval()
    said = []
    for start in (0, int(mask[row].argmax())):  # with its padding, and without
        output = plain.generate(
            input_ids=ids[row : row + 1, start:],
            attention_mask=mask[row : row + 1, start:],
            **{"max_new_tokens": 1, "min_new_tokens": 0, "min_length": 0},
            **{"do_sample": False, "num_beams": 1, "num_return_sequences": 1},
            **{"return_dict_in_generate": True, "output_logits": True},
        )
        said.append(output.logits[0][0].double().softmax(-1))
    away = float((said[0] - said[1]).abs().sum() / 2)
    if not away <= (1e-3 if output.logits[0].dtype in (torch.float32, torch.float64) else 0.1):  # NaN as well
        raise ValueError(
            f"prompts are of unequal lengths, and {type(plain).__name__} does not ignore padding: with {int((mask[row] == 0).sum())} tokens of "
            f"padding in front of prompt {row} its probabilities of the next token are others (by {away:.3g} of 1 in all); give prompts of one "
            "length at a time"
        )


def _first(token: Any) -> int:
    token = token[0] if isinstance(token, list | tuple) else token
    return 0 if token is None else int(token)


# ---- passes
def _recording(model: Any, steps: list[Tensor]) -> Callable[..., Any]:
    """A forward for `generate` that keeps what all members say about the next token."""
    state = model._workbench.state or CACHES

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
        }.items():
            columns.setdefault(name, []).append(value)
    table = {name: torch.stack(values, 2 if name == "member_log_probs" else 1) for name, values in columns.items()}
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
