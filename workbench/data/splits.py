"""Parts of a data set: `Split` with rows in memory, and `LazySplit`, which reads rows when they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from workbench.core.batches.rows import rows_loader
from workbench.data.targets import kind
from workbench.engine.tree import tensors, tree_map

MAX_BYTES = 4 * 2**30  # limit for reading all rows of a LazySplit into memory
INPUT_DTYPES = (torch.float32, torch.uint8, torch.int64, torch.bool)


@dataclass(frozen=True, eq=False)
class Split:
    """One part of a data set: inputs, targets and, if known, the true risk and named regions.

    Args:
        x: inputs [n, ...] in the units of the feature columns: float32, uint8 (such as images) or int64 (such as
            tokens [n, T]); or a dict of them, the keyword arguments of a model.
        y: targets: values float32 [n, k] or maps of them [n, ...]; class numbers int64 [n], per token [n, T] or per pixel [n, H, W], -100 for
            no class; labels int64 [n, k] of 0 and 1; or a dict of targets, one per output.
        sigma: true aleatoric standard deviation, float32 [n, 1], in the units of y; None if unknown.
        regions: named parts of the split, each a bool mask [n], such as "data" and "gap".
        origin: facts about the data set of these rows for model cards, "name" and "columns".

    Raises:
        ValueError: a tensor has another dtype or shape.

    Example:
        >>> import torch
        >>> split = Split(torch.zeros(3, 2), torch.ones(3, 1))
        >>> len(split), len(split.take([0, 2]))
        (3, 2)
    """

    x: Any
    y: Any
    sigma: Tensor | None = None
    regions: Mapping[str, Tensor] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self)
        inputs = self.x if isinstance(self.x, Mapping) else {None: self.x}
        for key, x in inputs.items():
            min_dims = 2 if key is None else 1
            if not isinstance(x, Tensor) or x.dtype not in INPUT_DTYPES or x.ndim < min_dims or len(x) != n:
                raise ValueError(
                    f"{'x' if key is None else f'x[{key!r}]'} must be float32 [n, ...] (or uint8, int64, bool) with "
                    f"{'at least two dimensions' if key is None else f'{n} rows'}; found {kind(x)}"
                )
        targets = self.y if isinstance(self.y, Mapping) else {None: self.y}
        for key, y in targets.items():
            values = isinstance(y, Tensor) and y.dtype == torch.float32 and y.ndim >= 2
            labels = isinstance(y, Tensor) and y.dtype == torch.int64 and (y.ndim == 1 or y.shape[1:] != (1,))
            if not (values or labels) or len(y) != n:
                raise ValueError(
                    f"{'y' if key is None else f'y[{key!r}]'} must be float32 [{n}, 1] or [{n}, ...] (values), or int64 [{n}] or [{n}, ...] "
                    f"(class numbers, labels), one row for each of x; found {kind(y)}"
                )
        if self.sigma is not None and (self.sigma.dtype != torch.float32 or self.sigma.shape != (n, 1)):
            raise ValueError(f"sigma must be float32 [{n}, 1]; found {kind(self.sigma)}")
        for name, mask in self.regions.items():
            if mask.dtype != torch.bool or mask.shape != (n,):
                raise ValueError(f"region {name!r} must be a bool mask [{n}]; found {kind(mask)}")

    def __len__(self) -> int:
        return len(next(iter(tensors(self.x)), ()))

    @property
    def labels(self) -> Tensor | None:
        """Class numbers [n], by which random draws of rows are stratified; None unless each row has exactly one class."""
        return self.y if isinstance(self.y, Tensor) and self.y.dtype == torch.int64 and self.y.ndim == 1 else None

    def take(self, rows: Tensor | Sequence[int] | np.ndarray) -> Split:
        """Return the split of some rows, given by row numbers or a bool mask such as `split.regions["gap"]`."""
        index = row_index(rows)
        x, y = tree_map(lambda t: t[index], (self.x, self.y))
        sigma = None if self.sigma is None else self.sigma[index]
        regions = {name: mask[index] for name, mask in self.regions.items()}
        return Split(x, y, sigma, regions, getattr(self, "origin", {}))  # pickles of earlier versions have no origin

    def dataset(self) -> Dataset:
        """Return a Dataset of pairs (x, y) for `torch.utils.data.DataLoader`."""
        if isinstance(self.x, Tensor) and isinstance(self.y, Tensor):
            return TensorDataset(self.x, self.y)
        return LazySplit(_Rows(self))

    def load(self) -> Split:
        """Return this split, whose rows are in memory already."""
        return self

    def __repr__(self) -> str:
        extra = ["sigma"] if self.sigma is not None else []
        extra += [f"{name}: {int(mask.sum())} rows" for name, mask in self.regions.items()]
        return f"Split({', '.join([f'{len(self)} rows', f'x {kind(self.x)}', f'y {kind(self.y)}', *extra])})"


class LazySplit(Dataset):
    """One part of a data set whose rows are read when needed: a torch Dataset of pairs (x, y).

    `fit`, `wrapped.fit` and `calibrate` read it batch by batch; `x`, `y` and `load()` read all rows into memory.

    Args:
        dataset: map-style Dataset of pairs.
        rows: numbers of the rows in the split [n]; None: all.
        convert: function convert(x, y, number) that checks a pair and converts it to tensors.
        labels: class numbers of all rows of the dataset, if known without reading them.
        workers: number of processes that read rows.
    """

    sigma = None

    def __init__(
        self,
        dataset: Any,
        rows: Tensor | None = None,
        *,
        convert: Any = None,
        labels: Tensor | None = None,
        workers: int = 0,
    ) -> None:
        self.source, self.convert, self.workers = dataset, convert, workers
        self.rows = torch.arange(len(cast(Sized, dataset))) if rows is None else rows
        self._labels = labels
        self.regions: Mapping[str, Tensor] = {}
        self.origin: Mapping[str, Any] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        number = int(self.rows[i])
        row = self.source[number]
        if not isinstance(row, tuple | list) or len(row) != 2:
            raise TypeError(f"row {number} is {type(row).__name__}; it must be a pair (x, y)")
        return (row[0], row[1]) if self.convert is None else self.convert(row[0], row[1], number)

    @property
    def labels(self) -> Tensor | None:
        """Class numbers [n], if known without reading the rows, else None."""
        return None if self._labels is None else self._labels[self.rows]

    @property
    def x(self) -> Any:
        """Inputs of all rows, read into memory."""
        return self._whole.x

    @property
    def y(self) -> Any:
        """Targets of all rows, read into memory."""
        return self._whole.y

    @cached_property
    def _whole(self) -> Split:
        bytes_of_row = sum(t.numel() * t.element_size() for t in tensors(self[0])) if len(self) else 0
        if bytes_of_row * len(self) > MAX_BYTES:
            raise ValueError(
                f"all {len(self):,} rows need {bytes_of_row * len(self) / 2**30:.1f} GiB of memory; read them batch by batch, or load fewer: "
                "take(torch.arange(1000)).load()"
            )
        batches = list(rows_loader(self, batch_size=256, generator=torch.Generator()))
        if not batches:
            raise ValueError("the split has no rows")
        x, y = tree_map(lambda *parts: torch.cat(parts), *[(x, y) for x, y in batches])
        return Split(x, y)

    def load(self) -> Split:
        """Read all rows into memory."""
        return self._whole

    def take(self, rows: Tensor | Sequence[int] | np.ndarray) -> LazySplit:
        """Return the split of some rows, given by number or bool mask, without reading them."""
        chosen = self.rows[row_index(rows)]
        new = LazySplit(self.source, chosen, convert=self.convert, labels=self._labels, workers=self.workers)
        new.origin = getattr(self, "origin", {})
        return new

    def dataset(self) -> Dataset:
        """Return this split, which is a Dataset of pairs (x, y)."""
        return self

    def loader(self, batch_size: int = 64, **options: Any) -> DataLoader:
        """Return a DataLoader that reads the rows in worker processes."""
        return rows_loader(self, batch_size=batch_size, **options)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_whole"}

    def __repr__(self) -> str:
        return f"LazySplit({len(self)} rows of {type(self.source).__name__})"


@dataclass(frozen=True, eq=False)
class _Rows:
    """Dataset of the rows of a split in memory."""

    split: Split

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return tree_map(lambda t: t[i], (self.split.x, self.split.y))


def row_index(rows: Any) -> Tensor:
    """Convert row numbers or a bool mask to a tensor."""
    # torch warns of read-only arrays, such as those of pandas
    if isinstance(rows, np.ndarray) and not rows.flags.writeable:
        rows = rows.copy()
    # an empty list would become a float tensor
    return torch.as_tensor(rows) if len(rows) else torch.empty(0, dtype=torch.int64)
