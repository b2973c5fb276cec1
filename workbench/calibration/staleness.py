"""Notice that a model was trained after something had been fitted to its answers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from workbench.engine.effects.random import values_unavailable
from workbench.errors import WorkbenchWarning
from workbench.introspect.source_lines import user_stacklevel

TOLERANCE = 1e-6  # of sums, relative to the sum of absolute values, since another device rounds differently
Sums = tuple[torch.dtype, float, float]


class FittedWeights:
    """Sums of the trained weights of a model, from which a later call tells whether they have changed.

    Sums are computed again only if torch has counted a change of a tensor, or the tensors are others, as in a copy.

    Args:
        model: the model at the time of fitting.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> weights = FittedWeights(model)
        >>> weights.changed(model), nn.init.constant_(model.weight, 9.0) is model.weight, weights.changed(model)
        ('', True, 'weight')
    """

    def __init__(self, model: nn.Module) -> None:
        self._versions, self._sums = _versions(model), _sums(model)
        self.warned = False

    def changed(self, model: nn.Module) -> str:
        """Return the name of a weight that has changed since this was last asked; "" if none has, other than by a cast to another dtype."""
        if (versions := _versions(model)) == self._versions:
            return ""
        before, self._versions, self._sums = self._sums, versions, _sums(model)
        return next((name for name, sums in self._sums.items() if name in before and _differ(before[name], sums)), "")


class FitsWeights(nn.Module):
    """Module around a model `wrapped` that warns, once, if it is asked after the model's weights have changed.

    Attributes:
        weights: those that it was fitted to; None if unknown, as after a state was loaded: then those at the next call.
    """

    wrapped: nn.Module
    weights: FittedWeights | None = None
    refit = "it was calibrated", "Calibrate again"  # what was fitted to the weights, and what to do if they change

    def warn_if_trained(self) -> None:
        """Warn if the weights have changed."""
        if values_unavailable():
            return
        if self.weights is None:
            self.weights = FittedWeights(self.wrapped)
        if self.weights.warned or not (name := self.weights.changed(self.wrapped)):
            return
        self.weights.warned = True
        what, remedy = self.refit
        warnings.warn(
            f"the weights of the model have changed, such as {name}, since {what}, so that its answers are those for other weights. {remedy}",
            WorkbenchWarning,
            stacklevel=user_stacklevel(),
        )

    def _load_from_state_dict(self, *args: Any) -> None:
        self.weights = None
        super()._load_from_state_dict(*args)


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    return [(id(p), 0 if p.is_inference() else p._version) for p in model.parameters() if p.requires_grad]


def _sums(model: nn.Module) -> dict[str, Sums]:
    """Return dtype, sum and sum of absolute values of each trained weight; subclasses, sharded or quantized, are left out."""
    sums = {}
    for name, p in model.named_parameters():
        if p.requires_grad and p.is_floating_point() and type(p) is nn.Parameter and not p.is_meta:
            wide = torch.float32 if p.device.type == "mps" else torch.float64
            values = p.detach()
            sums[name] = p.dtype, values.sum(dtype=wide).item(), values.abs().sum(dtype=wide).item()
    return sums


def _differ(before: Sums, now: Sums) -> bool:
    unit = TOLERANCE * max(before[2], now[2])
    return before[0] == now[0] and any(abs(old - new) > unit for old, new in zip(before[1:], now[1:], strict=True))


__all__ = ["FitsWeights", "FittedWeights"]
