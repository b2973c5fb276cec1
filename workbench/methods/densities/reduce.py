"""Dimension reduction of features: principal components and their residual."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.core.outputs.class_scores import at_least_float32
from workbench.methods.densities.moments import units


def _leading_axes(centred: Tensor, k: int) -> Tensor:
    """Return the first k principal axes [d, k] by subspace iteration (Halko, Martinsson & Tropp 2011, algorithm 4.4)."""
    generator = torch.Generator().manual_seed(0)
    shape = (centred.shape[1], min(k + 10, centred.shape[1]))
    axes = torch.randn(shape, generator=generator, device="cpu").to(centred)
    for _ in range(6):
        axes, _ = torch.linalg.qr(centred.T @ (centred @ axes))
    scores = centred @ axes
    _, rotation = torch.linalg.eigh(scores.T @ scores)
    return axes @ rotation.flip(1)[:, :k]


class Growing(nn.Module):
    """Module whose tensors are empty until the first data or a state dict determine their sizes.

    Tensors are empty rather than an `UninitializedParameter`, so that counting parameters, deepcopy, state_dict and a
    weights-only torch.load work before the first data, and a parameter stays the same object when it grows.
    """

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Adopt the sizes of the state dict, if no tensor here has a different size already."""
        current = {**self._parameters, **self._buffers}
        pairs = [(current[name], state_dict[prefix + name]) for name in current if prefix + name in state_dict]
        if all(old is not None and (not old.numel() or old.shape == new.shape) for old, new in pairs):
            for old, new in pairs:
                if old is not None and old.shape != new.shape:
                    old.data = old.data.new_zeros(new.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Reduce(Growing):
    """Standardize the features of one layer and reduce many features to principal scores and their residual.

    For more than `n_components` features v (standardized) with principal axes P, the reduced features are
    [v P, log1p(|v|^2 - |v P|^2)]: the residual energy measures what leaves the subspace of the training data, as the
    reconstruction error of principal component analysis does.

    Args:
        n_components: Largest number of scores to keep.

    Example:
        >>> reduce = Reduce(n_components=3)
        >>> reduce.fit(torch.randn(100, 8, generator=torch.Generator().manual_seed(0)))
        >>> reduce(torch.zeros(2, 8)).shape
        torch.Size([2, 4])
    """

    mean: Tensor
    unit: Tensor
    axes: Tensor

    def __init__(self, n_components: int = 64) -> None:
        super().__init__()
        self.n_components = n_components
        for name in ("mean", "unit", "axes"):
            self.register_buffer(name, torch.empty(0))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        mean = state_dict.get(f"{prefix}mean")
        if mean is not None and len(mean) <= self.n_components:  # no axes; accelerate leaves most empty tensors out
            state_dict.setdefault(f"{prefix}axes", mean.new_empty(len(mean), 0))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def fit(self, features: Tensor) -> None:
        """Set mean, unit and principal axes.

        There are min(n_components, d) axes for any n, so that sizes do not depend on the amount of data; with few rows,
        at most (n - 1) // 2 axes are used and the others are zero, so that training rows keep a residual.

        Args:
            features: Tensor [n, d] of finite floats, n >= 2.
        """
        dtype = self.mean.dtype
        features = at_least_float32(features.detach())
        n, d = features.shape
        mean, unit, _ = units(features)
        axes = features.new_zeros(d, self.n_components if d > self.n_components else 0)
        used = min(axes.shape[1], (n - 1) // 2)
        if used:
            axes[:, :used] = _leading_axes((features - mean) / unit, used)
        self.mean, self.unit, self.axes = mean.to(dtype), unit.to(dtype), axes.to(dtype)

    def forward(self, features: Tensor) -> Tensor:
        """Reduce features.

        Args:
            features: Tensor [m, d].

        Returns:
            Tensor [m, d], or [m, n_components + 1] if d > n_components; in units of the training rows.
        """
        mean, axes = self.mean, self.axes
        dtype = torch.promote_types(mean.dtype, torch.float32)
        v = (features.to(dtype) - mean) / self.unit
        if not axes.numel():
            return v
        scores = v @ axes.to(dtype)
        residual = (v.square().sum(1, keepdim=True) - scores.square().sum(1, keepdim=True)).clamp_min(0)
        return torch.cat([scores, residual.log1p()], 1)
