"""Objects among the inputs that forward changes, such as a cache of keys and values: each branch has its own, from call to call."""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ..clone import ATOMS, is_generator
from .attributes import mark
from .branch_values import duplicate, holds_tensors

Key = tuple[tuple[str, int], ...]  # where a branch stands along the axes, places 0 left out
DEPTH = 8


def is_object(leaf: Any) -> bool:
    """Whether a leaf is something that forward may change, and that is neither a tensor nor a container of the trees."""
    return not (
        isinstance(leaf, (Tensor, nn.Module, enum.Enum, slice, range, *ATOMS)) or callable(leaf) or is_generator(leaf)
    )


def refuse_iterators(leaves: Sequence[Any]) -> None:
    """An iterator can be read only once, and the branches are several.

    Raises:
        TypeError: if one is among the inputs.
    """
    for leaf in leaves:
        if isinstance(leaf, Iterator):
            raise TypeError(
                f"a {type(leaf).__name__} is among the inputs, which can be read only once, and the model runs several times; "
                "give a list, list(...)"
            )


class Objects:
    """Knows for an object that the first branch has worked on those that the other branches have in its place."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any, dict[Key, Any]]] = {}  # id -> (weak reference, mark, by branch)
        self.changes: bool | None = (
            None  # whether forward changes objects among its inputs; unknown before the first call
        )

    def branches(self, leaves: Sequence[Any], keys: Sequence[Key], apart: bool) -> list[dict[Key, Any] | None]:
        """For each leaf that is an object what each branch is to have in its place; None for other leaves.

        Args:
            leaves: of the inputs.
            keys: the branches.
            apart: whether the first branch is to have a copy as well, not the caller's own.

        Raises:
            RuntimeError: if somebody changed the object since the branches last worked on theirs, or they were other branches.
        """
        return [self._of(leaf, keys, apart) if is_object(leaf) else None for leaf in leaves]

    def _of(self, leaf: Any, keys: Sequence[Key], apart: bool) -> dict[Key, Any]:
        known = self._known.get(id(leaf))
        if apart and self.changes is not False:
            return {key: duplicate(leaf) for key in keys}
        if known is None or known[0]() is not leaf:
            if self.changes is False or len(keys) == 1:
                return dict.fromkeys(keys, leaf)
            return {key: duplicate(leaf) if k else leaf for k, key in enumerate(keys)}
        _, then, others = known
        if list(others) == list(keys) and len(keys) == 1:  # nobody else has one
            return {keys[0]: leaf}
        name = type(leaf).__name__
        if mark(leaf, DEPTH) != then:
            raise RuntimeError(
                f"the {name} among the inputs was changed outside the model since the last call, which only the first of "
                f"{len(others)} branches would see; do without it (use_cache=False), or wrap what changes it as well"
            )
        if missing := [key for key in keys if key not in others]:
            raise RuntimeError(
                f"the {name} among the inputs comes from a call with other branches (there is none for {dict(missing[0])}); ask in the same "
                "way as in that call (training mode, return_risk), or start with a new one"
            )
        return others

    def remember(self, keys: Sequence[Key], objects: Sequence[Any]) -> None:
        """The objects that the branches have in the place of the first one's, from now on."""
        first = objects[0]
        with contextlib.suppress(TypeError):  # what has no weak reference is not remembered: a copy is made each time
            number = id(first)
            reference = weakref.ref(first, lambda _: self._known.pop(number, None))
            self._known[number] = reference, mark(first, DEPTH), dict(zip(keys, objects, strict=True))

    def kept(self, keys: Sequence[Key], columns: Iterator[Sequence[Any]]) -> None:
        """Remember those among the outputs, a column of all branches each, that hold tensors and that each branch made for itself."""
        for items in columns:
            if is_object(items[0]) and len({id(item) for item in items}) == len(items) and holds_tensors(items[0]):
                self.remember(keys, items)
