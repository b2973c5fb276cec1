"""Notice that a model was trained after something had been fitted to its answers."""

from __future__ import annotations

from typing import Any

from torch import nn

from workbench.core.fitted_weights import FittedWeights
from workbench.engine.effects.random import values_unavailable


class FitsWeights(nn.Module):
    """Module around a model `wrapped` that warns, once, if it is asked after the model's weights have changed.

    Attributes:
        weights: those that it was fitted to; None if unknown, as after a state was loaded: then those at the next call.
    """

    wrapped: nn.Module
    weights: FittedWeights | None = None
    # what was fitted to the weights, what belongs to them, and what to do if they change
    refit = "it was calibrated", "its answers", "Calibrate again"

    def warn_if_trained(self) -> None:
        """Warn if the weights have changed."""
        if values_unavailable():
            return
        if self.weights is None:
            self.weights = FittedWeights(self.wrapped)
        self.weights.warn_if_changed(self.wrapped, *self.refit)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.weights = None
        super()._load_from_state_dict(*args)


__all__ = ["FitsWeights"]
