"""Mixture density: k Normals for every element of a prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, Normal

from workbench.distributions.base import wide_dtype
from workbench.distributions.parametric import Parametric, raw_of, refuse_unless
from workbench.errors import as_count


@dataclass(frozen=True)
class MixtureDensity(Parametric):
    """Mixture of k Normals for every element of a prediction, for noise with several peaks (Bishop 1994).

    The model's own output m remains the prediction, the mean of the mixture; 3 k risk heads predict the logits of the weights w, offsets d and
    logarithms of the scales s: p(y) = sum_j w_j N(y; m + d_j - sum_i w_i d_i, s_j). The risk is the standard deviation, the square root of
    sum_j w_j (s_j^2 + (mean_j - m)^2); note that a mean between two peaks may have hardly any values near it.

    Args:
        k: number of Normals, at least 1.

    Example:
        >>> import torch
        >>> logits, offsets, log_scales = [0.0, 0.0], [-3.0, 3.0], [0.0, 0.0]
        >>> heads = torch.tensor([*logits, *offsets, *log_scales]).reshape(6, 1, 1)
        >>> MixtureDensity(2).stddev(torch.zeros(1, 1), heads)
        tensor([[3.1623]])
    """

    k: int = field(default=3, metadata={"help": "number of Normals"})

    location_scale: ClassVar[bool] = True
    standardizable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", as_count("k", self.k))

    @property
    def n_heads(self) -> int:
        return 3 * self.k

    def structure(self) -> dict[str, Any]:
        return {"k": self.k}

    def at(self, y_pred: Tensor, y_risk: Tensor) -> MixtureSameFamily:
        logits, offsets, log_scales = y_risk.to(wide_dtype(y_risk)).movedim(0, -1).split(self.k, -1)
        weights = Categorical(logits=logits, validate_args=False)
        centred = offsets - (weights.probs * offsets).sum(-1, keepdim=True)
        parts = Normal(y_pred.to(centred).unsqueeze(-1) + centred, raw_of(log_scales).exp(), validate_args=False)
        return MixtureSameFamily(weights, parts, validate_args=False)

    def rescaled(self, loc: Tensor, heads: Tensor, scaling: Any) -> tuple[Tensor, Tensor]:
        logits, offsets, log_scales = heads.split(self.k)
        scale = scaling.y_scale.to(heads)
        return scaling.prediction(loc), torch.cat([logits, offsets * scale, log_scales + scale.log()])

    def check_targets(self, y: Tensor) -> None:
        refuse_unless(y.isfinite(), y, f"{self} is for finite values", "leave such rows out")

    def moments(self, y_pred: Tensor, y_risk: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return y_pred, super().moments(y_pred, y_risk)[1]

    def _crps(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        # E|Y - y| - E|Y - Y'| / 2, where all differences are normal (Grimit et al. 2006)
        mixture: Any = self.at(loc, risk)
        w, parts = mixture.mixture_distribution.probs, mixture.component_distribution
        mean, scale = parts.loc, parts.scale
        to_target = (w * _absolute(y.to(mean).unsqueeze(-1) - mean, scale)).sum(-1)
        spread = (scale.unsqueeze(-1).square() + scale.unsqueeze(-2).square()).sqrt()
        pairs = _absolute(mean.unsqueeze(-1) - mean.unsqueeze(-2), spread)
        return (to_target - 0.5 * (w.unsqueeze(-1) * w.unsqueeze(-2) * pairs).sum((-2, -1))).to(loc.dtype)

    def _icdf(self, q: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        mixture: Any = self.at(loc, risk)
        parts = mixture.component_distribution
        level = q.to(parts.loc).expand(loc.shape)
        ends = parts.icdf(level.unsqueeze(-1))
        low, high = ends.amin(-1), ends.amax(-1)
        for _ in range(60):
            middle = 0.5 * (low + high)
            below = mixture.cdf(middle) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (0.5 * (low + high)).to(loc.dtype)


def _absolute(mean: Tensor, scale: Tensor) -> Tensor:
    """Return E|X| of a normal X."""
    z = mean / scale
    return scale * math.sqrt(2 / math.pi) * torch.exp(-0.5 * z**2) + mean * torch.erf(z / math.sqrt(2))


__all__ = ["MixtureDensity"]
