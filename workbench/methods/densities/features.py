"""Rows that a density learns from or scores: features of several layers, class scores and labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_ROWS = 50  # for a single held-out part to estimate centre and scale

Features = Tensor | Sequence[Tensor]
Head = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Rows:
    """Features, optional class scores and optional labels of the same rows.

    Args:
        layers: Float tensors [n, d_l].
        reduced: Whether the layers are to be reduced (a list was given), or a single matrix is used as it is.
        logits: Class scores [n, classes] up to a constant per row, or None.
        labels: Class numbers [n], int64, or None.
        head: Weight [classes, d] and bias [classes] of the last layer, or None.
    """

    layers: list[Tensor]
    reduced: bool
    logits: Tensor | None = None
    labels: Tensor | None = None
    head: Head | None = None

    def __len__(self) -> int:
        parts = [*self.layers, *([] if self.logits is None else [self.logits])]
        return len(parts[0])

    def take(self, rows: Tensor) -> Rows:
        """Return some of the rows, by index or by mask."""
        logits, labels = (None if part is None else part[rows] for part in (self.logits, self.labels))
        return Rows([v[rows] for v in self.layers], self.reduced, logits, labels, self.head)

    def detached(self, device: torch.device) -> Rows:
        """Return the rows detached from autograd, on a device."""
        logits, labels = (None if part is None else part.detach().to(device) for part in (self.logits, self.labels))
        head = None if self.head is None else (self.head[0].detach().to(device), self.head[1].detach().to(device))
        return Rows([v.detach().to(device) for v in self.layers], self.reduced, logits, labels, head)

    @property
    def device(self) -> torch.device:
        return (self.layers[0] if self.layers else self.logits).device  # type: ignore[union-attr]

    @property
    def finite(self) -> Tensor:
        """Mask [n] of the rows without NaN or infinite values."""
        parts = [*self.layers, *([] if self.logits is None else [self.logits])]
        return torch.stack([v.isfinite().all(1) for v in parts]).all(0)

    @property
    def groups(self) -> Tensor | None:
        """Class number of each row [n]: the label, otherwise the predicted class; None without either."""
        if self.labels is not None:
            return self.labels
        return None if self.logits is None else self.logits.argmax(1)


def check(
    features: Features, logits: Tensor | None = None, labels: Tensor | None = None, head: Head | None = None
) -> Rows:
    """Check features, class scores, labels and last layer, and return them as rows.

    Raises:
        TypeError: If features or logits are not floating-point tensors.
        ValueError: If the shapes do not match, labels are not integers, or a label is not a class number.
    """
    reduced = not isinstance(features, Tensor)
    layers = list(features) if not isinstance(features, Tensor) else [features]
    shapes = [list(v.shape) for v in layers]
    if (not layers and logits is None) or any(not v.is_floating_point() for v in layers):
        raise TypeError(f"features must be floating-point tensors, got {[v.dtype for v in layers]}")
    if any(len(s) != 2 or s[0] != shapes[0][0] or not s[1] for s in shapes):
        raise ValueError(f"features must be matrices [rows, d] with the same rows, got shapes {shapes}; see pool")
    if logits is not None:
        if not logits.is_floating_point():
            raise TypeError(f"logits must be a floating-point tensor, got {logits.dtype}")
        if logits.dim() != 2 or logits.shape[1] < 2 or (shapes and len(logits) != shapes[0][0]):
            rows = f" with the {shapes[0][0]} rows of the features" if shapes else ""
            raise ValueError(
                f"logits must be [rows, classes]{rows}, at least 2 classes, got shape {list(logits.shape)}"
            )
    if labels is not None:
        n = len(layers[0]) if layers else len(logits)  # type: ignore[arg-type]
        if labels.is_floating_point() or labels.is_complex() or labels.shape != (n,):
            raise ValueError(f"labels must be whole numbers [{n}], got {labels.dtype} {list(labels.shape)}")
        n_classes = None if logits is None else logits.shape[1]
        if len(labels) and (labels.min() < 0 or (n_classes is not None and labels.max() >= n_classes)):
            raise ValueError(
                f"labels must be class numbers from 0{f' to {n_classes - 1}' if n_classes else ''}, "
                f"got {int(labels.min())} to {int(labels.max())}"
            )
    if head is not None and layers and logits is not None:
        expected = [logits.shape[1], shapes[-1][1]], [logits.shape[1]]
        if (list(head[0].shape), list(head[1].shape)) != expected:
            raise ValueError(
                f"head must be the weight {expected[0]} and the bias {expected[1]} of the layer from the last features to the logits, got "
                f"shapes {list(head[0].shape)} and {list(head[1].shape)}"
            )
    return Rows(layers, reduced, logits, labels, head)


def split_held_out(rows: Rows, generator: torch.Generator) -> Iterator[tuple[Rows, Rows]]:
    """Split the rows into kept (80 %) and held-out parts: once, or in five folds if there are few rows.

    Args:
        rows: At least 2.
        generator: Shuffles the rows.

    Yields:
        Kept and held-out rows. With fewer than 50 rows, every row is held out once.
    """
    n = len(rows)
    order = torch.randperm(n, generator=generator, device=generator.device).to(rows.device)
    parts = order.chunk(5)
    for held_out in parts[:1] if n >= MIN_ROWS else parts:
        yield rows.take(torch.cat([part for part in parts if part is not held_out])), rows.take(held_out)
