"""Densities of the last layer's features: per class, and by the distance to neighbours."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.core.outputs.class_scores import at_least_float32
from workbench.methods.densities.base import Density, refuse_size
from workbench.methods.densities.features import Rows
from workbench.methods.densities.moments import full_precision, whiten
from workbench.methods.densities.reduce import Reduce

MAX_NEIGHBOURS = 10_000  # training rows that are kept


class Classwise(Density):
    """Mixture of one Gaussian per class on the features before the last layer (DDU: Mukhoti et al. 2023).

    score = -log sum_c p_c N(x; m_c, S_c), with the share p_c, mean and covariance of the training rows of class c: of the
    given label, otherwise of the predicted class. Covariances are shrunk as in Ledoit & Wolf (2004), at least by 1e-4;
    classes with fewer than two rows are left out. For wide layers, the principal scores and the residual are used.

    Args:
        n_components: Largest number of principal scores.

    Example:
        >>> x = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
        >>> x[500:] += 10
        >>> density = Classwise()
        >>> density.fit(x, logits=torch.stack([10 - x.sum(1), x.sum(1) - 10], 1))
        >>> between, usual = density(torch.tensor([[5.0, 5.0], [10.0, 10.0]]), torch.zeros(2, 2))
        >>> bool(usual < 2 < 5 < between)
        True
    """

    last_only: ClassVar[bool] = True
    needs_logits: ClassVar[bool] = True
    uses_labels: ClassVar[bool] = True

    learned: ClassVar[tuple[str, ...]] = ("locations", "whitenings", "constants")

    locations: Tensor
    whitenings: Tensor
    constants: Tensor

    def __init__(self, *, n_components: int = 64) -> None:
        super().__init__()
        self.n_components = n_components

    @property
    def wants_logits(self) -> bool:
        return not self.fitted  # the fitted density has learned its classes

    def _check_sizes(self, rows: Rows) -> None:
        refuse_size(self, rows.layers[-1].shape[1], self.reductions[0].get_buffer("mean").numel(), "last features")

    @torch.no_grad()
    def _learn(self, rows: Rows) -> None:
        device, dtype = rows.device, self.locations.dtype
        groups = rows.groups
        assert groups is not None  # `needs_logits`
        reduce = Reduce(self.n_components).to(device, dtype)
        with full_precision(rows.layers[-1]):
            reduce.fit(rows.layers[-1])
            x = reduce(rows.layers[-1])
            locations, whitenings, constants = [], [], []
            for number in groups.unique():
                class_rows = x[groups == number]
                if len(class_rows) < 2:
                    continue
                mean, w = whiten(class_rows, None)
                locations.append(mean)
                whitenings.append(w)
                constants.append(w.diagonal().log().sum() + math.log(len(class_rows) / len(x)))
        if not locations:
            raise ValueError(
                f"Classwise needs a class with at least 2 rows, got {len(groups.unique())} classes in {len(x)} rows: use more data"
            )
        constant = torch.stack(constants) - 0.5 * x.shape[1] * math.log(2 * math.pi)
        self.reductions = nn.ModuleList([reduce]).train(self.training)
        self.locations, self.whitenings, self.constants = (
            t.to(device, dtype).contiguous() for t in (torch.stack(locations), torch.stack(whitenings), constant)
        )
        self.to(device)

    def _score(self, rows: Rows) -> Tensor:
        dtype = torch.promote_types(self.locations.dtype, torch.float32)
        with full_precision(rows.layers[-1]):
            x = self.reductions[0](rows.layers[-1]).to(dtype)
            z = (x - self.locations[:, None]) @ self.whitenings.to(dtype).mT
            score = -(self.constants.to(dtype)[:, None] - 0.5 * z.square().sum(2)).logsumexp(0)
        return score.where(x.isfinite().all(1), torch.nan)


class Bank(Density):
    """Density that stores training rows and compares a row with the nearest k.

    Args:
        k: Number of neighbours; at most the number of stored rows is used.
    """

    last_only: ClassVar[bool] = True
    learned: ClassVar[tuple[str, ...]] = ("bank",)

    bank: Tensor

    def __init__(self, *, k: int) -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"k, the number of neighbours, must be at least 1, got {k}")
        self.k = k

    def _check_sizes(self, rows: Rows) -> None:
        refuse_size(self, rows.layers[-1].shape[1], self.bank.shape[1], "last features")


class Neighbours(Bank):
    """Distance to the k-th nearest training row in the normalized features before the last layer (Sun et al. 2022).

    score = |x / |x| - x_(k) / |x_(k)||. At most 10,000 training rows, evenly spread, are stored.

    Args:
        k: Number of the neighbour; at most the number of stored rows is used.

    Example:
        >>> x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)) + torch.tensor([9.0, 0, 0])
        >>> density = Neighbours(k=5)
        >>> density.fit(x)
        >>> usual, strange = density(torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0]]))
        >>> bool(usual < 2 < 10 < strange)
        True
    """

    def __init__(self, *, k: int = 50) -> None:
        super().__init__(k=k)

    @torch.no_grad()
    def _learn(self, rows: Rows) -> None:
        x = rows.layers[-1]
        x = x[:: -(-len(x) // MAX_NEIGHBOURS)]
        self.bank = F.normalize(at_least_float32(x)).to(self.bank.dtype)
        self.to(rows.device)

    def _score(self, rows: Rows) -> Tensor:
        dtype = torch.promote_types(self.bank.dtype, torch.float32)
        x = rows.layers[-1].to(dtype)
        bank = self.bank.to(dtype)
        with full_precision(x):
            parts = [
                (F.normalize(part) @ bank.T).topk(min(self.k, len(bank)), 1).values[:, -1] for part in x.split(1024)
            ]
        nearest = torch.cat(parts)
        return (2 - 2 * nearest).clamp_min(0).sqrt().where(x.isfinite().all(1), torch.nan)


__all__ = ["MAX_NEIGHBOURS", "Bank", "Classwise", "Neighbours"]
