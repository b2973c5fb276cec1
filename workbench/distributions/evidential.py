"""Evidential regression: a distribution over Normals, whose spread is epistemic risk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.distributions.base import RISK_FLOOR, ManyHeads, common_dtype, on_class_or_instance
from workbench.distributions.values import StudentT
from workbench.engine.tree import holds

NU_FLOOR = 1e-6  # bounds epistemic risk to a thousand times the aleatoric one
ALPHA_FLOOR = 1.005  # the variance is infinite at 1; this is Student's t with df = 2.01


@dataclass(frozen=True)
class NormalInverseGamma(ManyHeads):
    """Normal with unknown mean and variance under its conjugate prior (Amini et al. 2020, deep evidential regression).

    The model's own output is gamma; three risk heads predict the evidence [3, *prediction], nu > 0, alpha > 1, beta > 0:
    sigma^2 ~ InverseGamma(alpha, beta), mu ~ Normal(gamma, sigma^2 / nu), y ~ Normal(mu, sigma^2). Risks as variances:
    aleatoric E[sigma^2] = beta / (alpha - 1), epistemic Var[mu] = beta / (nu (alpha - 1)). They add up to the variance of the
    predictive distribution, Student's t with 2 alpha degrees of freedom, location gamma and scale^2 = beta (1 + nu) / (nu alpha).
    loss = -log t(y) + regularization * |y - gamma| (2 nu + alpha).

    How to interpret the epistemic part: the likelihood depends only on alpha and beta (1 + nu) / nu, so that nu, and with it the
    split into aleatoric and epistemic risk, is determined by the regularizer and the course of training, not by the amount of data
    (Meinert et al. 2023); and no loss of this kind can make a model report its own lack of data faithfully (Bengs et al. 2022).
    Use the total as the spread of a Student-t predictive distribution, epistemic risk as a score of where errors are large, and
    `vote` to measure disagreement; composed with `vote`, this variance and that between voters are added.

    Methods take the evidence in place of a risk; in cdf, icdf and crps, alpha gets a gradient through the scale only.

    Args:
        regularization: Weight >= 0 of the evidence on wrong predictions.

    Example:
        >>> import torch
        >>> evidence = torch.tensor([[[2.0]], [[3.0]], [[4.0]]])
        >>> {name: v.item() for name, v in NormalInverseGamma.variances(evidence).items()}
        {'aleatoric': 2.0, 'epistemic': 1.0}
        >>> NormalInverseGamma.loss_function(torch.tensor([[1.0]]), torch.tensor([[0.0]]), evidence)
        tensor(1.6571)
    """

    regularization: float = field(
        default=0.01, metadata={"help": "weight, at least 0, of the evidence on wrong predictions"}
    )

    needs: ClassVar[str] = "nu, alpha and beta"

    def __post_init__(self) -> None:
        if not self.regularization >= 0:
            raise ValueError(f"regularization must be 0 or more, found {self.regularization}")

    @property
    def n_heads(self) -> int:
        return 3

    @on_class_or_instance
    def to_risk(self, raw: Tensor) -> Tensor:
        """Map unconstrained outputs of three heads [3, ...] to the evidence [3, ...]: nu, alpha and beta by softplus, alpha above 1."""
        parts = F.softplus(raw.to(common_dtype(raw)))
        return torch.stack(
            [part + floor for part, floor in zip(parts, (NU_FLOOR, ALPHA_FLOOR, RISK_FLOOR), strict=True)]
        )

    def _checked(self, where: str, *values: Any, zero_risk: bool = False) -> list[Tensor]:
        loc, evidence, *y = super()._checked(where, *values)
        nu, alpha, beta = evidence
        if not holds(((nu > 0) & (alpha > 1) & (beta > 0)) | evidence.isnan().any(0)):
            minima = ", ".join(f"{part.min().item():g}" for part in (nu, alpha, beta))
            raise ValueError(
                f"y_risk{where} must have nu > 0, alpha > 1 and beta > 0, found minima of {minima}; map raw outputs with to_risk"
            )
        return [loc, evidence, *y]

    def _predictive(self, evidence: Tensor) -> tuple[StudentT, Tensor]:
        """Return the predictive distribution and its standard deviation."""
        nu, alpha, beta = evidence
        return StudentT(2 * alpha), (beta * (1 + nu) / (nu * (alpha - 1))).sqrt()

    def _variances(self, evidence: Tensor) -> dict[str, Tensor]:
        nu, alpha, beta = evidence
        aleatoric = beta / (alpha - 1)
        return {"aleatoric": aleatoric, "epistemic": aleatoric / nu}

    def _loss(self, y: Tensor, loc: Tensor, evidence: Tensor) -> Tensor:
        nu, alpha, _ = evidence
        return super()._loss(y, loc, evidence) + self.regularization * (y - loc).abs() * (2 * nu + alpha)

    def _log_prob(self, y: Tensor, loc: Tensor, evidence: Tensor) -> Tensor:
        student, stddev = self._predictive(evidence)
        return student._log_prob(y, loc, stddev)

    def _cdf(self, y: Tensor, loc: Tensor, evidence: Tensor) -> Tensor:
        student, stddev = self._predictive(evidence)
        return student._cdf(y, loc, stddev)

    def _icdf(self, q: Tensor, loc: Tensor, evidence: Tensor) -> Tensor:
        student, stddev = self._predictive(evidence)
        return student._icdf(q, loc, stddev)

    def _crps(self, y: Tensor, loc: Tensor, evidence: Tensor) -> Tensor:
        student, stddev = self._predictive(evidence)
        return student._crps(y, loc, stddev)

    def _draw(self, loc: Tensor, evidence: Tensor, generator: torch.Generator | None) -> Tensor:
        student, stddev = self._predictive(evidence)
        return student._draw(loc, stddev, generator)

    def _stddev(self, loc: Tensor, evidence: Tensor) -> Tensor:
        return self._predictive(evidence)[1]
