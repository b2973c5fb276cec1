"""Small network that separates training rows from synthetic outliers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.methods.densities.moments import units
from workbench.methods.densities.reduce import Growing

HIDDEN = 64
_STEPS = 300
_BATCH_ROWS = 256  # of each class per step
_MAX_RATE = 3e-3  # learning rate at the peak of the one-cycle schedule
_DECAY = 1e-3
_LINEAR_RANGE = 5.0  # standard deviations up to which a feature counts about linearly, beyond logarithmically


class Discriminator(Growing):
    """Log odds that a row x is synthetic rather than from the training data: w' relu(V g((x - m) / s) + a) + b, g(z) = 5 asinh(z / 5).

    m and s are mean and standard deviation of the training rows; V, a, w and b are trained by AdamW on the log loss, with equal weight on both
    classes, and on all outliers: density estimation by discrimination (Gutmann & Hyvarinen 2010), and outlier exposure (Hendrycks et al. 2019)
    with synthetic outliers.

    Example:
        >>> x = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
        >>> discriminator = Discriminator()
        >>> discriminator.fit(x, [x + 6])
        >>> bool(discriminator(torch.zeros(1, 2)) < 0 < discriminator(torch.full((1, 2), 6.0)))
        True
    """

    mean: Tensor
    unit: Tensor
    inner_weight: Tensor
    inner_bias: Tensor
    outer_weight: Tensor
    outer_bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "unit", "inner_weight", "inner_bias", "outer_weight", "outer_bias"):
            self.register_buffer(name, torch.empty(0))

    @property
    def fitted(self) -> bool:
        """Whether it was trained."""
        return self.mean.numel() > 0

    @torch.enable_grad()
    def fit(self, usual: Tensor, outliers: Sequence[Tensor]) -> None:
        """Train from a fresh initialization.

        Args:
            usual: Float tensor [n, d] of finite training rows.
            outliers: Float tensors [m, d] of finite rows, one for each kind of outliers.
        """
        usual, strange = usual.detach().float(), torch.cat([*outliers]).detach().float()
        mean, unit, _ = units(usual)
        usual, strange = _compress((usual - mean) / unit), _compress((strange - mean) / unit)
        generator = torch.Generator().manual_seed(0)

        def initial(*shape: int, inputs: int) -> Tensor:
            drawn = (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(inputs)
            return drawn.to(usual).requires_grad_()

        d = usual.shape[1]
        weights = [initial(HIDDEN, d, inputs=d), initial(HIDDEN, inputs=d)]
        weights += [initial(1, HIDDEN, inputs=HIDDEN), initial(1, inputs=HIDDEN)]
        optimizer = torch.optim.AdamW(weights, lr=_MAX_RATE, weight_decay=_DECAY)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _MAX_RATE, total_steps=_STEPS)
        for _ in range(_STEPS):
            sides = [
                rows[torch.randint(len(rows), (_BATCH_ROWS,), generator=generator).to(rows.device)]
                for rows in (usual, strange)
            ]
            loss = F.softplus(_odds(sides[0], *weights)).mean() + F.softplus(-_odds(sides[1], *weights)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        dtype = self.mean.dtype
        self.mean, self.unit = mean.to(dtype), unit.to(dtype)
        self.inner_weight, self.inner_bias, self.outer_weight, self.outer_bias = (
            weight.detach().to(dtype) for weight in weights
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the log odds [m] of rows [m, d]."""
        x = x.to(torch.promote_types(self.mean.dtype, torch.float32))
        weights = (self.inner_weight, self.inner_bias, self.outer_weight, self.outer_bias)
        return _odds(_compress((x - self.mean) / self.unit), *(weight.to(x.dtype) for weight in weights))


def _odds(z: Tensor, inner_weight: Tensor, inner_bias: Tensor, outer_weight: Tensor, outer_bias: Tensor) -> Tensor:
    return F.linear(F.linear(z, inner_weight, inner_bias).relu(), outer_weight, outer_bias)[:, 0]


def _compress(z: Tensor) -> Tensor:
    return _LINEAR_RANGE * (z / _LINEAR_RANGE).asinh()


__all__ = ["Discriminator"]
