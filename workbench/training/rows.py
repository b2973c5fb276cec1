"""Rows to train on: read from what users have, checked, cut, standardised and dealt out in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from workbench.engine.tree import tensors, tree_map

ACCEPTED = "workbench Data, a pair (x, y) of tensors or arrays, a torch Dataset of such pairs, or a DataLoader"


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows in memory: x is a tensor [n, ...] or a tuple of positional arguments [n, ...], y is [n, ...]."""

    x: Tensor | tuple[Tensor, ...]
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    @property
    def args(self) -> tuple[Tensor, ...]:
        """The inputs as positional arguments."""
        return self.x if isinstance(self.x, tuple) else (self.x,)

    def take(self, index: Tensor) -> Rows:
        """Some of the rows, by number."""
        return Rows(tree_map(lambda t: t[index.to(t.device)], self.x), self.y[index.to(self.y.device)])

    def to(self, device: torch.device, dtype: torch.dtype) -> Rows:
        """The rows on a device, floating-point numbers in a dtype."""

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.to(device, dtype) if leaf.is_floating_point() else leaf.to(device)

        return Rows(tree_map(place, self.x), place(self.y))


Source = Rows | Dataset | DataLoader


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch: numbers of its rows (None where a DataLoader made it), inputs and targets."""

    numbers: Tensor | None
    x: Any
    y: Any

    @property
    def args(self) -> tuple[Any, ...]:
        """The inputs as positional arguments."""
        return self.x if isinstance(self.x, tuple) else (self.x,)

    def __len__(self) -> int:
        return len(next(iter([*tensors(self.y), *tensors(self.x)])))


def read(data: Any, name: str = "data") -> Source:
    """What users give, as `Rows` where it is in memory, else the Dataset or DataLoader itself.

    Raises:
        TypeError: it is something else.
        ValueError: x and y do not belong together, or hold numbers that nothing can be learned from.
    """
    if isinstance(data, TensorDataset):
        if len(data.tensors) != 2:
            raise TypeError(f"{name}: a TensorDataset of {len(data.tensors)} tensors; it must hold two, x and y")
        return _rows(*data.tensors, name=name)
    if isinstance(data, DataLoader):
        return data
    if isinstance(data, Dataset):
        if isinstance(data, IterableDataset) or not isinstance(data, Sized):
            raise TypeError(f"{name}: {type(data).__name__} has no numbered rows; give it in a DataLoader")
        pair = data[0] if len(data) else None
        if pair is not None and not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(f"{name}: {type(data).__name__} gives {_kind(pair)} for row 0; it must give a pair (x, y)")
        return data
    part = getattr(data, "train", data)
    if hasattr(part, "x") and hasattr(part, "y"):
        return _rows(part.x, part.y, name)
    if isinstance(data, tuple | list) and len(data) == 2:
        return _rows(data[0], data[1], name)
    raise TypeError(f"{name}: found {_kind(data)}; give {ACCEPTED}")


def _rows(x: Any, y: Any, name: str) -> Rows:
    inputs = tuple(_tensor(part, f"x[{i}]", name) for i, part in enumerate(x)) if isinstance(x, tuple) else None
    rows = Rows(_tensor(x, "x", name) if inputs is None else inputs, target(_tensor(y, "y", name)))
    for part in rows.args:
        if len(part) != len(rows.y):
            raise ValueError(f"{name}: x has {len(part)} rows and y has {len(rows.y)}; they must have the same")
    # an infinite number is meant where one of several arguments is a mask, and an error anywhere else
    several = len(rows.args) > 1
    for label, part in [*(("x", part) for part in rows.args), ("y", rows.y)]:
        bad = bad_rows(part, infinite=label == "y" or not several)
        if len(bad):
            raise ValueError(
                f"{name}: {label} holds NaN or infinite numbers in {len(bad)} of {len(part)} rows, first in row "
                f"{int(bad[0])}; drop these rows or fill the gaps"
            )
    return rows


def bad_rows(values: Any, infinite: bool = True) -> Tensor:
    """Numbers of the rows of a tensor [n, ...] that hold NaN (or infinity)."""
    if not isinstance(values, Tensor) or not (values.is_floating_point() or values.is_complex()) or not values.numel():
        return torch.empty(0, dtype=torch.int64)
    bad = ~values.isfinite() if infinite else values.isnan()
    return bad.reshape(len(values), -1).any(1).nonzero()[:, 0].cpu()


def _tensor(value: Any, part: str, name: str) -> Tensor:
    try:
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: {part} is {_kind(value)} and can't be made a tensor of numbers: {error}") from error
    if not tensor.dim():
        raise ValueError(f"{name}: {part} is a single number; its first dimension must be the rows")
    return tensor


def target(y: Any) -> Any:
    """Targets with class numbers as int64, whatever integers they came as."""
    return tree_map(lambda t: t if not isinstance(t, Tensor) or t.is_floating_point() else t.long(), y)


def cut(source: Rows | Dataset, fraction: float, seed: int) -> tuple[Rows | Dataset, Rows | Dataset]:
    """Rows to train on and rows to validate on; class labels keep their shares as well as whole rows can.

    Every k-th of the rows, in random order but sorted by label, is a stratified sample; a class may have one row.
    """
    n = len(cast(Sized, source))
    held = max(1, round(n * fraction))
    if n - held < 2:
        raise ValueError(f"data: {n} rows are too few to train on 2 and hold out {fraction:g} for validation")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    if isinstance(source, Rows) and not source.y.is_floating_point() and source.y.dim() == 1:
        order = order[source.y.cpu()[order].argsort(stable=True)]
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[order[((torch.arange(held) + 0.5) * n / held).long()]] = True
    parts = [mask.nonzero()[:, 0] for mask in (~chosen, chosen)]
    if isinstance(source, Rows):
        return source.take(parts[0]), source.take(parts[1])
    return Subset(source, parts[0].tolist()), Subset(source, parts[1].tolist())


def moments(values: Tensor, centre: bool = True) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over the rows: for each column of [n, d], one for all numbers of other shapes.

    Args:
        values: [n, ...], at least 2 rows.
        centre: False sets the mean to 0; the scale is then the root mean square.

    Returns:
        (mean, scale), float64 [d] or []; a column that never varies has scale 1.

    Example:
        >>> moments(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        (tensor([2., 5.], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))
    """
    values = values.double() if values.dim() == 2 else values.double().flatten()
    scale, mean = torch.std_mean(values, 0, correction=0)
    if not centre:
        mean, scale = torch.zeros_like(mean), values.square().mean(0).sqrt()
    constant = values.amin(0) == values.amax(0)  # rounding gives a constant column a spread of about 1e-17, not 0
    return mean, scale.where(~constant & (scale > 0), 1.0)


