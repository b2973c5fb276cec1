"""Slope of a model's output in the outputs of its last layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.outputs.class_scores import Binary, Classes, Logits, Probs, at_least_float32
from ..core.outputs.meanings import Meaning


def slope_of(
    meaning: Meaning | None, leaf: Tensor, moved: Sequence[Tensor], z: Tensor, steps: Sequence[Tensor]
) -> Tensor | None:
    """Return the slope of each column of an output that is slope * z + constant, elementwise; 1 for class probabilities with logits z.

    Args:
        meaning: meaning of the output.
        leaf: the output.
        moved: the output with each step added to z.
        z: outputs of the layer [rows, ..., columns].
        steps: a number, and the same with a sign for each element of z.

    Returns:
        float64 [columns]; None if the output depends on z in another way.
    """
    ones = torch.ones(z.shape[-1], dtype=torch.float64, device=z.device)
    if leaf.numel() == z.numel() and not leaf.is_complex() and not _gives_probabilities(meaning):
        scores, *others = (
            (meaning.classes_last(t) if isinstance(meaning, Logits) else t).reshape(z.shape) for t in (leaf, *moved)
        )
        if torch.equal(others[1], at_least_float32(z) + steps[1]):
            return ones
        size, tolerance = steps[0], 4 * torch.finfo(z.dtype).eps ** 0.5
        slopes, signed = (((other - scores) / size).double() for other in others)
        slope, most = slopes.reshape(-1, slopes.shape[-1]).mean(0), slopes.abs().max()
        if (
            _close(slopes / most, (slope / most).expand_as(slopes), tolerance)
            and _close(signed / most, slopes * steps[1] / size / most, tolerance)
            and bool(slope.abs().min() > 0.01 * most)
        ):
            return slope
    # a temperature hardly shows in probabilities that are nearly equal, but does after a step
    points = [(leaf, z), *((other, z + step) for other, step in zip(moved, steps, strict=True))]
    return ones if all(_has_logits(meaning, scores, logits) for scores, logits in points) else None


def _close(values: Tensor, expected: Tensor, tolerance: float) -> bool:
    return torch.allclose(values, expected, rtol=0, atol=tolerance)


def _has_logits(meaning: Meaning | None, leaf: Tensor, z: Tensor) -> bool:
    """Whether class scores have the probabilities that logits z have."""
    if isinstance(meaning, Binary):
        if not _gives_probabilities(meaning) or leaf.numel() != z.numel():
            return False
        probs, expected = leaf.reshape(z.shape), at_least_float32(z).sigmoid()
    elif isinstance(meaning, Classes) and leaf.dim():
        probs, expected = meaning.probabilities(leaf), at_least_float32(z).softmax(-1)
    else:
        return False
    tolerance = max(1e-3, 4 * torch.finfo(leaf.dtype).eps)
    return probs.shape == expected.shape and _close(probs.to(expected.dtype), expected, tolerance)


def _gives_probabilities(meaning: Meaning | None) -> bool:
    return isinstance(meaning, Probs) or (isinstance(meaning, Binary) and not meaning.logits)


__all__ = ["slope_of"]
