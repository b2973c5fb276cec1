"""Conversion of the rows of a Dataset to tensors, with checks of each row, and lazy splits of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from workbench.data.images import is_image, to_numbers, to_tensor
from workbench.data.splits import LazySplit
from workbench.data.targets import BOOLEAN, as_inputs, as_target, check_target, class_names, kind
from workbench.engine.tree import tree_map


@dataclass(frozen=True)
class RowConversion:
    """Converter of one pair (x, y) to tensors, which raises if the pair does not match the first row.

    Args:
        task, classes, void: as for `as_target`; for several targets dicts by name.
        first: descriptions of x and y of the first row (shapes and dtypes).
    """

    task: Any = None
    classes: Any = None
    void: Any = None
    first: tuple[str, str] | None = None

    def __call__(self, x: Any, y: Any, number: int) -> tuple[Any, Any]:
        """Convert and check row `number`."""
        try:
            if isinstance(y, str) and self.classes is None:
                raise TypeError(f"y is the text {y!r:.100}: give the names of the classes, classes=[...]")
            inputs = tree_map(lambda t: t[0], as_inputs(one_row(x), "x"))
            target, tasks, names = targets(one_row(y, mask=True), self.task, self.classes, self.void)
            if self.classes is not None:
                check_targets(target, tasks, names, "y")
        except (TypeError, ValueError) as error:
            raise type(error)(f"row {number}: {error}") from error
        target = tree_map(lambda t: t[0], target)
        described = kind(inputs), kind(target)
        if self.first is not None and described != self.first:
            raise ValueError(
                f"row {number}: x is {described[0]} and y is {described[1]}; the first row has {self.first[0]} and {self.first[1]}; all "
                "rows of a batch need the same shape: resize or pad them"
            )
        return inputs, target


def targets(y: Any, task: Any, classes: Any, void: Any, lengths: Any = None) -> tuple[Any, Any, Any]:
    """Return target, task and classes as `as_target` does; for a dict of targets three dicts."""
    if not isinstance(y, Mapping):
        return as_target(y, task, classes, void, lengths)
    if not y:
        raise ValueError("y is an empty dict; give at least one target")

    def setting_of(setting: Any, name: Any) -> Any:
        return setting.get(name) if isinstance(setting, Mapping) else setting

    checked = {
        str(name): as_target(
            value,
            setting_of(task, name),
            (classes or {}).get(name),
            setting_of(void, name),
            lengths,
            name=f"y[{name!r}]",
        )
        for name, value in y.items()
    }
    sizes = {len(target) for target, _, _ in checked.values()}
    if len(sizes) > 1:
        raise ValueError(
            f"the targets of y differ in their number of rows; found {kind({n: t for n, (t, _, _) in checked.items()})}"
        )
    tensors, tasks, names = ({name: value[i] for name, value in checked.items()} for i in range(3))
    return tensors, tasks, names


def check_targets(y: Any, task: Any, classes: Any, what: str) -> None:
    """Raise ValueError if a target, or one of a dict of targets, does not fit its task or its classes."""
    if not isinstance(y, Mapping):
        return check_target(y, task, classes, what)
    for name, target in y.items():
        check_target(target, task[name], (classes or {}).get(name), f"{what}[{name!r}]")


def one_row(value: Any, mask: bool = False) -> Any:
    """Convert an input or target of one row to a batch [1, ...]; Pillow images become pixels, masks class numbers."""
    if isinstance(value, Mapping):
        return {key: one_row(item, mask) for key, item in value.items()}
    if is_image(value):
        return (to_numbers(value) if mask else to_tensor(value))[None]
    if isinstance(value, tuple) and any(isinstance(item, Tensor | np.ndarray) for item in value):
        raise TypeError(
            f"a tuple of {len(value)}; give a dict with the names of the arguments or of the outputs as keys"
        )
    return value[None] if isinstance(value, Tensor) else np.asarray(value)[None]


@dataclass(frozen=True)
class PickedColumns:
    """Dataset of pairs (x, y) from a dataset whose rows are dicts.

    Args:
        dataset: map-style dataset of dicts.
        x, y: name of a column, or several names, which give a dict.
    """

    dataset: Any
    x: str | Sequence[str]
    y: str | Sequence[str]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        row = self.dataset[i]
        return tuple(
            row[names] if isinstance(names, str) else {name: row[name] for name in names} for names in (self.x, self.y)
        )  # type: ignore


@dataclass(frozen=True)
class _Targets:
    """Dataset of only the targets of a Dataset."""

    dataset: Any
    convert: RowConversion

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Any:
        x, y = self.dataset[i]
        return self.convert(x, y, i)[1]


def lazily(
    dataset: Any, task: Any, classes: Any, void: Any, workers: int, labels: Tensor | None = None
) -> tuple[LazySplit, Any, Any]:
    """Return a LazySplit of a Dataset, its task and class names. Without given classes, all rows are read once to count them.

    Raises:
        TypeError, ValueError: the dataset is not map-style, or its rows are not pairs that can be trained on.
    """
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"dataset: {type(dataset).__name__} has no numbered rows (__len__ and __getitem__); pass it to fit in a DataLoader, or collect "
            "its rows"
        )
    if not len(dataset):
        raise ValueError(f"dataset: {type(dataset).__name__} has no row")
    row = cast(Any, dataset)[0]
    if not isinstance(row, tuple | list) or len(row) != 2:
        keys = f" with {', '.join(map(repr, row))}" if isinstance(row, Mapping) else ""
        raise TypeError(
            f"dataset: it gives a {type(row).__name__}{keys} for row 0; give a pair (x, y), where each may be a dict of tensors. For rows "
            "that are dicts use Data.from_huggingface(dataset, x=..., y=...)"
        )
    own_classes = getattr(dataset, "classes", None)
    if (
        classes is None
        and isinstance(own_classes, list | tuple)
        and np.ndim(row[1]) == 0
        and not isinstance(row[1], Mapping)
    ):
        classes = tuple(map(str, own_classes))
    convert = RowConversion(task, classes, void)
    inputs, target = convert(row[0], row[1], 0)
    _, tasks, names = targets(one_row(row[1], mask=True), task, classes, void)
    if (
        tasks == "labels"
        and classes is None
        and isinstance(own_classes, list | tuple)
        and len(own_classes) == len(names)
    ):
        names = classes = tuple(map(str, own_classes))
        convert = replace(convert, classes=names)
    convert = replace(convert, task=tasks, first=(kind(inputs), kind(target)))
    split = LazySplit(dataset, convert=convert, labels=labels, workers=workers)
    numbered = tasks.values() if isinstance(tasks, Mapping) else (tasks,)
    if classes is not None or "classification" not in numbered:
        return split, tasks, names
    counts, seen = _count_classes(_Targets(dataset, convert), tasks, workers)
    of_first = names if isinstance(names, Mapping) else {"": names}
    counts |= {name: BOOLEAN for name, count in counts.items() if of_first[name] == BOOLEAN and len(count) <= 2}
    names = dict.fromkeys(tasks) | counts if isinstance(tasks, Mapping) else counts[""]
    convert = replace(convert, classes=names)
    return (
        LazySplit(dataset, convert=convert, labels=labels if labels is not None else seen, workers=workers),
        tasks,
        names,
    )


def _count_classes(rows: _Targets, tasks: Any, workers: int) -> tuple[dict[str, tuple[str, ...]], Tensor | None]:
    """Read all rows, and return the class names of each target, and the class numbers [n] if there is one per row."""
    max_numbers: dict[str, int] = {}
    labels: list[Tensor] = []
    for target in DataLoader(cast(Any, rows), batch_size=None, num_workers=workers, generator=torch.Generator()):
        for name, value in (target if isinstance(target, Mapping) else {"": target}).items():
            if (tasks[name] if name else tasks) == "classification":
                max_numbers[name] = max(max_numbers.get(name, 0), int(value.max()))
                if not name and not value.dim():
                    labels.append(value)
    names = {name: class_names(None, number + 1) for name, number in max_numbers.items()}
    return names, torch.stack(labels) if labels else None


__all__ = ["PickedColumns", "RowConversion", "check_targets", "lazily", "one_row", "targets"]
