"""Rescue under vmap: operations without a batching rule are put in other words, and fresh tensors may be written into."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..sites import transparent

_FACTORIES = frozenset(
    f"{stem}{end}" for stem in ("zeros", "ones", "empty", "full") for end in ("", "_like")
) | frozenset(f"new_{stem}" for stem in ("zeros", "ones", "empty", "full"))
_RECURRENT = {"lstm": "lstm_impl", "gru": "gru_impl", "rnn_tanh": "rnn_tanh_input", "rnn_relu": "rnn_relu_input"}


class Rescue(TorchFunctionMode):
    """Around a pass under vmap.

    - Fresh tensors (`torch.zeros`, ...) have the branches' axes, so that a branch may write into its own.
    - Attention is computed by its formula: fused kernels have no batching rule for some masks, and crash the interpreter under two vmaps.
    - Recurrent layers and cells run step by step.
    - `out=` becomes a computation and a copy.
    - Its mere presence keeps `nn.TransformerEncoderLayer` from its fused path.

    Args:
        token: a zero that has every branch axis.
    """

    def __init__(self, token: Tensor) -> None:
        super().__init__()
        self._token = token

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        out = kwargs.get("out")
        if isinstance(out, Tensor):
            value = function(*args, **{**kwargs, "out": None})
            if value.shape != out.shape:
                raise RuntimeError(f"{name}(out=) would give its target another shape")
            return out.copy_(value)
        if name in _FACTORIES:
            fresh = function(*args, **kwargs)
            if isinstance(args[0] if args else None, Tensor) and fresh.requires_grad:
                return fresh
            # not copied: a copy to the CPU would not have come yet where it is read
            zero = torch.zeros_like(self._token, device=fresh.device, dtype=fresh.dtype)
            return fresh ^ zero if fresh.dtype is torch.bool else fresh + zero
        if name == "multi_head_attention_forward":
            with self:
                return transparent(F.multi_head_attention_forward)(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return _attention(*args, **kwargs)
        if name == "gru_cell":
            return _gru_cell(*args, **kwargs)
        if name in _RECURRENT and len(args) == 9 and isinstance(args[3], bool):  # the other form takes packed sequences
            from torch._decomp import decompositions

            return getattr(decompositions, _RECURRENT[name])(*args)
        return function(*args, **kwargs)


class DropoutByFormula(TorchFunctionMode):
    """Around everything under two vmaps at once: dropout on a GPU by its formula.

    What it is there, `torch.native_dropout`, crashes the interpreter where its input differs along the outer axis only and the inner one draws
    the same for all, such as that of risk heads (torch 2.13).
    """

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(function, "__name__", "") == "dropout":
            return _dropout(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> Tensor:
    training = training if train is None else train  # of torch.dropout
    if input.is_cpu or not training or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    kept = ((torch.rand(input.shape, device=input.device) >= p) / (1 - p)).to(input.dtype)
    return input.mul_(kept) if inplace else input * kept


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    """softmax(q k^T / sqrt(d) + mask) v, by torch's own reference form, which takes masks as numbers to add."""
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    form = torch.ops.aten._scaled_dot_product_attention_math
    out, weights = form(query, key, value, attn_mask, 0.0, is_causal, None, **more)
    if not dropout_p:
        return out
    # by itself: inside that operation it crashes the interpreter under several vmaps (torch 2.13)
    groups = weights.shape[-3] // value.shape[-3] if more.get("enable_gqa") else 1
    return F.dropout(weights, dropout_p) @ (value if groups == 1 else value.repeat_interleave(groups, -3))


def _gru_cell(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """Cho et al. 2014, with the gates in torch's order."""
    r_x, z_x, n_x = F.linear(x, w_ih, b_ih).chunk(3, -1)
    r_h, z_h, n_h = F.linear(h, w_hh, b_hh).chunk(3, -1)
    r, z = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
    n = torch.tanh(n_x + r * n_h)
    return n + z * (h - n)
