"""Rows and batches that are dicts with `labels` (the convention of transformers), converted to pairs of inputs and targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ...engine.effects.private_random import own_random
from ..outputs.meanings import IGNORED
from .call_arguments import as_arguments, needs_both
from .dict_rows import columns, has_labelled_rows, is_labelled, stacked, with_columns
from .graph_rows import graphs_paired, pair_of
from .graphs import is_graph
from .own_loss import LABELS, ROWS, Pairing, decoder_of, pairing_of, refuse_others, without_labels
from .rows import in_batches, split_batch


def paired(wrapped: nn.Module, data: Any, *, targets: bool = True, mask: str | None = None) -> Any:
    """Convert rows in dicts with `labels`, and graphs with `y`, to pairs (x, y); data in any other form is returned unchanged.

    For a dict, x is the dict of the other entries. How labels become targets is inferred from the model's own loss, see `own_loss.pairing_of`.

    Args:
        wrapped: the wrapped model that uses the rows.
        data: a dict of columns, a list of dicts that are rows or batches, a Dataset whose rows are dicts (including Hugging Face datasets), or
            a DataLoader of such batches.
        targets: whether targets are needed; if not, they are only removed.
        mask: name of the mask of the nodes of graphs that count; see `graph_rows.graphs_paired`.

    Raises:
        ValueError: if it cannot be inferred how labels correspond to the scores of the model; the message says what was compared.
        TypeError: if an entry cannot be converted to a tensor.
    """
    data = graphs_paired(data, mask, targets)
    convert = _Converter(wrapped, targets, mask)
    data = with_columns(data)
    if is_labelled(data):
        return convert(columns(data))
    if isinstance(data, list) and data and all(is_labelled(row) for row in data):
        loader = DataLoader(cast(Any, data), batch_size=None, collate_fn=columns, generator=torch.Generator())
        return LabelledLoader(loader, convert)
    if isinstance(data, DataLoader):
        return LabelledLoader(data, convert)
    if has_labelled_rows(data):
        return LabelledRows(data, convert)
    return data


def batches_of(data: Any, wrapped: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """Yield (args, kwargs, targets) for every batch; targets are None if there are none, or if it is unknown where the labels of a dict belong.

    Args:
        data: inputs, pairs (x, y), pairs of inputs for a model that needs two, or dicts with `labels`, in any form that `rows.in_batches`
            accepts.
        wrapped: the model to call.

    Raises:
        ValueError: if some labels are missing (-100) and it is unknown where they belong.
    """
    convert = _Converter(wrapped)
    for batch in in_batches(data, wrapped):
        x, y = split_batch(batch)
        if y is None and is_labelled(x):
            x, y = convert.where_known(x)
        args, kwargs = as_arguments(wrapped, x)
        if y is not None and needs_both(wrapped, args, kwargs, y):
            args, y = (*args, y), None
        yield args, kwargs, y


def kind_of(source: Any) -> str:
    """Return the class name of the data that the user gave."""
    return type(getattr(source, "user_data", source)).__name__


class _Converter:
    """Converts batches to pairs; the pairing is inferred at the first batch.

    Args:
        wrapped, targets, mask: as for `paired`.
    """

    def __init__(self, wrapped: nn.Module, targets: bool = True, mask: str | None = None) -> None:
        self.wrapped, self.targets, self.mask = wrapped, targets, mask
        self._pairing: Pairing | None = None
        self._unknown: Exception | None = None

    def batch(self, batch: Any) -> Any:
        """Return the inputs and targets of a loader's batch, or the batch unchanged."""
        if is_graph(batch):
            return pair_of(batch, self.mask) if self.targets else batch
        return self(columns(batch)) if is_labelled(batch) else batch

    def __call__(self, batch: dict[str, Any]) -> Any:
        refuse_others(batch)
        if not self.targets and decoder_of(self.wrapped, batch) is None:
            return without_labels(batch), torch.zeros(len(batch[LABELS]))
        return self.pairing(batch).pair(batch)

    def where_known(self, batch: Any) -> tuple[Any, Any]:
        """Return inputs and targets; the whole batch and None if it is unknown where its labels belong and none is missing."""
        if self._unknown is None:
            try:
                return self(columns(batch))
            except (TypeError, ValueError) as error:
                self._unknown = error
        if LABELS in batch and bool((torch.as_tensor(batch[LABELS]) == IGNORED).any()):
            raise self._unknown
        return batch, None

    def pairing(self, batch: dict[str, Any]) -> Pairing:
        """Return how labels become targets, inferred at the first call."""
        if self._pairing is None:
            self._pairing = pairing_of(self.wrapped, batch)
        return self._pairing


class LabelledLoader(DataLoader):
    """Proxy of a DataLoader that converts batches with labels, or of graphs, to pairs."""

    def __init__(self, loader: DataLoader, convert: _Converter) -> None:
        self.user_data, self._convert = loader, convert

    def __getattr__(self, name: str) -> Any:
        if name in ("user_data", "_convert"):  # not set yet during unpickling
            raise AttributeError(name)
        return getattr(self.user_data, name)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in self.user_data:
            yield self._convert.batch(batch)

    def __len__(self) -> int:
        return len(self.user_data)


class LabelledRows(Dataset):
    """Dataset that converts rows with labels to pairs.

    Args:
        rows: dataset whose items are dicts.
        convert: converter of batches.
    """

    def __init__(self, rows: Any, convert: _Converter) -> None:
        self.user_data, self._convert = rows, convert
        self.workers = getattr(rows, "workers", 0)
        with own_random(0):
            convert(stacked([columns(rows[i]) for i in range(min(ROWS, len(rows)))]))

    def __len__(self) -> int:
        return len(self.user_data)

    def __getitem__(self, i: int) -> Any:
        x, y = self._convert(stacked([columns(self.user_data[int(i)])]))
        return {name: value[0] for name, value in x.items()}, y[0]


__all__ = ["LabelledLoader", "LabelledRows", "batches_of", "kind_of", "paired"]
