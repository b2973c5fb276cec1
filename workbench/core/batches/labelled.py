"""Rows and batches that are dicts with `labels`, the convention of transformers, as pairs of inputs and targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ...engine.effects.private_random import own_random
from .graph_rows import graphs_paired, pair_of
from .graphs import is_graph
from .own_loss import LABELS, ROWS, Pairing, decoder_of, pairing_of, refuse_others, without_labels
from .rows import describe

# the dimensions of one row of what models of transformers take, where the numbers alone could be one row or a batch
_DIMS = {"input_ids": 1, "inputs_embeds": 2, "pixel_values": 3, "input_values": 1, "input_features": 2}
_PADDING = (
    'make all rows of one length (tokenizer(..., padding="max_length")), or give a DataLoader whose collate_fn pads them and fills labels with '
    "-100 (transformers.DataCollatorForTokenClassification, DataCollatorForSeq2Seq)"
)


def paired(wrapped: nn.Module, data: Any, *, targets: bool = True, mask: str | None = None) -> Any:
    """Rows in dicts with `labels`, and graphs with `y`, as pairs (x, y); data in any other form as they are.

    Of a dict x is the dict of the other entries.

    How labels become targets is what the model's own loss says, see `own_loss.pairing_of`.

    Args:
        wrapped: the wrapped model that the rows are for.
        data: a dict of columns, a list of dicts that are rows or batches, a Dataset whose rows are dicts (also one of the package datasets), or
            a DataLoader of such batches.
        targets: whether they are needed; if not, they are only taken away.
        mask: the name of the mask of the nodes of graphs that count; see `graph_rows.graphs_paired`.

    Raises:
        ValueError: it cannot be told how the labels belong to the scores of the model; the message says what was compared.
        TypeError: an entry is nothing that a tensor can be made of.
    """
    data = graphs_paired(data, mask, targets)
    convert = _Converter(wrapped, targets, mask)
    if _is_labelled(data):
        return convert(_columns(data))
    if isinstance(data, list) and data and all(_is_labelled(row) for row in data):
        if _are_rows(data[0]):
            return convert(_stacked([_columns(row) for row in data]))
        loader = DataLoader(cast(Any, data), batch_size=None, collate_fn=_columns, generator=torch.Generator())
        return LabelledLoader(loader, convert)
    if isinstance(data, DataLoader):
        return LabelledLoader(data, convert)
    if _has_labelled_rows(data):
        return LabelledRows(data, convert)
    return data


def kind_of(source: Any) -> str:
    """The name of the class of what the user gave."""
    return type(getattr(source, "given", source)).__name__


class _Converter:
    """Makes pairs of batches; how is found out at the first one.

    Args:
        wrapped, targets, mask: as of `paired`.
    """

    def __init__(self, wrapped: nn.Module, targets: bool, mask: str | None = None) -> None:
        self.wrapped, self.targets, self.mask = wrapped, targets, mask
        self._pairing: Pairing | None = None

    def batch(self, batch: Any) -> Any:
        """Inputs and targets of a batch of a loader, or the batch as it is."""
        if is_graph(batch):
            return pair_of(batch, self.mask) if self.targets else batch
        return self(_columns(batch)) if _is_labelled(batch) else batch

    def __call__(self, batch: dict[str, Any]) -> Any:
        refuse_others(batch)
        if not self.targets and decoder_of(self.wrapped, batch) is None:
            return without_labels(batch), torch.zeros(len(batch[LABELS]))
        return self.pairing(batch).pair(batch)

    def pairing(self, batch: dict[str, Any]) -> Pairing:
        """How labels become targets."""
        if self._pairing is None:
            self._pairing = pairing_of(self.wrapped, batch)
        return self._pairing


class LabelledLoader(DataLoader):
    """A DataLoader whose batches with labels, or of graphs, come as pairs; all others as they are, and all else as it has it."""

    def __init__(self, loader: DataLoader, convert: _Converter) -> None:
        self.given, self._convert = loader, convert

    def __getattr__(self, name: str) -> Any:
        if name in ("given", "_convert"):  # not there yet, as while it is unpickled
            raise AttributeError(name)
        return getattr(self.given, name)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in self.given:
            yield self._convert.batch(batch)

    def __len__(self) -> int:
        return len(self.given)


class LabelledRows(Dataset):
    """Rows with labels as pairs.

    Args:
        rows: whose items are dicts.
        convert: of a batch.
    """

    def __init__(self, rows: Any, convert: _Converter) -> None:
        self.given, self._convert = rows, convert
        self.workers = getattr(rows, "workers", 0)
        with own_random(0):
            convert(_stacked([_columns(rows[i]) for i in range(min(ROWS, len(rows)))]))

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, i: int) -> Any:
        x, y = self._convert(_stacked([_columns(self.given[int(i)])]))
        return {name: value[0] for name, value in x.items()}, y[0]


def _is_labelled(value: Any) -> bool:
    return isinstance(value, Mapping) and (LABELS in value or "start_positions" in value)


def _has_labelled_rows(data: Any) -> bool:
    """Whether something has numbered rows that are dicts with labels."""
    if isinstance(data, str | bytes | Mapping | Tensor | np.ndarray | list | tuple | TensorDataset | IterableDataset):
        return False
    if isinstance(data, nn.Module) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or not len(data):
        return False
    if not isinstance(data, Dataset) and not hasattr(data, "column_names"):  # as those of the package datasets
        return False
    with own_random(0):
        return _is_labelled(data[0])


def _are_rows(first: Mapping[str, Any]) -> bool:
    """Whether dicts in a list are rows, not batches.

    Raises:
        ValueError: if it cannot be told.
    """
    labels = first.get(LABELS)
    if labels is not None and np.ndim(labels) == 0:
        return True
    for name, dims in _DIMS.items():
        if name in first:
            return np.ndim(_tensor(first[name], name)) == dims
    raise ValueError(
        f"data: a list of dicts with {', '.join(first)}, which may be rows or batches: give one dict of columns [rows, ...], or a DataLoader"
    )


def _columns(batch: Any) -> Any:
    """The entries as tensors."""
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
            f"data: {name!r} is {describe(value)}, and no tensor can be made of it: leave it out, as dataset.remove_columns([{name!r}]) does"
        )
    tensor = torch.tensor(array)
    return tensor.to(torch.get_default_dtype()) if array.dtype == np.float64 else tensor


def _stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows as one batch."""
    new = {}
    for name in rows[0]:
        if any(name not in row for row in rows):
            raise ValueError(f"data: not all rows have {name!r}")
        values = [row[name] for row in rows]
        if len({value.shape for value in values}) > 1:
            raise ValueError(f"data: the rows of {name!r} have several lengths; {_PADDING}")
        new[name] = torch.stack(values)
    return new


__all__ = ["LabelledLoader", "LabelledRows", "kind_of", "paired"]
