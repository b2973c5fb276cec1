"""Autocast under vmap: vmap decomposes some operations before autocast sees them, so their inputs are cast here instead."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import maybe_current_level
from torch.overrides import TorchFunctionMode

from ..branch import is_batched
from ..sites import transparent
from ..tree import tree_map

# by name, since one operation has several functions; operations that vmap does not decompose, such as matmul, are left to autocast
_LOW = frozenset(["linear", "addmm", "addbmm", "baddbmm", "scaled_dot_product_attention", "prelu"]) | frozenset(
    f"{stem}{n}d" for stem in ("conv", "conv_transpose") for n in (1, 2, 3)
)
_NORMS = frozenset(["batch_norm", "instance_norm", "layer_norm", "group_norm"])
# computed in float32 by autocast on the CPU
_FLOAT32 = frozenset(["cross_entropy", "mv", "cdist"]) | frozenset(f"fft_{name}" for name in torch.fft.__all__)


class AutocastUnderVmap(TorchFunctionMode):
    """Function mode for a pass under vmap and autocast: operations have the same dtypes as without vmap.

    Args:
        device: device type for which autocast is enabled.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._low_precision = torch.get_autocast_dtype(device)
        self._level = maybe_current_level()

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        # autocast sees what the branches share, such as a trunk, as it does without vmap
        if not any(map(is_batched, args)) and not any(map(is_batched, kwargs.values())):
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name == "multi_head_attention_forward":
            with self:
                return transparent(F.multi_head_attention_forward)(*args, **kwargs)
        # not inside a vmap of the model itself, nor where the model disables autocast
        if maybe_current_level() != self._level or not torch.is_autocast_enabled(self._device):
            return function(*args, **kwargs)
        if name in _LOW or (name in _FLOAT32 and self._device == "cpu"):
            args, kwargs = _cast((args, kwargs), self._low_precision if name in _LOW else torch.float32)
            return function(*args, **kwargs)
        if name not in _NORMS:
            return function(*args, **kwargs)
        # as in their kernels: inputs and outputs in low precision, sums in float32
        dtype = args[0].dtype
        args, kwargs = _cast((args, kwargs), torch.float32)
        out = function(*args, **kwargs)
        keeps_float32 = self._device == "cuda" and name in ("layer_norm", "group_norm")
        return out if keeps_float32 or dtype is torch.float64 else out.to(dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """Cast plain floating-point tensors other than float64 to a dtype; tensor subclasses are left unchanged."""

    def cast(leaf: Any) -> Any:
        plain = type(leaf) in (Tensor, nn.Parameter) and leaf.is_floating_point() and leaf.dtype is not torch.float64
        return leaf.to(dtype) if plain else leaf

    return tree_map(cast, tree)


__all__ = ["AutocastUnderVmap"]
