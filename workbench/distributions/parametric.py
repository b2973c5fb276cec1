"""Base class of families computed by a torch distribution from raw outputs of the model and its risk heads."""

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
    common_dtype,
    on_class_or_instance,
    same_shape,
    wide_dtype,
)
from workbench.engine.tree import holds

LARGEST_RAW = 80.0  # `transform_to` maps it to e^80, whose square and inverse square float64 can represent


class Parametric(ManyHeads):
    """Family whose parameters are computed from raw outputs: the model's own, and those of its heads [n_heads, *prediction].

    Methods take the raw output of the model in place of a location, and the raw outputs of the heads in place of a risk. Everything is
    computed in float64 (float32 on devices without it), because log-probabilities of counts of a million need it.
    """

    location_scale: ClassVar[bool] = False
    standardizable: ClassVar[bool] = False
    needs: ClassVar[str] = "the raw outputs of the heads"
    support: constraints.Constraint = constraints.real

    @abstractmethod
    def at(self, y_pred: Tensor, y_risk: Tensor) -> TorchDistribution:
        """Return the torch distribution for raw outputs, in float64.

        Args:
            y_pred: raw output of the model [...].
            y_risk: raw outputs of the heads [n_heads, ...].
        """

    def target_shape(self, prediction: torch.Size) -> torch.Size:
        """Return the shape of the targets for a shape of predictions."""
        return prediction

    def rescaled(self, loc: Tensor, heads: Tensor, scaling: Any) -> tuple[Tensor, Tensor]:
        """Convert raw outputs for standardized targets to raw outputs for targets in original units."""
        raise ValueError(
            f"{self} does not support standardized targets, but y_mean and y_scale are set. "
            "Remove the standardization with wrapped.unscale(), and train with the original targets"
        )

    @on_class_or_instance
    def to_risk(self, raw: Tensor) -> Tensor:
        """Return the raw outputs themselves, at least in float32: their meaning depends on the output of the model."""
        return raw.to(common_dtype(raw))

    @on_class_or_instance
    def variances(self, risk: Tensor) -> dict[str, Tensor]:
        """Raise TypeError, since the variances depend on the output of the model as well; see `moments`."""
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

    def _log_prob(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        self.check_targets(y)  # without validation, torch returns a number for any value
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

    def _closed(self, function: str, method: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(values: Tensor) -> Tensor:
            try:
                return method(values)
            except NotImplementedError as error:
                raise self._no_closed_form(function) from error

        return call

    def _no_closed_form(self, function: str) -> ValueError:
        return ValueError(
            f"{self} has no {function} in closed form; draw samples, wrapped.predictive(x).sample((1000,)), and count them, or score them by "
            "workbench.metrics.crps_samples"
        )


def raw_of(values: Tensor) -> Tensor:
    """Return raw numbers in float64, clamped so that the square of their transform is finite."""
    return values.to(wide_dtype(values)).clamp(-LARGEST_RAW, LARGEST_RAW)


def with_generator(draw: Callable[[], Tensor], generator: torch.Generator | None) -> Tensor:
    """Draw from a torch distribution with a generator, which torch does not support: the generator seeds a forked global one."""
    if generator is None:
        return draw()
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    devices = [generator.device] if generator.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        return draw()


def refuse_unless(condition: Tensor, y: Tensor, rule: str, remedy: str) -> None:
    """Raise ValueError with the first target that breaks a rule; NaN is allowed, as elsewhere."""
    if not holds(condition | y.isnan()):
        wrong = y[~(condition | y.isnan())].flatten()[0].item()
        raise ValueError(f"{rule}, found a target of {wrong:g}; {remedy}")


__all__ = ["Distribution", "Parametric", "raw_of", "refuse_unless", "wide_dtype", "with_generator"]
