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
    level = max(map(_level, (query, key, value, attn_mask)))
    if level < 0:
        return _as_rows(query, key, value, attn_mask, is_causal, **options)
    n_dims = query.dim()
    with torch._C.DisableTorchFunction():  # function modes would take these tensors for the model's own
        query, key, value = (_with_branches(tensor, level, n_dims) for tensor in (query, key, value))
        mask = None if attn_mask is None else _with_branches(attn_mask, level, n_dims)
        out = attention(query, key, value, mask, 0.0, is_causal, **options)
    return _functorch._add_batch_dim(out, 0, level)


def _level(tensor: Tensor | None) -> int:
    """Return the level of the innermost vmap by which a tensor is batched; -1 if there is none."""
    return _functorch.maybe_get_level(tensor) if is_batched(tensor) else -1


def _with_branches(tensor: Tensor, level: int, n_dims: int) -> Tensor:
    """Return the tensor [branches of a level, n_dims more axes], with one branch if it is the same for all."""
    inserted = (1,) * (n_dims - tensor.dim())
    if _level(tensor) < level:
        return tensor.reshape(1, *inserted, *tensor.shape)
    stacked = _functorch.get_unwrapped(tensor).movedim(_functorch.maybe_get_bdim(tensor), 0)
    return stacked.reshape(len(stacked), *inserted, *tensor.shape)


def _as_rows(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **options: Any
) -> Tensor:
    """Return the attention of tensors with any number of leading axes; fused kernels take one, of rows, beside that of heads."""
    shapes = [tensor.shape[:-3] for tensor in (query, key, value, attn_mask) if tensor is not None]
    leading = torch.broadcast_shapes(*shapes)

    def rows(tensor: Tensor) -> Tensor:
        return tensor.expand(*leading, *tensor.shape[-3:]).flatten(0, -4)

    if len(leading) > 1:
        query, key, value = rows(query), rows(key), rows(value)
        if attn_mask is not None:  # one for all rows is taken as it is
            attn_mask = rows(attn_mask) if attn_mask.shape[:-2].numel() > 1 else attn_mask.reshape(attn_mask.shape[-2:])
    out = F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **options)
    return out.unflatten(0, leading) if len(leading) > 1 else out


def _by_formula(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, **options: Any
) -> Tensor:
    """Return the attention by torch's reference implementation, which takes additive masks."""
    device = query.device.type
    under_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if under_autocast:  # as around a fused kernel: inside, gradients of the softmax would have another dtype
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
