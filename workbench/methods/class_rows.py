"""What a classifier says of rows that a density learns from or judges: class scores, class numbers, and the layer that makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.outputs.class_scores import Classes
from ..core.outputs.meanings import Values
from ..core.outputs.options import has_classes
from ..core.outputs.resolution import resolve
from ..core.ownership import table_of
from ..engine.tree import flatten, names
from .densities import Density
from .densities.features import Head
from .densities.head import find_head


def class_scores(wrapped: Any, y: Any, rows: int) -> Tensor | None:
    """The model's class scores [rows, classes], up to a constant for each row; None if it gives none."""
    leaves, output = flatten(y)[0], wrapped._workbench.output
    meanings = resolve(output, lambda: names(y), leaves, 0)
    scores = [leaf for leaf, meaning in zip(leaves, meanings, strict=True) if isinstance(meaning, Values)]
    if has_classes(output):
        scores = [m.log_scores(leaf) for leaf, m in zip(leaves, meanings, strict=True) if isinstance(m, Classes)]
        scores = [leaf.flatten(0, 1) if leaf.dim() == 3 and leaf.shape[1] == 1 else leaf for leaf in scores]
    fits = (leaf for leaf in scores if leaf.dim() == 2 and leaf.shape[0] == rows and leaf.shape[1] > 1)
    return next((leaf.detach() for leaf in fits), None)


def last_layer(wrapped: Any, site: str, density: Density, features: Tensor, logits: Any) -> Head | None:
    """Weight and bias of the layer that makes class scores of the last features; None if no layer does and the density needs none.

    Args:
        wrapped: the object.
        site: the parameter whose layer is given the features.
        density: that asks for it.
        features: Tensor [n, d].
        logits: class scores [n, classes].

    Raises:
        ValueError: If no layer does and the density can't do without.
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
            f"neo: density={type(density).__name__} works with the last layer, and no layer of the model makes the class scores out of "
            f"what enters {site.rpartition('.')[0] or 'the last layer'} ({features.shape[1]} features) as weight @ x + bias: "
            "the model must end in a linear layer, and layers= must name it last where it is given. Choose another density, knn, "
            "mahalanobis or energy for example"
        )
    return head


def class_numbers(target: Any, logits: Tensor | None) -> Tensor | None:
    """Class numbers [rows] for class scores, None if the target holds none."""
    if (
        logits is None
        or not isinstance(target, Tensor)
        or target.dtype != torch.int64
        or target.shape != logits.shape[:1]
    ):
        return None
    fits = not len(target) or (int(target.min()) >= 0 and int(target.max()) < logits.shape[1])
    return target.to(logits.device) if fits else None


def measurements(target: Any) -> list[int] | None:
    """The shape of targets that are measured numbers, None of class numbers and of probabilities of classes."""
    if not isinstance(target, Tensor) or not target.is_floating_point() or not target.numel():
        return None
    shares = target.dim() == 2 and target.shape[1] > 1 and bool((target >= 0).all())
    return None if shares and torch.allclose(target.sum(1), target.new_ones(()), atol=1e-3) else list(target.shape)


__all__ = ["class_numbers", "class_scores", "last_layer", "measurements"]
