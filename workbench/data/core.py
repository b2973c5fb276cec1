"""Data sets: columns with units, training and test rows, and a card that says where they are from."""

from __future__ import annotations

import hashlib
import html
import operator
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from workbench.errors import require

Task = Literal["regression", "classification"]


@dataclass(frozen=True)
class Column:
    """One column of a table: its name and its unit ("" where it has none or none is known)."""

    name: str
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Card:
    """Where a data set is from, what may be done with it, how to cite it, and what to beware of."""

    description: str
    source: str
    licence: str
    citation: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Split:
    """One part of a data set: inputs, targets and, where they are known, the true risk and named regions.

    Args:
        x: inputs, float32 [n, ...], in the units of the feature columns.
        y: targets, float32 [n, 1] for regression, int64 [n] (class numbers) for classification.
        sigma: true aleatoric standard deviation, float32 [n, 1], in the units of y; None where it is not known.
        regions: named parts of the split, each a bool mask [n], such as "data" and "gap".

    Raises:
        ValueError: a tensor has another dtype or shape.

    Example:
        >>> import torch
        >>> split = Split(torch.zeros(3, 2), torch.ones(3, 1))
        >>> len(split), len(split.take([0, 2]))
        (3, 2)
    """

    x: Tensor
    y: Tensor
    sigma: Tensor | None = None
    regions: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.x)
        values = self.y.dtype == torch.float32 and self.y.shape == (n, 1)
        labels = self.y.dtype == torch.int64 and self.y.shape == (n,)
        if self.x.dtype != torch.float32 or self.x.ndim < 2:
            raise ValueError(f"x must be float32 [n, ...] with at least two dimensions; found {_kind(self.x)}")
        if not (values or labels):
            raise ValueError(
                f"y must be float32 [{n}, 1] (regression) or int64 [{n}] (class numbers), "
                f"one row for each of x; found {_kind(self.y)}"
            )
        if self.sigma is not None and (self.sigma.dtype != torch.float32 or self.sigma.shape != (n, 1)):
            raise ValueError(f"sigma must be float32 [{n}, 1]; found {_kind(self.sigma)}")
        for name, mask in self.regions.items():
            if mask.dtype != torch.bool or mask.shape != (n,):
                raise ValueError(f"region {name!r} must be a bool mask [{n}]; found {_kind(mask)}")

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: Tensor | Sequence[int] | np.ndarray) -> Split:
        """The split with these rows only: row numbers, or a bool mask such as `split.regions["gap"]`."""
        # an empty list would become floats
        index = torch.as_tensor(rows) if len(rows) else torch.empty(0, dtype=torch.int64)
        sigma = None if self.sigma is None else self.sigma[index]
        return Split(self.x[index], self.y[index], sigma, {name: mask[index] for name, mask in self.regions.items()})

    def dataset(self) -> TensorDataset:
        """The pairs (x, y), as `torch.utils.data.DataLoader` wants them."""
        return TensorDataset(self.x, self.y)

    def __repr__(self) -> str:
        extra = ["sigma"] if self.sigma is not None else []
        extra += [f"{name}: {int(mask.sum())} rows" for name, mask in self.regions.items()]
        return f"Split({', '.join([f'{len(self)} rows', f'x {_kind(self.x)}', f'y {_kind(self.y)}', *extra])})"


