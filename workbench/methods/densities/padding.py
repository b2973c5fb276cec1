"""Which steps of a sequence are padding: what the call itself says, by a mask, by lengths, or by the padding token."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def kept_steps(
    model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """Mask [rows, t] of the steps that are no padding, None where nothing says which are.

    In this order: a bool or integer argument called `...attention_mask` [rows, t] (1 or True: kept) or `...padding_mask`
    [rows, t] (True: padding, as in torch); `length` or `lengths` [rows] beside a sequence; whole numbers [rows, t] where the model has
    embeddings that agree on one `padding_idx`. Steps that merely are zero are not taken for padding: zero may be a value.

    Args:
        model: Whose embeddings are asked.
        forward: Whose parameters name the positional arguments.
        args, kwargs: The call.

    Returns:
        Bool tensor [rows, t], or None.

    Example:
        >>> def forward(x, lengths): ...
        >>> kept_steps(nn.Identity(), forward, (torch.zeros(2, 3, 5), torch.tensor([1, 3])), {}).tolist()
        [[True, False, False], [True, True, True]]
    """
    if not kwargs and len(args) == 1 and not (isinstance(args[0], Tensor) and not args[0].is_floating_point()):
        return None  # the common case, at no cost
    arguments = _named(forward, args, kwargs)
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
            continue  # numbers to add to attention scores come in several conventions
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
    """The arguments of a call by name; those of `*args` and `**kwargs` by theirs or their number."""
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {}
    if not all(any(value is argument for argument in bound.values()) for value in (*args, *kwargs.values())):
        bound = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    return bound
