"""Attention under vmap: one fused call in which branches are rows, or the formula."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..branch import is_batched

_functorch: Any = torch._C._functorch


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Return softmax(q k^T / sqrt(d) + mask) v of all branches, as `F.scaled_dot_product_attention` does for one.

    torch's own batching rule for the fused kernels does not know some masks, crashes the interpreter under two vmaps (torch 2.13), and on a GPU
    does not keep what gradients need, since batched tensors never require any (torch 2.11).
    """
    if dropout_p:  # its random numbers may have to be the same in all branches
        return _by_formula(query, key, value, attn_mask, dropout_p, is_causal, **options)
    tensors = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    levels = [_functorch.maybe_get_level(tensor) if is_batched(tensor) else -1 for tensor in tensors]
    level = max(levels)
    if level < 0:
        return _as_rows(*tensors, is_causal=is_causal, **options)
    stacked = []
    for tensor, own in zip(tensors, levels, strict=True):
        # branches lead; a tensor that all of them share has one row, and a mask as many axes as the query
        shape = (1,) * (query.dim() - tensor.dim()) + tensor.shape
        if own == level:
            tensor = _functorch.get_unwrapped(tensor).movedim(_functorch.maybe_get_bdim(tensor), 0)
            shape = tensor.shape[:1] + shape
        else:
            shape = (1, *shape)
        stacked.append(tensor.reshape(shape))
    out = attention(*stacked, is_causal=is_causal, **options)
    return _functorch._add_batch_dim(out, 0, level)


def _as_rows(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **options: Any
) -> Tensor:
    """Return the attention of tensors with any number of leading axes; fused kernels take one, of rows, beside that of heads."""
    tensors = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    leading = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors))
    if len(leading) < 2:
        return F.scaled_dot_product_attention(*tensors, is_causal=is_causal, **options)
    if attn_mask is not None and attn_mask.shape[:-2].numel() == 1:  # one for all rows, which kernels take as it is
        tensors[3] = attn_mask.reshape(1, *attn_mask.shape[-3:])
    rows = [
        tensor.expand(*leading, *tensor.shape[-3:]).flatten(0, -4) if tensor.dim() > 4 else tensor for tensor in tensors
    ]
    out = F.scaled_dot_product_attention(*rows, is_causal=is_causal, **options)
    return out.unflatten(0, leading)


def _by_formula(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, **options: Any
) -> Tensor:
    """Return the attention by torch's reference implementation, which takes additive masks."""
    device = query.device.type
    under_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if under_autocast:  # as around a fused kernel: under autocast, gradients of the softmax inside would have another dtype
        low_precision = torch.get_autocast_dtype(device)
        query, key, value = (tensor.to(low_precision) for tensor in (query, key, value))
        mask = mask if mask is None or mask.dtype is torch.bool else mask.to(low_precision)
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    form = torch.ops.aten._scaled_dot_product_attention_math
    with torch.autocast(device, enabled=False) if under_autocast else nullcontext():
        _, weights = form(query, key, value, mask, 0.0, is_causal, None, **options)
    # dropout is applied separately: inside that operation it crashes the interpreter under several vmaps (torch 2.13)
    groups = weights.shape[-3] // value.shape[-3] if options.get("enable_gqa") else 1
    return F.dropout(weights, dropout_p) @ (value if groups == 1 else value.repeat_interleave(groups, -3))
