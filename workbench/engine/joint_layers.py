"""Linear layers and convolutions with the weights and biases of all branches, computed as a single product or convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .rank_one import LayerForward

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_functorch: Any = torch._C._functorch


class JointForward(LayerForward):
    """Forward of a layer in a clone, which computes the layer for all branches at once.

    vmap has no batching rule for the bias and adds it separately to the outputs of all branches, which takes as long as a convolution, and as
    several of the products of a small linear layer.
    """

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self._layer()
        weight, bias = layer._parameters["weight"], layer._parameters["bias"]
        if _functorch.is_batchedtensor(weight) and len(args) == 1 and not kwargs and _is_joint(args[0], weight, bias):
            out = (_linear if type(layer) is nn.Linear else _convolved)(layer, args[0], weight, bias)
            # modes that watch have not seen the layer
            return out.view_as(out) if torch._C._len_torch_function_stack() else out
        return type(layer).forward(layer, *args, **kwargs)


def can_be_joint(layer: nn.Module) -> bool:
    """Return whether `JointForward` can be used for a layer: a linear layer or convolution of torch with a bias and its own forward."""
    if "forward" in layer.__dict__ or getattr(layer, "bias", None) is None:
        return False
    if type(layer) is nn.Linear:
        return layer.in_features > 1  # products with a single feature are faster in vmap, which multiplies elementwise
    return type(layer) in CONVOLUTIONS and bool(layer.groups == 1)


def _is_joint(x: Any, weight: Tensor, bias: Any) -> bool:
    """Return whether weight and bias are batched along one vmap axis, the input along it or none, and no function mode changes calls."""
    level = _functorch.maybe_get_level(weight)
    # torch.jit.trace compares a trace with gradients to one without
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if level != _functorch.maybe_current_level() or type(x) is not Tensor:
        return False
    if not _functorch.is_batchedtensor(bias) or _functorch.maybe_get_level(bias) != level or not _only_watched():
        return False
    tensors = [weight, bias]
    if _functorch.is_functorch_wrapped_tensor(x):
        if weight.dim() > 2 or not _functorch.is_batchedtensor(x) or _functorch.maybe_get_level(x) != level:
            return False
        tensors.append(x)
    # the backward pass of vmap's own operations is faster than that of baddbmm
    if weight.dim() == 2 and (torch.is_grad_enabled() or x.dim() < 2 or x.dtype is not weight.dtype):
        return False
    return not any(_functorch.is_functorch_wrapped_tensor(_functorch.get_unwrapped(tensor)) for tensor in tensors)


def _only_watched() -> bool:
    """Return whether all active function modes only watch: they have an attribute `watches`."""
    return all(
        getattr(torch._C._get_function_stack_at(i), "watches", False)
        for i in range(torch._C._len_torch_function_stack())
    )


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return a batched tensor as a plain one with the branches in front."""
    return _functorch.get_unwrapped(tensor).movedim(_functorch.maybe_get_bdim(tensor), 0)


def _linear(layer: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    weights, biases = _unwrapped(weight), _unwrapped(bias)
    x = _unwrapped(x) if _functorch.is_batchedtensor(x) else x.expand(len(weights), *x.shape)
    out = torch.baddbmm(biases.unsqueeze(1), x if x.dim() == 3 else x.flatten(1, -2), weights.transpose(1, 2))
    out = out if x.dim() == 3 else out.unflatten(1, x.shape[1:-1])
    return _functorch._add_batch_dim(out, 0, _functorch.maybe_get_level(weight))


def _convolved(layer: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute a convolution with the branches along its channels."""
    weights, biases = _unwrapped(weight), _unwrapped(bias)
    out = layer._conv_forward(x, weights.flatten(0, 1), biases.flatten())
    channels = out.dim() - weight.dim() + 1
    level = _functorch.maybe_get_level(weight)
    return _functorch._add_batch_dim(out.unflatten(channels, biases.shape), channels, level)


__all__ = ["JointForward", "can_be_joint"]
