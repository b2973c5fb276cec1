"""Convolution of one shared input with the weights and biases of all branches, computed as a single convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .rank_one import LayerForward

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_functorch: Any = torch._C._functorch


class JointForward(LayerForward):
    """Forward of a convolution in a clone, which joins the branches into one convolution.

    vmap has no batching rule for the bias and adds it separately to the outputs of all branches, which takes as long as the convolution.
    """

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self._layer()
        weight, bias = layer._parameters["weight"], layer._parameters["bias"]
        if not torch.compiler.is_compiling() and len(args) == 1 and not kwargs and _is_joint(args[0], weight, bias):
            return _convolved(layer, args[0], weight, bias)
        return type(layer).forward(layer, *args, **kwargs)


def can_be_joint(layer: nn.Module) -> bool:
    """Return whether `JointForward` can be used for a layer: a convolution of torch with a bias, one group, and its own forward."""
    if type(layer) not in LAYERS or "forward" in layer.__dict__:
        return False
    return bool(layer.groups == 1 and layer.bias is not None)


def _is_joint(x: Any, weight: Any, bias: Any) -> bool:
    """Return whether weight and bias, but not the input, are batched along one vmap axis, and no function mode is active."""
    if not isinstance(x, Tensor) or not all(isinstance(tensor, Tensor) for tensor in (weight, bias)):
        return False
    level = _functorch.maybe_get_level(weight)
    if _functorch.is_functorch_wrapped_tensor(x) or not all(map(_functorch.is_batchedtensor, (weight, bias))):
        return False
    if _functorch.maybe_get_level(bias) != level or torch._C._len_torch_function_stack():
        return False
    return not any(
        _functorch.is_functorch_wrapped_tensor(_functorch.get_unwrapped(tensor)) for tensor in (weight, bias)
    )


def _convolved(layer: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute the layer for all branches at once, with the branches along the channels, and return a batched tensor."""
    weights, biases = (
        _functorch.get_unwrapped(tensor).movedim(_functorch.maybe_get_bdim(tensor), 0) for tensor in (weight, bias)
    )
    out = layer._conv_forward(x, weights.flatten(0, 1), biases.flatten())
    channels = out.dim() - weight.dim() + 1
    level = _functorch.maybe_get_level(weight)
    return _functorch._add_batch_dim(out.unflatten(channels, biases.shape), channels, level)


__all__ = ["JointForward", "can_be_joint"]
