"""Noise distributions for sample, of a fixed or a learned amount."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.settings import Settings, setting


class Noise(Settings, ABC):
    """Noise on a tensor; its amount is fixed, or learned as an unconstrained number."""

    @property
    @abstractmethod
    def silent(self) -> bool:
        """Whether the fixed amount is zero."""

    @abstractmethod
    def raw(self) -> float:
        """Return the unconstrained number that corresponds to the fixed amount."""

    @abstractmethod
    def apply(self, value: Tensor, raw: Tensor | None, generator: torch.Generator | None, additive: bool) -> Tensor:
        """Return the value with noise.

        Args:
            value: floating-point tensor of any shape.
            raw: learned amount (0-dim); None for the fixed one.
            generator: source of random numbers; None for torch's global generator.
            additive: whether the value is an input, whose zeros must get noise as well.
        """

    @abstractmethod
    def divergence(self, raw: Tensor) -> Tensor:
        """Return the regularization term of a learned amount per noisy value, in nats."""


def _uniform(value: Tensor, generator: torch.Generator | None) -> Tensor:
    # not rand_like: torch.compile merges equal calls of it into one draw
    return torch.rand(value.shape, dtype=value.dtype, device=value.device, generator=generator)


class Bernoulli(Noise):
    """Dropout: zeroes values with probability p and divides the others by 1 - p (Srivastava et al. 2014)."""

    p: float = setting(default=0.1, least=0, below=1, wording="must lie in [0, 1)", help="in [0, 1).")

    def __repr__(self) -> str:
        return f"Bernoulli({self.p:g})"

    @property
    def silent(self) -> bool:
        return self.p == 0

    def raw(self) -> float:
        p = min(max(self.p, 1e-4), 1 - 1e-4)
        return math.log(p / (1 - p))

    def apply(self, value: Tensor, raw: Tensor | None, generator: torch.Generator | None, additive: bool) -> Tensor:
        if raw is None:
            # on a GPU by the formula, since dropout draws other numbers there under two vmaps (with a risk) than under one
            if value.is_complex() or generator is not None or not value.is_cpu:
                real = value.real if value.is_complex() else value
                return value * ((_uniform(real, generator) >= self.p) / (1 - self.p)).to(real.dtype)
            return F.dropout(value, self.p, training=True)
        # a relaxed mask lets gradients reach the probability (Maddison et al. 2017; Gal et al. 2017, temperature 0.1)
        real = value.real if value.is_complex() else value
        u = _uniform(real, generator).clamp(1e-6, 1 - 1e-6)
        dropped = torch.sigmoid((raw.to(real.dtype) + u.logit()) / 0.1)
        return value * (1 - dropped) / (1 - torch.sigmoid(raw).to(real.dtype))

    def divergence(self, raw: Tensor) -> Tensor:
        p = torch.sigmoid(raw)
        return -(torch.special.entr(p) + torch.special.entr(1 - p))


class Normal(Noise):
    """Gaussian noise: multiplies values by N(1, scale^2) (Kingma et al. 2015), or adds N(0, scale^2) to inputs."""

    scale: float = setting(
        default=0.1, least=0, wording="must not be negative", help="standard deviation, not negative."
    )

    def __repr__(self) -> str:
        return f"Normal({self.scale:g})"

    @property
    def silent(self) -> bool:
        return self.scale == 0

    def raw(self) -> float:
        return math.log(max(self.scale, 1e-4))

    def apply(self, value: Tensor, raw: Tensor | None, generator: torch.Generator | None, additive: bool) -> Tensor:
        # not randn_like: torch.compile merges equal calls of it into one draw
        noise = torch.randn(value.shape, dtype=value.dtype, device=value.device, generator=generator)
        scale = self.scale if raw is None else raw.exp().to(value.dtype)
        return value + scale * noise if additive else value * (1 + scale * noise)

    def divergence(self, raw: Tensor) -> Tensor:
        # Kullback-Leibler divergence from a log-uniform prior, approximated as in Molchanov et al. 2017, eq. 14
        log_alpha = 2 * raw
        return -(0.63576 * torch.sigmoid(1.8732 + 1.48695 * log_alpha) - 0.5 * F.softplus(-log_alpha) - 0.63576)
