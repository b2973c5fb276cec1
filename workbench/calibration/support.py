"""Targets that a model's distribution allows, to whose range intervals are clipped; ends of intervals that rounding does not move inwards."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from workbench.core.members import predictive
from workbench.distributions import Censored

REAL = (-math.inf, math.inf)


def support_of(wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[float, float]:
    """Return the lowest and the highest target that are possible: of sculpt's distribution, or of the one that the model returns.

    Args:
        wrapped: the wrapped model.
        args, kwargs: inputs, for a model that returns distributions.
    """
    record = wrapped._workbench
    if not record.says_distributions:
        ranges = (_range(getattr(method.distribution, "support", None)) for method in record.methods)
        return next((bounds for bounds in ranges if bounds != REAL), REAL)
    try:
        return _range(getattr(predictive(wrapped, args, kwargs), "support", None))
    except (NotImplementedError, ValueError):  # a class without support, or a distribution among several outputs
        return REAL


def refuse_censored(wrapped: Any, y: Tensor, target: Tensor) -> None:
    """Raise if targets are those that a model of censored times is trained on: a time that was not reached has no error and no score."""
    families = (method.distribution for method in wrapped._workbench.methods)
    if target.shape == y.shape or not any(
        isinstance(f, Censored) and f.target_shape(y.shape) == target.shape for f in families
    ):
        return
    missing = int((target.chunk(2, -1)[1] == 0).sum())
    if not missing:
        raise ValueError(f"y: every event was observed, so give the times alone, y[..., :{y.shape[-1]}]")
    raise ValueError(
        f"y: {missing} of {y.numel()} held-out times are censored, so that their errors are not known; hold out rows that were all observed "
        "until the event, and give their times alone. Those of these rows that have an event are no substitute, as their times are shorter"
    )


def _range(support: Any) -> tuple[float, float]:
    """Return the bounds of a constraint of torch.distributions; those that depend on parameters are left out."""
    while (base := getattr(support, "base_constraint", None)) is not None:
        support = base
    if support is constraints.simplex:
        return 0.0, 1.0
    lower, upper = (
        getattr(support, name, bound) for name, bound in zip(("lower_bound", "upper_bound"), REAL, strict=True)
    )
    return (-math.inf if isinstance(lower, Tensor) else float(lower)), (
        math.inf if isinstance(upper, Tensor) else float(upper)
    )


def buffer_of(support: tuple[float, float], target: Tensor) -> Tensor:
    """Return the support as a tensor [2]; empty [0] if it is unbounded, or held-out targets lie outside, so that clipping could lose some."""
    lower, upper = support
    if support == REAL or bool(((target < lower) | (target > upper)).any()):
        return torch.empty(0)
    return torch.tensor(support, dtype=target.dtype, device=target.device)


def clipped(ends: tuple[Tensor, Tensor], support: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends of intervals clipped to a support [2]; as they are if it is empty [0]."""
    if not support.numel():
        return ends
    lower, upper = support.to(ends[0])
    return ends[0].clamp(lower, upper), ends[1].clamp(lower, upper)


def outward(ends: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Convert lower and upper ends to a dtype such that rounding makes no interval smaller."""
    if ends[0].dtype == dtype:
        return ends
    lower, upper = (end.to(dtype) for end in ends)
    infinite = torch.full_like(lower, math.inf)
    # nextafter has no gradient, but a step has that of the end
    below, above = (torch.nextafter(e.detach(), to) - e.detach() for e, to in ((lower, -infinite), (upper, infinite)))
    return (
        torch.where(lower.to(ends[0].dtype) <= ends[0], lower, lower + below),
        torch.where(upper.to(ends[1].dtype) >= ends[1], upper, upper + above),
    )


__all__ = ["REAL", "buffer_of", "clipped", "outward", "refuse_censored", "support_of"]
