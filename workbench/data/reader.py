"""Reading of rows in all accepted forms: names of data sets here, all others by `workbench.core.batches.rows`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from workbench.core.batches.rows import Source, TensorRows, rows_loader
from workbench.core.batches.rows import read as read_rows
from workbench.core.batches.target_forms import with_class_numbers
from workbench.data.columns import Card, Column, name_in, names_in
from workbench.data.data_set import UNNAMED, Data
from workbench.data.loading import load
from workbench.data.split_drawing import partition
from workbench.data.splits import Split
from workbench.data.targets import BOOLEAN, VOID, class_names, finite_float, is_boolean, kind

TEST_SHARE = 0.2  # share of test rows, for rows that are not a Data


def read(data: Any, name: str = "data", several: bool = False) -> Source:
    """Return the rows to train on, from the name of a data set or any form accepted by `workbench.core.batches.rows.read`.

    Args:
        data: name for `load`, or rows.
        name: name of the argument for error messages.
        several: whether a tuple or dict of targets, one per output, is accepted.

    Raises:
        TypeError, ValueError: as `load` and `workbench.core.batches.rows.read`.
    """
    return read_rows(load(data) if isinstance(data, str) else data, name, several=several)


def data_of(data: Any, split: int = 0, task: str | None = None) -> Data:
    """Return a Data from a Data, a name, or rows in another form, of which a fifth become test rows.

    Args:
        data: Data, name for `load`, or rows (x, y) as for `read`, with x [n, ...] and y as class numbers [n] or values [n] or
            [n, 1]. Rows of a Dataset or DataLoader are read once and kept in memory. Names of the columns of frames are kept.
        split: number of the split, for a name or rows.
        task: "regression" if whole numbers in y are values, "classification" if 0 and 1 in floating point are class numbers; None: as the
            dtype says.

    Raises:
        TypeError, ValueError: data is of another form, or has too few rows.

    Example:
        >>> d = data_of((torch.rand(50, 2), torch.arange(50) % 2))
        >>> d.task, len(d.train), len(d.test)
        ('classification', 40, 10)
    """
    if isinstance(data, str):
        return one_target(load(data, split=split))
    if isinstance(data, Data):
        if len(data.train) < 20 or not len(data.test):
            raise ValueError(
                f"data: {data.name} has {len(data.train)} training and {len(data.test)} test rows; at least 20 and 1 are needed: give more"
            )
        return one_target(data)
    source = read_rows(data)
    rows, boolean = (source, is_boolean(_target_of(data))) if isinstance(source, TensorRows) else _collected(source)
    x, y = _checked(rows, task)
    inputs, targets = data if isinstance(data, tuple | list) and len(data) == 2 else (None, None)
    classes = not y.is_floating_point()
    names = None if not classes else BOOLEAN if boolean else class_names(None, int(y.max()) + 1)
    try:
        train, test = partition(len(x), TEST_SHARE, split, y if classes else None)
    except ValueError as error:
        raise ValueError(f"data: the rows can't be cut into training and test rows: {error}") from error
    return Data(
        UNNAMED,
        "classification" if classes else "regression",
        Split(x[train], y[train]),
        Split(x[test], y[test]),
        tuple(map(Column, names_in(inputs) or [f"x{i + 1}" if x.shape[1] > 1 else "x" for i in range(x.shape[1])])),
        Column(name_in(targets) or ("class" if classes else "y")),
        Card(f"{len(x):,} rows, given as tensors", "", "", "", (f"test rows: {len(test):,}, drawn at random",)),
        names,
        split,
    )


def one_target(data: Data) -> Data:
    """Return the data in memory, with one value or one class per row, as tables that compare wrappers need.

    Counts become regression targets, and uint8 inputs floating-point numbers.

    Raises:
        ValueError: the data have maps, tokens, several targets or inputs; the message names alternatives.
    """
    if isinstance(data.task, Mapping):
        unsupported = f"the targets {', '.join(data.task)}"
    elif data.task == "labels":
        unsupported = f"{data.n_outputs} labels a row"
    else:
        first = data.train.take([0]).load()
        if not isinstance(first.x, Tensor):
            unsupported = f"the inputs {', '.join(first.x)}"
        elif first.y.shape[1:] != ((1,) if data.classes is None else ()):
            unsupported = (
                f"targets {kind(first.y)[: -len(str(list(first.y.shape)))]}{['n', *first.y.shape[1:]]}".replace("'", "")
            )
        else:
            unsupported = ""
    if unsupported:
        raise ValueError(
            f"data: {data.name} has {unsupported}; this takes one tensor x, and one value or one class a row. `Explorer`, `Comparison`, "
            "`workbench compare` and experiments.grid take maps, tokens, several columns of targets and several labels as well. Or train with "
            "workbench.fit(wrapped, data), ask wrapped(x, return_risk=True) for the risks of test rows, and draw them with workbench.plots"
        )
    train, test = (in_memory(split) for split in (data.train, data.test))
    if data.classes is not None and any(bool((split.y == VOID).any()) for split in (train, test)):
        raise ValueError(
            f"data: {data.name} has rows without a class ({VOID}); leave them out, such as train.take(train.y != {VOID})"
        )
    if train is data.train and test is data.test and data.task != "counts":
        return data
    return replace(data, train=train, test=test, task="classification" if data.classes is not None else "regression")


def in_memory(split: Any) -> Split:
    """Return a split with its rows in memory, and pixels in bytes as floats."""
    split = split.load()
    return split if split.x.dtype != torch.uint8 else replace(split, x=split.x.float())


def _target_of(data: Any) -> Any:
    """Return the targets as they were given, if rows are in memory."""
    if isinstance(data, TensorDataset):
        return data.tensors[1]
    return data[1] if isinstance(data, tuple | list) and len(data) == 2 else None


def _collected(source: Any) -> tuple[TensorRows, bool]:
    """Return all rows of a Dataset or DataLoader in memory, and whether their targets are True and False."""
    pairs = list(source if isinstance(source, DataLoader) else rows_loader(source, batch_size=1024))
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
            raise TypeError("data: the batches must be pairs (x, y) of one tensor each")
    if not pairs:
        raise ValueError("data: there is no row")
    x, y = (torch.cat([pair[i] for pair in pairs]) for i in range(2))
    return cast(TensorRows, read_rows((x, with_class_numbers(y)))), is_boolean(y)


def _checked(rows: TensorRows, task: str | None) -> tuple[Tensor, Tensor]:
    """Check rows, and return x float32 [n, ...] and y float32 [n, 1] or int64 [n]."""
    if not isinstance(rows.x, Tensor):
        raise TypeError(f"data: x is a {type(rows.x).__name__} of {len(rows.inputs)} inputs; one tensor is needed")
    x, y = rows.x.cpu(), rows.y.cpu()
    x = finite_float(x, "data: x")
    if len(x) < 25:
        raise ValueError(f"data: found {len(x)} rows; at least 25 are needed, of which a fifth is held out")
    y = y.reshape(len(y), -1)
    if y.shape[1] != 1:
        raise ValueError(f"data: y has {y.shape[1]} columns; one target at a time can be compared, such as y[:, :1]")
    values = y.is_floating_point() if task is None else task == "regression"
    y = finite_float(y, "data: y") if values else y[:, 0].long()
    if not y.is_floating_point() and int(y.min()) < 0:
        raise ValueError(f"data: class numbers start at 0; found {int(y.min())}")
    return x if x.ndim > 1 else x[:, None], y
