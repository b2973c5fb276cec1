"""What a call of a Keras model leaves beside its output: the losses that layers add, and the masks of outputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import torch
from torch import Tensor

from ...engine.plan import concatenate
from ...engine.state import BranchedState
from ...risk import Risk
from ..ownership import extra
from ..prior import NAME as PRIOR

KEY = "keras_extras"  # where they stand in the output of a call that gathers them, sealed: each branch has its own
_ALONE = "output"


def mask_of(leaf: Any) -> Any:
    """The mask that Keras has set on a tensor, or None."""
    return getattr(leaf, "_keras_mask", None)


def with_extras(output: Any, losses: list[Any], masks: list[Any]) -> dict[str, Any]:
    """An output as a dict whose names are its own, with what Keras keeps beside it.

    Args:
        output: of a Keras model: a tensor, or a list, tuple or dict.
        losses: that its layers have added.
        masks: of its leaves.
    """
    extras = {"losses": [keras.ops.sum(loss) for loss in losses], "masks": masks}
    if isinstance(output, Mapping):
        return {**output, KEY: extras}
    named = {str(i): part for i, part in enumerate(output)} if isinstance(output, list | tuple) else {_ALONE: output}
    return {**named, KEY: extras}


@contextmanager
def gathering(wrapped: Any) -> Iterator[None]:
    """While a wrapped torch module is called, what stands under `KEY` is kept apart for each branch.

    Raises:
        NotImplementedError: if voters have prior functions, which are added to outputs alone.
    """
    if extra(wrapped, PRIOR) is not None:
        raise NotImplementedError(
            "prior: layers of this Keras model add losses or mask its output, and compute them of what they give without the prior; leave prior "
            "out, or these"
        )
    record = wrapped._workbench
    before = record.state
    record.state = (*(before or ()), (KEY,))
    try:
        yield
    finally:
        record.state = before


def without_extras(answer: Any, kind: type, return_risk: bool) -> tuple[Any, Any, BranchedState]:
    """The prediction as the model gives it, its risk or None, and what was gathered.

    Args:
        answer: a prediction; with `return_risk` the pair of prediction and risk.
        kind: of the model's output.
        return_risk: whether risk was asked for.
    """
    y, risk = answer if return_risk else (answer, None)
    if isinstance(risk, Risk):
        return _restored(y, kind), Risk(**{name: _restored(risk[name], kind) for name in risk.names()}), y[KEY]
    return _restored(y, kind), _restored(risk, kind), y[KEY]


def _restored(tree: Any, kind: type) -> Any:
    if not isinstance(tree, Mapping):  # one number a row
        return tree
    values = {name: value for name, value in tree.items() if name != KEY}
    if issubclass(kind, Mapping):
        return values
    return kind(values.values()) if issubclass(kind, list | tuple) else values[_ALONE]


def losses_of(state: BranchedState, dealt: str) -> list[Tensor]:
    """The losses that layers added: the mean over the models, of which each counts by the rows that it answered.

    Args:
        state: what was gathered.
        dealt: the axis along which rows are dealt out where they are.
    """
    columns = zip(*(part["losses"] for part in state._parts), strict=True)
    return [_mean(torch.stack(column), state, dealt) for column in columns]


def _mean(values: Tensor, state: BranchedState, dealt: str) -> Tensor:
    values = values.reshape([axis.size for axis in state._axes])
    for dim, axis in reversed([*enumerate(state._axes)]):
        if axis.own_first:
            values = values.select(dim, 0)
        elif axis.name == dealt and state.rows is not None:
            counts = values.new_tensor([float(len(rows)) for rows in state.rows])
            values = (values.movedim(dim, -1) * (counts / counts.sum())).sum(-1)
        else:
            values = values.mean(dim)
    return values


def set_masks(y: Any, state: BranchedState, dealt: str) -> None:
    """Set the masks on the leaves of a prediction, as Keras does.

    Args:
        y: the prediction, like the model's output.
        state, dealt: as for `losses_of`.

    Raises:
        NotImplementedError: if models mask other places.
    """
    for i, leaf in enumerate(keras.tree.flatten(y)):
        masks = [part["masks"][i] for part in state._parts]
        if masks[0] is None:
            continue
        whole = masks if state.rows is None else _in_order(masks, state, dealt)
        if any(not torch.equal(mask, whole[0]) for mask in whole[1:]):
            raise NotImplementedError(
                "the models of this wrapped Keras model mask other places of the output than each other, so that their mean has no mask: let "
                "the mask follow from the inputs alone (Embedding(mask_zero=True), Masking as the first layer)"
            )
        leaf._keras_mask = whole[0]


def _in_order(masks: list[Tensor], state: BranchedState, dealt: str) -> list[Tensor]:
    """Masks whose rows were dealt out, in the order of the batch: one for each place along the other axes."""
    rows: Any = state.rows
    order = torch.argsort(concatenate(rows))
    places = itertools.product(*(range(axis.size) for axis in state._axes))
    groups: dict[tuple, list[Tensor]] = {}
    for place, mask in zip(places, masks, strict=True):
        others = tuple(k for k, axis in zip(place, state._axes, strict=True) if axis.name != dealt)
        groups.setdefault(others, []).append(mask)
    return [torch.cat(parts)[order.to(parts[0].device)] for parts in groups.values()]


__all__ = ["KEY", "gathering", "losses_of", "mask_of", "set_masks", "with_extras", "without_extras"]