class Batches:
    """The rows in batches, on a device and in a dtype; each iteration goes through all of them once.

    Args:
        source: what `read` gave.
        size: rows in a batch; the last one may have fewer, but never one. A DataLoader has its own.
        device: where the batches go.
        dtype: what floating-point numbers are cast to; integers stay.
        generator: draws a new order of the rows for every iteration; None keeps the order.
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

    def __len__(self) -> int:
        if isinstance(self.source, DataLoader):
            return len(self.source)
        n = len(cast(Sized, self.source))
        return max(1, n // self.size if n % self.size == 1 else -(-n // self.size))

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self.source, DataLoader):
            for pair in self.source:
                if not (isinstance(pair, tuple | list) and len(pair) == 2):
                    raise TypeError(f"data: the DataLoader gives {_kind(pair)}; it must give pairs (x, y)")
                yield self._batch(None, *pair)
            return
        n = len(cast(Sized, self.source))
        order = torch.arange(n) if self.generator is None else torch.randperm(n, generator=self.generator)
        if isinstance(self.source, Rows):
            order = order.to(self.source.y.device)
        # one row has no spread, so batch norm fails on it, and no two voters can share it
        chunks = list(order[: len(self) * self.size].split(self.size))
        chunks[-1] = torch.cat([chunks[-1], order[len(self) * self.size :]])
        if isinstance(self.source, Rows):
            for numbers in chunks:
                rows = self.source.take(numbers)
                yield self._batch(numbers, rows.x, rows.y)
            return
        loader = DataLoader(self.source, batch_sampler=cast(Any, [numbers.tolist() for numbers in chunks]))
        for numbers, pair in zip(chunks, loader, strict=True):
            yield self._batch(numbers, *pair)

    def _batch(self, numbers: Tensor | None, x: Any, y: Any) -> Batch:
        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            dtype = self.dtype if leaf.is_floating_point() else leaf.dtype
            pinned = self.device.type == "cuda" and leaf.device.type == "cpu"  # copies of other memory are waited for
            leaf = leaf.to(dtype).pin_memory() if pinned else leaf
            return leaf.to(self.device, dtype, non_blocking=pinned)

        # collating makes a list of a tuple of positional arguments
        return Batch(numbers, tree_map(place, tuple(x) if isinstance(x, list) else x), tree_map(place, target(y)))


class Inputs:
    """Pairs (x, y) of batches, as often as they are asked for; a pair tells inputs from several arguments."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return ((batch.x, batch.y) for batch in self.batches)


def checksum(source: Source | None) -> str:
    """What tells one set of rows from another: sha256 of rows in memory, else their kind and number."""
    if not isinstance(source, Rows):
        return "none" if source is None else f"{type(source).__name__} of {len(cast(Sized, source))}"
    total = hashlib.sha256()
    for part in (*source.args, source.y):
        total.update(f"{part.dtype} {tuple(part.shape)}\n".encode())
        total.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"an object of type {type(value).__name__}"
