"""The points of a last layer's Gaussian posterior at which the branches of `laplace` stand."""

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

# mean 0, variance 1; the first is the model itself
CENTRED = torch.tensor([[0.0], [1.5**0.5], [-(1.5**0.5)]], dtype=torch.float64)


def mirrored(rule: Rule, layers: Rule, none: Rule) -> Rule:
    """What the layer's own branches get, and those that have another layer in its place do not."""
    return Split(rule.axis, (layers, *[none] * (len(rule.options) - 1))) if isinstance(rule, Split) else layers


def normal_points(n: int, outputs: int) -> Tensor:
    """Standard normal draws [n, outputs] in opposite pairs, scaled so that mean 0 and variance 1 hold exactly."""
    half = torch.randn(n // 2, outputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = torch.cat([half, -half, half.new_zeros(n % 2, outputs)])
    return points / points.square().mean(0).sqrt()


def variances(phi: Tensor, basis: Tensor, variance: Tensor) -> Tensor:
    """h of `Posterior`: [..., outputs] for features [..., inputs]."""
    with full_precision(phi):
        squares = torch.einsum("...d,kde->...ke", phi, basis).square()
        return squares[..., 0, :] @ variance if len(basis) == 1 else (squares * variance.mT).sum(-1)


class Shift(AtLayer):
    """Moves the outputs by as many standard deviations as the branch's point says."""

    def __init__(self, layer_names: frozenset[str], parts: list[str], mixed: bool) -> None:
        super().__init__(layer_names)
        self.parts = parts
        self.mixed = mixed

    def tensors(self, installed: dict[str, Tensor], index: Index) -> dict[str, Tensor]:
        self._held = [installed[part] for part in self.parts]
        return installed

    def active(
        self, parameters: Sequence[tuple[Tensor, str]], state: Sequence[Tensor], inputs: list[Tensor]
    ) -> AbstractContextManager[Any] | None:
        (basis, variance, mixing, point), self._held = self._held, []  # nothing of a branch may outlive it
        self.trail = ()

        def shifted(features: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
            self.trail = (*self.trail, "layer")
            phi = augmented(features, bias is not None).to(basis.dtype)
            moved = sqrt(variances(phi, basis, variance)) * point
            if self.mixed:
                with full_precision(phi):
                    moved = moved @ mixing.mT
            # half precision could not hold the sum: a deviation that is small beside the output would be lost
            return at_least_float32(out) + moved.to(torch.promote_types(out.dtype, torch.float32))

        return self.at_layer(parameters, state, inputs, shifted)


__all__ = ["CENTRED", "Shift", "mirrored", "normal_points", "variances"]
