"""Effects of forward on its inputs: tensors that it writes into, and objects that it changes, of which each branch has a copy."""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ...introspect.objects import ATOMS, is_generator, is_graph
from ..state import BranchedState
from ..tree import flatten, tree_map
from .attributes import DEEP, mark
from .branch_values import duplicate, holds_tensors
from .containers import holds_mutable
from .written import WrittenTensors

Key = tuple[tuple[str, int], ...]  # positions of a branch along the axes, without those at 0


_FIRST = "_workbench_first_of"


def _refuse_copy(leaf: Any) -> None:
    """Raise RuntimeError for a copy of an object from an earlier call: it holds the values of the first branch only."""
    count = getattr(leaf, "__dict__", {}).get(_FIRST)
    if count is not None:
        raise RuntimeError(
            f"the {type(leaf).__name__} among the inputs is a copy of one from an earlier call, in which each of {count} branches had its own: "
            "it holds the first branch's only. Return it from forward and wrap with state= and its place in the output (such as "
            'state="past_key_values"), which can be copied, pickled and changed by state.map; or do without it (use_cache=False)'
        )


def object_mark(value: Any) -> Any:
    """Return a value that stays equal exactly as long as nothing inside the object changes."""
    return mark(value, DEEP)


def is_object(leaf: Any) -> bool:
    """Return whether a leaf is an object that forward may change, neither a tensor nor a state."""
    return not (
        isinstance(leaf, (Tensor, BranchedState, nn.Module, enum.Enum, slice, range, *ATOMS))
        or (callable(leaf) and not is_graph(leaf))
        or is_generator(leaf)
    )


def are_tensors(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether all inputs are tensors."""
    return all(isinstance(value, Tensor) for value in (*args, *kwargs.values()))


def are_plain(leaves: Sequence[Any]) -> bool:
    """Return whether all leaves are tensors without a class of their own."""
    return {*map(type, leaves)} <= {Tensor}


def own_inputs(tree: Any) -> Any:
    """Return the inputs with copies of containers, objects and states, for a pass that must not change the caller's."""
    return tree_map(
        lambda leaf: leaf.copy() if isinstance(leaf, BranchedState) else duplicate(leaf) if is_object(leaf) else leaf,
        tree,
    )


def may_change(effects: InputEffects, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether a container, an object or a state among the inputs may be changed by forward."""
    if are_tensors(args, kwargs):
        return False
    if effects.fills_containers is not False and holds_mutable(args, kwargs):
        return True
    return any(isinstance(leaf, BranchedState) or is_object(leaf) for leaf in flatten((args, kwargs))[0])


def refuse_iterators(leaves: Sequence[Any]) -> None:
    """Raise if there is an iterator among the inputs, which only one of several branches could read.

    Raises:
        TypeError: if there is one.
    """
    for leaf in leaves:
        if isinstance(leaf, Iterator):
            raise TypeError(
                f"a {type(leaf).__name__} is among the inputs, which can be read only once, and the model runs several times; pass a list, "
                "list(...)"
            )


class InputEffects:
    """Observed effects of forward on its inputs.

    For an object among the inputs, such as a key-value cache, it keeps the copies of the other branches from call to call.
    """

    def __init__(self) -> None:
        self.writes_tensors: bool | None = None  # unknown before the first call
        self.changes_objects: bool | None = None
        self.fills_containers: bool | None = None
        self.written = WrittenTensors()
        # id -> (weak reference to the first branch's object, its mark, keys of the branches, objects of the other branches)
        self._copies: dict[int, tuple[Any, Any, tuple[Key, ...], Sequence[Any]]] = {}

    def objects_of_branches(
        self, leaves: Sequence[Any], keys: Sequence[Key], copy_first: bool
    ) -> list[dict[Key, Any] | None]:
        """Return, for each leaf that is an object, the object of each branch; None for other leaves.

        Args:
            leaves: leaves of the inputs.
            keys: keys of the branches.
            copy_first: whether the first branch gets a copy too, instead of the caller's object.

        Raises:
            RuntimeError: if the object was changed outside the model since the last call, or comes from a call with other branches.
        """
        return [self._objects_of(leaf, keys, copy_first) if is_object(leaf) else None for leaf in leaves]

    def _objects_of(self, leaf: Any, keys: Sequence[Key], copy_first: bool) -> dict[Key, Any]:
        entry = self._copies.get(id(leaf))
        if copy_first and self.changes_objects is not False:
            return {key: duplicate(leaf) for key in keys}
        if entry is None or entry[0]() is not leaf:
            if len(keys) > 1:
                _refuse_copy(leaf)
            if self.changes_objects is False or len(keys) == 1:
                return dict.fromkeys(keys, leaf)
            return {key: duplicate(leaf) if k else leaf for k, key in enumerate(keys)}
        _, earlier_mark, earlier_keys, others = entry
        by_branch = dict(zip(earlier_keys, (leaf, *others), strict=True))
        if list(by_branch) == list(keys) and len(keys) == 1:  # there is no other branch
            return {keys[0]: leaf}
        kind = type(leaf).__name__
        if object_mark(leaf) != earlier_mark:
            raise RuntimeError(
                f"the {kind} among the inputs was changed outside the model since the last call, which only the first "
                f"of {len(by_branch)} branches would see: wrap with state= and its place in the output (such as state='past_key_values') and "
                "change it by state.map(function), do without it (use_cache=False), or wrap what changes it as well"
            )
        if missing := [key for key in keys if key not in by_branch]:
            raise RuntimeError(
                f"the {kind} among the inputs comes from a call with other branches (there is none for {dict(missing[0])}); call in the same "
                "way as then (training mode, return_risk), or start with a new one"
            )
        return by_branch

    def remember(self, keys: Sequence[Key], objects: Sequence[Any]) -> None:
        """Store the objects of the branches, to be used when the first branch's object is passed again."""
        first = objects[0]
        if len(keys) > 1 and hasattr(first, "__dict__"):
            vars(first)[_FIRST] = len(keys)  # an attribute, so that copies and pickles keep it
        with contextlib.suppress(TypeError):  # objects without weak references are not stored, but copied in each call
            key = id(first)
            reference = weakref.ref(first, lambda _: self._copies.pop(key, None))
            self._copies[key] = reference, object_mark(first), tuple(keys), objects[1:]

    def remember_outputs(self, keys: Sequence[Key], columns: Iterator[Sequence[Any]]) -> None:
        """Store output objects that hold tensors and that each branch has created separately.

        Args:
            keys: keys of the branches.
            columns: for each output leaf, the values of all branches.
        """
        for items in columns:
            if is_object(items[0]) and len({id(item) for item in items}) == len(items) and holds_tensors(items[0]):
                self.remember(keys, items)
