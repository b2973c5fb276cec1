"""Input tensors that forward writes into: allowed if all branches write the same or return them as state, refused otherwise."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import NotDealableError
from ..plan import Plan
from ..state import Sealed
from ..tree import flatten, is_float, tensors, version
from .random import values_unavailable

_REMEDY = (
    "return it from forward and wrap with state= and its place in the output, so that each branch keeps its own, or copy it at the start of "
    "forward (x = x.clone())"
)


class WrittenTensors:
    """Caller's tensors that hold what one branch has written, while the other branches have written other values into copies."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def add(self, tensor: Tensor) -> None:
        """Register a tensor in its present version."""
        key = id(tensor)
        self._known[key] = weakref.ref(tensor, lambda _: self._known.pop(key, None)), version(tensor)

    def refuse(self, leaves: Sequence[Any]) -> None:
        """Raise if a registered tensor is passed again unchanged.

        Raises:
            ValueError: if there is one among the leaves.
        """
        for leaf in leaves if self._known else ():
            reference, count = self._known.get(id(leaf), (None, 0))
            if leaf is not None and reference is not None and reference() is leaf and version(leaf) == count:
                raise ValueError(
                    f"an input, {_words(leaf)}, was written in place by an earlier call, with different values in each branch, and holds those "
                    f"of one branch: start with a new tensor and pass on what the call returned; or {_REMEDY}"
                )


def check_written(
    plan: Plan, leaves: Sequence[Any], passes: Sequence[Sequence[Any]], outputs: Sequence[Any]
) -> list[Tensor]:
    """Check that all branches have written the same values into their inputs.

    The first tensor is usually data that is not used after the call, so it is refused only if it is passed again.

    Args:
        plan: plan of the branches.
        leaves: leaves of the caller's inputs.
        passes: leaves of each branch, None for those that it has not written.
        outputs: outputs of the branches.

    Returns:
        The caller's tensors that must not be passed again: those that lie in the states of the branches, and the first.

    Raises:
        RuntimeError: if branches have written different values into an input other than the first.
        NotDealableError: if rows were dealt, so that no branch has written the whole tensor.
    """
    first = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
    kept = [_memories(output) for output in outputs]
    refused = []
    for i, leaf in enumerate(leaves):
        items = [branch[i] for branch in passes]
        if all(item is None for item in items):
            continue
        if all(item is not None and _memory(item) in inside for item, inside in zip(items, kept, strict=True)):
            refused.append(leaf)
        elif plan.dealt and i == first:
            continue  # the branch wrote into its copy of the dealt rows
        elif not plan.dealt and _are_same(items):
            continue
        elif i == first:
            refused.append(leaf)
        elif plan.dealt:
            raise NotDealableError("the model writes into its inputs")
        else:
            raise RuntimeError(
                f"the model writes into an input, {_words(leaf)}, in place, and each of {plan.size} branches writes different values, of which "
                f"only one branch's would be kept: {_REMEDY}"
            )
    return refused


def _are_same(items: Sequence[Tensor | None]) -> bool:
    first, *others = items
    return (
        first is not None
        and not values_unavailable()
        and all(
            item is not None
            and (torch.equal(item, first) or (is_float(item) and torch.allclose(item, first, equal_nan=True)))
            for item in others
        )
    )


def _memories(output: Any) -> set[int]:
    """Return the storage ids of the tensors in sealed parts of an output."""
    sealed = [leaf.value for leaf in flatten(output)[0] if isinstance(leaf, Sealed)]
    return {_memory(tensor) for tensor in tensors(sealed)}


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors have no one storage
        return id(tensor)


def _words(tensor: Any) -> str:
    return f"a tensor {list(tensor.shape)}"
