"""Padding steps of sequences, known from a mask, from lengths or from the padding token of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def kept_steps(
    model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """Return a mask of the steps that are not padding, None if the call does not tell.

    Looks for, in this order: a bool or integer argument named `...attention_mask` [rows, t] (1 or True: kept) or `...padding_mask` [rows, t]
    (True: padding, as in torch); an argument `length` or `lengths` [rows] next to a sequence; integer tokens [rows, t], if all embeddings of
    the model that have a `padding_idx` have the same one. Steps that are merely zero do not count as padding, since zero may be a value.

    Args:
        model: Model whose embeddings may define a padding token.
        forward: Function whose signature names the positional arguments.
        args, kwargs: Arguments of the call.

    Returns:
        Bool tensor [rows, t], or None.

    Example:
        >>> def forward(x, lengths): ...
        >>> kept_steps(nn.Identity(), forward, (torch.zeros(2, 3, 5), torch.tensor([1, 3])), {}).tolist()
        [[True, False, False], [True, True, True]]
    """
    if not kwargs and len(args) == 1 and not (isinstance(args[0], Tensor) and not args[0].is_floating_point()):
        return None  # fast path for the common case
    arguments = _named(forward, args, kwargs)
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
            continue  # additive attention masks follow several conventions
        if name.endswith("attention_mask"):
            return value != 0
        if name.endswith("padding_mask"):
            return value == 0
    sequence = next((v for v in arguments.values() if isinstance(v, Tensor) and v.dim() >= 2), None)
    if sequence is None:
        return None
    lengths = next((arguments[name] for name in ("lengths", "length") if isinstance(arguments.get(name), Tensor)), None)
    if lengths is not None and lengths.shape == sequence.shape[:1] and not lengths.is_floating_point():
        return torch.arange(sequence.shape[1], device=sequence.device) < lengths.to(sequence.device)[:, None]
    if sequence.dim() == 2 and not sequence.is_floating_point():
        marks = {m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None}
        if len(marks) == 1:
            return sequence != marks.pop()
    return None


def _named(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, or by position if the signature does not name them all."""
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {}
    if not all(any(value is argument for argument in bound.values()) for value in (*args, *kwargs.values())):
        bound = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    return bound
