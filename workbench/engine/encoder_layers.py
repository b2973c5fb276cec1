"""Encoders of torch in clones: they compute what they compute without function modes and vmap, under which torch leaves its fast paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _pop_mode_temporarily

from .rank_one import LayerForward
from .sites import Sites


class WholeForward(LayerForward):
    """Forward of an encoder layer in a clone, which hides the operations inside from `Sites` if these need no more than the layer's input.

    Args:
        layer: see `LayerForward`.
        path: name of the layer.
    """

    __slots__ = ("_path",)

    def __init__(self, layer: nn.Module, path: str) -> None:
        super().__init__(layer)
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self._layer()
        # other modes would have to see the operations
        if torch._C._len_torch_function_stack() == 1 and not torch.compiler.is_compiling():
            sites, source = torch._C._get_function_stack_at(0), args[0] if args else kwargs.get("src")
            if isinstance(sites, Sites) and type(source) is Tensor:
                with _pop_mode_temporarily():
                    if source.dim() == 3 and not source.is_nested and sites.at_layer(self._path, layer, source):
                        return type(layer).forward(layer, *args, **kwargs)
        return type(layer).forward(layer, *args, **kwargs)


def can_be_whole(layer: nn.Module) -> bool:
    """Return whether `WholeForward` can be used for a layer: an encoder layer of torch that has a fused kernel and begins with attention."""
    if type(layer) is not nn.TransformerEncoderLayer or "forward" in layer.__dict__:
        return False
    attention: Any = layer.self_attn
    if type(attention) is not nn.MultiheadAttention or layer.norm_first or not layer.activation_relu_or_gelu:
        return False
    return bool(attention.batch_first and attention.in_proj_weight is not None and attention.in_proj_bias is not None)


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
        if len(args) > 2:
            args = (*args[:2], padding, *args[3:])
        else:
            kwargs = {**kwargs, "src_key_padding_mask": padding}
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
    # without a check, torch takes as many steps as are kept, from the first one on
    return torch.arange(kept.shape[1], device=kept.device) >= kept.sum(1, keepdim=True)


__all__ = ["PaddedForward", "WholeForward", "can_be_padded", "can_be_whole", "in_modes"]
