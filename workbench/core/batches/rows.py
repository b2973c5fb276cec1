"""Reading of training rows from tensors, arrays, data sets, Datasets, DataLoaders and batches."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from ...engine.tree import tensors, tree_map
from .arrays import check_index, is_frame, numbers_of
from .graphs import batched, is_graph, mapped
from .target_forms import with_class_numbers

FORMS = "workbench Data, a pair (x, y) of tensors or arrays, a torch Dataset of such pairs, or a DataLoader"
TWO_OF_MORE = (
    "If rows have more parts, such as an index or a weight, select two: DataLoader(dataset, collate_fn=lambda rows: "
    "torch.utils.data.default_collate([(row[0], row[1]) for row in rows])); use row weights in a WeightedRandomSampler"
)
BATCH = 1024  # batch size where it does not affect the result
CHECKED_AT_ONCE = 2**22  # numbers


@dataclass(frozen=True, eq=False)
class TensorRows:
    """Rows in memory.

    Args:
        x: inputs [n, ...]: a tensor, a tuple of positional inputs, or a dict of keyword inputs (or of the items of one input).
        y: targets [n, ...], or a tuple or dict of them, one for each output of the model that is trained.
    """

    x: Tensor | tuple[Tensor, ...] | dict[str, Tensor]
    y: Any

    def __len__(self) -> int:
        return len(self.targets[0])

    @property
    def args(self) -> tuple[Any, ...]:
        """The inputs as a tuple of positional arguments."""
        return self.x if isinstance(self.x, tuple) else (self.x,)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """All tensors of the inputs."""
        return tuple(tensors(self.x))

    @property
    def targets(self) -> tuple[Tensor, ...]:
        """All tensors of the targets."""
        return tuple(tensors(self.y))

    @property
    def device(self) -> torch.device:
        """Device of the targets."""
        return self.targets[0].device

    def take(self, index: Tensor) -> TensorRows:
        """Return the rows with the given numbers."""

        def rows(t: Tensor) -> Tensor:
            return t[index.to(t.device)]

        return TensorRows(tree_map(rows, self.x), tree_map(rows, self.y))

    def to(self, device: torch.device, dtype: torch.dtype) -> TensorRows:
        """Move the rows to a device, and cast floating-point tensors to a dtype."""
        return TensorRows(place(self.x, device, dtype), place(self.y, device, dtype))

    def batches(self, size: int) -> Iterator[TensorRows]:
        """Yield consecutive batches of `size` rows."""
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield TensorRows(*tree_map(operator.itemgetter(rows), (self.x, self.y)))


Source = TensorRows | Dataset | DataLoader


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch.

    Args:
        numbers: numbers of its rows; None if a DataLoader made it.
        x, y: inputs and targets.
        source: original pair (x, y) if rows were augmented, otherwise None.
    """

    numbers: Tensor | None
    x: Any
    y: Any
    source: tuple[Any, Any] | None = None

    def __len__(self) -> int:
        return len(next(iter([*tensors(self.y), *tensors(self.x)])))

    def name_rows(self, positions: Iterable[int]) -> str:
        """Name rows by their numbers, or else by their places in the batch, as in "rows of the batch 3, 5"; at most five."""
        first = list(itertools.islice(positions, 5))
        numbers = first if self.numbers is None else self.numbers[first].tolist()
        return f"{'rows of the batch' if self.numbers is None else 'rows'} {', '.join(map(str, numbers))}"


