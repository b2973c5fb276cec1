"""Arguments of `Data` from arrays, Datasets, DataFrames, folders and Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from workbench.core.batches.arrays import check_columns, check_index
from workbench.data.columns import Card, Column, name_in, names_in
from workbench.data.conversion import PickedColumns, lazily, targets
from workbench.data.folders import check_lossless, find_files, is_grey
from workbench.data.frames import FrameEncoding, rows_by_index
from workbench.data.images import open_image
from workbench.data.series import as_series, column_numbers, windows
from workbench.data.split_drawing import partition, whole_number
from workbench.data.splits import LazySplit, Split, row_index
from workbench.data.targets import as_inputs, category_names, holds_texts
from workbench.engine.tree import tensors
from workbench.errors import require

MAX_EAGER_BYTES = 2**29  # images up to this size in all are read into memory at once

Parts = dict[str, Any]


def options(task: Any, classes: Any, void: Any, features: Any, target: Any, name: str, card: Card | None) -> Parts:
    """Return what a user says of the rows, by name, None where nothing is said."""
    return {
        "task": task,
        "classes": classes,
        "void": void,
        "features": features,
        "target": target,
        "name": name,
        "card": card,
    }


def of_arrays(x: Any, y: Any, test: Any, split: int, options: Parts, lengths: Any = None) -> Parts:
    """Return the arguments of a `Data` from inputs and targets in memory; see `Data.from_arrays`."""
    settings = (options["task"], options["classes"], options["void"])
    all_rows, task, classes = _rows(x, y, *settings, lengths)
    if options["features"] is None and isinstance(all_rows.x, Tensor) and all_rows.x.is_floating_point():
        options = options | {"features": names_in(x)}
    if options["target"] is None:
        options = options | {"target": name_in(y)}
    if not isinstance(test, tuple):
        (train, test_part), notes = cut(all_rows, test, split)
        return _parts(train, test_part, task, classes, split, options, notes)
    if len(test) != 2:
        raise ValueError(f"test: found a tuple of {len(test)}; give a pair (x, y) of test rows")
    if lengths is not None:
        raise ValueError("test: with lengths, test must be a share, a mask or row numbers, not other rows")
    check_columns(x, test[0], "test", "x")
    check_columns(y, test[1], "test", "y")
    # names have the same numbers in both; without names, test rows may have higher class numbers than training rows
    test_part, _, test_classes = _rows(*test, task, _given_names(y, classes, settings[1]), settings[2])
    return _parts(
        all_rows,
        test_part,
        task,
        _longer_classes(classes, test_classes),
        split,
        options,
        ["test rows: those that were given"],
    )


def of_series(series: Any, window: int, horizon: int, test: Any, target: Any, name: str, card: Card | None) -> Parts:
    """Return the arguments of a `Data` from the windows of a series; see `Data.from_series`."""
    if not isinstance(test, float) or not 0 < test < 1:
        raise ValueError(
            f"test: found {test!r:.100}; give the share of the latest values to use as test targets, such as 0.2"
        )
    values, target = as_series(series), column_numbers(series, target)
    cut = len(values) - round(test * len(values))
    first_test_value = max(0, cut - whole_number("window", window))
    (x, y, _), (test_x, test_y, _) = (
        windows(part, window, horizon, target=target) for part in (values[:cut], values[first_test_value:])
    )
    # each of a few steps has a score of its own
    steps = ", ".join(f"step {i + 1}" for i in range(horizon)) if y.dim() == 2 and 1 < horizon <= 8 else None
    settings = options("regression", None, None, None, steps, name, card)
    return {**of_arrays(x, y, (test_x, test_y), 0, settings), "horizon": horizon}


def of_dataset(dataset: Any, test: Any, split: int, workers: int, options: Parts) -> Parts:
    """Return the arguments of a `Data` from a map-style Dataset; see `Data.from_dataset`."""
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        other_parts = test.tensors if isinstance(test, TensorDataset) else test
        return of_arrays(*dataset.tensors, other_parts, split, options)
    if isinstance(workers, bool) or whole_number("workers", workers) < 0:
        raise ValueError(f"workers must be a number of processes, 0 or more; found {workers!r}")
    labels = options.pop("labels", None)
    all_rows, task, classes = lazily(dataset, options["task"], options["classes"], options["void"], workers, labels)
    is_numbers = isinstance(test, Sequence | Mapping | Tensor | np.ndarray) or hasattr(test, "to_numpy")
    if hasattr(test, "__getitem__") and hasattr(test, "__len__") and not is_numbers:
        known_classes = classes if options["classes"] is None else options["classes"]
        test_part, _, _ = lazily(test, task, known_classes, options["void"], workers)
        test_part.convert = replace(test_part.convert, first=all_rows.convert.first)
        return _parts(all_rows, test_part, task, classes, split, options, ["test rows: those that were given"])
    (train, test_part), notes = cut(all_rows, test, split)
    return _parts(train, test_part, task, classes, split, options, notes)


def of_frame(frame: Any, target: Any, test: Any, split: int, options: Parts) -> Parts:
    """Return the arguments of a `Data` from a pandas DataFrame; see `Data.from_dataframe`."""
    pandas = require("pandas")
    names = _target_names(frame, target)
    test_is_frame = isinstance(test, pandas.DataFrame)
    test = test if test_is_frame else rows_by_index(test, frame.index)
    all_rows = pandas.concat([frame, test], ignore_index=True) if test_is_frame else frame
    if test_is_frame and set(frame.columns) != set(test.columns):
        raise ValueError(
            f"test: its columns are {list(test.columns)}, those of the training rows {list(frame.columns)}"
        )
    if options["classes"] is None and len(names) == 1:
        options = {**options, "classes": category_names(all_rows[names[0]])}
    for name in names:
        if gaps := int(all_rows[name].isna().sum()):
            raise ValueError(
                f"target: {name!r} is missing in {gaps} of {len(all_rows)} rows; frame.dropna(subset=[{name!r}]) drops them"
            )
    y, task, classes = targets(
        _frame_targets(all_rows, names, options), *(options[key] for key in ("task", "classes", "void"))
    )
    numbers = torch.arange(len(all_rows))
    # split before encoding, since medians and categories come from the training rows only
    rows = Split(numbers[:, None].float(), y)
    if test_is_frame:
        train, test_part, notes = numbers[: len(frame)], numbers[len(frame) :], ["test rows: those that were given"]
    else:
        (first, second), notes = cut(rows, test, split, with_numbers=True)
        train, test_part = row_index(first), row_index(second)
    features = all_rows.drop(columns=names)
    frames = features.iloc[train.numpy()], features.iloc[test_part.numpy()]
    if test_is_frame:  # errors name rows as the caller knows them
        frames = frames[0].set_axis(frame.index), frames[1].set_axis(test.index)
    encoding = FrameEncoding.of(frames[0])
    notes += encoding.notes(*frames)
    if any(part.kind == "date" for part in encoding.parts) and isinstance(test, float):
        notes.append(
            "rows have dates, and test rows are drawn from between them: to test forecasts, give the latest rows as test"
        )
    if not isinstance(frame.index, pandas.RangeIndex):
        notes.append("the index of the frame is not used as a feature; frame.reset_index() makes it a column")
    parts = [Split(encoding(part), rows.take(index).y) for part, index in zip(frames, (train, test_part), strict=True)]
    columns = {str(name): Column(str(name)) for name in names}
    options = {
        **options,
        "features": encoding.columns,
        "target": columns if isinstance(y, Mapping) else Column(", ".join(map(str, names))),
    }
    return {**_parts(parts[0], parts[1], task, classes, split, options, notes), "encoding": encoding}


def _target_names(frame: Any, target: Any) -> list[Any]:
    """Return the names of the target columns of a frame, once both are checked."""
    pandas = require("pandas")
    if not isinstance(frame, pandas.DataFrame):
        remedy = "frame.to_pandas() makes one" if hasattr(frame, "to_pandas") else "give a pandas.DataFrame"
        package = type(frame).__module__.partition(".")[0]
        raise TypeError(f"frame: found {type(frame).__name__} of {package}, not of pandas; {remedy}")
    is_single = isinstance(target, str) or not isinstance(target, Sequence | pandas.Index)
    # a tuple is one column name if the columns have several levels
    if isinstance(target, tuple) and target in frame.columns:
        is_single = True
    names = [target] if is_single else list(target)
    if not frame.columns.is_unique:
        duplicates = frame.columns[frame.columns.duplicated()].unique()
        raise ValueError(
            f"frame: several columns have the same name: {', '.join(map(str, duplicates))}; "
            "frame.loc[:, ~frame.columns.duplicated()] keeps the first of each"
        )
    if missing := [name for name in names if name not in frame.columns]:
        raise ValueError(f"target: there is no column {missing[0]!r}; there are {', '.join(map(str, frame.columns))}")
    return names


def _frame_targets(frame: Any, names: list[Any], options: Parts) -> Any:
    """Return the target columns as values [n] or [n, k], texts [n] or a dict of these. Integers without a task are ambiguous, and refused."""
    types = require("pandas").api.types

    def column(name: Any) -> np.ndarray:
        series = frame[name]
        if hasattr(series, "cat"):
            series = series.astype(object) if options["classes"] is None else series.map(str).astype(object)
        task = options["task"].get(name) if isinstance(options["task"], Mapping) else options["task"]
        if types.is_integer_dtype(series) and task is None:
            raise ValueError(
                f"target: {name!r} holds whole numbers from {series.min()} to {series.max()}: are they classes (task='classification'), values "
                "(task='regression') or counts (task='counts')?"
            )
        distinct = set(series.unique()) if types.is_float_dtype(series) else set()
        if task is None and distinct in ({0, 1}, {-1, 1}):
            raise ValueError(
                f"target: {name!r} holds {min(distinct):g} and {max(distinct):g} alone: are they classes, frame[{name!r}].astype(int) with "
                "task='classification', or values (task='regression')?"
            )
        if types.is_bool_dtype(series) or types.infer_dtype(series) == "boolean":
            return series.to_numpy(bool)
        if types.is_numeric_dtype(series):
            return series.to_numpy(np.int64 if types.is_integer_dtype(series) else np.float64)
        texts = series.to_numpy(object)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"target: {name!r} holds {types.infer_dtype(series)}; give numbers or texts")
        return texts

    values = [column(name) for name in names]
    if len(values) == 1:
        return values[0]
    if (
        len({value.dtype.kind for value in values}) == 1
        and values[0].dtype.kind in "biuf"
        and not isinstance(options["task"], Mapping)
    ):
        return np.stack(values, 1)
    return dict(zip(map(str, names), values, strict=True))


def of_folder(
    folder: Any, masks: Any, size: Any, lazy: bool | None, test: Any, split: int, workers: int, options: Parts
) -> Parts:
    """Return the arguments of a `Data` from a folder of images; see `Data.from_folder`."""
    folder, classes = Path(folder).expanduser(), options["classes"]
    class_order = list(classes) if classes is not None and not isinstance(classes, int | Mapping) else None
    train, test_part, note = find_files(folder, masks, None if masks is not None else class_order)
    size = (size, size) if isinstance(size, int) else size
    grey = all(is_grey(file) for part in (train, test_part) if part is not None for file in part.images)
    train, test_part = replace(train, size=size, grey=grey), test_part and replace(test_part, size=size, grey=grey)
    left_out = train.left_out + (test_part.left_out if test_part is not None else 0)
    notes = [note, *([f"{left_out} files that are not images are left out"] if left_out else [])]
    if train.classes is not None:
        labels = torch.tensor(train.targets)
        options = {**options, "task": "classification", "classes": train.classes, "labels": labels}
    else:
        options = {**options, "task": options["task"] or _mask_task(train)}
        check_lossless(train, test_part, options["task"])
    channels = ("grey level",) if grey else ("red", "green", "blue")
    options["features"] = options["features"] or tuple(Column(name, "0 to 1") for name in channels)
    parts = of_dataset(train, test if test_part is None else test_part, split, workers, options)
    if lazy is None:
        row = sum(t.numel() * t.element_size() for t in tensors(parts["train"][0]))
        lazy = row * (len(parts["train"]) + len(parts["test"])) > MAX_EAGER_BYTES
    if not lazy:
        parts |= {name: parts[name].load() for name in ("train", "test")}
    return {**parts, "card": _card(parts["card"], [*notes, *parts["card"].notes])}


def _mask_task(files: Any) -> str:
    """Return the task of the first mask. Integers of 16 bits or more could be class numbers or values, and are refused."""
    mode = open_image(files.targets[0]).mode
    if mode.startswith("I"):
        raise ValueError(
            f"{files.targets[0]} holds whole numbers of mode {mode!r}: are they values such as depths (task='regression') or class numbers "
            "(task='classification')?"
        )
    return "regression" if mode == "F" else "classification"


def cut(all_rows: Any, test: Any, split: int, with_numbers: bool = False) -> tuple[tuple[Any, Any], list[str]]:
    """Split rows into training and test rows by a share (stratified if rows have one class each), a mask [n] or row numbers.

    Returns:
        (training rows, test rows), as splits or row numbers, and notes on how they were chosen.
    """
    n = len(all_rows)
    if isinstance(test, bool) or (isinstance(test, int | float | np.floating) and not 0 < test < 1):
        raise ValueError(f"test: a share of the rows must lie above 0 and below 1; found {test!r}")
    if isinstance(test, float | np.floating):
        try:
            train, test_part = map(torch.from_numpy, partition(n, float(test), split, all_rows.labels))
        except ValueError as error:
            raise ValueError(f"data: the rows can't be cut into training and test rows: {error}") from error
        notes = [f"test rows: {len(test_part):,}, drawn at random"]
    else:
        try:
            index = row_index(test)
        except (TypeError, ValueError, RuntimeError) as error:
            labels = "; pandas.Index(test) names rows by their labels" if with_numbers else ""
            raise TypeError(
                f"test: give a share, a mask [n], row numbers, or other rows; found {type(test).__name__}{labels}"
            ) from error
        if index.dtype == torch.bool and index.shape != (n,):
            raise ValueError(f"test: a mask must be bool [{n}]; found {list(index.shape)}")
        if index.dtype != torch.bool and (index.is_floating_point() or index.dim() != 1):
            raise ValueError("test: give a share, a mask [n], row numbers, or other rows")
        index = index.nonzero()[:, 0] if index.dtype == torch.bool else index.long()
        if len(index) and not -n <= int(index.min()) <= int(index.max()) < n:
            raise ValueError(f"test: row numbers go from 0 to {n - 1}; found {int(index.min())} to {int(index.max())}")
        if len(values := index.unique()) < len(index):
            mask = "; a mask is of bool, test == 1" if values.tolist() == [0, 1] else ""
            raise ValueError(
                f"test: {len(index)} row numbers name only {len(values)} rows, each must be given once{mask}"
            )
        is_test = torch.zeros(n, dtype=torch.bool)
        is_test[index] = True
        train, test_part = (~is_test).nonzero()[:, 0], is_test.nonzero()[:, 0]
        notes = [f"test rows: {len(test_part):,}, as given"]
    if not len(train) or not len(test_part):
        raise ValueError(f"test: {len(test_part)} of {n} rows leave {len(train)} to train on; both need at least one")
    return ((train, test_part) if with_numbers else (all_rows.take(train), all_rows.take(test_part))), notes


def _rows(x: Any, y: Any, task: Any, classes: Any, void: Any, lengths: Any = None) -> tuple[Split, Any, Any]:
    for inputs_of in x.values() if isinstance(x, Mapping) else [x]:
        check_index(inputs_of, y, "data")
    inputs, (target, task, classes) = as_inputs(x), targets(y, task, classes, void, lengths)
    n, rows = (len(next(iter(tensors(tree)))) for tree in (inputs, target))
    if n != rows:
        raise ValueError(f"data: x has {n} rows and y has {rows}; both need the same number of rows")
    if isinstance(inputs, Tensor) and inputs.dim() == 1:
        inputs = inputs[:, None]
    return Split(inputs, target), task, classes


def _given_names(y: Any, classes: Any, declared: Any) -> Any:
    """Return the classes of targets that are names, those given for other targets; for a dict of targets a dict."""
    if not isinstance(y, Mapping):
        return classes if holds_texts(y) else declared
    names = {str(name): classes[str(name)] for name, target in y.items() if holds_texts(target)}
    return {**(declared or {}), **names} or None


def _longer_classes(classes: Any, other_classes: Any) -> Any:
    if isinstance(classes, Mapping):
        return {name: _longer_classes(names, other_classes[name]) for name, names in classes.items()}
    return classes if classes is None or len(classes) >= len(other_classes) else other_classes


def _parts(train: Any, test: Any, task: Any, classes: Any, split: int, options: Parts, notes: Sequence[str]) -> Parts:
    """Return the arguments of `Data`."""
    x = train[0][0] if isinstance(train, LazySplit) else train.x
    features = options["features"]
    if features is None:
        features = _feature_columns(x, rows=isinstance(train, Split))
    columns = [
        column if isinstance(column, Column) else Column(*([column] if isinstance(column, str) else column))
        for column in features
    ]
    _check_columns(columns, x, rows=isinstance(train, Split))
    target = options["target"]
    if isinstance(task, Mapping):
        target = target or {name: Column(name) for name in task}
        classes = {name: names for name, names in classes.items() if names is not None} or None
    elif target is None:
        target = Column({"classification": "class", "labels": "labels", "counts": "count"}.get(task, "y"))
    target = Column(target) if isinstance(target, str) else target
    card = options["card"] or Card(f"{len(train) + len(test):,} rows of your own", "", "", "")
    return {
        "name": options["name"],
        "task": task,
        "train": train,
        "test": test,
        "features": tuple(columns),
        "target": target,
        "card": _card(card, [*card.notes, *notes, *_target_notes(train, task, classes)]),
        "classes": classes,
        "split": split,
    }


def _check_columns(columns: Sequence[Column], x: Any, rows: bool) -> None:
    """Raise ValueError if the columns of a table of numbers do not have one name each."""
    names = [column.name for column in columns]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"features: several columns have the same name: {', '.join(sorted(repeated))}")
    is_table = isinstance(x, Tensor) and x.is_floating_point() and x.dim() == (2 if rows else 1)
    if is_table and len(names) != x.shape[-1]:
        raise ValueError(f"features: {len(names)} names for {x.shape[-1]} columns of x; give one for each")


def _target_notes(train: Any, task: Any, classes: Any) -> list[str]:
    """Return notes on targets in memory: classes without training rows, and values that could be classes."""
    if not isinstance(train, Split) or not isinstance(train.y, Tensor) or not len(train):
        return []
    if task == "classification" and train.y.dim() == 1:
        seen_classes = set(train.y.unique().tolist())
        missing = [name for number, name in enumerate(classes) if number not in seen_classes]
        ellipsis = ", ..." if len(missing) > 10 else ""
        return [f"no training row is of class {', '.join(missing[:10])}{ellipsis}"] if missing else []
    if task == "regression" and train.y.shape[1:] == (1,):
        values = train.y.unique()
        if 1 < len(values) <= 10 and bool((values == values.round()).all()):
            numbers = ", ".join(f"{value:g}" for value in values.tolist())
            return [f"the target is {numbers}, taken for values; for classes give whole numbers, y.astype(int)"]
    return []


def _card(card: Card, notes: Sequence[str]) -> Card:
    return Card(card.description, card.source, card.licence, card.citation, tuple(notes))


def _feature_columns(x: Any, rows: bool) -> tuple[Column, ...]:
    """Return default names of the columns (channels of images), or of the items of a dict."""
    if isinstance(x, Mapping):
        return tuple(Column(name) for name in x)
    if x.dtype == torch.int64:
        return (Column("token"),)
    n = (x.shape[1:] if rows else x.shape)[:1]
    return tuple(Column(f"x{i + 1}" if n[0] > 1 else "x") for i in range(n[0])) if n else (Column("x"),)


def of_huggingface(dataset: Any, x: Any, y: Any, test: Any, split: int, workers: int, options: Parts) -> Parts:
    """Return the arguments of a `Data` from a dataset of dicts; see `Data.from_huggingface`."""
    all_rows = dataset
    if isinstance(dataset, Mapping):
        test_part = next((name for name in ("test", "validation") if name in dataset), None)
        if "train" not in dataset or test_part is None:
            raise ValueError(
                f"dataset: it has the parts {', '.join(dataset)}; give one of them, or one with train and test"
            )
        all_rows, test = dataset["train"], dataset[test_part]
    names = list(getattr(all_rows, "column_names", ()))
    if not names:
        raise TypeError(
            f"dataset: {type(all_rows).__name__} has no column_names; for a torch Dataset of pairs use Data.from_dataset"
        )
    default_targets = [name for name in ("label", "labels", "target") if name in names]
    y = y if y is not None else default_targets[0] if default_targets else None
    other_columns = [name for name in names if name not in ([y] if isinstance(y, str) else y or [])]
    x = x if x is not None else other_columns[0] if len(other_columns) == 1 else None
    for setting, columns in (("y", y), ("x", x)):
        is_test = [columns] if isinstance(columns, str) else columns
        if not is_test or any(name not in names for name in is_test):
            raise ValueError(
                f"{setting}: found {columns!r}; give one of the columns {', '.join(map(str, names))}, or several in a list"
            )
    column_types = getattr(all_rows, "features", None) or {}
    label_names = getattr(column_types.get(y), "names", None) if isinstance(y, str) else None
    options = {**options, "classes": options["classes"] or (tuple(label_names) if label_names else None)}
    all_rows, test = (PickedColumns(part, x, y) if hasattr(part, "column_names") else part for part in (all_rows, test))
    arguments = of_dataset(all_rows, test, split, workers, options)
    if isinstance(dataset, Mapping):
        note = f"training rows are those of train, test rows those of {test_part}"
        other_parts = [name for name in dataset if name not in ("train", test_part)]
        note += f"; {', '.join(other_parts)} is left out" if other_parts else ""
        arguments["card"] = _card(arguments["card"], [note, *arguments["card"].notes[1:]])
    return arguments
