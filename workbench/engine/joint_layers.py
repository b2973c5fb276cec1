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
        if len(args) == 1 and not kwargs and (out := _joint(layer, args[0])) is not None:
            # modes that watch have not seen the layer
            return out.view_as(out) if torch._C._len_torch_function_stack() else out
        return type(layer).forward(layer, *args, **kwargs)


def can_be_joint(layer: nn.Module) -> bool:
    """Return whether `JointForward` can be used for a layer: a linear layer or convolution of torch with a bias and its own forward."""
    if "forward" in layer.__dict__ or getattr(layer, "bias", None) is None:
        return False
    return type(layer) is nn.Linear or (type(layer) in CONVOLUTIONS and bool(layer.groups == 1))


def _joint(layer: Any, x: Any) -> Tensor | None:
    """Return the outputs of a layer for all branches, None if it cannot be joint.

    Weight and bias must be batched along one vmap axis, the input along it or none, and no function mode may change calls.
    """
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    if type(x) is not Tensor or not (_functorch.is_batchedtensor(weight) and _functorch.is_batchedtensor(bias)):
        return None
    level = _functorch.maybe_get_level(weight)
    if not level == _functorch.maybe_current_level() == _functorch.maybe_get_level(bias) or not _only_watched():
        return None
    # torch.jit.trace compares a trace with gradients to one without
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return None
    linear = weight.dim() == 2
    # the backward pass of vmap's own operations is faster than that of baddbmm
    if linear and (torch.is_grad_enabled() or x.dim() < 2 or x.dtype is not weight.dtype):
        return None
    batched = _functorch.is_functorch_wrapped_tensor(x)
    if batched and not (linear and _functorch.is_batchedtensor(x) and _functorch.maybe_get_level(x) == level):
        return None
    weights, biases, inputs = _unwrapped(weight), _unwrapped(bias), _unwrapped(x) if batched else x
    if any(map(_functorch.is_functorch_wrapped_tensor, (weights, biases, inputs))):
        return None
    if linear:
        return _functorch._add_batch_dim(_linear(inputs, weights, biases, batched), 0, level)
    # the branches lie along the channels
    out = layer._conv_forward(inputs, weights.flatten(0, 1), biases.flatten())
    channels = out.dim() - weight.dim() + 1
    return _functorch._add_batch_dim(out.unflatten(channels, biases.shape), channels, level)


def _only_watched() -> bool:
    """Return whether all active function modes only watch: they have an attribute `watches`."""
    return not (count := torch._C._len_torch_function_stack()) or all(
        getattr(torch._C._get_function_stack_at(i), "watches", False) for i in range(count)
    )


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return a batched tensor as a plain one with the branches in front."""
    place = _functorch.maybe_get_bdim(tensor)
    plain = _functorch.get_unwrapped(tensor)
    return plain.movedim(place, 0) if place else plain


def _linear(x: Tensor, weights: Tensor, biases: Tensor, batched: bool) -> Tensor:
    """Return x [branches, rows, ..., in], or [rows, ..., in] if it is not batched, through the layers of all branches."""
    lead = x.shape[1 if batched else 0 : -1]
    if not batched:
        x = x.expand(len(weights), *x.shape)
    if len(lead) != 1:
        x = x.flatten(1, -2)
    biases, weights = biases.unsqueeze(1), weights.transpose(1, 2)
    if weights.shape[1] == x.shape[2] == 1 and not torch.is_autocast_enabled(x.device.type):
        out = x * weights + biases  # faster for a single feature, and rounded as in vmap, unlike addcmul
    else:
        out = torch.baddbmm(biases, x, weights)
    return out if len(lead) == 1 else out.unflatten(1, lead)


__all__ = ["JointForward", "can_be_joint"]
