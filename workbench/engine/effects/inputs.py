"""Effects of forward on its inputs: tensors that it writes into, and objects that it changes, of which each branch has its own."""

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

Key = tuple[tuple[str, int], ...]  # where a branch stands along the axes, places 0 left out


_FIRST = "_workbench_first_of"


def _refuse_copy(leaf: Any) -> None:
    """A copy of an object of an earlier call, or one whose wrapped model is gone, holds what the first branch kept, which is no other's."""
    count = getattr(leaf, "__dict__", {}).get(_FIRST)
    if count is not None:
        raise RuntimeError(
            f"the {type(leaf).__name__} among the inputs is a copy of one that came from an earlier call, where each of {count} branches had "
            "its own: it holds the first one's only. Return it from forward and wrap with state= and its place in the output (such as "
            'state="past_key_values"), which can be copied, pickled and changed by state.map; or do without it (use_cache=False)'
        )


def object_mark(value: Any) -> Any:
    """Something that is equal before and after exactly if nothing inside the object was changed."""
    return mark(value, DEEP)


def is_object(leaf: Any) -> bool:
    """Whether a leaf is something that forward may change, and that is neither a tensor nor a container of the trees."""
    return not (
        isinstance(leaf, (Tensor, BranchedState, nn.Module, enum.Enum, slice, range, *ATOMS))
        or (callable(leaf) and not is_graph(leaf))
        or is_generator(leaf)
    )


def are_tensors(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the inputs are tensors and nothing else, as those of most calls."""
    return all(isinstance(value, Tensor) for value in (*args, *kwargs.values()))


def own_inputs(tree: Any) -> Any:
    """A tree of inputs with containers, objects and states of its own, for a pass that is to leave no trace in the caller's."""
    return tree_map(
        lambda leaf: leaf.copy() if isinstance(leaf, BranchedState) else duplicate(leaf) if is_object(leaf) else leaf,
        tree,
    )


def may_change(effects: InputEffects, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether there is a container, an object or a state among the inputs that forward may change."""
    if are_tensors(args, kwargs):
        return False
    if effects.fills_containers is not False and holds_mutable(args, kwargs):
        return True
    return any(isinstance(leaf, BranchedState) or is_object(leaf) for leaf in flatten((args, kwargs))[0])


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


class InputEffects:
    """What forward does to its inputs.

    For an object among them, such as a cache of keys and values, it knows those that the other branches have in its place, from call to call.
    """

    def __init__(self) -> None:
        self.writes_tensors: bool | None = None  # unknown before the first call
        self.changes_objects: bool | None = None
        self.fills_containers: bool | None = None
        self.written = WrittenTensors()
        # id -> (weak reference, mark, branches, what all but the first one have); the first one's must be free to die
        self._copies: dict[int, tuple[Any, Any, tuple[Key, ...], Sequence[Any]]] = {}

    def objects_of_branches(
        self, leaves: Sequence[Any], keys: Sequence[Key], copy_first: bool
    ) -> list[dict[Key, Any] | None]:
        """For each leaf that is an object what each branch is to have in its place; None for other leaves.

        Args:
            leaves: of the inputs.
            keys: the branches.
            copy_first: whether the first branch is to have a copy as well, not the caller's own.

        Raises:
            RuntimeError: if somebody changed the object since the branches last worked on theirs, or they were other branches.
        """
        return [self._of(leaf, keys, copy_first) if is_object(leaf) else None for leaf in leaves]

    def _of(self, leaf: Any, keys: Sequence[Key], copy_first: bool) -> dict[Key, Any]:
        known = self._copies.get(id(leaf))
        if copy_first and self.changes_objects is not False:
            return {key: duplicate(leaf) for key in keys}
        if known is None or known[0]() is not leaf:
            if len(keys) > 1:
                _refuse_copy(leaf)
            if self.changes_objects is False or len(keys) == 1:
                return dict.fromkeys(keys, leaf)
            return {key: duplicate(leaf) if k else leaf for k, key in enumerate(keys)}
        _, earlier_mark, earlier_keys, others = known
        by_branch = dict(zip(earlier_keys, (leaf, *others), strict=True))
        if list(by_branch) == list(keys) and len(keys) == 1:  # nobody else has one
            return {keys[0]: leaf}
        name = type(leaf).__name__
        if object_mark(leaf) != earlier_mark:
            raise RuntimeError(
                f"the {name} among the inputs was changed outside the model since the last call, which only the first "
                f"of {len(by_branch)} branches would see: wrap with state= and its place in the output (such as state='past_key_values') and "
                "change it by state.map(function), do without it (use_cache=False), or wrap what changes it as well"
            )
        if missing := [key for key in keys if key not in by_branch]:
            raise RuntimeError(
                f"the {name} among the inputs comes from a call with other branches (there is none for {dict(missing[0])}); ask in the same "
                "way as in that call (training mode, return_risk), or start with a new one"
            )
        return by_branch

    def remember(self, keys: Sequence[Key], objects: Sequence[Any]) -> None:
        """The objects that the branches have in the place of the first one's, from now on."""
        first = objects[0]
        if len(keys) > 1 and hasattr(first, "__dict__"):
            vars(first)[_FIRST] = len(keys)  # which copies and pickles of it keep
        with contextlib.suppress(TypeError):  # what has no weak reference is not remembered: a copy is made each time
            number = id(first)
            reference = weakref.ref(first, lambda _: self._copies.pop(number, None))
            self._copies[number] = reference, object_mark(first), tuple(keys), objects[1:]

    def remember_outputs(self, keys: Sequence[Key], columns: Iterator[Sequence[Any]]) -> None:
        """Remember those among the outputs, a column of all branches each, that hold tensors and that each branch made for itself."""
        for items in columns:
            if is_object(items[0]) and len({id(item) for item in items}) == len(items) and holds_tensors(items[0]):
                self.remember(keys, items)
