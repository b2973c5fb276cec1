"""Joint Gaussian of all features."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.methods.densities.likelihood import Likelihood

_NOISE = 1e-3  # variance of the assumed noise on whitened features


class Gaussian(Likelihood):
    """Joint Gaussian of all features, fitted in closed form by `fit` or trained by `risk.mean()`.

    On whitened features z, the trained part is a mean m and a lower-triangular L with positive diagonal:
    -log p = |L (z - m)|^2 / 2 - sum log diag L + const, whose minimum is the maximum-likelihood Gaussian. Without the
    log determinant, L would shrink to 0 and every row would look usual. Since a constant feature would send -log p to
    minus infinity instead, z is assumed to have noise of variance 1e-3, which adds 1e-3 |L|^2 / 2 in expectation
    (a ridge, relative to L = I so that the closed form is exact). The squared distance is the one of Lee et al., "A
    simple unified framework for detecting out-of-distribution samples" (2018), with one group for all layers.

    Args:
        d: Number of features after reduction; None: known from the first features.
        n_components: Largest number of principal scores for each layer, where a list of layers is given.
        shrinkage: Share in [0, 1] of the identity in the covariance of the standardized features; None: the optimal
            one of Ledoit & Wolf (2004), at least 1e-4.

    Example:
        >>> density = Gaussian()
        >>> density.fit(torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)))
        >>> usual, strange = density(torch.tensor([[0.0, 0.0, 0.0], [5.0, 5.0, 5.0]]))
        >>> bool(usual < 0 < 10 < strange)
        True
    """

    mean: Tensor
    factor: Tensor

    def _identity(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"mean": torch.zeros(d), "factor": torch.zeros(d, d)}  # the diagonal of factor holds log diag L

    def _transport(self, z: Tensor) -> tuple[Tensor, Tensor]:
        factor = self.factor.to(z.dtype)
        log_diagonal = factor.diagonal()
        lower = factor.tril(-1) + log_diagonal.exp().diag()
        ridge = 0.5 * _NOISE * (lower.square().sum() - len(lower))
        return (z - self.mean) @ lower.T, log_diagonal.sum() - ridge
