"""Encoders of torch in clones: they compute what they compute without function modes and vmap, under which torch leaves its fast paths."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.overrides import _pop_mode_temporarily

from .rank_one import FactoredWeight, LayerForward
from .sites import Sites


class WholeForward(LayerForward):
    """Forward of an encoder layer in a clone, which computes without `Sites` what these only look at, and tells them of the data.

    Under a function mode, torch leaves the layer's fused kernel, and puts steps before rows and back. The fused kernel is used if the input of
    the layer is all that `Sites` need, and otherwise, without masks, its operations with rows first, which take about as long.

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
            if isinstance(sites, Sites) and sites.wanted is not None and type(source) is Tensor:
                with _pop_mode_temporarily():
                    output = self._notified(layer, sites, sites.wanted, source, args, kwargs)
                if output is not None:
                    return output
        return type(layer).forward(layer, *args, **kwargs)

    def _notified(
        self, layer: Any, sites: Sites, wanted: Collection[str], source: Tensor, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Return the output after telling `sites` of the data at the weights that they want; None if only their mode can see these data."""
        if source.dim() != 3 or source.is_nested:
            return None
        attention = layer.self_attn
        first = sites.names_among([attention.in_proj_weight])
        inside = {name for name in wanted if name.startswith(f"{self._path}.")} - first
        if not inside:
            sites.notify([attention.in_proj_weight], source.transpose(0, 1))  # as attention computes
            return type(layer).forward(layer, *args, **kwargs)
        weights = (attention.out_proj.weight, layer.linear1.weight, layer.linear2.weight)
        if _is_plain(layer, *args, **kwargs) and inside <= sites.names_among(weights):
            return _by_parts(layer, source, sites)
        return None


def can_be_whole(layer: nn.Module) -> bool:
    """Return whether `WholeForward` can be used for a layer: an encoder layer of torch that has a fused kernel and begins with attention."""
    if type(layer) is not nn.TransformerEncoderLayer or "forward" in layer.__dict__:
        return False
    attention: Any = layer.self_attn
    if type(attention) is not nn.MultiheadAttention or layer.norm_first or not layer.activation_relu_or_gelu:
        return False
    return bool(attention.batch_first and attention.in_proj_weight is not None and attention.in_proj_bias is not None)


def _is_plain(
    layer: Any,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> bool:
    """Return whether a call is one that torch answers by the fused kernel, and without masks; the conditions are torch's, or narrower."""
    parts = list(layer.modules())
    return (
        src_mask is None
        and src_key_padding_mask is None
        and not is_causal
        and not torch.is_grad_enabled()
        and src.device.type in ("cpu", "cuda")
        and not torch.is_autocast_enabled(src.device.type)
        and torch.backends.mha.get_fastpath_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and type(layer.self_attn.out_proj) is NonDynamicallyQuantizableLinear
        and type(layer.linear1) is type(layer.linear2) is nn.Linear
        and type(layer.norm1) is type(layer.norm2) is nn.LayerNorm
        # otherwise torch leaves the fused kernel, which ignores dropout layers, steps added to keys, and the form of gelu
        and layer.norm1.eps == layer.norm2.eps
        and layer.self_attn.num_heads % 2 == 0
        and not any(part.training or part._forward_hooks or part._forward_pre_hooks for part in parts)
        and all(type(parameter) is not FactoredWeight for part in parts for parameter in part._parameters.values())
    )


def _by_parts(layer: Any, source: Tensor, sites: Sites) -> Tensor:
    """Return what a layer computes from its input [rows, t, d], without gradients, and tell `sites` of the data at each of its weights."""
    attention, linear1, linear2 = layer.self_attn, layer.linear1, layer.linear2
    out_proj = attention.out_proj
    rows, t, d = source.shape
    weights = (attention.in_proj_weight, attention.in_proj_bias)
    # steps first, as attention computes
    sites.notify(weights, source.transpose(0, 1))
    joint = F.linear(source, *weights).view(rows, t, 3, attention.num_heads, d // attention.num_heads)
    mixed = F.scaled_dot_product_attention(*joint.permute(2, 0, 3, 1, 4)).transpose(1, 2).reshape(rows, t, d)
    weights = (out_proj.weight, out_proj.bias)
    if sites.names_among(weights):
        sites.notify(weights, mixed.transpose(0, 1).reshape(-1, d))
    x = layer.norm1(F.linear(mixed, *weights).add_(source))
    weights = (linear1.weight, linear1.bias)
    sites.notify(weights, x)
    hidden = F.linear(x, *weights)
    hidden = hidden.relu_() if layer.activation_relu_or_gelu == 1 else F.gelu(hidden)
    weights = (linear2.weight, linear2.bias)
    sites.notify(weights, hidden)
    return layer.norm2(F.linear(hidden, *weights).add_(x))


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
