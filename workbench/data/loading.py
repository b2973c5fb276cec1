"""Loading of data sets by name."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from workbench.data import toy
from workbench.data.columns import Column
from workbench.data.data_set import Data
from workbench.data.files import is_local, read
from workbench.data.published_images import camvid, cifar10, cifar10h, cifar10n
from workbench.data.published_tables import adult, clinc, curve, ett, nab
from workbench.data.registry import card, entries, resolve
from workbench.data.split_drawing import partition, subset, whole_number
from workbench.data.splits import Split
from workbench.data.usage import AVAILABLE, note
from workbench.errors import require


def names(available: bool = False) -> list[str]:
    """Return the names of all data sets, for `load`.

    Args:
        available: whether to return only those that can be loaded without network access.

    Example:
        >>> from workbench import data
        >>> "cubic" in data.names(available=True), "concrete" in data.names()
        (True, True)
    """
    if available:
        note(AVAILABLE)
    return [name for name in entries() if not available or is_local(name)]


def load(name: str, split: int = 0, **options: Any) -> Data:
    """Load a data set by name, in original units.

    Files are searched in the folder given by the environment variable WORKBENCH_DATA, in `datasets` of a checkout of the repository,
    and in the user cache; missing files are downloaded. Every file is verified by its sha256.

    Args:
        name: one of `names()`.
        split: number of the split into training and test rows: 0 to 19 for the UCI regression sets (protein
            0 to 4); the seed of an 80/20 split for the sets that come with scikit-learn; the seed of the draw for the
            toys; the seed of a 90/10 split for "mcycle" and "engel" (80/20 for "cifar10h"); only 0 for sets with a single published split.
        **options: for the toys the arguments of `toy.cubic`, `toy.sine_gap` or `toy.moons`; for "mnist", "fashion-mnist", the
            variants of "cifar10" and "camvid" n_train, n_test and seed, for a random subset (stratified by
            class); for "cifar10n" labels ("aggregate", "worst", "random1", "random2", "random3" or "clean"); for "ett-h1" and
            "ett-h2" input_length and horizon in hours; for "nab" series and window; for "co2" until, the first year of the
            test rows.

    Returns:
        Data: x float32 [n, features] or [n, channels, height, width] in [0, 1], words int64 [n, words], y float32 [n, 1] or [n, horizon], or
        int64 [n] or [n, height, width].

    Raises:
        ValueError: there is no such name or split, or a file is damaged.
        TypeError: the data set has no such option.
        FileNotFoundError: a file is missing and can't be downloaded.

    Example:
        >>> from workbench import data
        >>> d = data.load("breast-cancer", split=3)
        >>> d.input_shape, d.classes, len(d.train)
        ((30,), ('malignant', 'benign'), 455)
    """
    name = resolve(name)
    data = build(name, whole_number("split", split), **options)
    note(name)
    return data


def build(name: str, split: int, **options: Any) -> Data:
    """Build the data set of a registered name; see `load`."""
    kind = entries()[name]["kind"]
    if kind == "toy":
        make = getattr(toy, name.replace("-", "_"))
        options = {"seed": split, **options}
    else:
        _check_split(name, split)
        make = _LOADERS[kind]
        options = {"name": name, "split": operator.index(split), **options}
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        allowed = [key for key in inspect.signature(make).parameters if key not in ("name", "split")]
        raise TypeError(f"load({name!r}): {error}; it takes {', '.join(['split', *allowed])}") from None
    return make(**options)


def _check_split(name: str, split: int) -> None:
    n_splits = entries()[name].get("splits")
    if operator.index(split) < 0 or (n_splits is not None and split >= n_splits):
        valid_splits = "0 only" if n_splits == 1 else f"0 to {n_splits - 1}" if n_splits else "0 or more (a seed)"
        raise ValueError(f"{name} takes split={valid_splits}; found split={split}")


def _uci(name: str, split: int) -> Data:
    entry = entries()[name]
    (arrays,) = read(name)

    def split_of(rows: np.ndarray) -> Split:
        x, y = arrays["X"][rows], arrays["y"][rows, None]
        return Split(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.float32)))

    train, test = split_of(arrays["train_idx"][split]), split_of(arrays["test_idx"][split])
    return Data(name, "regression", train, test, _columns(name), Column(*entry["target"]), card(name), split=split)


def _images(name: str, split: int, n_train: int | None = None, n_test: int | None = None, seed: int = 0) -> Data:
    entry = entries()[name]
    contents = read(name)
    splits = []
    for option, n, pixels, numbers in (("n_train", n_train, *contents[:2]), ("n_test", n_test, *contents[2:])):
        labels = torch.from_numpy(numbers.astype(np.int64))
        rows = subset(name, option, n, len(labels), labels, len(entry["classes"]), seed)
        pixels, labels = pixels[rows], labels[torch.from_numpy(rows)]
        splits.append(Split(torch.from_numpy(pixels.astype(np.float32)[:, None] / 255), labels))
    (train, test), target = splits, Column(*entry["target"])
    return Data(name, "classification", train, test, _columns(name), target, card(name), tuple(entry["classes"]), split)


def _bundled(name: str, split: int) -> Data:
    entry = entries()[name]
    bunch = getattr(require("sklearn.datasets"), entry["loader"])(**entry.get("arguments", {}))
    x = torch.from_numpy(bunch.data.astype(np.float32))
    features = (
        _columns(name) if "features" in entry else tuple(Column(c.replace("_", " ")) for c in bunch.feature_names)
    )
    target = Column(*entry["target"])
    if entry["task"] == "regression":
        all_rows, classes = Split(x, torch.from_numpy(bunch.target.astype(np.float32))[:, None]), None
    else:
        if hasattr(bunch, "images"):
            x = x.reshape(-1, 1, *bunch.images.shape[1:]) / 16
        classes = tuple(map(str, entry.get("classes", bunch.target_names)))
        all_rows = Split(x, torch.from_numpy(bunch.target.astype(np.int64)))
    train, test = partition(len(all_rows), 0.2, split, None if classes is None else all_rows.y)
    return Data(
        name, entry["task"], all_rows.take(train), all_rows.take(test), features, target, card(name), classes, split
    )


def _columns(name: str) -> tuple[Column, ...]:
    return tuple(Column(*column) for column in entries()[name]["features"])


_LOADERS: dict[str, Callable[..., Data]] = {
    "uci": _uci,
    "images": _images,
    "scikit-learn": _bundled,
    **{
        function.__name__: function for function in (adult, camvid, cifar10, cifar10h, cifar10n, clinc, curve, ett, nab)
    },
}
