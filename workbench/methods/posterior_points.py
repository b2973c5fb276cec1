"""Points of a last layer's Gaussian posterior at which the branches of `laplace` predict."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..core.method import sqrt
from ..core.outputs.class_scores import at_least_float32
from ..engine.plan import Index, Rule, Split
from .densities.moments import full_precision
from .last_layer import AtLayer, augmented

PARTS = ("basis", "variance", "mixing")  # tensors of a `Posterior`
# three points of mean 0 and variance 1, in standard deviations; the first is the model itself
CENTRED = torch.tensor([[0.0], [1.5**0.5], [-(1.5**0.5)]], dtype=torch.float64)


def split_like(rule: Rule, points: Rule, zeros: Rule) -> Rule:
    """Return a rule that gives `points` to the branches of the layer itself, and `zeros` to heads that have another layer in its place."""
    return Split(rule.axis, (points, *[zeros] * (len(rule.options) - 1))) if isinstance(rule, Split) else points


def normal_points(n: int, outputs: int) -> Tensor:
    """Return standard normal draws [n, outputs] in opposite pairs, scaled so that mean 0 and variance 1 hold exactly."""
    half = torch.randn(n // 2, outputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = torch.cat([half, -half, half.new_zeros(n % 2, outputs)])
    return points / points.square().mean(0).sqrt()


def variances(phi: Tensor, basis: Tensor, variance: Tensor) -> Tensor:
    """Return h of `Posterior`, [..., outputs], for features [..., inputs]."""
    with full_precision(phi):
        squares = torch.einsum("...d,kde->...ke", phi, basis).square()
        return squares[..., 0, :] @ variance if len(basis) == 1 else (squares * variance.mT).sum(-1)


class Shift(AtLayer):
    """Shifts the outputs of the last layer by the branch's point, in standard deviations."""

    def __init__(self, layer_names: frozenset[str], parts: list[str], mixed: bool) -> None:
        super().__init__(layer_names)
        self.parts = parts
        self.mixed = mixed

    def tensors(self, installed: dict[str, Tensor], index: Index) -> dict[str, Tensor]:
        self._tensors = [installed[part] for part in self.parts]
        return installed

    def active(
        self, parameters: Sequence[tuple[Tensor, str]], state: Sequence[Tensor], inputs: list[Tensor]
    ) -> AbstractContextManager[Any] | None:
        (basis, variance, mixing, point), self._tensors = self._tensors, []  # keep nothing beyond the branch
        self.trail = ()

        def shifted(features: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
            self.trail = (*self.trail, "layer")
            phi = augmented(features, bias is not None).to(basis.dtype)
            deviation = sqrt(variances(phi, basis, variance)) * point
            if self.mixed:
                with full_precision(phi):
                    deviation = deviation @ mixing.mT
            # not in half precision, where a deviation that is small relative to the output would be rounded away
            wide = at_least_float32(out)
            return wide + deviation.to(wide.dtype)

        return self.at_layer(parameters, state, inputs, shifted)


__all__ = ["CENTRED", "Shift", "normal_points", "split_like", "variances"]
