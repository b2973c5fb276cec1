"""What is asked of a wrapped object in one call."""

from __future__ import annotations

from typing import NamedTuple


class Call(NamedTuple):
    """What is asked of a wrapped object in one call.

    Args:
        training: whether the object is in training mode.
        return_risk: whether risks are wanted.
        dealt: whether each row of the batch is answered by one branch of the dealing method only.
        loss: whether the call computes the training loss.
    """

    training: bool
    return_risk: bool
    dealt: bool = False
    loss: bool = False
