"""The exact mixture of the distributions that several models predict."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Distribution, same_shape


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixture of m distributions of one family for every element of a prediction: p(y) = sum_k w_k p_k(y).

    Not the Normal with the mixture's mean and variance, as whose likelihood the members' disagreement would count as noise.

    Args:
        family: of the members.
        loc: [m, ...], location of every member.
        risk: [m, ...], its risk, > 0.
        weights: [m], >= 0 and summing to one.

    Example:
        >>> from workbench.distributions import Normal
        >>> two = Mixture(Normal(), torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1), torch.tensor([0.5, 0.5]))
        >>> two.mean(), two.cdf(torch.zeros(1))
        (tensor([0.]), tensor([0.5000]))
    """

    family: Distribution
    loc: Tensor
    risk: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        same_shape(loc=self.loc, risk=self.risk)
        total = float(self.weights.double().sum())
        if self.weights.shape != self.loc.shape[:1] or bool((self.weights < 0).any()) or abs(total - 1) > 1e-4:
            raise ValueError(
                f"weights must be {len(self.loc)} numbers >= 0 that sum to one, found {list(self.weights.shape)} that sum to {total:g}"
            )

    def _weights(self) -> Tensor:
        return self.weights.to(self.loc).reshape(-1, *[1] * (self.loc.dim() - 1))

    def _target(self, y: Tensor) -> Tensor:
        y = torch.as_tensor(y).to(self.loc)
        same_shape(y=y, prediction=self.loc[0])
        return y.expand_as(self.loc)

    def log_prob(self, y: Tensor) -> Tensor:
        """Logarithm of the density at y [...], in nats: log sum_k w_k p_k(y)."""
        terms = self.family.log_prob(self._target(y), self.loc, self.risk)
        return torch.logsumexp(terms + self._weights().log(), 0)

    def cdf(self, y: Tensor) -> Tensor:
        """Probability of a value of at most y [...]."""
        return (self._weights() * self.family.cdf(self._target(y), self.loc, self.risk)).sum(0)

    def icdf(self, q: float) -> Tensor:
        """The quantile [...] at a level, in the units of the prediction, by bisection between those of the members.

        Args:
            q: level, above 0 and below 1.
        """
        if not 0 < q < 1:
            raise ValueError(f"q must lie above 0 and below 1; found {q!r}")
        ends = self.family.icdf(torch.as_tensor(q).to(self.loc).expand_as(self.loc), self.loc, self.risk)
        low, high = ends.amin(0), ends.amax(0)
        for _ in range(60 if self.loc.dtype == torch.float64 else 30):
            middle = 0.5 * (low + high)
            below = self.cdf(middle) < q
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return 0.5 * (low + high)

    def mean(self) -> Tensor:
        """Expected value [...]."""
        return (self._weights() * self.family.mean(self.loc, self.risk)).sum(0)

    def stddev(self) -> Tensor:
        """Standard deviation [...], by the law of total variance: that of the members and that among them."""
        means = self.family.mean(self.loc, self.risk)
        apart = means - (self._weights() * means).sum(0)
        return (self._weights() * (self.family.stddev(self.loc, self.risk) ** 2 + apart**2)).sum(0).sqrt()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws [n, ...].

        Args:
            n: how many.
            generator: source of the random numbers, on the device of the prediction; None is torch's own.
        """
        of = torch.multinomial(
            self.weights.to(self.loc), n * self.loc[0].numel(), replacement=True, generator=generator
        )
        of = of.reshape(n, *self.loc.shape[1:])
        loc, risk = self.loc.gather(0, of), self.risk.gather(0, of)
        return self.family.sample((loc, risk), generator)
