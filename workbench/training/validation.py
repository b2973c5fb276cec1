"""Split of the rows into training and validation rows."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from workbench.core.batches.arrays import check_columns
from workbench.core.batches.rows import Source, TensorRows
from workbench.data import Data
from workbench.data.reader import read


class DrawnRows(Subset):
    """Rows of a Dataset that `fit` has drawn, which keep their numbers in it."""


def read_and_hold_out(data: Any, validation: Any, batch_size: int | None, seed: int) -> tuple[Source, Source | None]:
    """Return training and validation rows from the arguments of `fit`; the latter are None if validation is 0.

    Of windows of a series, the latest are held out: neighbours of those drawn at random would be trained on, and share most of their values.
    """
    is_share = isinstance(validation, float | np.floating) and 0 < validation < 1
    if is_share and isinstance(data, Data) and data.horizon is not None:
        data, validation = data.validation(float(validation))
    train = read(data, several=True)
    if isinstance(train, DataLoader):
        if batch_size is not None:
            raise ValueError(f"batch_size: the DataLoader has its own; leave batch_size={batch_size} out")
    elif (n := len(cast(Sized, train))) < 2:
        raise ValueError(f"data: found {n} row{'s' * (n != 1)}; training needs at least 2")
    if not isinstance(validation, int | float | np.integer | np.floating):
        _check_columns(data, validation)
        return train, _validation_rows(validation, train)
    if isinstance(train, DataLoader) and validation:
        raise ValueError(
            "validation: the rows of a DataLoader can't be split; give validation=0, or validation=another_loader"
        )
    if isinstance(validation, bool) or not 0 <= validation < 1:
        raise ValueError(f"validation must be a share of at least 0 and below 1, or rows; found {validation!r}")
    if isinstance(train, DataLoader) or not validation:
        return train, None
    return hold_out(train, float(validation), seed)


def _check_columns(data: Any, validation: Any) -> None:
    """Raise if frames of validation rows have the columns of those of training rows in another order."""
    if all(isinstance(rows, tuple | list) and len(rows) == 2 for rows in (data, validation)):
        for label, expected, value in zip("xy", data, validation, strict=True):
            check_columns(expected, value, "validation", label)


def _validation_rows(validation: Any, train: Source) -> Source:
    rows = read(validation, "validation", several=True)
    if isinstance(train, TensorRows) and isinstance(rows, TensorRows):
        shapes = [[tuple(leaf.shape[1:]) for leaf in (*source.inputs, *source.targets)] for source in (train, rows)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"validation: its rows have shapes {shapes[1]}, the training rows {shapes[0]}")
    if not isinstance(rows, DataLoader) and not len(cast(Sized, rows)):
        raise ValueError("validation: it has no rows; give validation=0 to train without validation")
    return rows


def hold_out(
    source: TensorRows | Dataset, fraction: float, seed: int
) -> tuple[TensorRows | Dataset, TensorRows | Dataset]:
    """Split rows into training and validation rows, stratified by class label.

    Taking rows at equal distances in a random order sorted by label is a stratified sample, even if a class has only one row.
    """
    n = len(cast(Sized, source))
    held_out = max(1, round(n * fraction))
    if n - held_out < 2:
        raise ValueError(
            f"data: {n} rows are too few: validation={fraction:g} holds out {held_out}, and training needs at least 2; "
            "give more rows, or validation=0"
        )
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    labels = (
        next((t for t in source.targets if not t.is_floating_point() and t.dim() == 1), None)
        if isinstance(source, TensorRows)
        else None
    )
    if labels is not None:
        order = order[labels.cpu()[order].argsort(stable=True)]
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[order[((torch.arange(held_out) + 0.5) * n / held_out).long()]] = True
    train, valid = (mask.nonzero()[:, 0] for mask in (~chosen, chosen))
    if isinstance(source, TensorRows):
        return source.take(train), source.take(valid)
    return DrawnRows(source, train.tolist()), DrawnRows(source, valid.tolist())
