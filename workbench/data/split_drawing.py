"""Random draws of rows by a seed, without changing the global random state."""

from __future__ import annotations

import math
import operator

import numpy as np
from torch import Tensor

from workbench.errors import require


def partition(n: int, size: float, seed: int, labels: Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Split the row numbers 0 to n - 1 in two, the second part of this size (a share or a number), stratified by labels [n].

    The row of a class with a single row goes to the first part. With more classes than rows in a part, all rows are drawn alike.
    """
    split = require("sklearn.model_selection").train_test_split
    seed = whole_number("the split, which is the seed of the rows drawn", seed)
    if not 0 <= seed < 2**32:
        raise ValueError(f"the split is the seed of the rows drawn, from 0 to 2**32 - 1; found {seed}")
    if n < 2:
        raise ValueError(f"found {n} row{'' if n == 1 else 's'}; at least 2 are needed, one for each part")
    rows = np.arange(n)
    if labels is not None:
        _, number, counts = np.unique(labels.numpy(), return_inverse=True, return_counts=True)
        if (is_single := counts[number] == 1).any():
            n_single = int(is_single.sum())
            if n_single == n or n_single > max(n / 2, 10):
                raise ValueError(
                    f"{n_single} of {n} rows are the only one of their class; if the targets are amounts that came as texts, make them numbers"
                )
            first, second = partition(n - n_single, math.ceil(size * n) if size < 1 else size, seed, labels[~is_single])
            return np.concatenate([rows[~is_single][first], rows[is_single]]), rows[~is_single][second]
        n_second = math.ceil(size * n) if size < 1 else size
        if len(counts) > min(n_second, n - n_second):
            labels = None
    first, second = split(rows, test_size=size, random_state=seed, stratify=labels)
    return first, second


def latest(n: int, fraction: float, gap: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the row numbers 0 to n - 1, which are in time order, into earlier and latest ones, without `gap` rows between them."""
    held_out = max(1, round(fraction * n))
    if (earlier := n - held_out - gap) < 1:
        raise ValueError(
            f"{n} windows of a series are too few: the latest {held_out} are held out, and {gap} before them have targets that overlap with "
            "theirs, so that none is left to train on; hold out fewer (none in fit: validation=0), or give a longer series"
        )
    return np.arange(earlier), np.arange(n - held_out, n)


def whole_number(name: str, value: object) -> int:
    """Convert an integer of any type to int; raise TypeError for anything else."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a whole number (an integer); found {value!r:.100}") from None


def subset(
    name: str, option: str, n: int | None, n_rows: int, labels: Tensor | None, n_classes: int, seed: int
) -> np.ndarray:
    """Draw n row numbers of a data set, stratified by class; return all in order if n is None or the number of rows."""
    if n is None or n == n_rows:
        return np.arange(n_rows)
    if not n_classes <= n <= n_rows - n_classes:
        raise ValueError(
            f"{name}: {option} must be {n_rows} (all) or lie between {n_classes} (one of each class) and {n_rows - n_classes}; found {n}"
        )
    return partition(n_rows, n, seed, labels)[1]
