"""Range of the targets that a model's distribution allows, to which intervals are clipped: no target is lost by it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from workbench.core.members import predictive

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


__all__ = ["REAL", "buffer_of", "clipped", "support_of"]
