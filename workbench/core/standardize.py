"""Standardisation between the user's units and the model's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..engine.tree import is_float, tree_map


class Scaling(nn.Module):
    """Standardises the first input and undoes it for predictions and risks.

    Args:
        x_mean, x_scale: what is subtracted from the first positional input, and what it is divided by; None leaves inputs alone.
        y_mean, y_scale: the same for targets; None leaves outputs alone.
    """

    NAMES = ("x_mean", "x_scale", "y_mean", "y_scale")

    def __init__(
        self,
        x_mean: Tensor | None = None,
        x_scale: Tensor | None = None,
        y_mean: Tensor | None = None,
        y_scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        for name, value in zip(self.NAMES, (x_mean, x_scale, y_mean, y_scale), strict=True):
            self.register_buffer(name, None if value is None else torch.as_tensor(value).detach().clone())
        for kind in ("x", "y"):
            scale = getattr(self, f"{kind}_scale")
            if (getattr(self, f"{kind}_mean") is None) != (scale is None):
                raise ValueError(f"{kind}_mean and {kind}_scale go together: give both or neither")
            if scale is not None and not bool((scale > 0).all()):
                raise ValueError(
                    f"{kind}_scale must be positive everywhere, its smallest value is {scale.min().item():g}"
                )

    def inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The positional inputs in standardised units."""
        if self.x_mean is None or not args or not is_float(args[0]):
            return args
        return ((args[0] - self.x_mean) / self.x_scale, *args[1:])

    def original(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `inputs` was given."""
        if self.x_mean is None or not args or not is_float(args[0]):
            return args
        return (args[0] * self.x_scale + self.x_mean, *args[1:])

    def targets(self, y: Any) -> Any:
        """Targets in standardised units."""
        return (
            y if self.y_mean is None else tree_map(lambda t: (t - self.y_mean) / self.y_scale if is_float(t) else t, y)
        )

    def prediction(self, y: Any) -> Any:
        """Predictions in original units."""
        return y if self.y_mean is None else tree_map(lambda t: t * self.y_scale + self.y_mean if is_float(t) else t, y)

    def risk(self, risk: Any) -> Any:
        """Standard deviations in original units."""
        return risk if self.y_mean is None else tree_map(lambda t: t * self.y_scale if is_float(t) else t, risk)
