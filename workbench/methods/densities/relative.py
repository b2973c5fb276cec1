"""Relative Mahalanobis scores: the distance to the nearest class minus the distance to all training data."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.methods.densities.moments import double, units
from workbench.methods.densities.reduce import Growing

_RIDGE = 1e-4  # share of the diagonal that is added to the within-class covariance
_MIN_VARIANCE = 1e-3  # of a feature within the classes, where some are constant
_NOISE = 1e-6
MAX_DIRECTIONS = 64


class Relative(Growing):
    """Relative Mahalanobis distance of every layer (Ren et al. 2021) in the discriminant directions only.

    With within-class covariance S_w = L L', class means M and shares p, and the singular values s and vectors U of
    L^-1 M diag(sqrt(p)), the projections u = U' L^-1 (v - mean) have covariance I within classes and variances 1 + s^2
    in total (linear discriminant analysis, Fisher 1936), and

        min_c |u - u_c|^2 - sum_k u_k^2 / (1 + s_k^2)

    is the Mahalanobis distance to the nearest class minus that to all training data. The other d - classes + 1
    directions have equal covariances in both and cancel exactly, so they are not computed.

    One set of buffers holds all layers, so that a batch costs one product per layer and a handful of operations.
    """

    directions: Tensor
    offset: Tensor
    means: Tensor
    height: Tensor
    share: Tensor
    sizes: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("directions", "offset", "means", "height", "share"):
            self.register_buffer(name, torch.empty(0))

    @property
    def fitted(self) -> bool:
        """Whether the training rows had several classes."""
        return self.directions.numel() > 0

    def fit(self, layers: list[Tensor], groups: Tensor) -> None:
        """Find the discriminant directions.

        Args:
            layers: Tensors [n, d_l] of finite floats.
            groups: Class number of every row, int64 [n]; classes without rows are ignored.
        """
        names, groups = groups.unique(return_inverse=True)
        if len(names) < 2:
            for name in ("directions", "offset", "means", "height", "share"):
                setattr(self, name, self.get_buffer(name).new_empty(0))
            return
        discriminants = [_discriminant(double(v), groups.to(double(v).device), len(names)) for v in layers]
        width = max(w.shape[1] for w, *_ in discriminants)
        columns = [[F.pad(t, (0, width - t.shape[-1])) for t in parts] for parts in discriminants]
        directions, offset, means, share = zip(*columns, strict=True)
        device, dtype = layers[0].device, self.directions.dtype
        self.directions = torch.cat(directions).to(device, dtype)
        self.offset = torch.stack(offset).to(device, dtype)
        # contiguous like loaded ones, so that results are bitwise equal
        self.means = (-2 * torch.stack(means).mT).to(device, dtype).contiguous()
        self.height = torch.stack(means).square().sum(2)[:, None].to(device, dtype)
        self.share = torch.stack(share).to(device, dtype)

    def forward(self, layers: list[Tensor]) -> Tensor:
        """Return the scores of every layer.

        Args:
            layers: Tensors [m, d_l], the same sizes as in `fit`.

        Returns:
            Tensor [layers, m].
        """
        dtype = torch.promote_types(self.directions.dtype, torch.float32)
        directions = self.directions.to(dtype).split([v.shape[1] for v in layers])
        offsets = self.offset.to(dtype).unbind(0)
        u = torch.stack([torch.addmm(o, v.to(dtype), w) for o, v, w in zip(offsets, layers, directions, strict=True)])
        nearest = torch.baddbmm(self.height.to(dtype), u, self.means.to(dtype)).amin(2)
        return nearest + (u.square() @ self.share.to(dtype)[:, :, None])[:, :, 0]


def _discriminant(v: Tensor, groups: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return directions [d, k] and offset [k] for raw features, class means [classes, k], and s^2 / (1 + s^2) [k], in float64."""
    mean, unit, _ = units(v)
    z = (v - mean) / unit
    share = torch.bincount(groups, minlength=classes).to(z) / len(z)
    means = torch.zeros(classes, z.shape[1], dtype=z.dtype, device=z.device).index_add_(0, groups, z)
    means = means / (share * len(z))[:, None]
    within = z - means[groups]
    k = min(classes - 1, z.shape[1], MAX_DIRECTIONS)
    solve = _by_rows if len(z) < z.shape[1] else _by_features
    directions, values = solve(within, (means * share.sqrt()[:, None]).T, k)
    raw = directions / unit[:, None]
    power = values.square()
    return raw, -(mean @ raw), means @ directions, power / (1 + power)


def _by_features(within: Tensor, centres: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return directions L'^-1 U [d, k] and singular values [k] of L^-1 C = U s V', with the within-class covariance S = L L'.

    Args:
        within: Rows [n, d] minus their class mean.
        centres: C [d, classes], class means times the square root of their share.
        k: Number of directions.
    """
    covariance = within.T @ within / len(within)
    spread = covariance.diagonal().clamp_min(_MIN_VARIANCE)
    covariance = (1 - _RIDGE) * covariance + _RIDGE * spread.diag() + _NOISE * torch.eye(len(spread)).to(within)
    factor = torch.linalg.cholesky(covariance)
    axes, values, _ = torch.linalg.svd(torch.linalg.solve_triangular(factor, centres, upper=False), full_matrices=False)
    return torch.linalg.solve_triangular(factor.T, axes[:, :k], upper=True), values[:k]


def _by_rows(within: Tensor, centres: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the same as `_by_features` at a cost of n^2 d, for fewer rows than features: S^-1 C V / s, where C' S^-1 C = V s^2 V'.

    S is a diagonal plus a product of n rows, so that its inverse needs only one of size n (Woodbury 1950).
    """
    ridge = _RIDGE * within.square().mean(0).clamp_min(_MIN_VARIANCE) + _NOISE
    rows = within * math.sqrt((1 - _RIDGE) / len(within))
    scaled = rows / ridge
    factor = torch.linalg.cholesky(torch.eye(len(rows)).to(rows) + scaled @ rows.T)
    solved = centres / ridge[:, None] - scaled.T @ torch.cholesky_solve(scaled @ centres, factor)
    power, vectors = torch.linalg.eigh(centres.T @ solved)
    values = power.flip(0)[:k].clamp_min(0).sqrt()
    # leave out directions in which the classes do not differ: both distances are equal there
    inverse = torch.where(values > 1e-6 * values[0], 1 / values, 0)
    return solved @ vectors.flip(1)[:, :k] * inverse, values


__all__ = ["Relative"]
