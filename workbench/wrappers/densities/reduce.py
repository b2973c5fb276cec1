"""From the feature maps of a layer to a short vector per row: pooling, then principal components."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_BINS = 2
_FLOOR = 1e-3  # smallest unit of a column, as a share of the layer's largest: nearly dead features must not explode


def pool(feature: Tensor, rows: int, *, row_dim: int = 0, channel_dim: int | None = None) -> Tensor:
    """Average a feature map of any shape over a coarse grid, one vector per row.

    A 2x2 grid keeps the rough place of things, which a global mean throws away.

    Args:
        feature: Real tensor with `rows` entries along `row_dim`: a vector per row [rows, d] is kept as it is, a map
            [rows, c, h, w] (or with one or three axes in place of h, w) is averaged over two bins per axis, a
            sequence [rows, t, c] over two bins of t.
        rows: Number of rows of the batch.
        row_dim: Dimension of the rows; 1 for the [t, rows, c] of recurrent layers.
        channel_dim: Dimension of the channels, counted with the rows first. Default: the last one of three, else 1;
            give 1 for the [rows, c, length] of a 1-D convolution and -1 for [rows, h, w, c].

    Returns:
        Tensor [rows, d], at least float32. Axes of size 1 are not split, except t of a sequence, so that d does not
        depend on its length.

    Raises:
        TypeError: If the feature is complex.
        ValueError: If the feature has not `rows` entries along `row_dim`, or no entries to average.

    Example:
        >>> pool(torch.ones(8, 16, 7, 7), rows=8).shape
        torch.Size([8, 64])
        >>> pool(torch.ones(8, 20, 16), rows=8).shape
        torch.Size([8, 32])
    """
    if feature.is_complex():
        raise TypeError(f"cannot pool a complex feature {list(feature.shape)}; choose layers with real outputs")
    if feature.dim() <= row_dim or feature.shape[row_dim] != rows:
        raise ValueError(
            f"a feature of shape {list(feature.shape)} has not the {rows} rows of the batch in dimension {row_dim}; "
            "leave its layer out, or say where the rows are with row_dim="
        )
    feature = feature.to(torch.promote_types(feature.dtype, torch.float32)).movedim(row_dim, 0)
    if feature.dim() <= 2:
        return feature if feature.dim() == 2 else feature[:, None]
    is_sequence = channel_dim is None and feature.dim() == 3
    if channel_dim is None:
        channel_dim = -1 if is_sequence else 1
    feature = feature.movedim(channel_dim, 1)
    if feature.dim() > 5:  # pooling knows three axes; the trailing ones become one
        feature = feature.flatten(4)
    axes = feature.shape[2:]
    if 0 in feature.shape[1:]:
        raise ValueError(f"a feature of shape {list(feature.shape)} has nothing to average; leave its layer out")
    bins = [_BINS if is_sequence else min(_BINS, size) for size in axes]
    averages: list[Any] = [F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d]
    return averages[len(axes) - 1](feature, bins).flatten(1)


def units(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and unit of every column, and which columns are constant.

    Args:
        features: Tensor [n, d] of finite floats, n >= 2.

    Returns:
        Mean [d], unit [d] > 0 and a mask [d] of constant columns. The unit is the standard deviation, at least
        1e-3 of the largest one; constant columns get the largest one, for their own scale was never seen.
    """
    variance, mean = torch.var_mean(features, dim=0, correction=0)
    sd = variance.sqrt()
    constant = sd <= 1e-6 * mean.abs()
    largest = sd.masked_fill(constant, 0).amax()
    largest = torch.where(largest > 0, largest, torch.ones_like(largest))
    return mean, torch.where(constant, largest, sd.clamp_min(_FLOOR * largest)), constant


def _leading_axes(centred: Tensor, k: int) -> Tensor:
    """First k principal axes [d, k] by subspace iteration (Halko, Martinsson & Tropp 2011, algorithm 4.4)."""
    generator = torch.Generator().manual_seed(0)
    shape = (centred.shape[1], min(k + 10, centred.shape[1]))
    axes = torch.randn(shape, generator=generator, device="cpu").to(centred)
    for _ in range(6):
        axes, _ = torch.linalg.qr(centred.T @ (centred @ axes))
    scores = centred @ axes
    _, rotation = torch.linalg.eigh(scores.T @ scores)
    return axes @ rotation.flip(1)[:, :k]


class Growing(nn.Module):
    """A module whose tensors are empty until the first data, or a state dict, tell their sizes.

    Empty tensors rather than `UninitializedParameter`: counting parameters, deepcopy, state_dict and a weights-only
    torch.load all work before the first data, and a parameter stays the same object when it grows.
    """

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take over the sizes of the state dict, if nothing here has another size already."""
        own = {**self._parameters, **self._buffers}
        pairs = [(own[name], state_dict[prefix + name]) for name in own if prefix + name in state_dict]
        if all(old is not None and (not old.numel() or old.shape == new.shape) for old, new in pairs):
            for old, new in pairs:
                if old is not None and old.shape != new.shape:
                    old.data = old.data.new_zeros(new.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Reduce(Growing):
    """Standardise the features of one layer and, where they are many, keep scores and what the scores miss.

    For more than `n_components` features v (standardised) with principal axes P the reduced features are
    [v P, log1p(|v|^2 - |v P|^2)]: the residual energy sees what leaves the subspace of the training data, as in the
    reconstruction error of principal component analysis.

    Args:
        n_components: Largest number of scores that is kept.

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

    def fit(self, features: Tensor) -> None:
        """Set mean, unit and principal axes.

        The axes number min(n_components, d) whatever n is, so that sizes do not depend on the amount of data; when
        rows are few, at most every second one is used and the others are zero, so that training rows keep a residual.

        Args:
            features: Tensor [n, d] of finite floats, n >= 2.
        """
        dtype = self.mean.dtype
        features = features.detach().to(torch.promote_types(features.dtype, torch.float32))
        n, d = features.shape
        mean, unit, _ = units(features)
        axes = features.new_zeros(d, self.n_components if d > self.n_components else 0)
        used = min(axes.shape[1], (n - 1) // 2)
        if used:
            axes[:, :used] = _leading_axes((features - mean) / unit, used)
        self.mean, self.unit, self.axes = mean.to(dtype), unit.to(dtype), axes.to(dtype)

    def forward(self, features: Tensor) -> Tensor:
        """Reduced features.

        Args:
            features: Tensor [m, d].

        Returns:
            Tensor [m, d], or [m, n_components + 1] where d > n_components; in units of the training rows.
        """
        dtype = torch.promote_types(self.mean.dtype, torch.float32)
        v = (features.to(dtype) - self.mean) / self.unit
        if not self.axes.numel():
            return v
        scores = v @ self.axes.to(dtype)
        residual = (v.square().sum(1, keepdim=True) - scores.square().sum(1, keepdim=True)).clamp_min(0)
        return torch.cat([scores, residual.log1p()], 1)
