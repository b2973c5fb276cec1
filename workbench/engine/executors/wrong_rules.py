"""Operations for which a rule of vmap is wrong (torch 2.13): found by comparing torch's own samples of all operations with a loop."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ..branch import is_batched
from ..rank_one import FactoredWeight
from ..tree import flatten

# linear_cross_entropy is wrong if it runs by chunks
DIFFERENTIATED = frozenset(["cov", "linear_cross_entropy", "select_scatter"])


def wrong_rule(function: Any, args: tuple, kwargs: dict[str, Any]) -> str:
    """Return what vmap would do wrongly in a call, "" if nothing is known."""
    name = getattr(function, "__name__", "").partition(".")[0]
    if name == "embedding":
        name, wrong = "embedding with padding or scale_grad_by_freq", _is_embedded_wrongly(function, args, kwargs)
    elif name in DIFFERENTIATED:
        wrong = any(map(is_batched, flatten((args, kwargs))[0]))
    elif name == "index_fill":
        return "vmap computes index_fill wrongly" if is_batched(kwargs.get("value", args[-1])) else ""
    elif name == "roll":
        return "vmap computes roll wrongly" if is_batched(args[0]) and not args[0].dim() else ""
    else:
        return ""
    return f"vmap differentiates {name} wrongly" if wrong and torch.is_grad_enabled() else ""


def _is_embedded_wrongly(function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether a lookup of tokens that differ between branches has padding and weights that differ, or scaled gradients of one weight."""
    if function is F.embedding:
        (tokens, weight), padding = args[:2], kwargs.get("padding_idx")
    else:  # the operation of torch has no negative padding
        (weight, tokens), padding = args[:2], args[2] if len(args) > 2 else kwargs.get("padding_idx", -1)
        padding = None if padding < 0 else padding
    if not is_batched(tokens):
        return False
    if is_batched(weight) or isinstance(weight, FactoredWeight):
        return padding is not None
    return bool(kwargs.get("scale_grad_by_freq", len(args) > 3 and args[3]))


__all__ = ["wrong_rule"]
