"""Distribution of any shape, given by some of its quantiles, one head for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.distributions.base import RISK_FLOOR, ManyHeads, common_dtype, on_class_or_instance
from workbench.distributions.values import LOG_SQRT_2PI, normal_cdf
from workbench.engine.tree import holds


@dataclass(frozen=True)
class Quantiles(ManyHeads):
    """Quantiles at fixed levels, learned by the pinball loss (Koenker & Bassett 1978), for noise of any shape.

    One head per level predicts the offset of its quantile from the model's own prediction: offsets [levels, *prediction], in units
    of the prediction. They cannot cross: the middle head predicts its offset directly, each other head the distance to its
    neighbour towards the middle, by softplus. loss = mean over the levels of max(level * u, (level - 1) * u) with u = y - quantile.

    Between and beyond the levels, quantiles are linear in the standard normal quantile z of the level, so that the quantiles of a
    Normal reproduce the Normal, and every shape has a cdf, a density and normal tails. The aleatoric risk is half the distance
    between the quantiles at z = -1 and z = 1 (15.9 % and 84.1 %), for any levels: the standard deviation if the noise is normal.
    `mean` is the prediction itself.

    Methods take the offsets in place of a risk. `wrapped.quantiles(x)` returns the quantiles of a model.

    Args:
        levels: At least two probabilities between 0 and 1, in increasing order.

    Example:
        >>> import torch
        >>> offsets = torch.tensor([[[-2.0]], [[-1.0]], [[0.0]], [[1.0]], [[3.0]]])
        >>> Quantiles.icdf(0.95, torch.tensor([[10.0]]), offsets)
        tensor([[13.]])
        >>> Quantiles.loss_function(torch.tensor([[10.0]]), torch.tensor([[10.0]]), offsets)
        tensor(0.1140)
    """

    levels: Sequence[float] = (0.05, 0.16, 0.5, 0.84, 0.95)

    needs: ClassVar[str] = "the offset of each quantile"
    trains_prediction: ClassVar[bool] = False  # the heads reach the quantiles from wherever it is

    def __post_init__(self) -> None:
        levels = tuple(float(level) for level in self.levels)
        edges = (0.0, *levels, 1.0)
        if len(levels) < 2 or any(not low < high for low, high in pairwise(edges)):
            raise ValueError(
                f"levels must be at least two probabilities between 0 and 1, increasing, found {self.levels}"
            )
        object.__setattr__(self, "levels", levels)

    @property
    def n_heads(self) -> int:
        return len(self.levels)

    def structure(self) -> dict[str, Any]:
        return {"levels": list(self.levels)}

    @on_class_or_instance
    def to_risk(self, raw: Tensor) -> Tensor:
        """Map unconstrained outputs of the heads [levels, ...] to offsets that increase with the level."""
        raw = raw.to(common_dtype(raw))
        middle = self.n_heads // 2
        gaps = F.softplus(raw) + RISK_FLOOR
        below = -gaps[:middle].flip(0).cumsum(0).flip(0)
        offsets = torch.cat([below, torch.zeros_like(raw[:1]), gaps[middle + 1 :].cumsum(0)])
        return raw[middle] + offsets

    def _checked(self, where: str, *values: Any, zero_risk: bool = False) -> list[Tensor]:
        loc, offsets, *y = super()._checked(where, *values)
        gaps = offsets.diff(dim=0)
        if not holds((gaps >= 0) | gaps.isnan()):
            raise ValueError(
                f"y_risk{where} must increase with the level, found a step of {gaps.min().item():g}; map raw outputs with to_risk"
            )
        return [loc, offsets, *y]

    def _loss(self, y: Tensor, loc: Tensor, offsets: Tensor) -> Tensor:
        difference, levels = y - loc - offsets, self._column(offsets, self.levels)
        return torch.maximum(levels * difference, (levels - 1) * difference).mean(0)

    def _column(self, like: Tensor, values: Sequence[float]) -> Tensor:
        """Return one number per level, [levels, 1, ...]; created on the device, as copying to it would synchronize."""
        return torch.stack([like.new_full((), value) for value in values]).reshape(-1, *[1] * (like.dim() - 1))

    def _z(self, like: Tensor) -> Tensor:
        """Return the standard normal quantiles of the levels, [levels, 1, ...]."""
        return self._column(like, torch.special.ndtri(torch.tensor(self.levels, dtype=torch.float64)).tolist())

    def _piece(self, offsets: Tensor, knots: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return offset, z and slope d offset / d z of the linear piece at a value; the inner knots separate the pieces."""
        z = self._z(offsets)
        slopes = offsets.diff(dim=0) / z.diff(dim=0)
        shape = torch.broadcast_shapes(at.shape, offsets.shape[1:])
        piece = (at > knots[1:-1]).sum(0, keepdim=True).expand(1, *shape)
        parts = (values.expand(len(values), *shape).gather(0, piece)[0] for values in (offsets[:-1], z[:-1], slopes))
        offset, z, slope = parts
        return offset, z, slope.clamp_min(torch.finfo(slope.dtype).tiny)

    def _at(self, z: Tensor, offsets: Tensor) -> Tensor:
        """Return the offset of the quantile at a standard normal quantile."""
        offset, start, slope = self._piece(offsets, self._z(offsets), z)
        return offset + slope * (z - start)

    def _standard(self, y: Tensor, loc: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the standard normal quantile of a value, and the slope of the values there."""
        offset, start, slope = self._piece(offsets, offsets, y - loc)
        return start + (y - loc - offset) / slope, slope

    def _log_prob(self, y: Tensor, loc: Tensor, offsets: Tensor) -> Tensor:
        z, slope = self._standard(y, loc, offsets)
        return -0.5 * z**2 - LOG_SQRT_2PI - slope.log()

    def _cdf(self, y: Tensor, loc: Tensor, offsets: Tensor) -> Tensor:
        return normal_cdf(self._standard(y, loc, offsets)[0])

    def _icdf(self, q: Tensor, loc: Tensor, offsets: Tensor) -> Tensor:
        return loc + self._at(torch.special.ndtri(q), offsets)

    def _draw(self, loc: Tensor, offsets: Tensor, generator: torch.Generator | None) -> Tensor:
        noise = torch.randn(loc.shape, generator=generator, dtype=loc.dtype, device=loc.device)
        return loc + self._at(noise, offsets)

    def _crps(self, y: Tensor, loc: Tensor, offsets: Tensor) -> Tensor:
        raise ValueError("Quantiles has no crps in closed form; draw samples and use workbench.metrics.crps_samples")

    def _variances(self, offsets: Tensor) -> dict[str, Tensor]:
        one = torch.ones_like(offsets[0])
        return {"aleatoric": ((self._at(one, offsets) - self._at(-one, offsets)) / 2).square()}

    def _stddev(self, loc: Tensor, offsets: Tensor) -> Tensor:
        return self._variances(offsets)["aleatoric"].sqrt()
