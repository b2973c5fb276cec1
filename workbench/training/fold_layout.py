"""Layout of folds and voters: the fold of each row, and the voters trained without each fold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from workbench.core.additions import EXTRAS
from workbench.core.batches.arrays import is_frame, numbers_of
from workbench.core.batches.rows import Source, TensorRows
from workbench.core.outputs.options import form_of
from workbench.data.targets import check_names, holds_texts
from workbench.engine.plan import Rule, Split, Stacked
from workbench.methods.vote import NAME as VOTERS


@dataclass(frozen=True, eq=False)
class FoldedRows:
    """A set of rows with its own folds and voters; most trainings have only one such part.

    Args:
        rows: numbers of the rows [n].
        fold: fold of each of these rows [n], 0 to folds - 1.
    """

    rows: Tensor
    fold: Tensor


@dataclass(frozen=True)
class Layout:
    """The order of the voters: parts x settings x folds x repeats, the last one fastest.

    Folds with numbers from `folds` on are held out from no voter.
    """

    parts: int
    settings: int
    folds: int
    repeats: int

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        parts, settings, folds, repeats = map(range, (self.parts, self.settings, self.folds, self.repeats))
        return itertools.product(parts, settings, folds, repeats)


def check_voters(wrapped: Any, folds: int, settings: int) -> Layout:
    """Return the layout of the voters if they can be cross-fitted.

    Raises:
        ValueError: the model has no voters, their number does not fit, or they share trained parameters.
    """
    vote = next((method.wrapper for method in wrapped._workbench.methods if method.name == VOTERS), None)
    if vote is None:
        raise ValueError(f"folds: this model has no voters; wrap it with vote.Wrapper(n_voters={2 * folds * settings})")
    groups = folds * settings
    if vote.n_voters % groups:
        several = f"{folds} folds" + (f" x {settings} settings" if settings > 1 else "")
        raise ValueError(
            f"folds: {vote.n_voters} voters can't be divided evenly into {several}; take n_voters={groups}, {2 * groups} ..."
        )
    if (name := shared_by_voters(wrapped)) is not None:
        raise ValueError(
            f"folds: the voters share {name}, which would be trained on all folds; give each voter its own parameters (share=None, "
            f"use_bias=True), or freeze it ({name}.requires_grad_(False))"
        )
    return Layout(1, settings, folds, vote.n_voters // groups)


def shared_by_voters(wrapped: Any) -> str | None:
    """Return the name of the first trained parameter that voters share; None if there is none."""
    stacked = {name for rule in wrapped._workbench.rules.values() for name in _stacked(rule)}
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad and name not in stacked and not name.startswith(EXTRAS):
            return name
    return None


def _stacked(rule: Rule) -> list[str]:
    """Return the names of the tensors of a rule that have one row per voter."""
    if isinstance(rule, Split):
        return [name for option in rule.options for name in _stacked(option)]
    return [rule.name] if isinstance(rule, Stacked) and rule.axis == VOTERS else []


def assign_folds(n: int, folds: int, labels: Tensor | None, seed: int) -> Tensor:
    """Return a random fold for each of n rows, as balanced as possible, also within each class."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    if labels is not None:
        order = order[labels.cpu()[order].argsort(stable=True)]
    fold = torch.empty(n, dtype=torch.int64)
    fold[order] = torch.arange(n) % folds
    return fold


