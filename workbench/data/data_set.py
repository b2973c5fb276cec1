"""Data sets: columns with units, training and test rows, and a card that says where they are from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.data import assembly
from workbench.data.columns import Card, Column
from workbench.data.conversion import check_targets
from workbench.data.digests import arrays_of, digest, row_bytes
from workbench.data.series import as_series, windows
from workbench.data.split_drawing import partition
from workbench.data.splits import LazySplit, Split
from workbench.data.summary import as_html, as_text
from workbench.data.targets import TASKS, kind
from workbench.engine.tree import tensors

UNNAMED = "your data"  # the name of those that got none


@dataclass(frozen=True, eq=False)
class Data:
    """A data set, cut into training and test rows, with its card.

    Args:
        name: what `load` calls it.
        task: "regression" (values [n, k], or maps of values), "classification" (class numbers of rows, pixels or tokens, -100 where there is
            none), "probabilities" (of classes [n, classes]), "labels" (yes or no [n, labels]) or "counts";
            a dict of these where the targets are a dict.
        train: the training rows.
        test: the test rows; never choose anything by them, see `validation`.
        features: the columns of x (one per channel for images).
        target: the column y; a dict where the targets are a dict.
        card: description, source, licence, citation and notes.
        classes: names of the classes, in the order of their numbers, or of the labels; None for values and counts. A dict where the targets
            are a dict.
        split: which of the fixed splits (or the seed of the draw) this is.
        parts: further published rows by name, such as "validation".
        encoding: what makes inputs of raw rows, such as `FrameEncoding` of new frames; None where x is raw.

    Raises:
        ValueError: task, classes and the targets disagree, or train and test rows differ in shape.

    Example:
        >>> from workbench import data
        >>> d = data.load("cubic", n_train=100)
        >>> d.input_shape, d.n_outputs, len(d.train)
        ((1,), 1, 100)
    """

    name: str
    task: Any
    train: Any
    test: Any
    features: tuple[Column, ...]
    target: Any
    card: Card
    classes: Any = None
    split: int = 0
    parts: Mapping[str, Any] = field(default_factory=dict)
    encoding: Any = None

    def __post_init__(self) -> None:
        tasks = self.task if isinstance(self.task, Mapping) else {"": self.task}
        classes = (self.classes or {}) if isinstance(self.task, Mapping) else {"": self.classes}
        for name, task in tasks.items():
            if task not in TASKS:
                raise ValueError(f"task must be one of {', '.join(map(repr, TASKS))}; found {task!r}")
            if (task not in ("regression", "counts")) != (classes.get(name) is not None):
                raise ValueError(
                    f"task {task!r} with classes={classes.get(name)!r}: give classes to classification only"
                )
        described = []
        for label, split in (("train", self.train), ("test", self.test), *self.parts.items()):
            rows = split[0] if isinstance(split, LazySplit) else (split.x, split.y)
            # what is read row by row is checked row by row
            if not isinstance(split, LazySplit):
                if isinstance(self.task, Mapping) != isinstance(split.y, Mapping) or (
                    isinstance(self.task, Mapping) and self.task.keys() != split.y.keys()
                ):
                    raise ValueError(f"task {self.task!r} does not fit targets {kind(split.y)}")
                check_targets(split.y, self.task, self.classes, f"{label}.y")
            lazy = isinstance(split, LazySplit)
            described.append([list(t.shape[0 if lazy else 1 :]) for t in tensors(rows[0])])
            if described[-1] != described[0]:
                raise ValueError(f"training rows {described[0]} and {label} rows {described[-1]} differ in shape")
        for label, split in (("", self.train), ("test", self.test), *self.parts.items()):
            if not getattr(split, "origin", None):
                object.__setattr__(split, "origin", self._origin(f", {label} rows" if label else ""))

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        *,
        test: Any = 0.2,
        split: int = 0,
        task: Any = None,
        classes: Any = None,
        void: Any = None,
        lengths: Any = None,
        features: Any = None,
        target: Any = None,
        name: str = UNNAMED,
        card: Card | None = None,
    ) -> Data:
        """A Data of tensors, arrays or lists.

        Args:
            x: inputs [n, ...], or a dict of them, the keyword arguments of the model. Floating-point numbers become float32; bytes (images)
                and whole numbers (tokens) stay.
            y: values [n], [n, k] or maps [n, height, width] (floating-point); class numbers [n] or maps of them (integers); names of classes
                [n]; tokens, labels or counts [n, k], which `task` tells apart; or a dict of targets.
            test: share of the rows that become test rows, drawn by the seed `split` (stratified for classes); or a bool mask [n], row numbers,
                or a tuple (x, y) of other rows.
            split: seed of the draw.
            task: "regression", "classification", "probabilities", "labels" or "counts"; None tells by dtype and
                shape, where they tell. Of several a dict.
            classes: names of the classes in the order of their numbers, how many there are, or a dict class number -> name.
            void: number of what has no class; it becomes -100, which `fit` leaves out.
            lengths: how many tokens of each row count [n]; class numbers of the others become -100.
            features: names of the columns of x (channels of images), or `Column`s with units.
            target: name of y, or its `Column`.
            name: of the data.
            card: where they are from.

        Raises:
            TypeError, ValueError: numbers of rows differ, there is NaN, or y does not fit the task or could be one of several.

        Example:
            >>> d = Data.from_arrays(torch.rand(50, 3, 8, 8), torch.randint(0, 3, (50, 8, 8)), classes=["sky", "road", "car"])
            >>> d.task, len(d.train), d.train.y.shape
            ('classification', 40, torch.Size([40, 8, 8]))
        """
        options = _options(task, classes, void, features, target, name, card)
        return cls(**assembly.of_arrays(x, y, test, split, options, lengths))

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        *,
        test: Any = 0.2,
        split: int = 0,
        task: Any = None,
        classes: Any = None,
        void: Any = None,
        workers: int = 0,
        features: Any = None,
        target: Any = None,
        name: str = UNNAMED,
        card: Card | None = None,
    ) -> Data:
        """A Data of a map-style torch Dataset of pairs (x, y), whose rows are read when they are asked for.

        Each row is checked when it is read. `fit`, `wrapped.fit` and `calibrate` read batch by batch; `d.train.load()` reads all.

        Args:
            dataset: gives a pair for each row number: x a tensor, an array, a Pillow image (which becomes float32 [channels, height, width] in
                [0, 1]) or a dict of them; y a number, an array, a Pillow mask, or a dict of targets.
            test: as for `from_arrays`, or a Dataset of test rows.
            split, task, void, features, target, name, card: as for `from_arrays`.
            classes: as for `from_arrays`; None takes the dataset's own `classes`, or reads all rows once to see how many there are.
            workers: processes that read rows.

        Raises:
            TypeError, ValueError: the dataset has no numbered rows, or its first row is nothing to be learned from.

        Example:
            >>> d = Data.from_dataset([(torch.rand(2), i % 3) for i in range(30)])
            >>> d.task, d.classes, len(d.train)
            ('classification', ('0', '1', '2'), 24)
        """
        options = _options(task, classes, void, features, target, name, card)
        return cls(**assembly.of_dataset(dataset, test, split, workers, options))

    @classmethod
    def from_dataframe(
        cls,
        frame: Any,
        target: Any,
        *,
        test: Any = 0.2,
        split: int = 0,
        task: Any = None,
        classes: Any = None,
        name: str = UNNAMED,
        card: Card | None = None,
    ) -> Data:
        """A Data of a pandas DataFrame, whose columns but the targets are features.

        Numbers stay, truth values become 0 and 1, texts and categories a column of 0 and 1 for each category of the training rows, dates the
        days since the first of the training rows. Missing numbers and dates are filled with the median of the training rows, and a column
        "... is missing" says where; missing categories have such a column only. The notes of the card say what was done;
        `d.encoding(frame)` does the same with new rows.

        Args:
            frame: one row for each row.
            target: name of the column y, or several.
            test: as for `from_arrays`, or a frame of test rows.
            split, task, classes, name, card: as for `from_arrays`.

        Raises:
            TypeError, ValueError: a target is missing or could be one of several tasks, or a column can't be made numbers.

        Example:
            >>> import pandas as pd
            >>> d = Data.from_dataframe(pd.DataFrame({"a": range(20), "b": ["u", "v"] * 10, "y": [0.5, 1.5] * 10}), target="y")
            >>> [str(column) for column in d.features], d.train.y.shape
            (['a', 'b = u', 'b = v'], torch.Size([16, 1]))
        """
        options = _options(task, classes, None, None, None, name, card)
        return cls(**assembly.of_frame(frame, target, test, split, options))

    @classmethod
    def from_folder(
        cls,
        path: Any,
        *,
        masks: Any = None,
        size: int | tuple[int, int] | None = None,
        test: Any = 0.2,
        split: int = 0,
        task: Any = None,
        classes: Any = None,
        void: Any = None,
        lazy: bool | None = None,
        workers: int = 0,
        features: Any = None,
        target: Any = None,
        name: str | None = None,
        card: Card | None = None,
    ) -> Data:
        """A Data of a folder of images, by Pillow: x float32 [n, channels, height, width] in [0, 1].

        A folder for each class (`cat/1.png`, `dog/2.png`), or images beside masks: `images/1.png` and `masks/1.png`, or `1.png` and
        `1_mask.png` in one folder. If there are folders `train` and `test` (or `val`), these are the training and test rows.

        Args:
            path: the folder.
            masks: folder of the masks, where it has none of the usual names (masks, labels, annotations, ...).
            size: (height, width), or one number for both, that images and masks are brought to (masks by the nearest pixel); None: they have
                one size.
            test: as for `from_arrays`, where there is no test folder.
            split, features, target, card: as for `from_arrays`.
            task: "regression" for masks of values, such as depths; None: class numbers, and values where pixels are floating-point numbers.
            classes: the names of the folders in the order that their numbers shall have; for masks as for `from_arrays`: a dict such as
                {0: "background", 255: "object"} says which numbers mean what.
            void: number of pixels without a class, such as 255.
            lazy: whether images are read when they are asked for; None: if they need more than half a GiB.
            workers: processes that read images.
            name: None: that of the folder.

        Raises:
            FileNotFoundError: there is no such folder, or no image in it.
            ValueError: an image has no mask, another size or can't be read.
        """
        options = _options(task, classes, void, features, target, name or str(getattr(path, "name", path)), card)
        return cls(**assembly.of_folder(path, masks, size, lazy, test, split, workers, options))

    @classmethod
    def from_huggingface(
        cls,
        dataset: Any,
        *,
        x: Any = None,
        y: Any = None,
        test: Any = 0.2,
        split: int = 0,
        task: Any = None,
        classes: Any = None,
        void: Any = None,
        workers: int = 0,
        name: str = UNNAMED,
        card: Card | None = None,
    ) -> Data:
        """A Data of a dataset of the package `datasets`, or a dict of them with "train" and "test"; rows are read when they are asked for.

        Args:
            dataset: `datasets.Dataset` or `DatasetDict`; anything whose rows are dicts by number, and which has `column_names`.
            x: name of the column of inputs (numbers, images), or several, which become a dict, the keyword arguments of a model. None: the only
                one that is not y.
            y: name of the column of targets, or several; None: "label", "labels" or "target".
            test: as for `from_arrays`, where there is no part "test" or "validation".
            split, task, classes, void, workers, name, card: as for `from_dataset`; classes of a `ClassLabel` have its names.

        Raises:
            TypeError, ValueError: there are no such columns, or they are text: a tokenizer makes numbers of them, `dataset.map(tokenize)`.

        Example:
            >>> class Rows(list):
            ...     column_names = ["pixels", "label"]
            >>> d = Data.from_huggingface(Rows({"pixels": [0.1 * i, 1.0], "label": i % 2} for i in range(20)))
            >>> d.train[0][0].shape, d.classes
            (torch.Size([2]), ('0', '1'))
        """
        options = _options(task, classes, void, None, None, name, card)
        return cls(**assembly.of_huggingface(dataset, x, y, test, split, workers, options))

    @classmethod
    def from_series(
        cls,
        series: Any,
        *,
        window: int,
        horizon: int = 1,
        test: float = 0.2,
        target: Any = None,
        name: str = UNNAMED,
        card: Card | None = None,
    ) -> Data:
        """A Data of the windows of a series, in the order of time: all that test rows forecast comes after all that training rows have seen.

        Args:
            series, window, horizon, target: as for `workbench.data.windows`.
            test: share of the values, the latest, that test rows forecast.
            name, card: as for `from_arrays`.

        Raises:
            TypeError, ValueError: one of the parts is shorter than a window and its horizon, or there is NaN.

        Example:
            >>> d = Data.from_series(torch.arange(100.0), window=8, horizon=2)
            >>> d.train.x.shape, d.train.y.max(), d.test.y.min()
            (torch.Size([71, 8]), tensor(79.), tensor(80.))
        """
        if not isinstance(test, float) or not 0 < test < 1:
            raise ValueError(
                f"test: found {test!r:.100}; the latest rows are for tests, give a share of them such as 0.2"
            )
        values = as_series(series)
        cut = len(values) - round(test * len(values))
        (x, y, _), (test_x, test_y, _) = (
            windows(part, window, horizon, target=target) for part in (values[:cut], values[max(0, cut - window) :])
        )
        options = _options("regression", None, None, None, None, name, card)
        return cls(**assembly.of_arrays(x, y, (test_x, test_y), 0, options))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one row of x, if it is one tensor."""
        x = self.train[0][0] if isinstance(self.train, LazySplit) else self.train.x
        if isinstance(x, Mapping):
            raise ValueError(f"input_shape: x of {self.name} is a dict of {', '.join(x)}, each with a shape of its own")
        return tuple(x.shape if isinstance(self.train, LazySplit) else x.shape[1:])

    @property
    def n_outputs(self) -> int:
        """How many numbers a model must give for each row (pixel, token): the classes or labels, else the columns of y."""
        if isinstance(self.task, Mapping):
            raise ValueError(
                f"n_outputs: {self.name} has the targets {', '.join(self.task)}, each with outputs of its own"
            )
        if self.classes is not None:
            return len(self.classes)
        y = self.train[0][1][None] if isinstance(self.train, LazySplit) else self.train.y
        return y.shape[1] if y.ndim == 2 else 1

    @cached_property
    def checksum(self) -> str:
        """sha256 over all tensors of train and test: two data sets with the same checksum hold the same numbers."""
        arrays: dict[str, np.ndarray] = {}
        for part, split in (("train", self.train), ("test", self.test)):
            if isinstance(split, LazySplit):
                rows = "".join(
                    digest(arrays_of("", {"x": x, "y": y})) for x, y in (split[i] for i in range(len(split)))
                )
                arrays[part] = np.frombuffer(rows.encode(), np.uint8)
                continue
            arrays |= arrays_of(part, {"x": split.x, "y": split.y})
            if split.sigma is not None:
                arrays[f"{part}.sigma"] = split.sigma.detach().cpu().numpy()
        return digest(arrays)

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
        train, validation = partition(len(self.train), fraction, seed, self.train.labels)
        rows, held_out = self.train.take(train), self.train.take(validation)
        object.__setattr__(held_out, "origin", self._origin(", validation rows"))
        return rows, held_out

    @property
    def origin(self) -> dict[str, Any]:
        """Facts about the training rows for model cards: "name", "rows", "columns", "checksum"."""
        in_memory = not isinstance(self.train, LazySplit) and not isinstance(self.test, LazySplit)
        checksum = {"checksum": f"sha256 {self.checksum}"} if in_memory else {}  # nothing is read for it
        return {**self._origin(""), "rows": len(self.train), **checksum}

    def _origin(self, part: str) -> dict[str, Any]:
        name = {} if self.name == UNNAMED else {"name": f"{self.name}, split {self.split}{part}"}
        return {**name, "columns": [str(column) for column in self.features]}

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
        seen = set(row_bytes(self.train.x))
        return torch.tensor([row in seen for row in row_bytes(self.test.x)], dtype=torch.bool)

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)


def _options(task: Any, classes: Any, void: Any, features: Any, target: Any, name: str, card: Any) -> dict[str, Any]:
    return {
        "task": task,
        "classes": classes,
        "void": void,
        "features": features,
        "target": target,
        "name": name,
        "card": card,
    }
