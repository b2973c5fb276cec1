"""Likelihood of right-censored survival times, some of which are only known to be longer than observed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.distributions.base import same_shape, wide_dtype
from workbench.distributions.from_torch import FromTorch, log_density_of_weibull
from workbench.distributions.parametric import refuse_unless

# Log survival functions: 1 - cdf would round to 0. Gamma is missing, as its has no gradient in torch.
_LOG_SURVIVAL: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "Exponential": lambda d, t: -d.rate * t,
    "Weibull": lambda d, t: -((t / d.scale) ** d.concentration),
    "LogNormal": lambda d, t: torch.special.log_ndtr((d.loc - t.log()) / d.scale),
}


@dataclass(frozen=True)
class Censored(FromTorch):
    """Times until an event, with right-censored targets: some observations ended before the event.

    Targets have two numbers for each element of the prediction, [..., 2 k] for predictions [..., k]: first the times > 0, then as many
    indicators, 1 (event at that time) or 0 (no event until then). loss = -log p(t) for events, -log P(T > t) for the others (Klein &
    Moeschberger 2003). The prediction is the mean of the uncensored distribution, its risk the standard deviation; `log_prob` of targets
    [..., k] is the density.

    Args:
        family: Exponential, Weibull or LogNormal of torch.distributions, or its name.

    Raises:
        ValueError: if the family is another one.

    Example:
        >>> import torch
        >>> log_rate, none = torch.zeros(2, 1), torch.zeros(0, 2, 1)
        >>> targets = torch.tensor([[2.0, 1.0], [2.0, 0.0]])  # an event at 2, and none until 2
        >>> Censored("Exponential").loss_function(targets, log_rate, none, reduction="none").T
        tensor([[2., 2.]])
    """

    family: str | type = field(
        default="Weibull", metadata={"help": "Exponential, Weibull or LogNormal of torch.distributions"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.family not in _LOG_SURVIVAL:
            raise ValueError(f"Censored: family is one of {', '.join(_LOG_SURVIVAL)}, found {self.family}")

    def __str__(self) -> str:
        return f"Censored({self.family})"

    @property
    def standardizable(self) -> bool:  # type: ignore[override]
        return False

    def target_shape(self, prediction: torch.Size) -> torch.Size:
        return torch.Size((*prediction[:-1], 2 * prediction[-1])) if prediction else prediction

    def check_targets(self, y: Tensor) -> None:
        times, events = y.chunk(2, -1)
        refuse_unless(
            (times > 0) & times.isfinite(),
            times,
            f"{self} is for times above 0",
            "give the times since the start of observation, in one unit",
        )
        refuse_unless(
            (events == 0) | (events == 1),
            events,
            f"{self} takes 1 for an event and 0 for none",
            "give [..., times, events]",
        )

    def _target(self, where: str, y: Tensor, loc: Tensor) -> Tensor:
        if y.shape != self.target_shape(loc.shape):
            same_shape(**{f"y{where}": y, f"y_pred{where}": loc})
        return y.to(wide_dtype(loc))

    def _loss(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        if y.shape == loc.shape:
            raise ValueError(
                f"y has shape {tuple(y.shape)}, but {self} needs {tuple(self.target_shape(loc.shape))}: times, then 1 or 0 for each; "
                f"if every event was observed, train with sculpt.Wrapper(torch.distributions.{self.family})"
            )
        self.check_targets(y)
        distribution: Any = self.at(loc, risk)
        times, events = y.chunk(2, -1)
        survival = _LOG_SURVIVAL[str(self.family)](distribution, times)
        density = (
            log_density_of_weibull(distribution, times) if self.family == "Weibull" else distribution.log_prob(times)
        )
        return -torch.where(events > 0, density, survival).to(loc.dtype)

    def _log_prob(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        return FromTorch(self.family)._log_prob(y, loc, risk) if y.shape == loc.shape else -self._loss(y, loc, risk)


__all__ = ["Censored"]