def pair_settings(lr: Any, weight_decay: Any, folds: Any) -> tuple[list[float], list[float]]:
    """Return the learning rates and weight decays of the settings, two lists of equal length (1 without folds).

    Raises:
        ValueError: there are several settings without folds, or the numbers of values do not match.
    """
    both = [list(v) if isinstance(v, Sequence) and not isinstance(v, str) else [v] for v in (lr, weight_decay)]
    n_settings = max(map(len, both))
    if n_settings > 1 and folds is None:
        raise ValueError(
            f"lr={lr}, weight_decay={weight_decay}: several settings need folds=, which decide how much each counts"
        )
    if any(len(values) not in (1, n_settings) for values in both):
        raise ValueError(
            f"lr={lr} and weight_decay={weight_decay} are paired one by one; give equally many of both, or a single one of either"
        )
    rates, decays = (values * (n_settings // len(values)) for values in both)
    return rates, decays


def lay_out(wrapped: Any, train: Source, folds: Any, settings: int, seed: int, in_time: bool) -> tuple[Tensor, Layout]:
    """Return the fold of each row, and the layout of the voters.

    A number of folds is drawn at random; `in_time`, for windows of a series in time order, each is a period.

    Raises:
        TypeError: the rows are not in memory, so that they can't be split.
        ValueError: the rows can't be split into these folds, or the number of voters does not fit.
    """
    rows = _checked_rows(wrapped, train)
    n = len(rows)
    if is_frame(folds):
        folds = folds.to_numpy()
    if isinstance(folds, np.ndarray | list | tuple):
        check_names(folds, "folds")
        if holds_texts(folds):
            folds = np.unique(np.asarray(folds, dtype=str), return_inverse=True)[1]
        try:
            folds = torch.tensor(numbers_of(folds))
        except TypeError as error:
            raise ValueError(f"folds: {error}") from error
    if isinstance(folds, Tensor):
        fold = _numbered(folds, n)
        count = int(fold.max()) + 1
    elif isinstance(folds, bool) or not isinstance(folds, int | np.integer):
        raise ValueError(
            "folds must be a whole number, or a tensor, array or Series with the fold of each row, in their order; found "
            f"{folds if isinstance(folds, str | float) else type(folds).__name__!r}"
        )
    else:
        count = int(folds)
        labels = rows.y if not rows.y.is_floating_point() and rows.y.dim() == 1 else None
        fold = torch.arange(n) * count // n if in_time else assign_folds(n, max(count, 1), labels, seed)
    if not 2 <= count <= n // 2:
        raise ValueError(f"folds: {count} for {n} rows; there must be at least 2, and 2 rows in each")
    return fold, check_voters(wrapped, count, settings)


def _checked_rows(wrapped: Any, train: Source) -> TensorRows:
    """Return the rows if voters of this model can be cross-fitted on them."""
    if not isinstance(train, TensorRows):
        kind = "DataLoader" if isinstance(train, DataLoader) else type(train).__name__
        raise TypeError(f"folds: the rows of a {kind} can't be split into folds; give tensors or arrays (x, y)")
    if isinstance(train.x, dict):
        raise TypeError("folds: x is a dict; cross-fitting takes a tensor, or a tuple of positional inputs")
    form = form_of(wrapped._workbench.output)
    if form == "several" or not isinstance(train.y, Tensor):
        raise TypeError(
            "folds: cross-fitting needs a model with one output and one tensor of targets; wrap a function that returns this output"
        )
    if form in ("logits", "probs") and train.y.is_floating_point():
        raise TypeError(
            f"folds: the model gives class scores, and y is {train.y.dtype}; cross-fitting takes class numbers"
        )
    return train


def _numbered(folds: Tensor, n: int) -> Tensor:
    """Return the fold of each of n rows as numbers from 0 on, without gaps."""
    if folds.shape != (n,) or folds.is_floating_point():
        raise ValueError(
            f"folds: found {folds.dtype} {list(folds.shape)}; give a number, or one whole number for each of {n} rows"
        )
    if n and (lowest := int(folds.min())) < 0:
        raise ValueError(
            f"folds: {lowest} in {int((folds < 0).sum())} of {n} rows, which elsewhere marks rows without a fold or group; leave these rows "
            "out, or give them a fold from 0 on"
        )
    fold = folds.cpu().unique(return_inverse=True)[1]
    if (n_others := n - int(fold.bincount().max())) == 1:
        raise ValueError(
            f"folds: one fold has {n - n_others} of {n} rows, so that a voter would be trained on one row; give at least 2"
        )
    return fold
