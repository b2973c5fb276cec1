"""The posterior of a last layer's weights: curvature summed over batches, prior and noise by marginal likelihood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_STEPS = 1000


@dataclass(frozen=True)
class Posterior:
    """A Gaussian of the weights [outputs, inputs], so that the outputs at features phi have a Gaussian of closed form.

    Var[z] = U diag(h) U^T with h_c = sum_d (phi q_cd)^2 v_dc, q the basis, v the variance and U the mixing.

    Args:
        basis: orthonormal columns [1 or outputs, inputs, inputs], one for all outputs or one for each.
        variance: of the weights in that basis [inputs, outputs].
        mixing: orthonormal columns [outputs, outputs]; None if the outputs are independent.
        prior: the prior precision [].
        noise: standard deviation of each output [outputs], for values with one noise for all rows.
    """

    basis: Tensor
    variance: Tensor
    mixing: Tensor | None
    prior: Tensor
    noise: Tensor | None


class Curvature:
    """What the posterior needs to know of the training data, summed batch after batch in float64."""

    def __init__(self) -> None:
        self.rows = 0
        self.gram: Any = (
            0  # sum of phi phi^T [inputs, inputs], or with a noise for each row and output [outputs, inputs, inputs]
        )
        self.fisher: Any = 0  # sum of diag(p) - p p^T [outputs, outputs]
        self.squares: Any = 0  # sum of squared residuals [outputs]
        self.each = False

    def add_values(self, features: Tensor, precision: Tensor | None, residuals: Tensor | None) -> None:
        """A batch of a regression.

        Args:
            features: [rows, inputs], the constant of the bias included.
            precision: 1 / noise^2 of each row and output [rows, outputs]; None if all rows have one noise.
            residuals: target - prediction [rows, outputs], None if nobody needs them.
        """
        phi = features.double()
        self.rows += len(phi)
        self.each = precision is not None
        weighted = phi if precision is None else phi * precision.double().T[:, :, None]
        self.gram = self.gram + weighted.mT @ phi
        if residuals is not None:
            self.squares = self.squares + residuals.double().square().sum(0)

    def add_classes(self, features: Tensor, probs: Tensor, slope: Tensor) -> None:
        """A batch of a classification.

        Args:
            features: [rows, inputs], the constant of the bias included.
            probs: softmax of the logits [rows, classes].
            slope: of the logits in the layer's outputs [classes].
        """
        p = probs.double()
        self._add(features, (torch.diag(p.sum(0)) - p.T @ p) * slope[:, None] * slope)

    def add_labels(self, features: Tensor, probs: Tensor, slope: Tensor) -> None:
        """A batch of labels that don't exclude each other.

        Args:
            features: [rows, inputs], the constant of the bias included.
            probs: sigmoid of the logits [rows, labels].
            slope: of the logits in the layer's outputs [labels].
        """
        p = probs.double()
        self._add(features, torch.diag((p * (1 - p)).sum(0) * slope.square()))

    def _add(self, features: Tensor, fisher: Tensor) -> None:
        phi = features.double()
        self.rows += len(phi)
        self.gram = self.gram + phi.T @ phi
        self.fisher = self.fisher + fisher

    def posterior(self, weights: Tensor, prior_precision: float | None, noise: Tensor | None) -> Posterior:
        """The posterior, with what is not given chosen by marginal likelihood.

        MacKay's fixed point (1992): with the eigenvalues l of the curvature and gamma = sum l / (l + prior_precision), the number of
        parameters that the data settle, prior_precision = gamma / |weights|^2 and noise^2 = |residuals|^2 / (rows - gamma).

        Args:
            weights: trained values [outputs, inputs], the bias included.
            prior_precision: None chooses it.
            noise: standard deviations [outputs]; None takes that of the residuals, if rows have one noise.
        """
        weights = weights.double()
        scale, basis = torch.linalg.eigh(self.gram)
        scale = scale.clamp_min(0)
        mixing, factor = None, torch.ones_like(weights[:, 0])
        estimates = False
        if isinstance(self.fisher, Tensor):
            factor, mixing = torch.linalg.eigh(self.fisher / self.rows)
            factor = factor.clamp_min(0)
        elif not self.each:
            estimates = noise is None
            least = torch.finfo(torch.float64).tiny  # of data that are met without any error
            noise = (self.squares / self.rows).clamp_min(least).sqrt() if noise is None else noise.double()
            factor = 1 / noise.square()
        spectrum = scale.mT if self.each else scale[:, None]
        alpha = 1.0 if prior_precision is None else prior_precision
        size = weights.square().sum().clamp_min(1e-12)
        for _ in range(MOST_STEPS if estimates or prior_precision is None else 0):
            before = alpha
            settled = (spectrum * factor / (spectrum * factor + alpha)).sum(0)
            if prior_precision is None:
                alpha = float((settled.sum() / size).clamp(1e-8, 1e8))
            if estimates:
                free = (self.rows - settled).clamp_min(1)
                factor = 1 / (self.squares / free).clamp_min(torch.finfo(torch.float64).tiny)
            if abs(alpha - before) <= 1e-9 * before and not estimates:
                break
        if estimates:
            noise = factor.rsqrt()
        bases = basis if self.each else basis[None]
        return Posterior(bases, 1 / (spectrum * factor + alpha), mixing, torch.tensor(alpha), noise)


__all__ = ["Curvature", "Posterior"]
