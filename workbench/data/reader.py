"""Read rows from every form that users give: names of data sets here, all others by `workbench.core.batches.rows`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from workbench.core.batches.rows import Source, TensorRows, rows_loader, with_class_numbers
from workbench.core.batches.rows import read as read_rows
from workbench.data.columns import Card, Column
from workbench.data.data_set import UNNAMED, Data
from workbench.data.loading import load
from workbench.data.split_drawing import partition
from workbench.data.splits import Split
from workbench.data.targets import VOID, finite_float, kind

HELD_OUT = 0.2  # share of the rows that become test rows, where they are not a Data


def read(data: Any, name: str = "data", several: bool = False) -> Source:
    """The rows to train on: those of a named data set, or of any form that `workbench.core.batches.rows.read` takes.

    Args:
        data: a name that `load` takes, or rows.
        name: of the argument, for errors.
        several: whether a tuple or dict of targets is taken, one for each output.

    Raises:
        TypeError, ValueError: as `load` and `workbench.core.batches.rows.read`.
    """
    return read_rows(load(data) if isinstance(data, str) else data, name, several=several)


def data_of(data: Any, split: int = 0) -> Data:
    """A Data of what the user has: one, the name of one, or rows in another form, a fifth of which become test rows.

    Args:
        data: a Data, a name that `load` takes, or rows (x, y) as `read` takes them, with x [n, ...] and y, class numbers [n] or values [n] or
            [n, 1]. Rows of a Dataset or DataLoader are gone through once and kept.
        split: which split, for a name or rows.

    Raises:
        TypeError, ValueError: it is something else, or has too few rows.

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
    rows = source if isinstance(source, TensorRows) else _collected(source)
    x, y = _checked(rows)
    classes = not y.is_floating_point()
    try:
        train, test = partition(len(x), HELD_OUT, split, y if classes else None)
    except ValueError as error:
        raise ValueError(f"data: the rows can't be cut into training and test rows: {error}") from error
    return Data(
        UNNAMED,
        "classification" if classes else "regression",
        Split(x[train], y[train]),
        Split(x[test], y[test]),
        tuple(Column(f"x{i + 1}" if x.shape[1] > 1 else "x") for i in range(x.shape[1])),
        Column("class" if classes else "y"),
        Card(f"{len(x):,} rows, given as tensors", "", "", "", (f"test rows: {len(test):,}, drawn at random",)),
        tuple(map(str, range(int(y.max()) + 1))) if classes else None,
        split,
    )


def one_target(data: Data) -> Data:
    """A Data of one number or one class for each row, in memory, which is what tables of wrappers side by side are made of.

    Counts are values there, and bytes floating-point numbers.

    Raises:
        ValueError: it has maps, tokens, several targets or inputs; the message says what goes instead.
    """
    if isinstance(data.task, Mapping):
        what = f"the targets {', '.join(data.task)}"
    elif data.task == "labels":
        what = f"{data.n_outputs} labels a row"
    else:
        first = data.train.take([0]).load()
        if not isinstance(first.x, Tensor):
            what = f"the inputs {', '.join(first.x)}"
        elif first.y.shape[1:] != ((1,) if data.classes is None else ()):
            what = f"targets {kind(first.y)[: -len(str(list(first.y.shape)))]}{['n', *first.y.shape[1:]]}".replace(
                "'", ""
            )
        else:
            what = ""
    if what:
        raise ValueError(
            f"data: {data.name} has {what}; this takes one tensor x, and one value or one class a row. `Explorer`, `Comparison`, `workbench "
            "compare` and experiments.grid take maps, tokens, several columns of targets and several labels as well. Or train with "
            "workbench.fit(wrapped, data), ask wrapped(x, return_risk=True) for the risks of test rows, and draw them with workbench.plots"
        )
    train, test = (_in_memory(split) for split in (data.train, data.test))
    if data.classes is not None and any(bool((split.y == VOID).any()) for split in (train, test)):
        raise ValueError(
            f"data: {data.name} has rows without a class ({VOID}); leave them out, such as train.take(train.y != {VOID})"
        )
    if train is data.train and test is data.test and data.task != "counts":
        return data
    return replace(data, train=train, test=test, task="classification" if data.classes is not None else "regression")


def _in_memory(split: Any) -> Split:
    split = split.load()
    return split if split.x.dtype != torch.uint8 else replace(split, x=split.x.float())


def _collected(source: Any) -> TensorRows:
    """All rows of a Dataset or DataLoader."""
    pairs = list(source if isinstance(source, DataLoader) else rows_loader(source, batch_size=1024))
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
            raise TypeError("data: the batches must be pairs (x, y) of one tensor each")
    if not pairs:
        raise ValueError("data: there is no row")
    x, y = (torch.cat([pair[i] for pair in pairs]) for i in range(2))
    return cast(TensorRows, read_rows((x, with_class_numbers(y))))


def _checked(rows: TensorRows) -> tuple[Tensor, Tensor]:
    """x float32 [n, ...], and y float32 [n, 1] or int64 [n]."""
    if not isinstance(rows.x, Tensor):
        raise TypeError(f"data: x is a {type(rows.x).__name__} of {len(rows.inputs)} inputs; one tensor is needed")
    x, y = rows.x.cpu(), rows.y.cpu()
    x = finite_float(x, "data: x") if x.is_floating_point() else x.float()
    if len(x) < 25:
        raise ValueError(f"data: found {len(x)} rows; at least 25 are needed, of which a fifth is held out")
    y = y.reshape(len(y), -1)
    if y.shape[1] != 1:
        raise ValueError(f"data: y has {y.shape[1]} columns; one target at a time can be compared, such as y[:, :1]")
    y = finite_float(y, "data: y") if y.is_floating_point() else y[:, 0]
    if not y.is_floating_point() and int(y.min()) < 0:
        raise ValueError(f"data: class numbers start at 0; found {int(y.min())}")
    return x if x.ndim > 1 else x[:, None], y
