"""Prompts of language models: padded token ids with their mask, or the features that an encoder takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from workbench.core.wrapped import unwrap


def padded(
    model: Any, prompts: Any, tokenizer: Any, attention_mask: Tensor | None, pad: Any, end: Any
) -> tuple[Tensor, Tensor]:
    """Return token ids and mask [n, t], padded on the left for a decoder, which continues on the right, and on the right for an encoder."""
    encoder = model.config.is_encoder_decoder
    if isinstance(prompts, Mapping):  # what a tokenizer returns
        raise ValueError(
            f"prompts: expected texts or token ids, found a dict of {', '.join(map(str, prompts))}: give inputs['input_ids'], and "
            "attention_mask=inputs['attention_mask']"
        )
    if isinstance(prompts, Tensor):
        return prompts, _checked_mask(prompts, attention_mask, pad, end, encoder)
    if attention_mask is not None:
        raise ValueError(
            "attention_mask is for ids in one tensor; lists of ids are padded here, so leave attention_mask out"
        )
    rows = [row.to(next(model.parameters()).device, torch.long) for row in _token_ids(prompts, tokenizer)]
    longest = max(map(len, rows))
    gaps = [(0, longest - len(row)) if encoder else (longest - len(row), 0) for row in rows]
    ids, mask = (
        torch.stack([torch.nn.functional.pad(row, gap, value=value) for row, gap in zip(filled, gaps, strict=True)])
        for filled, value in ((rows, _first(pad)), ([torch.ones_like(row) for row in rows], 0))
    )
    return ids, mask


def _token_ids(prompts: Any, tokenizer: Any) -> list[Tensor]:
    """Return the ids [t] of each prompt; prompts are texts or lists of ids, or one of these."""
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts: expected texts or token ids, found {type(prompts).__name__}")
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if any(isinstance(prompt, Mapping) for prompt in prompts):
        raise ValueError(
            "prompts: found the messages of a chat: give its token ids, tokenizer.apply_chat_template(messages, "
            "add_generation_prompt=True, return_dict=True)['input_ids']"  # as a text it would get a second start token
        )
    if any(isinstance(prompt, str) for prompt in prompts):
        if tokenizer is None:
            raise ValueError("prompts are texts: give tokenizer=, or their token ids")
        prompts = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    if prompts and isinstance(prompts[0], Integral):
        prompts = [prompts]
    rows = [torch.as_tensor(prompt) for prompt in prompts]
    if not rows or any(row.dim() != 1 or not len(row) or row.is_floating_point() for row in rows):
        raise ValueError(
            "prompts: expected one or more lists of token ids, which are integers, each with one id or more"
        )
    return rows


def _checked_mask(ids: Tensor, mask: Tensor | None, pad: Any, end: Any, encoder: bool) -> Tensor:
    """Return the mask [n, t] of ids, by default derived from the padding token."""
    if ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        raise ValueError(f"prompts: expected token ids [n, t], found {ids.dtype} of shape {list(ids.shape)}")
    if mask is None:
        mask = _derived_mask(ids, pad, end, encoder)
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask: expected the shape of prompts, {list(ids.shape)}, found {list(mask.shape)}")
    mask = mask.to(ids.device, torch.long)
    if bool((mask.sum(1) == 0).any()):
        raise ValueError("a prompt is all padding: give at least one token with attention_mask 1")
    if not encoder and (bool((mask.diff(dim=1) < 0).any()) or bool((mask[:, -1] == 0).any())):
        raise ValueError(
            "prompts have padding after or within a text, from which a decoder would continue: pad on the left (padding_side='left'), or "
            "give lists of ids; if pad_token_id is meant as a token of the text, give attention_mask="
        )
    return mask


def _derived_mask(ids: Tensor, pad: Any, end: Any, encoder: bool) -> Tensor:
    if pad is None:
        return torch.ones_like(ids)
    padding = ids.eq(_first(pad))
    if _first(pad) not in (end if isinstance(end, list | tuple) else [end]):
        return (~padding).long()
    edge = padding.flip(1) if encoder else padding
    if len(set(edge.long().cummin(1).values.sum(1).tolist())) > 1:
        raise ValueError(
            f"prompts {'end' if encoder else 'begin'} with different numbers of token {_first(pad)}, which is both the padding and the "
            "end token, so that it is unclear which of them count: give attention_mask=, or lists of ids without padding"
        )
    return torch.ones_like(ids)


def check_ids(model: Any, ids: Tensor, mask: Tensor, max_new_tokens: int) -> None:
    """Raise ValueError if ids are not in the vocabulary, or the text would be longer than a table of positions.

    Args:
        model: wrapped model.
        ids, mask: padded prompts [n, t].
        max_new_tokens: number of tokens that will be written.
    """
    try:
        embeddings = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return
    n_ids = getattr(embeddings, "num_embeddings", None)
    if n_ids is not None and bool(((ids < 0) | (ids >= n_ids)).any()):
        wrong = int(ids[(ids < 0) | (ids >= n_ids)][0])
        raise ValueError(
            f"prompts: {type(model).__name__} has embeddings of {n_ids:,} tokens, 0 to {n_ids - 1}, found id {wrong}; was it encoded by the "
            "tokenizer of another model?"
        )
    if model.config.is_encoder_decoder:
        return
    # a table with a row for each position, unlike positions that are computed
    tables = [part for part in model.modules() if isinstance(part, nn.Embedding) and part is not embeddings]
    limit = getattr(model.config, "max_position_embeddings", None)
    length = int(mask.sum(1).max()) + max_new_tokens - 1  # the last token is not read
    if limit is not None and length > limit and any(part.num_embeddings - limit in (0, 1, 2) for part in tables):
        raise ValueError(
            f"max_new_tokens={max_new_tokens}: with the longest prompt the model reads {length:,} tokens, and {type(model).__name__} has "
            f"positions for {limit:,}; give max_new_tokens of at most {max(0, limit - length + max_new_tokens)}, or shorter prompts"
        )


def check_padding(model: Any, ids: Tensor, mask: Tensor, max_new_tokens: int, options: dict[str, Any]) -> None:
    """Raise ValueError if padding changes the plain model's predictions, as with positions that count it or a recurrence that reads it.

    It looks at the first token, which is predicted from the prompt, and the second one, which is predicted from a cache.

    Args:
        model: wrapped model.
        ids, mask: padded prompts [n, t].
        max_new_tokens: number of tokens that will be written.
        options: other options of `generate`, of which those that the first token depends on are used.
    """
    row = int(mask.sum(1).argmin())
    if bool(mask[row].all()):
        return
    plain: Any = unwrap(model).eval()
    starting = {name: options[name] for name in ("decoder_start_token_id", "pad_token_id") if name in options}
    n_tokens = min(2, max_new_tokens)
    tokens, probabilities = [], []
    for kept in (torch.ones_like(mask[row], dtype=torch.bool), mask[row].bool()):  # with padding, and without
        output = plain.generate(
            input_ids=ids[row : row + 1, kept],
            attention_mask=mask[row : row + 1, kept],
            **{"max_new_tokens": n_tokens, "min_new_tokens": n_tokens},
            **{"do_sample": False, "num_beams": 1, "num_return_sequences": 1},
            **{"return_dict_in_generate": True, "output_logits": True},
            **starting,
        )
        tokens.append(output.sequences[0, -n_tokens:])
        probabilities.append(torch.stack(output.logits)[:, 0].double().softmax(-1))
    steps = n_tokens if tokens[0][0] == tokens[1][0] else 1  # the second is compared after the same first one
    difference = float((probabilities[0] - probabilities[1])[:steps].abs().sum(-1).max() / 2)
    if not difference <= max(1e-5, torch.finfo(output.logits[0].dtype).eps ** 0.5):  # NaN as well
        raise ValueError(
            f"prompts have unequal lengths, and {type(plain).__name__} does not ignore padding: with {int((mask[row] == 0).sum())} padding "
            f"tokens {'after' if model.config.is_encoder_decoder else 'before'} prompt {row}, its probabilities of tokens change (total "
            f"variation {difference:.3g}); give prompts of one length at a time"
        )


def features(model: Any, prompts: Any, attention_mask: Tensor | None) -> dict[str, Tensor]:
    """Return the inputs of an encoder of images or sounds by name, with the attention mask if there is one."""
    name = model.main_input_name
    if not isinstance(prompts, Tensor) or not prompts.is_floating_point():
        kind = f"{prompts.dtype} of shape {list(prompts.shape)}" if isinstance(prompts, Tensor) else repr(prompts)[:80]
        raise ValueError(
            f"prompts: {type(model).__name__} takes {name}, a floating-point tensor with one row per text, found {kind}"
        )
    return {name: prompts} if attention_mask is None else {name: prompts, "attention_mask": attention_mask}


def _first(token: Any) -> int:
    token = token[0] if isinstance(token, list | tuple) else token
    return 0 if token is None else int(token)


__all__ = ["check_ids", "check_padding", "features", "padded"]
