"""Energy of class scores computed from features that are clipped, pruned or scaled before the last layer."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from workbench.methods.densities.head import Headed

_MAX_VALUES = 1_000_000  # number of training activations that the percentile is computed from


class Shaped(Headed):
    """Free energy -log sum_c exp(logit_c) of logits = W f(x) + b, for a shape f of the features."""

    def _strange(self, x: Tensor) -> Tensor:
        return -self._logits(self._shape(x)).logsumexp(1)

    @abstractmethod
    def _shape(self, x: Tensor) -> Tensor:
        """Transform features [m, d]."""


class ClippedEnergy(Shaped):
    """Energy with the features clipped at a percentile of all training activations (ReAct: Sun et al. 2021).

    f(x) = min(x, t), with the `percentile` t of all values of the training features (1,000,000 of them, evenly spread).

    Args:
        percentile: Percentile of the activations to clip at, in [0, 100].

    Example:
        >>> x = torch.rand(1000, 2, generator=torch.Generator().manual_seed(0))
        >>> weight = torch.tensor([[9.0, 0.0], [0.0, 9.0]])
        >>> density = ClippedEnergy()
        >>> density.fit(x, x @ weight.T, head=(weight, torch.zeros(2)))
        >>> bool(density.score(torch.tensor([[99.0, 0.0]])) > -9)  # Energy has -891
        True
    """

    learned: ClassVar[tuple[str, ...]] = (*Shaped.learned, "limit")

    limit: Tensor

    def __init__(self, *, percentile: float = 90.0) -> None:
        super().__init__()
        self.percentile = _checked(percentile)

    def _learn_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> None:
        values = x.flatten()
        values = values[:: -(-len(values) // _MAX_VALUES)]
        self.limit = torch.quantile(values, self.percentile / 100)[None].to(self.head_weight)

    def _shape(self, x: Tensor) -> Tensor:
        return x.minimum(self.limit.to(x.dtype))


class PrunedEnergy(Shaped):
    """Energy with each row's small features set to 0 and the others scaled up (ASH-S: Djurisic et al. 2023).

    Of d features, the d - round(percentile / 100 d) largest are kept and multiplied by exp(sum of all / sum of those kept). The features must
    not be negative, as after a ReLU.

    Args:
        percentile: Percentage of the features to prune, in [0, 100].

    Example:
        >>> x = torch.rand(1000, 10, generator=torch.Generator().manual_seed(0))
        >>> density = PrunedEnergy()
        >>> density.fit(x, 9 * x[:, :2], head=(9 * torch.eye(2, 10), torch.zeros(2)))
        >>> usual, strange = density(torch.tensor([[1.0] + 9 * [0.3], [0.0] + 9 * [0.3]]))
        >>> bool(usual < strange)
        True
    """

    def __init__(self, *, percentile: float = 90.0) -> None:
        super().__init__()
        self.percentile = _checked(percentile)

    def _learn_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> None:
        self.check_features(x)

    def check_features(self, x: Tensor) -> None:
        if (x < 0).any():
            raise ValueError(
                f"{type(self).__name__} divides by sums of the features before the last layer, which must not be negative, as after a ReLU; "
                f"the smallest is {x.min().item():.3g}. Choose another density, such as react or energy"
            )

    def _shape(self, x: Tensor) -> Tensor:
        kept, factor = self._largest(x)
        return torch.zeros_like(x).scatter(1, kept.indices, kept.values * factor)

    def _largest(self, x: Tensor) -> tuple[torch.return_types.topk, Tensor]:
        """Return the largest features of each row, and the factor [m, 1]."""
        d = x.shape[1]
        kept = x.topk(max(1, d - round(self.percentile / 100 * d)), 1)
        share = kept.values.sum(1, keepdim=True)
        factor = (x.sum(1, keepdim=True) / share.where(share > 0, 1)).exp()
        return kept, factor.where(share > 0, 1)


class ScaledEnergy(PrunedEnergy):
    """Energy with each row scaled up, more so the smaller the share of its largest features (SCALE: Xu et al. 2024).

    f(x) = x exp(sum of all / sum of the d - round(percentile / 100 d) largest): ASH-S without the pruning.

    Args:
        percentile: Percentage of the features that the second sum leaves out, in [0, 100].

    Example:
        >>> x = torch.rand(1000, 10, generator=torch.Generator().manual_seed(0))
        >>> density = ScaledEnergy()
        >>> density.fit(x, 9 * x[:, :2], head=(9 * torch.eye(2, 10), torch.zeros(2)))
        >>> usual, strange = density(torch.tensor([10 * [0.3], [0.0, 0.0] + 8 * [0.3]]))
        >>> bool(usual < strange)
        True
    """

    def __init__(self, *, percentile: float = 85.0) -> None:
        super().__init__(percentile=percentile)

    def _shape(self, x: Tensor) -> Tensor:
        return x * self._largest(x)[1]


def _checked(percentile: float) -> float:
    if not 0 <= percentile <= 100:
        raise ValueError(f"percentile must be a number from 0 to 100, got {percentile}")
    return float(percentile)


__all__ = ["ClippedEnergy", "PrunedEnergy", "ScaledEnergy"]
