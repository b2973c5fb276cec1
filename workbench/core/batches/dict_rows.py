"""Rows that are dicts with `labels` (the convention of transformers), converted to dicts of columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ...engine.effects.private_random import own_random
from .rows import describe

LABELS = "labels"
# number of dimensions of one row for inputs of transformers, to distinguish a row from a batch
_DIMS = {"input_ids": 1, "inputs_embeds": 2, "pixel_values": 3, "input_values": 1, "input_features": 2}
_PADDING = (
    'pad all rows to one length (tokenizer(..., padding="max_length")), or give a DataLoader whose collate_fn pads them and fills labels with '
    "-100 (transformers.DataCollatorForTokenClassification, DataCollatorForSeq2Seq)"
)


def with_columns(data: Any, unknown: bool | None = None) -> Any:
    """Convert a list of dicts that are rows with labels to a dict of columns; data in any other form is returned unchanged.

    Args:
        data: data in any form.
        unknown: whether to treat ambiguous dicts as rows; None raises an error for them.

    Raises:
        ValueError: if it is ambiguous whether dicts are rows or batches, or rows differ in length.
    """
    if isinstance(data, list) and data and all(is_labelled(row) for row in data) and _are_rows(data[0], unknown):
        return stacked([columns(row) for row in data])
    return data


def as_inputs(data: Any) -> Any:
    """Convert rows that are dicts with labels to a form that can be batched as inputs, including labels; other data is returned unchanged."""
    data = with_columns(data, unknown=False)
    return _Rows(data) if has_labelled_rows(data) else data


class _Rows(Dataset):
    """Rows of a torch Dataset or a Hugging Face dataset, as dicts of tensors."""

    def __init__(self, source: Any) -> None:
        self.user_data = source
        self.workers = getattr(source, "workers", 0)

    def __len__(self) -> int:
        return len(self.user_data)

    def __getitem__(self, i: int) -> Any:
        return columns(self.user_data[i])


def is_labelled(value: Any) -> bool:
    return isinstance(value, Mapping) and (LABELS in value or "start_positions" in value)


def has_labelled_rows(data: Any) -> bool:
    """Return whether data has indexable rows that are dicts with labels."""
    if isinstance(data, str | bytes | Mapping | Tensor | np.ndarray | list | tuple | TensorDataset | IterableDataset):
        return False
    if isinstance(data, nn.Module) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or not len(data):
        return False
    if not isinstance(data, Dataset) and not hasattr(data, "column_names"):  # not a Hugging Face dataset either
        return False
    with own_random(0):
        return is_labelled(data[0])


def _are_rows(first: Mapping[str, Any], unknown: bool | None) -> bool:
    """Return whether the dicts of a list are rows, not batches, judged by the first."""
    labels = first.get(LABELS)
    if labels is not None and np.ndim(labels) == 0:
        return True
    for name, dims in _DIMS.items():
        if name in first:
            return np.ndim(_tensor(first[name], name)) == dims
    if unknown is not None:
        return unknown
    raise ValueError(
        f"data: a list of dicts with {', '.join(first)}, which may be rows or batches: give one dict of columns [rows, ...], or a DataLoader"
    )


def columns(batch: Any) -> Any:
    """Convert the entries of a dict to tensors; None entries are dropped."""
    return {name: _tensor(value, name) for name, value in batch.items() if value is not None}


def _tensor(value: Any, name: str) -> Any:
    if isinstance(value, Tensor):
        return value
    try:
        array = np.asarray(value)
    except ValueError as error:  # lists of several lengths
        raise ValueError(f"data: the rows of {name!r} have several lengths; {_PADDING}") from error
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"data: {name!r} is {describe(value)}, which cannot be converted to a tensor: remove it, as with dataset.remove_columns([{name!r}])"
        )
    tensor = torch.tensor(array)
    return tensor.to(torch.get_default_dtype()) if array.dtype == np.float64 else tensor


def stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Stack rows to one batch."""
    new = {}
    for name in rows[0]:
        if any(name not in row for row in rows):
            raise ValueError(f"data: not all rows have {name!r}")
        values = [row[name] for row in rows]
        if len({value.shape for value in values}) > 1:
            raise ValueError(f"data: the rows of {name!r} have several lengths; {_PADDING}")
        new[name] = torch.stack(values)
    return new


__all__ = ["LABELS", "as_inputs", "columns", "has_labelled_rows", "is_labelled", "stacked", "with_columns"]
