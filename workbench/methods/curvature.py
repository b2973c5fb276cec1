"""Posterior of a last layer's weights: curvature summed over batches, prior and noise by marginal likelihood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_STEPS = 1000


@dataclass(frozen=True)
class Posterior:
    """Gaussian posterior of the weights [outputs, inputs], which gives the outputs at features phi a Gaussian in closed form.

    Var[z] = U diag(h) U^T with h_c = sum_d (phi q_cd)^2 v_dc, q the basis, v the variance and U the mixing.

    Args:
        basis: orthonormal columns [1 or outputs, inputs, inputs], one basis for all outputs or one for each.
        variance: variance of the weights in that basis [inputs, outputs].
        mixing: orthonormal columns [outputs, outputs]; None if the outputs are independent.
        prior: prior precision [].
        noise: standard deviation of each output [outputs], for values whose rows share one noise; otherwise None.
    """

    basis: Tensor
    variance: Tensor
    mixing: Tensor | None
    prior: Tensor
    noise: Tensor | None


class Curvature:
    """Statistics of the training data that the posterior follows from, summed over batches in float64."""

    def __init__(self) -> None:
        self.rows = 0
        # sum of phi phi^T [inputs, inputs], or with a noise for each row and output [outputs, inputs, inputs]
        self.gram: Any = 0
        self.fisher: Any = 0  # sum of diag(p) - p p^T [outputs, outputs]
        self.squares: Any = 0  # sum of squared residuals [outputs]
        # whether each row and output has its own noise, so that there is a gram matrix for each output
        self.per_output = False

    @property
    def finite(self) -> bool:
        """Whether all sums are finite."""
        sums = (self.gram, self.fisher, self.squares)
        return all(bool(part.isfinite().all()) for part in sums if isinstance(part, Tensor))

    def add_values(self, features: Tensor, precision: Tensor | None, residuals: Tensor | None) -> None:
        """Add a batch of regression data.

        Args:
            features: inputs of the layer [rows, inputs], with a 1 for the bias.
            precision: 1 / noise^2 of each row and output [rows, outputs]; None if all rows share one noise.
            residuals: target - prediction [rows, outputs]; None if the noise is known.
        """
        phi = features.double()
        self.rows += len(phi)
        self.per_output = precision is not None
        weighted = phi if precision is None else phi * precision.double().T[:, :, None]
        self.gram = self.gram + weighted.mT @ phi
        if residuals is not None:
            self.squares = self.squares + residuals.double().square().sum(0)

    def add_classes(self, features: Tensor, probs: Tensor, slope: Tensor) -> None:
        """Add a batch of classification data.

        Args:
            features: inputs of the layer [rows, inputs], with a 1 for the bias.
            probs: softmax of the logits [rows, classes].
            slope: slope of the logits with respect to the layer's outputs [classes].
        """
        p = probs.double()
        self._add(features, (torch.diag(p.sum(0)) - p.T @ p) * slope[:, None] * slope)

    def add_labels(self, features: Tensor, probs: Tensor, slope: Tensor) -> None:
        """Add a batch of multi-label data, whose labels do not exclude each other.

        Args:
            features: inputs of the layer [rows, inputs], with a 1 for the bias.
            probs: sigmoid of the logits [rows, labels].
            slope: slope of the logits with respect to the layer's outputs [labels].
        """
        p = probs.double()
        self._add(features, torch.diag((p * (1 - p)).sum(0) * slope.square()))

    def _add(self, features: Tensor, fisher: Tensor) -> None:
        phi = features.double()
        self.rows += len(phi)
        self.gram = self.gram + phi.T @ phi
        self.fisher = self.fisher + fisher

    def posterior(self, weights: Tensor, prior_precision: float | None, noise: Tensor | None) -> Posterior:
        """Return the posterior; prior precision and noise that are not given maximize the marginal likelihood.

        MacKay's fixed point (1992): with the eigenvalues l of the curvature and gamma = sum l / (l + prior_precision), the effective number
        of parameters, prior_precision = gamma / |weights|^2 and noise^2 = |residuals|^2 / (rows - gamma).

        Args:
            weights: trained values [outputs, inputs], the bias included.
            prior_precision: prior precision; None estimates it.
            noise: standard deviations [outputs]; None estimates them from the residuals, if rows share one noise.
        """
        weights = weights.double()
        scale, basis = torch.linalg.eigh(self.gram)
        scale = scale.clamp_min(0)
        mixing, factor = None, torch.ones_like(weights[:, 0])
        estimates_noise = False
        if isinstance(self.fisher, Tensor):
            factor, mixing = torch.linalg.eigh(self.fisher / self.rows)
            factor = factor.clamp_min(0)
        elif not self.per_output:
            estimates_noise = noise is None
            tiny = torch.finfo(torch.float64).tiny  # the model may fit the data without any error
            noise = (self.squares / self.rows).clamp_min(tiny).sqrt() if noise is None else noise.double()
            factor = 1 / noise.square()
        spectrum = scale.mT if self.per_output else scale[:, None]
        alpha = 1.0 if prior_precision is None else prior_precision
        size = weights.square().sum().clamp_min(1e-12)
        for _ in range(MAX_STEPS if estimates_noise or prior_precision is None else 0):
            previous = alpha
            effective = (spectrum * factor / (spectrum * factor + alpha)).sum(0)
            if prior_precision is None:
                alpha = float((effective.sum() / size).clamp(1e-8, 1e8))
            if estimates_noise:
                free = (self.rows - effective).clamp_min(1)
                factor = 1 / (self.squares / free).clamp_min(torch.finfo(torch.float64).tiny)
            if abs(alpha - previous) <= 1e-9 * previous and not estimates_noise:
                break
        if estimates_noise:
            noise = factor.rsqrt()
        bases = basis if self.per_output else basis[None]
        return Posterior(bases, 1 / (spectrum * factor + alpha), mixing, torch.tensor(alpha), noise)


__all__ = ["Curvature", "Posterior"]
