"""Mixtures of the distributions that several models predict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from ..deprecation import warn_deprecated
from .base import Distribution, same_shape


class Mixture(torch.distributions.Distribution):
    """A mixture of m distributions of one family for every element of a prediction: p(y) = sum_k w_k p_k(y).

    Not the Normal with the mixture's mean and variance, as whose likelihood the members' disagreement would count as noise. The batch shape is
    that of the prediction, the event shape is empty; of `JointNormal` and Dirichlet a row is one event.

    Args:
        family: of the members.
        loc: [m, ...], location of every member.
        risk: [m, ...], its risk, > 0; of a family with heads [n_heads, m, ...].
        weights: [m], >= 0 and summing to one.

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
        self.family, self.loc, self.risk, self.weights = family, loc, risk, weights
        depth = loc.dim() - family.event_dims
        # more would be asked of the weights than rounding leaves
        super().__init__(loc.shape[1:depth], loc.shape[depth:], validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        """The values that have a density: all, or those above zero."""
        if (support := getattr(self.family, "support", None)) is not None:
            return support
        return constraints.real if self.family.location_scale else constraints.positive

    def expand(self, batch_shape: Any, _instance: Any = None) -> Mixture:
        """The same mixture for a larger batch shape, to which the present one broadcasts."""
        loc, risk = self._members(torch.Size(batch_shape) + self._event_shape)
        return Mixture(self.family, loc, risk, self.weights)

    def _members(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Location and risk of every member, each [m, *shape]; of several heads, these in front."""
        m, whole = len(self.loc), self.loc.shape[1:]
        lifted = (m, *[1] * (len(shape) - len(whole)), *whole)
        heads = self._heads
        return self.loc.reshape(lifted).expand(m, *shape), self.risk.reshape(*heads, *lifted).expand(*heads, m, *shape)

    @property
    def _heads(self) -> torch.Size:
        return self.risk.shape[: self.risk.dim() - self.loc.dim()]

    def _weights_of(self, members: Tensor) -> Tensor:
        return self.weights.to(self.loc).reshape(-1, *[1] * (members.dim() - 1))

    def _at(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values [m, sample..., batch...] with locations and risks of every member."""
        y = torch.as_tensor(y).to(self.loc)
        whole = self.loc.shape[1:]
        if y.shape[max(0, y.dim() - len(whole)) :] != whole:
            same_shape(y=y, prediction=self.loc[0])  # nothing is broadcast but the mixture itself
        loc, risk = self._members(y.shape)
        return y.expand_as(loc), loc, risk

    def log_prob(self, value: Tensor) -> Tensor:
        """Logarithm of the density at the values [sample..., batch...], in nats: log sum_k w_k p_k(y)."""
        value, loc, risk = self._at(value)
        each = self.family.log_prob(value, loc, risk)
        return torch.logsumexp(each + self._weights_of(each).log(), 0)

    def cdf(self, value: Tensor) -> Tensor:
        """Probability of at most the values [sample..., batch...]."""
        value, loc, risk = self._at(value)
        return (self._weights_of(loc) * self.family.cdf(value, loc, risk)).sum(0)

    def icdf(self, value: Tensor | float) -> Tensor:
        """Quantiles in the units of the prediction, by bisection between those of the members.

        Args:
            value: levels above 0 and below 1: a number, or a tensor that broadcasts with the batch shape.

        Returns:
            [sample..., batch...].
        """
        # brackets come from the level in torch's default dtype, as in all results so far; give a tensor for one in float64
        levels = torch.as_tensor(value).to(self.loc)
        if not bool(((levels > 0) & (levels < 1)).all()):
            raise ValueError(f"q must lie above 0 and below 1; found {value!r}")
        loc, risk = self._members(torch.broadcast_shapes(levels.shape, self.loc.shape[1:]))
        ends = self.family.icdf(levels.expand_as(loc), loc, risk)
        low, high = ends.amin(0), ends.amax(0)
        for _ in range(60 if self.loc.dtype == torch.float64 else 30):
            middle = 0.5 * (low + high)
            below = self.cdf(middle) < value
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (0.5 * (low + high)).round() if self.support is constraints.nonnegative_integer else 0.5 * (low + high)

    @property
    def covariance_matrix(self) -> Tensor:
        """Covariance of the targets of a row [..., k, k], within the members and among them; of `JointNormal` only.

        Raises:
            ValueError: if each target has a distribution by itself.
        """
        if not hasattr(self.family, "covariance"):
            raise ValueError(
                f"{self.family} says no covariance of the targets: wrap with sculpt.Wrapper(Normal(joint=True))"
            )
        inside, weights = self.family.covariance(self.loc, self.risk), self._weights_of(self.loc)
        deviations = self.loc - (weights * self.loc).sum(0)
        among = deviations.unsqueeze(-1) * deviations.unsqueeze(-2)
        return (weights.unsqueeze(-1) * (inside + among)).sum(0)

    @property
    def mean(self) -> Tensor:
        """Expected value [...]."""
        return (self._weights_of(self.loc) * self.family.mean(self.loc, self.risk)).sum(0)

    @property
    def variance(self) -> Tensor:
        """Variance [...], by the law of total variance: that of the members and that among them."""
        means, weights = self.family.mean(self.loc, self.risk), self._weights_of(self.loc)
        deviations = means - (weights * means).sum(0)
        return (weights * (self.family.stddev(self.loc, self.risk) ** 2 + deviations**2)).sum(0)

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Draws [sample..., batch...], which no gradient flows through.

        Args:
            sample_shape: how many, such as (3,).
            generator: source of the random numbers, on the device of the prediction; None is torch's own.
        """
        if isinstance(sample_shape, int):
            warn_deprecated(f"sample({sample_shape}) of a Mixture", f"sample(({sample_shape},))")
            sample_shape = (sample_shape,)
        shape = self._extended_shape(torch.Size(sample_shape))
        return self._draws(shape, len(shape) - len(self._event_shape), generator)  # all of an event are of one member

    def sample_paths(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Joint draws [sample..., n, ...] of whole rows: one member speaks for all steps of a path, as one voter would.

        The covariance of a path's steps is that of the members' locations plus, on the diagonal, the mean variance of their noise. In
        `sample` each step is drawn by itself, and what members disagree on averages out over a path. Within a member the noise of steps is
        independent, but for the targets of `Normal(joint=True)`, whose covariance it has.

        Args:
            sample_shape: how many paths of each row, such as (500,).
            generator: source of the random numbers, on the device of the prediction; None is torch's own.

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
        """Draws of a shape, behind whose first `depth` dimensions all are of one member."""
        with torch.no_grad():
            rows, beyond = shape[:depth], len(shape) - depth
            member = torch.multinomial(self.weights.to(self.loc), rows.numel(), replacement=True, generator=generator)
            member = member.reshape(1, *rows, *[1] * beyond).expand(1, *shape)
            loc, risk = self._members(shape)
            heads = self._heads
            risk = risk.gather(len(heads), member.expand(*heads, *member.shape)).squeeze(len(heads))
            return self.family.sample((loc.gather(0, member)[0], risk), generator)

    def __repr__(self) -> str:
        return f"Mixture({self.family!r}, {len(self.loc)} members, batch_shape={tuple(self._batch_shape)})"
