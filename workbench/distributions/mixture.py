"""Mixtures of the distributions predicted by several models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from ..deprecation import warn_deprecated
from .base import Distribution, common_dtype, same_shape, wide_dtype


class Mixture(torch.distributions.Distribution):
    """Mixture of m distributions of one family for every element of a prediction: p(y) = sum_k w_k p_k(y).

    It is not the Normal with the mixture's mean and variance, in whose likelihood the members' disagreement would count as noise. The batch
    shape is that of the prediction, and the event shape is empty, except that for `JointNormal` and Dirichlet a row is one event.

    Args:
        family: family of the members.
        loc: location of every member [m, ...].
        risk: risk of every member [m, ...], > 0; for a family with several heads [n_heads, m, ...].
        weights: weights of the members [m], >= 0 and summing to one.

    Raises:
        ValueError: if loc and risk differ in shape, or weights are not m numbers >= 0 that sum to one.

    Example:
        >>> from workbench.distributions import Normal
        >>> two = Mixture(Normal(), torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1), torch.tensor([0.5, 0.5]))
        >>> two.mean, two.cdf(torch.zeros(1)), two.sample((3,)).shape
        (tensor([0.]), tensor([0.5000]), torch.Size([3, 1]))
    """

    arg_constraints = {  # noqa: RUF012  # torch's own declaration
        "loc": constraints.real,
        "risk": constraints.positive,
        "weights": constraints.simplex,
    }

    def __init__(self, family: Distribution, loc: Tensor, risk: Tensor, weights: Tensor) -> None:
        same_shape(
            loc=loc, risk=risk if family.by_risk else risk[(0,) * (risk.dim() - loc.dim())] if risk.numel() else loc
        )
        total = float(weights.double().sum())
        if weights.shape != loc.shape[:1] or bool((weights < 0).any()) or abs(total - 1) > 1e-4:
            raise ValueError(
                f"weights must be {len(loc)} numbers >= 0 that sum to one, found {list(weights.shape)} that sum to {total:g}"
            )
        # half precision rounds levels, and weights so that they no longer sum to one
        self.loc, self.risk = loc.to(common_dtype(loc)), risk.to(common_dtype(risk))
        self.family, self.weights = family, weights
        depth = loc.dim() - family.event_dims
        # torch's own validation would ask more of the weights than rounding allows
        super().__init__(loc.shape[1:depth], loc.shape[depth:], validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        """Values that have a density: all, those above zero, or the family's own support."""
        if (support := getattr(self.family, "support", None)) is not None:
            return support
        return constraints.real if self.family.location_scale else constraints.positive

    def expand(self, batch_shape: Any, _instance: Any = None) -> Mixture:
        """Return the mixture expanded to a larger batch shape, to which the present one broadcasts."""
        loc, risk = self._members(torch.Size(batch_shape) + self._event_shape)
        return Mixture(self.family, loc, risk, self.weights)

    def _members(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Return location and risk of every member, [m, *shape] each; for several heads, the risk is [n_heads, m, *shape]."""
        m, base = len(self.loc), self.loc.shape[1:]
        padded = (m, *[1] * (len(shape) - len(base)), *base)
        heads = self._heads
        return self.loc.reshape(padded).expand(m, *shape), self.risk.reshape(*heads, *padded).expand(*heads, m, *shape)

    @property
    def _heads(self) -> torch.Size:
        return self.risk.shape[: self.risk.dim() - self.loc.dim()]

    def _weights_of(self, members: Tensor) -> Tensor:
        weights = self.weights.to(members.device, wide_dtype(members))
        return (weights / weights.sum()).reshape(-1, *[1] * (members.dim() - 1))

    def _at(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the values [m, sample..., batch...], with location and risk of every member."""
        y = torch.as_tensor(y)
        # rounded to the prediction's dtype, a value next to the end of the support would have another density
        y = y.to(self.loc.device, wide_dtype(self.loc) if y.dtype == torch.float64 else self.loc.dtype)
        base = self.loc.shape[1:]
        if y.shape[max(0, y.dim() - len(base)) :] != base:
            same_shape(y=y, prediction=self.loc[0])  # the mixture broadcasts to the values, but not the values
        loc, risk = self._members(y.shape)
        return y.expand_as(loc), loc, risk

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the logarithm of the density at the values [sample..., batch...], in nats: log sum_k w_k p_k(y)."""
        value, loc, risk = self._at(value)
        log_probs = self.family.log_prob(value, loc, risk)
        return torch.logsumexp(log_probs + self._weights_of(log_probs).log(), 0).to(self.loc.dtype)

    def cdf(self, value: Tensor) -> Tensor:
        """Return the probability of at most the values [sample..., batch...]."""
        return self._cdf(value).to(self.loc.dtype)

    def _cdf(self, value: Tensor) -> Tensor:
        value, loc, risk = self._at(value)
        return (self._weights_of(loc) * self.family.cdf(value, loc, risk)).sum(0)

    def icdf(self, value: Tensor | float) -> Tensor:
        """Return quantiles in the units of the prediction, by bisection between those of the members.

        Args:
            value: levels above 0 and below 1: a number, or a tensor that broadcasts with the batch shape.

        Returns:
            Quantiles [sample..., batch...].

        Raises:
            ValueError: if a level is not above 0 and below 1.
        """
        # in float64, since float32 has no number between 1 - 6e-8 and 1
        levels = torch.as_tensor(value, dtype=wide_dtype(self.loc), device=self.loc.device)
        if not bool(((levels > 0) & (levels < 1)).all()):
            raise ValueError(f"q must lie above 0 and below 1; found {value!r}, rounded to {levels.dtype}")
        loc, risk = self._members(torch.broadcast_shapes(levels.shape, self.loc.shape[1:]))
        ends = self.family.icdf(levels.expand_as(loc), loc, risk).to(levels)
        low, high = ends.amin(0), ends.amax(0)
        for _ in range(60):  # members may differ by many orders of magnitude
            middle = 0.5 * (low + high)
            below = self._cdf(middle) < levels
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
            if bool((low.to(self.loc.dtype) == high.to(self.loc.dtype)).all()):
                break
        quantile = 0.5 * (low + high)
        return (quantile.round() if self.support is constraints.nonnegative_integer else quantile).to(self.loc.dtype)

    @property
    def covariance_matrix(self) -> Tensor:
        """Covariance of the targets of a row [..., k, k], within and between members; for `JointNormal` only.

        Raises:
            ValueError: if the family has no covariance.
        """
        if not hasattr(self.family, "covariance"):
            raise ValueError(
                f"{self.family} has no covariance of the targets: wrap with sculpt.Wrapper(Normal(joint=True))"
            )
        within, (weights, _, deviations) = self.family.covariance(self.loc, self.risk), self._spread()
        between = deviations.unsqueeze(-1) * deviations.unsqueeze(-2)
        return (weights.unsqueeze(-1) * (within + between)).sum(0).to(within.dtype)

    @property
    def mean(self) -> Tensor:
        """Expected value [...]."""
        return self._spread()[1].to(self.loc.dtype)

    @property
    def variance(self) -> Tensor:
        """Variance [...] by the law of total variance: within plus between members."""
        return self._variance().to(self.loc.dtype)

    @property
    def stddev(self) -> Tensor:
        """Standard deviation [...], the square root of the variance, also where that is too large or too small for the dtype."""
        return self._variance().sqrt().to(self.loc.dtype)

    def _variance(self) -> Tensor:
        weights, _, deviations = self._spread()
        within = self.family.stddev(self.loc, self.risk).to(weights)
        return (weights * (within**2 + deviations**2)).sum(0)

    def _spread(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights, mean and the members' deviations from it, in float64: far from zero, a rounded mean would count as disagreement."""
        means = self.family.mean(self.loc, self.risk)
        weights = self._weights_of(means)
        means = means.to(weights)
        mean = (weights * means).sum(0)
        return weights, mean, means - mean

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw values [sample..., batch...], without gradients.

        Args:
            sample_shape: shape of the draws, such as (3,).
            generator: source of the random numbers, on the device of the prediction; None for torch's global generator.
        """
        if isinstance(sample_shape, int):
            warn_deprecated(f"sample({sample_shape}) of a Mixture", f"sample(({sample_shape},))")
            sample_shape = (sample_shape,)
        shape = self._extended_shape(torch.Size(sample_shape))
        return self._draws(shape, len(shape) - len(self._event_shape), generator)  # an event comes from one member

    def sample_paths(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw whole rows jointly [sample..., n, ...]: all steps of a path come from the same member, such as one voter.

        The covariance of a path's steps is that of the members' locations plus, on the diagonal, the mean variance of their noise. In
        `sample`, each step is drawn independently, so that the members' disagreement averages out over a path. Within a member, the noise of
        steps is independent, except between the targets of `Normal(joint=True)`, which have a covariance.

        Args:
            sample_shape: shape of the paths drawn for each row, such as (500,).
            generator: source of the random numbers, on the device of the prediction; None for torch's global generator.

        Example:
            >>> from workbench.distributions import Normal
            >>> two = Mixture(Normal(), torch.tensor([-5.0, 5.0])[:, None, None].expand(2, 1, 3), torch.ones(2, 1, 3), torch.tensor([0.5, 0.5]))
            >>> paths = two.sample_paths((100,))  # of one row with three steps
            >>> bool((paths.sign() == paths.sign()[..., :1]).all())
            True
        """
        shape = self._extended_shape(torch.Size(sample_shape))
        return self._draws(shape, len(torch.Size(sample_shape)) + min(1, len(self._batch_shape)), generator)

    def _draws(self, shape: torch.Size, depth: int, generator: torch.Generator | None) -> Tensor:
        """Draw values of a shape, choosing one member for each index of its first `depth` dimensions."""
        with torch.no_grad():
            rows, n_trailing = shape[:depth], len(shape) - depth
            member = torch.multinomial(self.weights.to(self.loc), rows.numel(), replacement=True, generator=generator)
            member = member.reshape(1, *rows, *[1] * n_trailing).expand(1, *shape)
            loc, risk = self._members(shape)
            heads = self._heads
            risk = risk.gather(len(heads), member.expand(*heads, *member.shape)).squeeze(len(heads))
            return self.family.sample((loc.gather(0, member)[0], risk), generator)

    def __repr__(self) -> str:
        return f"Mixture({self.family!r}, {len(self.loc)} members, batch_shape={tuple(self._batch_shape)})"
