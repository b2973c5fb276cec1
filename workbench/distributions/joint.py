"""Multivariate normal distribution of several targets, with a full covariance."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal, constraints, transform_to

from workbench.distributions.base import common_dtype, wide_dtype
from workbench.distributions.parametric import LARGEST_RAW, Parametric, raw_of, refuse_unless
from workbench.errors import as_count


@dataclass(frozen=True)
class JointNormal(Parametric):
    """Multivariate normal distribution of the k targets of a row, y ~ N(mu, L L^T); written `Normal(joint=True)` (Dorta et al. 2018).

    The model's own output [..., k] is the mean; k risk heads predict the rows of a matrix [k, k], from which `transform_to(lower_cholesky)`
    makes L: entries below the diagonal unchanged, the diagonal by exp. The risk is the square root of the diagonal of L L^T; the covariances
    are in `wrapped.predictive(x).covariance_matrix`. There is one log_prob per row.

    Args:
        n_targets: k; None: the number of outputs of the wrapped model's last layer.

    Example:
        >>> import torch
        >>> mu, heads = torch.zeros(1, 2), torch.zeros(2, 1, 2)
        >>> JointNormal(2).log_prob(torch.zeros(1, 2), mu, heads)
        tensor([-1.8379])
        >>> heads[1, 0, 0] = 2.0  # L = [[1, 0], [2, 1]]
        >>> JointNormal(2).stddev(mu, heads)
        tensor([[1.0000, 2.2361]])
    """

    n_targets: int | None = field(default=None, metadata={"help": "number of targets; None: the last layer's outputs"})

    location_scale: ClassVar[bool] = True
    standardizable: ClassVar[bool] = True
    event_dims: ClassVar[int] = 1
    needs: ClassVar[str] = "the raw rows of the Cholesky factor"

    def __post_init__(self) -> None:
        if self.n_targets is not None:
            object.__setattr__(self, "n_targets", as_count("n_targets", self.n_targets))

    @property
    def support(self) -> constraints.Constraint:  # type: ignore[override]
        return constraints.independent(constraints.real, 1)

    @property
    def n_heads(self) -> int:
        return self.n_targets or 1

    def for_targets(self, n: int | None) -> JointNormal:
        if self.n_targets is not None:
            return self
        if n is None:
            raise ValueError(
                "Normal(joint=True): the number of targets is unknown, since the model does not end in one nn.Linear; "
                "write Normal(joint=True, n_targets=k)"
            )
        return replace(self, n_targets=n)

    def structure(self) -> dict[str, Any]:
        return {"n_targets": self.n_targets}

    def _checked(self, where: str, *values: Any, zero_risk: bool = False) -> list[Tensor]:
        loc = values[0]
        if isinstance(loc, Tensor) and loc.shape[-1:] != (self.n_heads,):
            raise ValueError(
                f"{self} needs predictions [..., {self.n_heads}], found y_pred{where} of shape {tuple(loc.shape)}; write "
                f"Normal(joint=True, n_targets={loc.shape[-1] if loc.dim() else 1})"
            )
        return super()._checked(where, *values)

    def at(self, y_pred: Tensor, y_risk: Tensor) -> Distribution:
        rows = y_risk.to(wide_dtype(y_risk)).movedim(0, -2)
        diagonal = raw_of(rows.diagonal(dim1=-2, dim2=-1))
        raw = rows.tril(-1) + torch.diag_embed(diagonal)
        factor = transform_to(constraints.lower_cholesky)(raw)
        return MultivariateNormal(y_pred.to(factor), scale_tril=factor, validate_args=False)

    def rescaled(self, loc: Tensor, heads: Tensor, scaling: Any) -> tuple[Tensor, Tensor]:
        scale = scaling.y_scale.to(heads).expand(self.n_heads)
        eye = torch.eye(self.n_heads, dtype=heads.dtype, device=heads.device)
        row = scale.reshape(-1, *[1] * (heads.dim() - 1))  # each head is a row of L, in the unit of one target
        diagonal = eye.reshape(self.n_heads, *[1] * (heads.dim() - 2), self.n_heads)
        return scaling.prediction(loc), torch.where(
            diagonal > 0, heads.clamp(-LARGEST_RAW, LARGEST_RAW) + row.log(), heads * row
        )

    def check_targets(self, y: Tensor) -> None:
        refuse_unless(y.isfinite(), y, f"{self} is for finite values", "leave such rows out")

    def covariance(self, loc: Tensor, risk: Tensor) -> Tensor:
        """Return the covariance matrices [..., k, k] for raw outputs."""
        distribution: Any = self.at(loc, risk)
        return distribution.covariance_matrix.to(common_dtype(loc))

    def _cdf(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        raise self._no_closed_form("cdf")

    def _icdf(self, q: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        raise self._no_closed_form("icdf")


__all__ = ["JointNormal"]
