"""Draw rows by a seed, without touching the global random state."""

from __future__ import annotations

import math
import operator

import numpy as np
from torch import Tensor

from workbench.errors import require


def partition(n: int, size: float, seed: int, labels: Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Two sets of row numbers out of n, the second of this size (a share or a number), stratified by labels [n].

    A class of one row, which can't be in both, is in the first.
    """
    split = require("sklearn.model_selection").train_test_split
    seed = whole_number("the split, which is the seed of the rows drawn", seed)
    if not 0 <= seed < 2**32:
        raise ValueError(f"the split is the seed of the rows drawn, from 0 to 2**32 - 1; found {seed}")
    rows = np.arange(n)
    if labels is not None:
        _, number, counts = np.unique(labels.numpy(), return_inverse=True, return_counts=True)
        if (alone := counts[number] == 1).any() and not alone.all():
            size = math.ceil(size * n) if size < 1 else size
            first, second = split(rows[~alone], test_size=size, random_state=seed, stratify=labels[~alone])
            return np.concatenate([first, rows[alone]]), second
    first, second = split(rows, test_size=size, random_state=seed, stratify=labels)
    return first, second


def whole_number(name: str, value: object) -> int:
    """The value as an int, if it is a whole number of any type."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a whole number (an integer); found {value!r:.100}") from None


def subset(
    name: str, option: str, n: int | None, every: int, labels: Tensor | None, n_classes: int, seed: int
) -> np.ndarray:
    """Row numbers of n of all rows of a data set, with the shares of the classes; of all in their order if n is None or all."""
    if n is None or n == every:
        return np.arange(every)
    if not n_classes <= n <= every - n_classes:
        raise ValueError(
            f"{name}: {option} must be {every} (all) or lie between {n_classes} (one of each class) and {every - n_classes}; found {n}"
        )
    return partition(every, n, seed, labels)[1]
