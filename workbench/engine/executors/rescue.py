"""Rescue under vmap: operations without a batching rule are replaced by equivalent ones, and new tensors may be written into."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..sites import transparent
from .attention import attention

_FACTORIES = frozenset(
    f"{stem}{end}" for stem in ("zeros", "ones", "empty", "full") for end in ("", "_like")
) | frozenset(f"new_{stem}" for stem in ("zeros", "ones", "empty", "full"))
_RECURRENT = {"lstm": "lstm_impl", "gru": "gru_impl", "rnn_tanh": "rnn_tanh_input", "rnn_relu": "rnn_relu_input"}


class Rescue(TorchFunctionMode):
    """Function mode for a pass under vmap.

    - New tensors (`torch.zeros`, ...) get the branch axes, so that each branch can write into its own.
    - Attention is one call of the fused kernel, of which all branches are rows, see `attention`.
    - Recurrent layers and cells are computed step by step.
    - `out=` becomes a computation and a copy.
    - An active function mode also keeps `nn.TransformerEncoderLayer` from its fused path.

    Args:
        token: a zero that is batched along every branch axis.
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
            new = function(*args, **kwargs)
            if isinstance(args[0] if args else None, Tensor) and new.requires_grad:
                return new
            # created on its device instead of copied: a non-blocking copy to the CPU might not be finished when it is read
            zero = torch.zeros_like(self._token, device=new.device, dtype=new.dtype)
            return new ^ zero if new.dtype is torch.bool else new + zero
        if name == "multi_head_attention_forward":
            with self:
                return transparent(F.multi_head_attention_forward)(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return attention(*args, **kwargs)
        if name == "gru_cell":
            return _gru_cell(*args, **kwargs)
        if name in _RECURRENT and len(args) == 9 and isinstance(args[3], bool):  # not the overload for packed sequences
            from torch._decomp import decompositions

            return getattr(decompositions, _RECURRENT[name])(*args)
        return function(*args, **kwargs)


class DropoutByFormula(TorchFunctionMode):
    """Function mode under two vmaps: computes dropout on a GPU by its formula.

    `torch.native_dropout`, used there, crashes the interpreter if its input differs along the outer axis only and draws are the same along the
    inner one, as for risk heads (torch 2.13).
    """

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(function, "__name__", "") == "dropout":
            return _dropout(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> Tensor:
    training = training if train is None else train  # torch.dropout calls it `train`
    if input.is_cpu or not training or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    mask = ((torch.rand(input.shape, device=input.device) >= p) / (1 - p)).to(input.dtype)
    return input.mul_(mask) if inplace else input * mask


def _gru_cell(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """Return the next hidden state of a GRU cell (Cho et al. 2014), with the gates in torch's order."""
    r_x, z_x, n_x = F.linear(x, w_ih, b_ih).chunk(3, -1)
    r_h, z_h, n_h = F.linear(h, w_hh, b_hh).chunk(3, -1)
    r, z = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
    n = torch.tanh(n_x + r * n_h)
    return n + z * (h - n)
