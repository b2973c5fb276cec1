"""Base class of families that a torch distribution computes, given by raw outputs: the model's own and those of heads beside it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution as TorchDistribution
from torch.distributions import constraints

from workbench.distributions.base import (
    Distribution,
    ManyHeads,
    _at_least_float32,
    on_class_or_instance,
    same_shape,
)
from workbench.engine.tree import holds

LARGEST_RAW = 80.0  # what `transform_to` makes of it, e^80, has a square that float64 can hold, and so has its inverse


class Parametric(ManyHeads):
    """A family whose parameters are made of raw numbers: what the model itself gives, and its heads [n_heads, *prediction].

    Methods take the raw output of the model in the place of a location, and the raw outputs of the heads in that of a risk. Everything is
    computed in float64 (float32 on devices without it): counts of a million have a log-probability that float32 cannot hold.
    """

    location_scale: ClassVar[bool] = False
    standardizable: ClassVar[bool] = False
    needs: ClassVar[str] = "the raw outputs of the heads"
    support: constraints.Constraint = constraints.real

    @abstractmethod
    def at(self, y_pred: Tensor, y_risk: Tensor) -> TorchDistribution:
        """The distribution that raw outputs stand for, float64.

        Args:
            y_pred: raw output of the model [...].
            y_risk: raw outputs of the heads [n_heads, ...].
        """

    def target_shape(self, prediction: torch.Size) -> torch.Size:
        """The shape of the targets of predictions of a shape."""
        return prediction

    def rescaled(self, loc: Tensor, heads: Tensor, scaling: Any) -> tuple[Tensor, Tensor]:
        """Raw outputs for targets in original units, of those for standardised ones."""
        raise ValueError(
            f"{self} has no standardised targets: y_mean and y_scale are set, and its targets cannot be in other units. "
            "Take the standardisation of targets away with wrapped.unscale(), and train with targets as they are"
        )

    @on_class_or_instance
    def to_risk(self, raw: Tensor) -> Tensor:
        """The raw outputs themselves, in float32 at least: what they mean depends on the output of the model."""
        return raw.to(_at_least_float32(raw))

    @on_class_or_instance
    def variances(self, risk: Tensor) -> dict[str, Tensor]:
        """Refused: the variances depend on the output of the model as well, see `moments`."""
        raise TypeError(
            f"the variances of {self} depend on the output of the model as well: use moments(y_pred, y_risk)"
        )

    def moments(self, y_pred: Tensor, y_risk: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loc, heads = self._checked("", y_pred, y_risk)
        distribution = self.at(loc, heads)
        return distribution.mean.to(loc.dtype), {"aleatoric": distribution.variance.to(loc.dtype)}

    def _target(self, where: str, y: Tensor, loc: Tensor) -> Tensor:
        same_shape(**{f"y{where}": y, f"y_pred{where}": loc})
        return y.to(wide_dtype(loc))

    def _loss(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        return -self._log_prob(y, loc, risk)

    def _log_prob(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        self.check_targets(y)  # torch computes a number for any value
        return self.at(loc, risk).log_prob(y).to(loc.dtype)

    def _cdf(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        return self._closed("cdf", self.at(loc, risk).cdf)(y).to(loc.dtype)

    def _icdf(self, q: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        return self._closed("icdf", self.at(loc, risk).icdf)(q.to(wide_dtype(loc))).to(loc.dtype)

    def _crps(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        raise self._no_closed_form("crps")

    def _draw(self, loc: Tensor, risk: Tensor, generator: torch.Generator | None) -> Tensor:
        distribution = self.at(loc, risk)
        draw = distribution.rsample if distribution.has_rsample else distribution.sample
        return with_generator(draw, generator).to(loc.dtype)

    def _mean(self, loc: Tensor, risk: Tensor) -> Tensor:
        return self.at(loc, risk).mean.to(loc.dtype)

    def _stddev(self, loc: Tensor, risk: Tensor) -> Tensor:
        return self.at(loc, risk).variance.sqrt().to(loc.dtype)

    def _closed(self, what: str, method: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def asked(values: Tensor) -> Tensor:
            try:
                return method(values)
            except NotImplementedError as error:
                raise self._no_closed_form(what) from error

        return asked

    def _no_closed_form(self, what: str) -> ValueError:
        return ValueError(
            f"{self} has no {what} in closed form; draw samples, wrapped.predictive(x).sample((1000,)), and count them, or score them by "
            "workbench.metrics.crps_samples"
        )


def wide_dtype(like: Tensor) -> torch.dtype:
    """float64, where the device has it."""
    return torch.float32 if like.device.type == "mps" else torch.float64


def raw_of(values: Tensor) -> Tensor:
    """Raw numbers in float64, within what `transform_to` maps to numbers that have a square."""
    return values.to(wide_dtype(values)).clamp(-LARGEST_RAW, LARGEST_RAW)


def with_generator(draw: Callable[[], Tensor], generator: torch.Generator | None) -> Tensor:
    """A draw of torch's distributions, which know no generators: the seed of its own is drawn from the generator."""
    if generator is None:
        return draw()
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    devices = [generator.device] if generator.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        return draw()


def refuse_unless(condition: Tensor, y: Tensor, rule: str, remedy: str) -> None:
    """Raise ValueError with the first target that breaks a rule; NaN is let through, as elsewhere."""
    if not holds(condition | y.isnan()):
        wrong = y[~(condition | y.isnan())].flatten()[0].item()
        raise ValueError(f"{rule}, found a target of {wrong:g}; {remedy}")


__all__ = ["Distribution", "Parametric", "raw_of", "refuse_unless", "wide_dtype", "with_generator"]