def read(
    data: Any, name: str = "data", *, targets: bool = True, numbered: bool = True, several: bool = False
) -> Source:
    """Read rows in any supported form: as `TensorRows` if they are in memory, otherwise the Dataset or DataLoader itself.

    Args:
        data: a workbench Data (its training rows) or Split, a pair (x, y) of tensors or arrays, where x may be a tuple of positional or a dict
            of keyword inputs, a TensorDataset, another Dataset of pairs, or a DataLoader.
        name: name of the argument, for errors.
        targets: whether targets are needed; if not, inputs alone are accepted as well (y is then zeros [n]), and y is not checked.
        numbered: whether rows are accessed by number, which an IterableDataset does not support.
        several: whether a tuple or dict of targets, one per output, is accepted.

    Raises:
        TypeError: if data has another form.
        ValueError: if x and y do not belong together, or contain NaN or infinite numbers.
    """
    if isinstance(data, TensorDataset):
        if len(data.tensors) == 1 and not targets:
            return _inputs_alone(data.tensors[0], name)
        if len(data.tensors) != 2:
            raise TypeError(
                f"{name}: a TensorDataset of one tensor; it must hold two, TensorDataset(x, y)"
                if len(data.tensors) < 2
                else f"{name}: a TensorDataset of {len(data.tensors)} tensors; it must hold two, x and y: "
                "TensorDataset(*dataset.tensors[:2]). For row weights use a DataLoader with a WeightedRandomSampler"
            )
        return _pair(*data.tensors, name=name, needed=targets)
    if isinstance(data, DataLoader):
        check_batched(data, name)
        return data
    data = _training_rows(data)
    if isinstance(data, Dataset):
        _check_dataset(data, name, targets, numbered)
        return data
    if _has_columns(data):
        return _pair(data.x, data.y, name, several, targets)
    if isinstance(data, tuple | list) and len(data) == 2:
        return _pair(data[0], data[1], name, several, targets)
    if not targets and (isinstance(data, Tensor | np.ndarray | Mapping) or is_frame(data)):
        return _inputs_alone(data, name)
    hint = "; workbench.data.Data.from_dataframe(frame, target=...) makes a Data of it" if is_frame(data) else ""
    raise TypeError(f"{name}: found {describe(data)}; give {FORMS}{hint}")


def in_batches(data: Any, wrapped: nn.Module) -> Iterable[Any]:
    """Return rows in any supported form as batches in order: inputs, or pairs (x, y).

    Args:
        data: a form that `read` accepts, inputs alone, or an iterable of batches. Two tensors with equal numbers of rows are a pair (x, y) if
            they are in a tuple, and two batches if they are in a list. A tuple of an input and a tuple of targets is a pair as well; two
            tuples are two batches. A tensor and batches are not converted.
        wrapped: the model, to whose dtype floating-point numbers in other forms are cast.

    Raises:
        TypeError, ValueError: as for `read`.
    """
    if isinstance(data, Tensor):
        return data.split(BATCH)
    if isinstance(data, DataLoader):
        check_batched(data, "data")
    if isinstance(data, IterableDataset | DataLoader):
        return data
    data = _training_rows(data)
    inputs_only = (
        isinstance(data, np.ndarray | Mapping)
        or is_frame(data)
        or (isinstance(data, TensorDataset) and len(data.tensors) == 1)
    )
    if inputs_only or isinstance(data, Dataset) or _has_columns(data) or _is_pair(data):
        pairs = not inputs_only and (isinstance(data, TensorDataset) or not isinstance(data, Dataset))
        source = read(data, targets=pairs, several=True)
        if not isinstance(source, TensorRows):
            return rows_loader(cast(Dataset, source), batch_size=BATCH)
        like = first_weight(wrapped)
        batches = (rows.to(rows.device, like.dtype) for rows in source.batches(BATCH))
        return [rows.x if inputs_only else (rows.x, rows.y) for rows in batches]
    if not isinstance(data, Iterable) or isinstance(data, str | bytes):
        raise TypeError(f"data: found {describe(data)}; give {FORMS}, or batches of inputs or of such pairs in a list")
    return data


def check_batched(loader: DataLoader, name: str) -> None:
    """Raise ValueError if an unbatched DataLoader yields single rows of a TensorDataset, whose columns would be mistaken for rows."""
    dataset: Any = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if (
        loader.batch_sampler is None
        and isinstance(dataset, TensorDataset)
        and not isinstance(loader.sampler, BatchSampler)
    ):
        raise ValueError(
            f"{name}: the DataLoader has batch_size=None and gives single rows; give it a batch_size, or give its dataset"
        )


def rows_loader(dataset: Dataset, **options: Any) -> DataLoader:
    """Create a DataLoader with the number of worker processes in the attribute `workers` of the dataset (or of what it is a Subset of)."""
    source: Any = dataset
    while isinstance(source, Subset):
        source = source.dataset
    return DataLoader(dataset, **{"num_workers": getattr(source, "workers", 0), "collate_fn": _collated, **options})


