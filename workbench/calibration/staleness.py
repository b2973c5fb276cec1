"""Notice that a model was trained after something had been fitted to its answers."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from workbench.core.fitted_weights import FittedWeights
from workbench.engine.effects.random import values_unavailable
from workbench.errors import WorkbenchWarning
from workbench.introspect.source_lines import user_stacklevel


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


__all__ = ["FitsWeights"]
