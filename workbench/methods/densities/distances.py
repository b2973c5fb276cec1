"""Mahalanobis distances to the classes in the features before the last layer."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from workbench.methods.densities.base import Density, refuse_size
from workbench.methods.densities.features import Rows
from workbench.methods.densities.moments import check_shrinkage, double, full_precision, whiten


class Mahalanobis(Density):
    """Distance to the nearest class in the features before the last layer (Lee et al. 2018).

    score = min_c (x - m_c)' S^-1 (x - m_c), with the mean m_c of the training rows of class c (of the given label, otherwise of the predicted
    class) and one covariance S of all rows about their class means, divided by the number of rows. The paper inverts S directly; here it is
    shrunk, so that duplicate and dead features do no harm.

    Args:
        shrinkage: Share in [0, 1] of the identity in the covariance of the standardized features; None: the optimal one of Ledoit & Wolf
            (2004), at least 1e-4.

    Example:
        >>> x = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
        >>> x[500:] += 10
        >>> density = Mahalanobis()
        >>> density.fit(x, logits=torch.stack([10 - x.sum(1), x.sum(1) - 10], 1))
        >>> between, usual = density(torch.tensor([[5.0, 5.0], [10.0, 10.0]]))
        >>> bool(usual < 2 < 5 < between)
        True
    """

    last_only: ClassVar[bool] = True
    needs_logits: ClassVar[bool] = True
    uses_labels: ClassVar[bool] = True

    learned: ClassVar[tuple[str, ...]] = ("locations", "whitening")

    locations: Tensor
    whitening: Tensor

    def __init__(self, *, shrinkage: float | None = None) -> None:
        super().__init__()
        check_shrinkage(shrinkage)
        self.shrinkage = shrinkage

    @property
    def wants_logits(self) -> bool:
        return not self.fitted  # the fitted density has learned its classes

    def _check_sizes(self, rows: Rows) -> None:
        refuse_size(self, rows.layers[-1].shape[1], self.locations.shape[1], "last features")

    @torch.no_grad()
    def _learn(self, rows: Rows) -> None:
        groups = rows.groups
        assert groups is not None  # `needs_logits`
        with full_precision(rows.layers[-1]):
            x = double(rows.layers[-1])
            names, groups = groups.to(x.device).unique(return_inverse=True)
            sums = torch.zeros(len(names), x.shape[1], dtype=x.dtype, device=x.device).index_add_(0, groups, x)
            means = sums / torch.bincount(groups)[:, None]
            _, whitening = whiten(x - means[groups], self.shrinkage)
        self.locations, self.whitening = (
            t.to(rows.device, self.locations.dtype).contiguous() for t in (means, whitening)
        )
        self.to(rows.device)

    def _score(self, rows: Rows) -> Tensor:
        dtype = torch.promote_types(self.locations.dtype, torch.float32)
        x = rows.layers[-1].to(dtype)
        with full_precision(x):
            whitening, centre = self.whitening.to(dtype).mT, self.locations.to(dtype).mean(0)
            z, classes = (x - centre) @ whitening, (self.locations.to(dtype) - centre) @ whitening
            score = torch.stack([(z - mean).square().sum(1) for mean in classes]).amin(0)
        return score.where(x.isfinite().all(1), torch.nan)


class RelativeMahalanobis(Mahalanobis):
    """Distance to the nearest class minus the distance to all training rows, before the last layer (Ren et al. 2021).

    score = min_c (x - m_c)' S^-1 (x - m_c) - (x - m)' T^-1 (x - m), with mean m and covariance T of all rows; the rest as in `Mahalanobis`.

    Args:
        shrinkage: As in `Mahalanobis`, of both covariances.

    Example:
        >>> x = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
        >>> x[500:] += 10
        >>> density = RelativeMahalanobis()
        >>> density.fit(x, logits=torch.stack([10 - x.sum(1), x.sum(1) - 10], 1))
        >>> between, usual = density(torch.tensor([[5.0, 5.0], [10.0, 10.0]]))
        >>> bool(usual < 2 < 5 < between)
        True
    """

    learned: ClassVar[tuple[str, ...]] = (*Mahalanobis.learned, "location", "overall")

    location: Tensor
    overall: Tensor

    @torch.no_grad()
    def _learn(self, rows: Rows) -> None:
        with full_precision(rows.layers[-1]):
            moments = whiten(rows.layers[-1], self.shrinkage)
        super()._learn(rows)
        self.location, self.overall = (t.to(rows.device, self.locations.dtype).contiguous() for t in moments)

    def _score(self, rows: Rows) -> Tensor:
        nearest = super()._score(rows)
        with full_precision(nearest):
            z = (rows.layers[-1].to(nearest.dtype) - self.location) @ self.overall.to(nearest.dtype).mT
            return nearest - z.square().sum(1)


__all__ = ["Mahalanobis", "RelativeMahalanobis"]
