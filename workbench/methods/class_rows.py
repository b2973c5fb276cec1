"""Rows that a density is fitted to, with class scores, class numbers and the last layer of a classifier for densities that use them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.outputs.class_scores import Classes
from ..core.outputs.meanings import IGNORED, Values
from ..core.outputs.options import has_classes
from ..core.outputs.resolution import resolve
from ..core.ownership import table_of
from ..engine.tree import flatten, names
from .densities import Density
from .densities.features import Head
from .densities.head import find_head


class TrainingRows(NamedTuple):
    """What a density is fitted to.

    Args:
        features: features of each chosen layer [rows, d].
        scores: class scores [rows, classes]; None if not all batches have them.
        labels: class numbers [rows]; None if not all batches have them.
        value_shape: shape of targets that are measured values, not classes; None if there are none.
        outliers: features, class scores and kind of outliers made of the rows.
    """

    features: list[Tensor]
    scores: Tensor | None
    labels: Tensor | None
    value_shape: list[int] | None
    outliers: list[tuple[list[Tensor], Tensor, str]]


def class_scores(wrapped: Any, y: Any, rows: int) -> Tensor | None:
    """Return the model's class scores [rows, classes], up to a constant per row; None if it has none."""
    leaves, output = flatten(y)[0], wrapped._workbench.output
    meanings = resolve(output, lambda: names(y), leaves, 0)
    scores = [leaf for leaf, meaning in zip(leaves, meanings, strict=True) if isinstance(meaning, Values)]
    if has_classes(output):
        scores = [m.log_scores(leaf) for leaf, m in zip(leaves, meanings, strict=True) if isinstance(m, Classes)]
        scores = [leaf.flatten(0, 1) if leaf.dim() == 3 and leaf.shape[1] == 1 else leaf for leaf in scores]
    matrices = (leaf for leaf in scores if leaf.dim() == 2 and leaf.shape[0] == rows and leaf.shape[1] > 1)
    return next((leaf.detach() for leaf in matrices), None)


def last_layer(wrapped: Any, site: str, density: Density, features: Tensor, logits: Any) -> Head | None:
    """Return weight and bias of the layer that maps the last features to class scores; None if there is none and the density needs none.

    Args:
        wrapped: the wrapped model.
        site: name of the parameter whose layer takes the features.
        density: the density that uses the layer.
        features: inputs of the layer [n, d].
        logits: class scores [n, classes].

    Raises:
        ValueError: if there is no such layer and the density needs one.
    """
    table = table_of(wrapped)
    slots = table.parameters()
    weights = [name for name in reversed(slots) if table.value(name).dim() >= 2]
    biases = [f"{name.removesuffix('weight')}bias" for name in weights]
    pairs = [
        (table.value(weight), table.value(bias) if bias in slots else None)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    head = find_head(pairs, features, logits)
    if head is None and density.needs_head:
        raise ValueError(
            f"neo: density={type(density).__name__} works with the last layer, but no layer of the model computes the class scores from the "
            f"input of {site.rpartition('.')[0] or 'the last layer'} ({features.shape[1]} features) as weight @ x + bias: "
            "the model must end in a linear layer, and if layers= is given, its last name must be that layer. Or choose another density, such "
            "as knn, mahalanobis or energy"
        )
    return head


def class_numbers(target: Any, logits: Tensor | None) -> Tensor | None:
    """Return the target if it may hold class numbers [rows] for these class scores, with the predicted class in place of -100; otherwise None.

    Whether they are in the range of the scores is tested for all batches at once, see `in_range`.
    """
    if (
        logits is None
        or not isinstance(target, Tensor)
        or target.dtype != torch.int64
        or target.shape != logits.shape[:1]
    ):
        return None
    target = target.to(logits.device)
    return torch.where(target == IGNORED, logits.argmax(1), target)


def in_range(numbers: Tensor | None, logits: Tensor | None) -> Tensor | None:
    """Return class numbers [rows] if all of them have a score, otherwise None."""
    if numbers is None or logits is None or not len(numbers):
        return numbers
    lowest, highest = torch.stack(numbers.aminmax()).tolist()  # one wait for a GPU
    return numbers if lowest >= 0 and highest < logits.shape[1] else None


def shape_of_values(target: Any) -> list[int] | None:
    """Return the shape of targets that are measured values; None for class numbers and class probabilities."""
    if not isinstance(target, Tensor) or not target.is_floating_point() or not target.numel():
        return None
    nonnegative = target.dim() == 2 and target.shape[1] > 1 and bool((target >= 0).all())
    return None if nonnegative and torch.allclose(target.sum(1), target.new_ones(()), atol=1e-3) else list(target.shape)


def concatenate_if_all(parts: list[Tensor | None]) -> Tensor | None:
    """Concatenate the parts of all batches; None if a batch has none."""
    present = [part for part in parts if part is not None]
    return torch.cat(present) if len(present) == len(parts) else None


__all__ = [
    "TrainingRows",
    "class_numbers",
    "class_scores",
    "concatenate_if_all",
    "in_range",
    "last_layer",
    "shape_of_values",
]
