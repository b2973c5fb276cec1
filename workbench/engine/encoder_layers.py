"""Encoders of torch in clones: they compute what they compute without function modes and vmap, under which torch leaves its fast paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .rank_one import LayerForward


class PaddedForward(LayerForward):
    """Forward of an encoder in a clone, which fills padding steps with zeros where torch does.

    Without gradients, torch leaves out padding steps by nested tensors and fills them with zeros before the last norm, but not under function
    modes and vmap.

    Args:
        layer: see `LayerForward`.
        undisturbed: function that returns whether neither was active around the call of the wrapped object.
    """

    __slots__ = ("_undisturbed",)

    def __init__(self, layer: nn.Module, undisturbed: Callable[[], bool]) -> None:
        super().__init__(layer)
        self._undisturbed = undisturbed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self._layer()
        if torch.compiler.is_compiling() or not self._undisturbed() or not in_modes():
            return type(layer).forward(layer, *args, **kwargs)
        padding = _padding(layer, *args, **kwargs)
        if padding is None:
            return type(layer).forward(layer, *args, **kwargs)
        norm = layer.norm
        if norm is None:
            return type(layer).forward(layer, *args, **kwargs).masked_fill(padding[..., None], 0.0)
        layer._modules["norm"] = None
        try:
            out = type(layer).forward(layer, *args, **kwargs)
        finally:
            layer._modules["norm"] = norm
        return norm(out.masked_fill(padding[..., None], 0.0))


def can_be_padded(layer: nn.Module) -> bool:
    """Return whether `PaddedForward` can be used for a module: an encoder of torch that uses nested tensors."""
    return type(layer) is nn.TransformerEncoder and "forward" not in layer.__dict__ and bool(layer.use_nested_tensor)


def in_modes() -> bool:
    """Return whether function modes or function transforms are active."""
    return bool(torch._C._len_torch_function_stack()) or torch._C._functorch.peek_interpreter_stack() is not None


def _padding(
    encoder: Any,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor | None:
    """Return the mask of padding steps [rows, t] if torch leaves them out of this call, None otherwise; the conditions are torch's."""
    first = encoder.layers[0]
    if src_key_padding_mask is None or mask is not None or src.dim() != 3 or src.is_nested or first.training:
        return None
    if not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (src, *first.parameters())):
        return None
    kept = src_key_padding_mask.logical_not()  # 0 in masks that are added to the scores
    if encoder.mask_check and bool((kept[:, 1:] > kept[:, :-1]).any()):
        return None  # not at the end
    return kept.logical_not()


__all__ = ["PaddedForward", "can_be_padded", "in_modes"]
