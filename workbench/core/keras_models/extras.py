"""Extras of a call of a Keras model besides its output: losses added by layers, and masks of outputs."""

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
from ..additions import extra
from ..prior import NAME as PRIOR

KEY = "keras_extras"  # key of the extras in the output of a call that collects them; treated as state, so that each branch has its own
_SINGLE = "output"


def mask_of(leaf: Any) -> Any:
    """Return the mask that Keras has set on a tensor, or None."""
    return getattr(leaf, "_keras_mask", None)


def with_extras(output: Any, losses: list[Any], masks: list[Any]) -> dict[str, Any]:
    """Convert an output to a dict that also contains the extras under `KEY`.

    Args:
        output: output of a Keras model: a tensor, list, tuple or dict.
        losses: losses added by its layers.
        masks: masks of its leaves.
    """
    extras = {"losses": [keras.ops.sum(loss) for loss in losses], "masks": masks}
    if isinstance(output, Mapping):
        return {**output, KEY: extras}
    named = {str(i): part for i, part in enumerate(output)} if isinstance(output, list | tuple) else {_SINGLE: output}
    return {**named, KEY: extras}


@contextmanager
def gathering(wrapped: Any) -> Iterator[None]:
    """Context manager for calls of a wrapped torch module in which the extras are treated as state, separate for each branch.

    Raises:
        NotImplementedError: if voters have prior functions, which are only added to outputs.
    """
    if extra(wrapped, PRIOR) is not None:
        raise NotImplementedError(
            "prior: layers of this Keras model add losses or mask its output, and compute them from outputs without the prior; leave prior out, "
            "or remove these losses and masks"
        )
    record = wrapped._workbench
    original_state = record.state
    record.state = (*(original_state or ()), (KEY,))
    try:
        yield
    finally:
        record.state = original_state


def without_extras(answer: Any, kind: type, return_risk: bool) -> tuple[Any, Any, BranchedState]:
    """Split an answer into the prediction in the model's form, its risk or None, and the extras.

    Args:
        answer: a prediction; with `return_risk` the pair of prediction and risk.
        kind: type of the model's output.
        return_risk: whether risk was requested.
    """
    y, risk = answer if return_risk else (answer, None)
    if isinstance(risk, Risk):
        return _restored(y, kind), Risk(**{name: _restored(risk[name], kind) for name in risk.names()}), y[KEY]
    return _restored(y, kind), _restored(risk, kind), y[KEY]


def _restored(tree: Any, kind: type) -> Any:
    if not isinstance(tree, Mapping):  # a risk with one number per row
        return tree
    values = {name: value for name, value in tree.items() if name != KEY}
    if issubclass(kind, Mapping):
        return values
    return kind(values.values()) if issubclass(kind, list | tuple) else values[_SINGLE]


def losses_of(state: BranchedState, dealt: str) -> list[Tensor]:
    """Return the losses added by layers, averaged over the models, each weighted by the number of rows that it answered.

    Args:
        state: the extras of a call.
        dealt: name of the axis along which rows are dealt out, if they are.
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
        y: the prediction, in the form of the model's output.
        state, dealt: as for `losses_of`.

    Raises:
        NotImplementedError: if masks differ between models.
    """
    for i, leaf in enumerate(keras.tree.flatten(y)):
        masks = [part["masks"][i] for part in state._parts]
        if masks[0] is None:
            continue
        full_masks = masks if state.rows is None else _in_order(masks, state, dealt)
        if any(not torch.equal(mask, full_masks[0]) for mask in full_masks[1:]):
            raise NotImplementedError(
                "the voters of this wrapped Keras model mask different places of the output, so that their mean has no mask: use masks that "
                "only depend on the inputs (Embedding(mask_zero=True), Masking as the first layer)"
            )
        leaf._keras_mask = full_masks[0]


def _in_order(masks: list[Tensor], state: BranchedState, dealt: str) -> list[Tensor]:
    """Concatenate masks of dealt rows in the order of the batch; one mask per position along the other axes."""
    rows: Any = state.rows
    order = torch.argsort(concatenate(rows))
    places = itertools.product(*(range(axis.size) for axis in state._axes))
    groups: dict[tuple, list[Tensor]] = {}
    for place, mask in zip(places, masks, strict=True):
        others = tuple(k for k, axis in zip(place, state._axes, strict=True) if axis.name != dealt)
        groups.setdefault(others, []).append(mask)
    return [torch.cat(parts)[order.to(parts[0].device)] for parts in groups.values()]


__all__ = ["KEY", "gathering", "losses_of", "mask_of", "set_masks", "with_extras", "without_extras"]
