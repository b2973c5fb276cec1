"""The `Data` class: training and test rows, columns with units, and a card with source, licence and citation."""

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
from workbench.data.split_drawing import latest, partition
from workbench.data.splits import LazySplit, Split
from workbench.data.summary import as_html, as_text
from workbench.data.targets import TASKS, kind
from workbench.engine.tree import tensors

UNNAMED = "your data"  # default name


@dataclass(frozen=True, eq=False)
class Data:
    """A data set, split into training and test rows, with its card.

    Args:
        name: name of the data set, as for `load`.
        task: "regression" (values [n, k], or maps of values), "classification" (class numbers of rows, pixels or tokens, -100 for no
            class), "probabilities" (of classes [n, classes]), "labels" (0 or 1 [n, labels]) or "counts";
            a dict of these if the targets are a dict.
        train: training rows.
        test: test rows. Never use them to choose anything, see `validation`.
        features: columns of x (one per channel for images).
        target: column of y; a dict if the targets are a dict.
        card: description, source, licence, citation and notes.
        classes: names of the classes, in the order of their numbers, or of the labels; None for regression and counts. A dict if the targets
            are a dict.
        split: number of the fixed split, or seed of a random one.
        parts: further published rows by name, such as "validation".
        encoding: callable that converts raw rows to inputs, such as a `FrameEncoding` for DataFrames; None if x is raw.
        horizon: number of steps of a target if the training rows are overlapping windows of one series in time order; None for other rows.

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
    horizon: int | None = None

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
            # a LazySplit checks each row when it is read
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
        """Create a Data from tensors, arrays or lists.

        Args:
            x: inputs [n, ...], or a dict of them, the keyword arguments of the model. Floating-point numbers become float32; uint8 (images)
                and integers (tokens) are kept.
            y: values [n], [n, k] or maps [n, height, width] (floating-point); class numbers [n] or maps of them (integers); class names
                [n]; tokens, labels or counts [n, k], which need `task`; or a dict of targets.
            test: share of the rows to use as test rows, drawn by the seed `split` (stratified by class); or a bool mask [n], row numbers,
                or a tuple (x, y) of other rows.
            split: seed of the draw.
            task: "regression", "classification", "probabilities", "labels" or "counts"; None: inferred from dtype and
                shape if they are unambiguous. A dict for a dict of targets.
            classes: class names in the order of their numbers, the number of classes, or a dict class number -> name.
            void: class number that means "no class"; it becomes -100, which `fit` ignores.
            lengths: number of valid tokens per row [n]; class numbers of the others become -100.
            features: names of the columns of x (channels of images), or `Column`s with units; None: those of a DataFrame, or x1, x2, ...
            target: name of y, or its `Column`; None: that of a Series, or "y", "class" and so on.
            name: name of the data.
            card: description and source.

        Raises:
            TypeError, ValueError: numbers of rows differ, there is NaN, or y does not fit the task or is ambiguous.

        Example:
            >>> d = Data.from_arrays(torch.rand(50, 3, 8, 8), torch.randint(0, 3, (50, 8, 8)), classes=["sky", "road", "car"])
            >>> d.task, len(d.train), d.train.y.shape
            ('classification', 40, torch.Size([40, 8, 8]))
        """
        options = assembly.options(task, classes, void, features, target, name, card)
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
        """Create a Data from a map-style torch Dataset of pairs (x, y), whose rows are read lazily.

        Each row is checked when it is read. `fit`, `wrapped.fit` and `calibrate` read batch by batch; `d.train.load()` reads all rows.

        Args:
            dataset: map-style Dataset of pairs: x a tensor, an array, a Pillow image (which becomes float32 [channels, height, width] in
                [0, 1]) or a dict of them; y a number, an array, a Pillow mask, or a dict of targets.
            test: as for `from_arrays`, or a Dataset of test rows.
            split, task, void, features, target, name, card: as for `from_arrays`.
            classes: as for `from_arrays`; None: the dataset's attribute `classes`, or else all rows are read once to count the classes.
            workers: number of processes that read rows.

        Raises:
            TypeError, ValueError: the dataset is not map-style, or its first row can't be trained on.

        Example:
            >>> d = Data.from_dataset([(torch.rand(2), i % 3) for i in range(30)])
            >>> d.task, d.classes, len(d.train)
            ('classification', ('0', '1', '2'), 24)
        """
        options = assembly.options(task, classes, void, features, target, name, card)
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
        """Create a Data from a pandas DataFrame; all columns except the targets are features.

        Numbers are kept, booleans become 0 and 1, texts and categories are one-hot encoded by the categories of the training rows, and dates
        become days since the first date of the training rows. Missing numbers and dates are filled with the median of the training rows, and
        a column "... is missing" marks them if training rows lack some; missing categories only have that column. The notes of the card
        describe the conversion; `d.encoding(frame)` applies it to new rows.

        Args:
            frame: DataFrame with one example per row.
            target: name of the target column, or several names.
            test: as for `from_arrays`, or a frame of test rows.
            split, task, classes, name, card: as for `from_arrays`.

        Raises:
            TypeError, ValueError: a target is missing or its task is ambiguous, or a column can't be converted to numbers.

        Example:
            >>> import pandas as pd
            >>> d = Data.from_dataframe(pd.DataFrame({"a": range(20), "b": ["u", "v"] * 10, "y": [0.5, 1.5] * 10}), target="y")
            >>> [str(column) for column in d.features], d.train.y.shape
            (['a', 'b = u', 'b = v'], torch.Size([16, 1]))
        """
        options = assembly.options(task, classes, None, None, None, name, card)
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
        """Create a Data from a folder of images, read by Pillow: x float32 [n, channels, height, width] in [0, 1].

        There is either one folder per class (`cat/1.png`, `dog/2.png`), or a mask per image: `images/1.png` and `masks/1.png`, or `1.png` and
        `1_mask.png` in one folder. Folders named `train` and `test` (or `val`) hold the training and test rows.

        Args:
            path: path of the folder.
            masks: folder of the masks, if it has none of the usual names (masks, labels, annotations, ...).
            size: (height, width), or one number for both, to resize images (bilinearly) and masks (nearest pixel) to; None: all have the
                same size.
            test: as for `from_arrays`, if there is no test folder.
            split, features, target, card: as for `from_arrays`.
            task: "regression" for masks of values, such as depths; None: "classification", or "regression" if pixels are floating-point.
            classes: names of the class folders in the order of their numbers; for masks as for `from_arrays`, say a dict
                {0: "background", 255: "object"}.
            void: mask value of pixels without a class, such as 255.
            lazy: whether to read images only when needed; None: if they need more than half a GiB.
            workers: number of processes that read images.
            name: name of the data; None: that of the folder.

        Raises:
            FileNotFoundError: there is no such folder, or no image in it.
            ValueError: an image has no mask, has another size or can't be read.
        """
        options = assembly.options(
            task, classes, void, features, target, name or str(getattr(path, "name", path)), card
        )
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
        """Create a Data from a Hugging Face dataset, or a dict of them with "train" and "test". Rows are read lazily.

        Args:
            dataset: `datasets.Dataset` or `DatasetDict`, or any map-style dataset of dicts with `column_names`.
            x: name of the input column (numbers, images), or several, which become a dict, the keyword arguments of a model. None: the only
                column that is not y.
            y: name of the target column, or several; None: "label", "labels" or "target".
            test: as for `from_arrays`, if there is no part "test" or "validation".
            split, task, classes, void, workers, name, card: as for `from_dataset`; a `ClassLabel` column provides the class names.

        Raises:
            TypeError, ValueError: there are no such columns, or they hold text, which must be tokenized first: `dataset.map(tokenize)`.

        Example:
            >>> class Rows(list):
            ...     column_names = ["pixels", "label"]
            >>> d = Data.from_huggingface(Rows({"pixels": [0.1 * i, 1.0], "label": i % 2} for i in range(20)))
            >>> d.train[0][0].shape, d.classes
            (torch.Size([2]), ('0', '1'))
        """
        options = assembly.options(task, classes, void, None, None, name, card)
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
        """Create a Data from the windows of a series, split in time: all test targets come after all values of the training rows.

        Args:
            series, window, horizon, target: as for `workbench.data.windows`.
            test: share of the values, the latest ones, to use as test targets.
            name, card: as for `from_arrays`.

        Raises:
            TypeError, ValueError: a part is shorter than a window and its horizon, or there is NaN.

        Example:
            >>> d = Data.from_series(torch.arange(100.0), window=8, horizon=2)
            >>> d.train.x.shape, d.train.y.max(), d.test.y.min()
            (torch.Size([71, 8]), tensor(79.), tensor(80.))
        """
        return cls(**assembly.of_series(series, window, horizon, test, target, name, card))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one row of x, if x is one tensor."""
        x = self.train[0][0] if isinstance(self.train, LazySplit) else self.train.x
        if isinstance(x, Mapping):
            raise ValueError(f"input_shape: x of {self.name} is a dict of {', '.join(x)}, each with its own shape")
        return tuple(x.shape if isinstance(self.train, LazySplit) else x.shape[1:])

    @property
    def n_outputs(self) -> int:
        """Number of model outputs per row (pixel, token): the number of classes or labels, else of columns of y."""
        if isinstance(self.task, Mapping):
            raise ValueError(
                f"n_outputs: {self.name} has the targets {', '.join(self.task)}, each with its own number of outputs"
            )
        if self.classes is not None:
            return len(self.classes)
        y = self.train[0][1][None] if isinstance(self.train, LazySplit) else self.train.y
        return y.shape[1] if y.ndim == 2 else 1

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of all tensors of train and test; data sets with the same checksum hold the same numbers."""
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
        """Split the training rows into a part to train on and a validation part.

        Windows of a series are split in time, since neighbours share most of their values: the latest are held out, and those whose targets
        overlap with theirs are in neither part.

        Args:
            fraction: share of the training rows to hold out, above 0 and below 1.
            seed: seed of the draw, which is stratified by class; not used for windows of a series.

        Returns:
            (train, validation), two disjoint splits. The global random state is not changed.

        Raises:
            ValueError: fraction is out of range, or there are too few rows for it.

        Example:
            >>> from workbench import data
            >>> train, validation = data.load("diabetes").validation(0.2)
            >>> len(train), len(validation)
            (282, 71)
        """
        if not 0 < fraction < 1:
            raise ValueError(f"fraction must lie above 0 and below 1; found {fraction!r}")
        if self.horizon is None:
            train, validation = partition(len(self.train), fraction, seed, self.train.labels)
        else:
            train, validation = latest(len(self.train), fraction, gap=self.horizon - 1)
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
        """Return the data without the test rows whose x is also a training row, since a model may have memorized them.

        Example:
            >>> from workbench import data
            >>> d = data.load("diabetes")
            >>> len(d.test) - len(d.without_repeats().test)
            0
        """
        return replace(self, test=self.test.take(~self.repeats()))

    def repeats(self) -> Tensor:
        """Return a mask of the test rows whose x is also a training row: bool [n]."""
        seen = set(row_bytes(self.train.x))
        return torch.tensor([row in seen for row in row_bytes(self.test.x)], dtype=torch.bool)

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)