@dataclass(frozen=True, eq=False)
class Data:
    """A data set, cut into training and test rows, with its card.

    Args:
        name: what `load` calls it.
        task: "regression" or "classification".
        train: the training rows.
        test: the test rows; never choose anything by them, see `validation`.
        features: the columns of x (one per channel for images).
        target: the column y.
        card: description, source, licence, citation and notes.
        classes: names of the classes, in the order of their numbers; None for regression.
        split: which of the fixed splits (or the seed of the draw) this is.

    Raises:
        ValueError: task, classes and the dtype of y disagree, or train and test rows differ in shape.

    Example:
        >>> from workbench import data
        >>> d = data.load("cubic", n_train=100)
        >>> d.input_shape, d.n_outputs, len(d.train)
        ((1,), 1, 100)
    """

    name: str
    task: Task
    train: Split
    test: Split
    features: tuple[Column, ...]
    target: Column
    card: Card
    classes: tuple[str, ...] | None = None
    split: int = 0

    def __post_init__(self) -> None:
        if self.task not in ("regression", "classification"):
            raise ValueError(f"task must be 'regression' or 'classification'; found {self.task!r}")
        if (self.task == "classification") != (self.classes is not None):
            raise ValueError(f"task {self.task!r} with classes={self.classes!r}: give classes to classification only")
        for split in (self.train, self.test):
            y = split.y
            if (y.dtype == torch.int64) != (self.task == "classification"):
                raise ValueError(f"task {self.task!r} does not fit targets {_kind(y)}")
            if self.classes is not None and len(y) and not 0 <= y.min() <= y.max() < len(self.classes):
                raise ValueError(
                    f"class numbers must lie between 0 and {len(self.classes) - 1}, as there are {len(self.classes)} "
                    f"classes; found {int(y.min())} to {int(y.max())}"
                )
        if self.train.x.shape[1:] != self.test.x.shape[1:]:
            raise ValueError(f"training rows {_kind(self.train.x)} and test rows {_kind(self.test.x)} differ in shape")

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one row of x."""
        return tuple(self.train.x.shape[1:])

    @property
    def n_outputs(self) -> int:
        """How many numbers a model must give for each row: the classes, or 1 for regression."""
        return 1 if self.classes is None else len(self.classes)

    @cached_property
    def checksum(self) -> str:
        """sha256 over all tensors of train and test: two data sets with the same checksum hold the same numbers."""
        tensors: dict[str, Tensor] = {}
        for name, split in (("train", self.train), ("test", self.test)):
            tensors |= {f"{name}.x": split.x, f"{name}.y": split.y}
            if split.sigma is not None:
                tensors[f"{name}.sigma"] = split.sigma
        return digest({name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()})

    def validation(self, fraction: float = 0.1, seed: int = 0) -> tuple[Split, Split]:
        """Cut the training rows into a part to train on and a part to choose settings by.

        Args:
            fraction: share of the training rows that is held out, above 0 and below 1.
            seed: which cut; the same seed gives the same rows. Classes keep their shares in both parts.

        Returns:
            (train, validation), two splits that share no row. Global random state is left alone.

        Raises:
            ValueError: fraction is out of range, or too few rows for the classes.

        Example:
            >>> from workbench import data
            >>> train, validation = data.load("diabetes").validation(0.2)
            >>> len(train), len(validation)
            (282, 71)
        """
        if not 0 < fraction < 1:
            raise ValueError(f"fraction must lie above 0 and below 1; found {fraction!r}")
        labels = self.train.y if self.classes is not None else None
        train, validation = partition(len(self.train), fraction, seed, labels)
        return self.train.take(train), self.train.take(validation)

    def without_repeats(self) -> Data:
        """The same data without the test rows whose x is also a training row (those can be known by heart).

        Example:
            >>> from workbench import data
            >>> d = data.load("diabetes")
            >>> len(d.test) - len(d.without_repeats().test)
            0
        """
        return replace(self, test=self.test.take(~self.repeats()))

    def repeats(self) -> Tensor:
        """Which test rows have an x that is also a training row: bool [n]."""
        seen = set(_row_bytes(self.train.x))
        return torch.tensor([row in seen for row in _row_bytes(self.test.x)], dtype=torch.bool)

    def __repr__(self) -> str:
        rows = _summary(self)
        width = max(len(label) for label, _ in rows)
        lines = [f"{self.name}: {self.card.description}"]
        for label, text in rows:
            wrapped = textwrap.wrap(text, 100 - width) or [""]
            lines += [f"  {label:<{width}}  {wrapped[0]}", *(" " * (width + 4) + line for line in wrapped[1:])]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        left = "text-align: left; vertical-align: top"
        body = "".join(
            f'<tr><th style="{left}">{html.escape(label)}</th><td style="{left}">{html.escape(text)}</td></tr>'
            for label, text in _summary(self)
        )
        caption = f"<b>{html.escape(self.name)}</b>: {html.escape(self.card.description)}"
        return f'<table><caption style="text-align: left">{caption}</caption><tbody>{body}</tbody></table>'


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """sha256 over names, dtypes, shapes and values of arrays; does not depend on byte order or file format.

    Example:
        >>> import numpy as np
        >>> digest({"a": np.zeros(2)}) == digest({"a": np.zeros((2, 1))})
        False
    """
    total = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        total.update(f"{name} {little.dtype.str.lstrip('<|')} {array.shape}\n".encode())
        total.update(little.data if little.size else b"")
    return total.hexdigest()


def partition(n: int, size: float, seed: int, labels: Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Two sets of row numbers out of n, the second of this size (a share or a number), stratified by labels [n]."""
    split = require("sklearn.model_selection").train_test_split
    seed = whole_number("the split, which is the seed of the rows drawn", seed)
    if not 0 <= seed < 2**32:
        raise ValueError(f"the split is the seed of the rows drawn, from 0 to 2**32 - 1; found {seed}")
    first, second = split(np.arange(n), test_size=size, random_state=seed, stratify=labels)
    return first, second


def whole_number(name: str, value: object) -> int:
    """The value as an int, if it is a whole number of any type."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a whole number (an integer); found {value!r:.100}") from None


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _row_bytes(x: Tensor) -> list[bytes]:
    # adding 0 turns -0.0 into 0.0, which is the same number with other bytes
    return [row.tobytes() for row in (x.detach().cpu().flatten(1) + 0.0).numpy()]


def _summary(data: Data) -> list[tuple[str, str]]:
    train, test, card = data.train, data.test, data.card
    if data.classes is None:
        target = f"{data.target}, {train.y.min():.4g} to {train.y.max():.4g} in training" if len(train) else ""
    else:
        counts = torch.bincount(train.y, minlength=data.n_outputs).tolist()
        target = f"{data.target}: " + ", ".join(f"{c} {n}" for c, n in zip(data.classes, counts, strict=True))
    rows = [
        ("task", data.task),
        ("rows", f"{len(train)} training, {len(test)} test (split {data.split})"),
        ("input", f"{list(data.input_shape)}: " + ", ".join(map(str, data.features))),
        ("target", target),
    ]
    if test.regions:
        rows.append(
            ("regions", ", ".join(f"{name} {int(mask.sum())}" for name, mask in test.regions.items()) + " (test)")
        )
    rows += [("source", card.source), ("licence", card.licence), ("citation", card.citation)]
    return rows + [("note", note) for note in card.notes]
