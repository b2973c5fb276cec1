"""Convolutions of one input by the weights of all branches: one convolution, to which the biases are not added afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .rank_one import LayerForward

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_functorch: Any = torch._C._functorch


class JointForward(LayerForward):
    """The forward of a convolution in a clone, around the one of its class.

    vmap has no rule for a bias: it adds it to what all branches give, which takes as long as to compute that.
    """

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self._layer()
        weight, bias = layer._parameters["weight"], layer._parameters["bias"]
        if not torch.compiler.is_compiling() and len(args) == 1 and not kwargs and _is_joint(args[0], weight, bias):
            return _convolved(layer, args[0], weight, bias)
        return type(layer).forward(layer, *args, **kwargs)


def can_be_joint(layer: nn.Module) -> bool:
    """Whether `JointForward` fits a layer: one of torch's own, of which nobody has put in another forward."""
    if type(layer) not in LAYERS or "forward" in layer.__dict__:
        return False
    return bool(layer.groups == 1 and layer.bias is not None)


def _is_joint(x: Any, weight: Any, bias: Any) -> bool:
    """Whether weight and bias, but not the input, have branches, along one axis; and nobody looks at the functions that are called."""
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
    """What the layer gives in all branches, one behind the other along the channels, as vmap has it."""
    weights, biases = (
        _functorch.get_unwrapped(tensor).movedim(_functorch.maybe_get_bdim(tensor), 0) for tensor in (weight, bias)
    )
    out = layer._conv_forward(x, weights.flatten(0, 1), biases.flatten())
    channels = out.dim() - weight.dim() + 1
    level = _functorch.maybe_get_level(weight)
    return _functorch._add_batch_dim(out.unflatten(channels, biases.shape), channels, level)


__all__ = ["JointForward", "can_be_joint"]
