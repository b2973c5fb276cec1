"""Batches spread evenly over the training data, where it has more rows than are used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch import Tensor

from ..core.batches.labelled import batches_of
from ..core.batches.rows import in_batches
from ..engine.tree import tensors


def spread(inputs: Any, wrapped: Any, max_rows: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """Iterate over inputs and targets of about `max_rows` rows, evenly spaced so that sorted data are represented.

    Args:
        inputs: tensor or batches of training inputs; all batches of an iterable without a length are used.
        wrapped: the wrapped model.
        max_rows: number of rows to use at most, roughly.

    Yields:
        Positional inputs, keyword inputs and target of each batch.
    """
    if isinstance(inputs, Tensor):
        step = -(-len(inputs) // max_rows) if inputs.dim() else 1
        yield from batches_of(inputs[::step] if step > 1 else inputs, wrapped)
        return
    yield from batches_of(_some(in_batches(inputs, wrapped), max_rows), wrapped)


def _some(batches: Iterable[Any], max_rows: int) -> Iterator[Any]:
    """Yield every k-th batch, so that they have about `max_rows` rows."""
    step = 1
    for i, batch in enumerate(batches):
        if i == 0 and isinstance(batches, Sized):
            first = next((t for t in tensors(batch) if t.dim()), None)
            rows = len(batches) * (first.shape[0] if first is not None else 1)
            step = max(1, rows // max_rows)
        if i % step == 0:
            yield batch


__all__ = ["spread"]
