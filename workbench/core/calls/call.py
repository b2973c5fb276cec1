"""Request for one call of a wrapped object."""

from __future__ import annotations

from typing import NamedTuple


class Call(NamedTuple):
    """Request for one call of a wrapped object.

    Args:
        training: whether the object is in training mode.
        return_risk: whether risks are computed.
        dealt: whether rows are dealt: one branch of the dealing method answers each row of the batch, instead of all of them.
        loss: whether the training loss is computed.
    """

    training: bool
    return_risk: bool
    dealt: bool = False
    loss: bool = False
