"""Batches of training rows, on a device and in a dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from workbench.core.batches.arrays import numbers_of
from workbench.core.batches.graphs import is_graph, mapped
from workbench.core.batches.rows import (
    TWO_OF_MORE,
    Batch,
    Source,
    TensorRows,
    describe,
    rows_loader,
)
from workbench.core.batches.target_forms import with_class_numbers
from workbench.engine.tree import tree_map
from workbench.training.validation import DrawnRows

MEMORY_SHARE = 1 / 8  # of the free memory of a device, which rows may take


class Batches:
    """The rows in batches, on a device and in a dtype; each iteration passes over all rows once.

    Args:
        source: rows as returned by `read`.
        size: rows per batch; the last batch may have fewer, but never one. A DataLoader has its own batch size.
        device: device of the batches.
        dtype: dtype to which floating-point numbers are cast; integers are not cast.
        generator: draws a new order of the rows for each iteration; None keeps the order.
    """

    def __init__(
        self,
        source: Source,
        size: int,
        device: torch.device,
        dtype: torch.dtype,
        generator: torch.Generator | None = None,
    ) -> None:
        self.source, self.size, self.device, self.dtype, self.generator = source, size, device, dtype, generator
        self._rows: TensorRows | None = None  # the rows where batches are taken from them

    def __len__(self) -> int:
        if isinstance(self.source, DataLoader):
            return len(self.source)
        n = len(cast(Sized, self.source))
        return max(1, n // self.size if n % self.size == 1 else -(-n // self.size))

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self.source, DataLoader):
            for pair in self.source:
                if not (isinstance(pair, tuple | list) and len(pair) == 2):
                    raise TypeError(
                        f'data: the DataLoader yields {describe(pair)}; it must yield pairs (x, y), or dicts with "labels"'
                        + (f". {TWO_OF_MORE}" if isinstance(pair, tuple | list) and len(pair) > 2 else "")
                    )
                yield self._batch(None, *pair)
            return
        n = len(cast(Sized, self.source))
        order = torch.arange(n) if self.generator is None else torch.randperm(n, generator=self.generator)
        source = self._within_reach(self.source) if isinstance(self.source, TensorRows) else self.source
        if isinstance(source, TensorRows):
            order = _sent(order, source.device)
        # no batch of one row: batch norm can't compute its variance, and it can't be divided among voters
        chunks = list(order[: len(self) * self.size].split(self.size))
        chunks[-1] = torch.cat([chunks[-1], order[len(self) * self.size :]])
        if isinstance(source, TensorRows):
            for numbers in chunks:
                rows = source.take(numbers)
                yield self._batch(numbers, rows.x, rows.y)
            return
        loader = rows_loader(source, batch_sampler=cast(Any, [numbers.tolist() for numbers in chunks]))
        in_dataset = torch.tensor(source.indices) if isinstance(source, DrawnRows) else torch.arange(n)
        for numbers, pair in zip(chunks, loader, strict=True):
            yield self._batch(in_dataset[numbers], *pair)

    def _within_reach(self, source: TensorRows) -> TensorRows:
        """Return the rows, moved once to the device if they fit."""
        if self._rows is None:
            fits = _fit(source, self.device, self.dtype)
            self._rows = source.to(self.device, self.dtype) if fits else source
        return self._rows

    def _batch(self, numbers: Tensor | None, x: Any, y: Any) -> Batch:
        def placed(leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray):  # returned by a collate_fn
                leaf = torch.tensor(numbers_of(leaf))
            if not isinstance(leaf, Tensor):
                return mapped(leaf, placed) if is_graph(leaf) else leaf
            return _sent(leaf.to(self.dtype) if leaf.is_floating_point() else leaf, self.device)

        # the default collate_fn turns a tuple of positional arguments into a list
        x = tuple(x) if isinstance(x, list) else x
        return Batch(numbers, tree_map(placed, x), with_class_numbers(tree_map(placed, y)))


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, without waiting for a GPU: copies from unpinned memory would."""
    pinned = device.type == "cuda" and tensor.is_cpu
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=pinned)


def _fit(rows: TensorRows, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether rows are elsewhere and few enough to be moved to a device: copying each batch takes longer than a step of a small model."""
    leaves = [*rows.inputs, *rows.targets]
    free_memory = getattr(torch.get_device_module(device), "mem_get_info", None)
    if free_memory is None or all(leaf.device == device for leaf in leaves):
        return False
    size = sum(leaf.numel() * (dtype.itemsize if leaf.is_floating_point() else leaf.itemsize) for leaf in leaves)
    return all(leaf.layout is torch.strided for leaf in leaves) and size <= MEMORY_SHARE * free_memory(device)[0]


class Pairs:
    """Re-iterable pairs (x, y) of batches, where x may be one input or several arguments."""

    of_training = True

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return ((batch.x, batch.y) for batch in self.batches)
