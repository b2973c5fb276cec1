"""Sums of a model's weights, by which what was fitted to its answers notices that it was trained since."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ..engine.effects.random import values_unavailable
from ..errors import WorkbenchWarning
from ..introspect.source_lines import user_stacklevel
from .additions import EXTRAS

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
        """Return the name of a weight that has changed since this was last asked; "" if none has, other than by a cast to another dtype.

        Weights that were trained together with a method's own module, such as the signature of neo, count as unchanged: what is trained by
        gradient is fitted to them.
        """
        if (versions := _versions(model)) == self._versions:
            return ""
        before, self._versions, self._sums = self._sums, versions, _sums(model)
        names = [name for name, sums in self._sums.items() if name in before and _differ(before[name], sums)]
        return "" if any(EXTRAS in name for name in names) else next(iter(names), "")

    def warn_if_changed(self, model: nn.Module, event: str, answers: str, remedy: str) -> None:
        """Warn, once, if a weight has changed.

        Args:
            model: the model, or a copy of it.
            event: what was fitted to the weights, such as "it was calibrated".
            answers: what belongs to the earlier weights, such as "its intervals".
            remedy: what to do about it.
        """
        if self.warned or values_unavailable() or not (name := self.changed(model)):
            return
        self.warned = True
        warnings.warn(
            f"the weights of the model have changed, such as {name}, since {event}, so that {answers} are those for other weights. {remedy}",
            WorkbenchWarning,
            stacklevel=user_stacklevel(),
        )


def warn_if_trained(wrapped: Any) -> None:
    """Warn, once, if weights of a wrapped object have changed since its methods were fitted in closed form.

    If it is unknown to which weights they were fitted, as after a state was loaded, those at the first call count. Methods that collect
    weights are left out: they predict with what they have collected, and warn themselves.
    """
    record = wrapped._workbench
    names = [method.name for method in record.methods if method.needs_fit and not method.collects]
    if not names or wrapped.training or values_unavailable():
        return
    if record.fitted_weights is None:
        record.fitted_weights = FittedWeights(wrapped)
    event, remedy = f"{' and '.join(names)} saw the training rows", "Call wrapped.fit(...) again with these rows"
    record.fitted_weights.warn_if_changed(wrapped, event, "its risks", remedy)


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


__all__ = ["FittedWeights", "warn_if_trained"]
