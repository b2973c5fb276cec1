"""Layout of folds and voters: which rows are in which fold, and which voter trains without it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.core.batches.rows import Source, TensorRows
from workbench.core.outputs.options import form_of
from workbench.core.ownership import EXTRAS
from workbench.engine.plan import Rule, Split, Stacked
from workbench.methods.vote import NAME as VOTERS


@dataclass(frozen=True, eq=False)
class FoldedRows:
    """Rows that are cut into folds of their own, with voters of their own; most trainings have one such part.

    Args:
        rows: numbers of the rows [n].
        fold: for each of them the number of its fold [n], 0 to folds - 1.
    """

    rows: Tensor
    fold: Tensor


@dataclass(frozen=True)
class Layout:
    """Which voter is which: parts x settings x folds x repeats, the last fastest.

    Folds beyond `folds` are held out by nobody.
    """

    parts: int
    settings: int
    folds: int
    repeats: int

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        parts, settings, folds, repeats = map(range, (self.parts, self.settings, self.folds, self.repeats))
        return itertools.product(parts, settings, folds, repeats)


def check_voters(wrapped: Any, folds: int, settings: int, parts: int = 1) -> Layout:
    """The layout of the voters, if they can be cross-fitted.

    Raises:
        ValueError: there is nothing that votes, the number of voters does not fit, or voters share what is trained.
    """
    vote = next((method.wrapper for method in wrapped._workbench.methods if method.name == VOTERS), None)
    if vote is None:
        raise ValueError(
            f"folds: nothing votes in this model; wrap it with vote.Wrapper(n_voters={2 * folds * settings})"
        )
    groups = folds * settings * parts
    if vote.n_voters % groups:
        several = f"{folds} folds" + (f" x {settings} settings" if settings > 1 else "")
        raise ValueError(
            f"folds: {vote.n_voters} voters can't be shared out evenly to {several}; take n_voters={groups}, {2 * groups} ..."
        )
    if (name := shared_by_voters(wrapped)) is not None:
        raise ValueError(
            f"folds: the voters share {name}, which would see all folds; let every voter have all parameters of its own (share=None, "
            f"use_bias=True), or freeze it ({name}.requires_grad_(False))"
        )
    return Layout(parts, settings, folds, vote.n_voters // groups)


def shared_by_voters(wrapped: Any) -> str | None:
    """The first parameter that is trained and of which voters have no values of their own; None if there is none."""
    stacked = {name for rule in wrapped._workbench.rules.values() for name in _stacked(rule)}
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad and name not in stacked and not name.startswith(EXTRAS):
            return name
    return None


def _stacked(rule: Rule) -> list[str]:
    """The tensors behind a rule of which every voter has a row."""
    if isinstance(rule, Split):
        return [name for option in rule.options for name in _stacked(option)]
    return [rule.name] if isinstance(rule, Stacked) and rule.axis == VOTERS else []


def assign_folds(n: int, folds: int, labels: Tensor | None, seed: int) -> Tensor:
    """A fold for each of n rows, at random and as even as can be, for each class as well."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    if labels is not None:
        order = order[labels.cpu()[order].argsort(stable=True)]
    fold = torch.empty(n, dtype=torch.int64)
    fold[order] = torch.arange(n) % folds
    return fold


def pair_settings(lr: Any, weight_decay: Any, folds: Any) -> tuple[list[float], list[float]]:
    """Learning rates and weight decays of the settings: as many of both, one where there are no folds.

    Raises:
        ValueError: there are several without folds, or not as many of one as of the other.
    """
    both = [list(v) if isinstance(v, Sequence) else [v] for v in (lr, weight_decay)]
    most = max(map(len, both))
    if most > 1 and folds is None:
        raise ValueError(
            f"lr={lr}, weight_decay={weight_decay}: several settings need folds=, by which they are weighed"
        )
    if any(len(values) not in (1, most) for values in both):
        raise ValueError(
            f"lr={lr} and weight_decay={weight_decay} go together, one by one; give as many of both, or one of one"
        )
    rates, decays = (values * (most // len(values)) for values in both)
    return rates, decays


def lay_out(wrapped: Any, train: Source, folds: Any, settings: int, seed: int) -> tuple[Tensor, Layout]:
    """The fold of each row, and the layout of the voters.

    Raises:
        TypeError: the rows are not in memory, so that they can't be cut.
        ValueError: folds can't be cut so, or the voters do not fit.
    """
    if not isinstance(train, TensorRows):
        raise TypeError(
            f"folds: the rows of a {type(train).__name__} can't be cut into folds; give tensors or arrays (x, y)"
        )
    if isinstance(train.x, dict):
        raise TypeError("folds: x is a dict; cross-fitting takes a tensor, or a tuple of positional inputs")
    if form_of(wrapped._workbench.output) == "several" or not isinstance(train.y, Tensor):
        raise TypeError(
            "folds: cross-fitting takes a model of one output and one tensor of targets; wrap a function that returns the output"
        )
    if form_of(wrapped._workbench.output) in ("logits", "probs") and train.y.is_floating_point():
        raise TypeError(
            f"folds: the model gives class scores, and y is {train.y.dtype}; cross-fitting takes class numbers"
        )
    n = len(train)
    if isinstance(folds, Tensor):
        if folds.shape != (n,) or folds.is_floating_point():
            raise ValueError(
                f"folds: found {folds.dtype} {list(folds.shape)}; give a number, or one whole number for each of {n} rows"
            )
        fold = folds.cpu().unique(return_inverse=True)[1]
        count = int(fold.max()) + 1
    else:
        if isinstance(folds, bool) or not isinstance(folds, int):
            raise ValueError(f"folds must be a whole number, or one for each row; found {folds!r}")
        count = folds
        labels = train.y if not train.y.is_floating_point() and train.y.dim() == 1 else None
        fold = assign_folds(n, max(count, 1), labels, seed)
    if not 2 <= count <= n // 2:
        raise ValueError(f"folds: {count} for {n} rows; there must be at least 2, and 2 rows in each")
    return fold, check_voters(wrapped, count, settings)
