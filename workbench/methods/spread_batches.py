"""Batches from all parts of the training data, where there are more than are looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from torch import Tensor

from ..core.batches.call_arguments import batches_of
from ..core.batches.rows import in_batches
from ..engine.tree import tensors


def spread(inputs: Any, wrapped: Any, most: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """Inputs and targets of batches spread evenly over all that there are, as far as their number is known; sorted data are met whole."""
    if isinstance(inputs, Tensor):
        step = -(-len(inputs) // most) if inputs.dim() else 1
        yield from batches_of(inputs[::step] if step > 1 else inputs, wrapped)
        return
    step, inputs = 1, in_batches(inputs, wrapped)
    for i, batch in enumerate(inputs):
        if i == 0 and isinstance(inputs, Sized):
            first = next((t for t in tensors(batch) if t.dim()), None)
            rows = len(inputs) * (first.shape[0] if first is not None else 1)
            step = max(1, rows // most)
        if i % step == 0:
            yield from batches_of([batch], wrapped)


__all__ = ["spread"]
