"""What `wrapped.fit` takes for batches of training inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def inputs_of(batches: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Positional and keyword inputs of every batch; see `batches_of`."""
    return ((args, kwargs) for args, kwargs, _ in batches_of(batches))


def batches_of(batches: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """Positional and keyword inputs and the targets of every batch, None where there are none.

    Args:
        batches: a tensor; or an iterable of inputs or of (input, target) pairs, where an input is a tensor, a tuple of positional inputs, or
            a dict of keyword inputs.
    """
    if isinstance(batches, Tensor):
        yield from (((rows,), {}, None) for rows in batches.split(1024))
        return
    for batch in batches:
        given, *rest = batch if isinstance(batch, list | tuple) else (batch,)
        target = rest[0] if rest else None
        if isinstance(given, dict):
            yield (), given, target
        else:
            yield (tuple(given) if isinstance(given, list | tuple) else (given,)), {}, target