def _collated(rows: list[Any]) -> Any:
    if is_graph(rows[0]):
        return batched(rows)
    if isinstance(rows[0], tuple) and is_graph(rows[0][0]):
        targets = [torch.as_tensor(y) for _, y in rows]
        # targets have several rows per graph (such as nodes), or are one number per graph
        join = torch.cat if targets[0].dim() else torch.stack
        return batched([graph for graph, _ in rows]), join(targets)
    try:
        return default_collate(rows)
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        raise ValueError(
            f"data: the rows differ in shape, and those of a batch must be equal ({error}): give a DataLoader whose collate_fn pads them, such "
            "as with torch.nn.utils.rnn.pad_sequence"
        ) from error


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Split a batch into inputs and targets (None if there are none); a list of positional inputs, as made by collation, becomes a tuple.

    Raises:
        TypeError: if it has more than two parts.
    """
    x, *rest = batch if isinstance(batch, list | tuple) else (batch,)
    if len(rest) > 1:
        raise TypeError(f"data: a batch is {describe(batch)}; it must be inputs, or a pair (x, y). {TWO_OF_MORE}")
    return tuple(x) if isinstance(x, list) else x, rest[0] if rest else None


def place(tree: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Move the tensors of a tree to a device, and cast floating-point ones to a dtype."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return mapped(leaf, moved) if is_graph(leaf) else leaf
        return leaf.to(device, dtype) if leaf.is_floating_point() else leaf.to(device)

    return tree_map(moved, tree)


def first_weight(model: Any) -> Tensor:
    """Return the first floating-point parameter of a model, whose device and dtype its inputs get; an empty tensor if there is none."""
    return next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))


def bad_rows(values: Any, infinite: bool = True) -> Tensor:
    """Return the numbers of the rows of a tensor [n, ...] that contain NaN (or infinity)."""
    if not isinstance(values, Tensor) or not (values.is_floating_point() or values.is_complex()) or not values.numel():
        return torch.empty(0, dtype=torch.int64)
    rows = values.detach().reshape(len(values), -1)
    bad: list[Tensor] = []
    # in parts, since the conditions take several times the memory of the values
    for part in rows.split(max(1, CHECKED_AT_ONCE // rows.shape[1])):
        if part.sum().isfinite():  # then all of them are, and a sum is quicker
            bad.append(torch.zeros(len(part), dtype=torch.bool, device=part.device))
        else:
            bad.append((~part.isfinite() if infinite else part.isnan()).any(1))
    return torch.cat(bad).nonzero()[:, 0].cpu()


def describe(value: Any) -> str:
    """Describe a value in error messages.

    Example:
        >>> describe(torch.zeros(2, 3)), describe((1, 2)), describe("text")
        ('a tensor [2, 3]', 'a tuple of 2', 'str')
    """
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__


def _training_rows(data: Any) -> Any:
    """Return the training rows of a workbench Data, or of an object with its interface; anything else is returned unchanged."""
    rows = getattr(data, "train", data)
    return rows if isinstance(rows, Dataset) or _has_columns(rows) else data


def _has_columns(data: Any) -> bool:
    """Return whether data is a workbench Split, or has its interface."""
    return hasattr(data, "x") and hasattr(data, "y")


def _is_pair(data: Any) -> bool:
    """Return whether data is a tuple (x, y) rather than two batches."""
    if not isinstance(data, tuple) or len(data) != 2:
        return False
    x, y = data
    if isinstance(y, Mapping):
        targets = list(y.values())
        same_keys = isinstance(x, Mapping) and x.keys() == y.keys()  # two batches of inputs
    else:
        # beside a single input, a tuple holds the targets of several outputs; beside a tuple, both may be batches of pairs
        targets, same_keys = list(y) if isinstance(y, tuple) and not isinstance(x, tuple | list) else [y], False
    if same_keys or not all(
        (isinstance(target, Tensor | np.ndarray) or is_frame(target)) and target.ndim for target in targets
    ):
        return False
    inputs = tensors(
        tree_map(lambda leaf: torch.empty(leaf.shape) if isinstance(leaf, np.ndarray) or is_frame(leaf) else leaf, x)
    )
    return {len(t) for t in inputs if t.dim()} == {len(target) for target in targets}


def _check_dataset(data: Dataset, name: str, targets: bool, numbered: bool) -> None:
    if numbered and (isinstance(data, IterableDataset) or not isinstance(data, Sized)):
        raise TypeError(f"{name}: {type(data).__name__} has no numbered rows; give it in a DataLoader")
    row = data[0] if targets and isinstance(data, Sized) and len(data) else None
    if row is not None and not (isinstance(row, tuple | list) and len(row) == 2):
        raise TypeError(
            f"{name}: {type(data).__name__} gives {describe(row)} for row 0; it must give a pair (x, y)"
            + (
                ' or a dict with targets under the name "labels"'
                if isinstance(row, Mapping)
                else f". {TWO_OF_MORE}"
                if isinstance(row, tuple | list) and len(row) > 2
                else ""
            )
        )


def _inputs_alone(x: Any, name: str) -> TensorRows:
    inputs = _inputs(x, name)
    return TensorRows(inputs, torch.zeros(len(next(iter(tensors(inputs))))))


def _pair(x: Any, y: Any, name: str, several: bool = False, needed: bool = True) -> TensorRows:
    for part in x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple) else [x]:
        check_index(part, y, name)
    targets = _targets(y, name)
    if not several and not isinstance(targets, Tensor):
        raise TypeError(f"{name}: y is {describe(y)} of targets; this takes one tensor of targets [rows, ...]")
    rows = TensorRows(_inputs(x, name), with_class_numbers(targets) if needed else targets)
    for leaf in (*rows.inputs, *rows.targets):
        if len(leaf) != len(rows):
            raise ValueError(f"{name}: x has {len(leaf)} rows and y has {len(rows)}; both need the same number of rows")
    # infinite numbers are allowed in one of several inputs, which may be a mask, and are an error otherwise
    several = len(rows.inputs) > 1
    checked = rows.targets if needed else ()
    for label, leaf in [*(("x", leaf) for leaf in rows.inputs), *(("y", leaf) for leaf in checked)]:
        bad = bad_rows(leaf, infinite=label == "y" or not several)
        if len(bad):
            raise ValueError(
                f"{name}: {label} holds NaN or infinite numbers in {len(bad)} of {len(leaf)} rows, first in row "
                f"{int(bad[0])}; drop these rows or fill the gaps"
            )
    return rows


def _targets(y: Any, name: str, label: str = "y") -> Any:
    """Convert targets to a tensor or a tree of tensors; a tuple of numbers is one column."""
    if isinstance(y, tuple) and y and all(isinstance(part, Tensor | np.ndarray) and part.ndim for part in y):
        return tuple(_targets(part, name, f"{label}[{i}]") for i, part in enumerate(y))
    if isinstance(y, Mapping) and y:
        return {key: _targets(part, name, f"{label}[{key!r}]") for key, part in y.items()}
    return _tensor(y, label, name)


def _inputs(x: Any, name: str) -> Any:
    if isinstance(x, tuple):
        return tuple(_tensor(value, f"x[{i}]", name) for i, value in enumerate(x))
    if isinstance(x, Mapping) and len(x):  # a TensorDict has no truth value
        return {key: _tensor(value, f"x[{key!r}]", name) for key, value in x.items()}
    return _tensor(x, "x", name)


def _tensor(value: Any, label: str, name: str) -> Tensor:
    try:
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(numbers_of(value))
    except TypeError as error:
        raise TypeError(
            f"{name}: {label} is {describe(value)} and can't be made a tensor of numbers: {error}"
        ) from error
    except ValueError as error:
        raise TypeError(
            f"{name}: {label} is {describe(value)} and can't be made a tensor of numbers: its rows differ in shape; pad sequences of unequal "
            "length, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)"
        ) from error
    if not tensor.dim():
        raise ValueError(
            f"{name}: {label} is {'None' if value is None else 'a single number'}; its first dimension must be the rows"
        )
    if tensor.layout not in (torch.strided, torch.jagged):  # other layouts do not support selecting rows
        raise TypeError(
            f"{name}: {label} is a tensor {list(tensor.shape)} of {tensor.layout}; give {label}.to_dense(), or batches in a DataLoader"
        )
    if tensor.is_meta:
        raise TypeError(f"{name}: {label} is a tensor {list(tensor.shape)} on the meta device, which has no numbers")
    return tensor
