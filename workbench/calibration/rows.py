"""Held-out rows in batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from workbench.core.batches.rows import Batch, TensorRows, place, read, rows_loader, split_batch
from workbench.core.batches.target_forms import with_class_numbers
from workbench.data import Data


def batches_of_rows(data: Any, reference: Tensor, size: int, targets: bool) -> Iterator[Batch]:
    """Yield the rows in batches, with inputs on the device and in the dtype of a parameter `reference`."""
    if isinstance(data, Data | str):
        raise ValueError(
            "data: a Data holds training rows, on which a calibration does not hold for new ones; hold some out before training (train, held = "
            "data.validation(0.2)) and give these"
        )
    source = read(data, targets=targets, numbered=False)
    if isinstance(source, TensorRows):
        for numbers in torch.arange(len(source)).split(size):
            rows = source.take(numbers)
            yield Batch(numbers, place(rows.x, reference.device, reference.dtype), rows.y)
        return
    loader = source if isinstance(source, DataLoader) else rows_loader(source, batch_size=size)
    for item in loader:
        if targets and not (isinstance(item, tuple | list) and len(item) == 2):
            raise TypeError(f'data: found {type(item).__name__} instead of pairs (x, y) or dicts with "labels"')
        x, y = split_batch(item)
        y = with_class_numbers(y) if targets else y
        if targets and not isinstance(y, Tensor):
            raise TypeError(f"data: targets must be a tensor, found {type(y).__name__}")
        yield Batch(None, place(x, reference.device, reference.dtype), y)
