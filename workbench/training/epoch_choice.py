"""Choice of the number of epochs of cross-fitted voters: each length is a separate training, and the next is tried while longer is better."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from workbench.errors import WorkbenchWarning
from workbench.introspect.source_lines import user_stacklevel
from workbench.training.copied_state import copied_state
from workbench.training.cross_fitting import CrossFit
from workbench.training.fold_decisions import exceeds_error
from workbench.training.history import History


def lengths_of(epochs: Any, folds: Any) -> list[Any]:
    """Return the numbers of epochs to try, in increasing order.

    Raises:
        ValueError: there are several without folds, or they are not strictly increasing.
    """
    lengths = list(epochs) if isinstance(epochs, Sequence) and not isinstance(epochs, str) else [epochs]
    if len(lengths) > 1 and folds is None:
        raise ValueError(f"epochs={epochs}: several lengths need folds=, on which they are compared")
    if not lengths or any(longer <= shorter for shorter, longer in itertools.pairwise(lengths)):
        raise ValueError(f"epochs={epochs}: give each length once, the shortest first, such as (100, 300, 900)")
    return lengths


def train_lengths(wrapped: Any, lengths: Sequence[int], make: Callable[[int], CrossFit]) -> History:
    """Train for each length from the same initial weights, until one is not better than the one before; the model becomes the best.

    A length is better if the mean log density of the rows under the voters that have not seen them is larger by more than its standard error
    (one-standard-error rule, Breiman et al. 1984). A longer training that is stopped early is not considered.

    Args:
        wrapped: the model.
        lengths: numbers of epochs, in increasing order.
        make: make(epochs) -> the training.

    Returns:
        The course of the training that was kept.
    """
    start = copied_state(wrapped) if len(lengths) > 1 else {}
    best = make(lengths[0])
    best.run()
    ended_early = best.interrupted or best.stopped
    for epochs in () if ended_early else lengths[1:]:
        wrapped.load_state_dict(start)
        longer = make(epochs)
        longer.run()
        if longer.interrupted:
            warnings.warn(
                f"training was interrupted while it tried {epochs} epochs; the model is that of {best.epochs} epochs",
                WorkbenchWarning,
                stacklevel=user_stacklevel(),
            )
        if ended_early := longer.interrupted or longer.stopped:
            break
        if not exceeds_error(longer.decide().log_prob - best.decide().log_prob):
            break
        best = longer
    return dataclasses.replace(best.finish(), interrupted=ended_early)


__all__ = ["lengths_of", "train_lengths"]
