"""Lists, dicts and dataclasses among the inputs that forward may fill: each branch has its own, and the caller's are updated from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...introspect.objects import is_atom
from ..plan import Plan
from ..state import BranchedState, Sealed
from ..tree import children, like, values_of
from .random import values_unavailable


class Containers:
    """Mutable containers among the inputs, with a snapshot of their contents.

    Args:
        args, kwargs: the inputs; sealed parts count as leaves.
        unsealed: the same inputs without seals, as the model receives them.
    """

    def __init__(
        self, args: tuple, kwargs: dict[str, Any], unsealed: tuple[tuple, dict[str, Any]] | None = None
    ) -> None:
        self.leaves: list[Any] = []
        self._nodes: list[Any] = []
        plain_args, plain_kwargs = (args, kwargs) if unsealed is None else unsealed
        for value, other in zip((*args, *kwargs.values()), (*plain_args, *plain_kwargs.values()), strict=True):
            self._walk(value, other)
        self._snapshot = [_contents_of(node) for node in self._nodes]

    def _walk(self, node: Any, unsealed: Any) -> None:
        values = None if isinstance(node, Sealed) else values_of(node)
        if values is None:
            self.leaves.append(unsealed)
            return
        if is_mutable(unsealed):
            self._nodes.append(unsealed)
        for value, other in zip(values, values_of(unsealed) or (), strict=True):
            self._walk(value, other)

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def changed(self) -> bool:
        """Return whether the contents of any container have changed."""
        return any(not _same(_contents_of(node), held) for node, held in zip(self._nodes, self._snapshot, strict=True))

    def values(self) -> list[Any]:
        """Return the present values in all containers, without those nested in them."""
        return [value for node in self._nodes for _, value in _contents_of(node)]

    def follow(self, plan: Plan, passes: Sequence[Containers]) -> None:
        """Update these containers from those of the branches; values that differ between branches become a `BranchedState`.

        Args:
            plan: plan of the branches.
            passes: the containers of each branch in the order of `plan.indices`, or those of the only pass.

        Raises:
            RuntimeError: if lengths or keys differ between branches; nothing is changed then.
        """
        if not any(each.changed() for each in passes):
            return
        merge = _Merge(plan, self, passes)
        new = [merge.contents(each) for each in zip(*(each._nodes for each in passes), strict=True)]
        for node, items in zip(self._nodes, new, strict=True):
            _fill(node, items)


class _Merge:
    """Merges the containers of all branches into contents for the caller's containers."""

    def __init__(self, plan: Plan, callers: Containers, passes: Sequence[Containers]) -> None:
        self.plan, self.caller = plan, callers
        self.leaves = [{id(leaf): i for i, leaf in enumerate(each.leaves) if not is_atom(leaf)} for each in passes]
        self.nodes = [{id(node): i for i, node in enumerate(each._nodes)} for each in passes]

    def contents(self, nodes: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Return the keys and values for one container."""
        contents = [_contents_of(node) for node in nodes]
        if any([name for name, _ in other] != [name for name, _ in contents[0]] for other in contents):
            raise RuntimeError(
                f"the model fills a {type(nodes[0]).__name__} among its inputs, with different lengths or keys in different branches: return "
                "what it keeps from forward, and wrap with state= and its place in the output"
            )
        columns = zip(*([value for _, value in other] for other in contents), strict=True)
        return [(name, self.item(column)) for (name, _), column in zip(contents[0], columns, strict=True)]

    def item(self, items: Sequence[Any]) -> Any:
        """Merge the values of all branches into one."""
        for places, originals in ((self.leaves, self.caller.leaves), (self.nodes, self.caller._nodes)):
            known = {by_id.get(id(item)) for by_id, item in zip(places, items, strict=True)}
            if len(known) == 1 and (place := known.pop()) is not None:
                return originals[place]
        first = items[0]
        trees = [children(item) for item in items]
        if trees[0] is not None and all(
            tree is not None and type(item) is type(first) and [n for n, _ in tree] == [n for n, _ in trees[0]]
            for tree, item in zip(trees, items, strict=True)
        ):
            columns = zip(*([value for _, value in tree] for tree in trees if tree is not None), strict=True)
            return like(first, list(map(self.item, columns)))
        if self._is_common(items):
            return first
        rows = self.plan.rows if self.plan.dealt else None
        return BranchedState(self.plan.axes, list(items), rows)

    def _is_common(self, items: Sequence[Any]) -> bool:
        """Return whether all branches have the same value."""
        first = items[0]
        if isinstance(first, Tensor):
            if self.plan.size == 1 and not any(rule.axes() for rule in self.plan.rules.values()):
                return True  # the model has a single branch
            if len(items) == 1:
                return self.plan.size > 1  # one pass for all branches: vmap refuses containers with batched tensors
            if all(item is first for item in items):
                return True
            return not (self.plan.dealt or values_unavailable()) and all(
                isinstance(item, Tensor)
                and not item.requires_grad
                and item.shape == first.shape
                and item.dtype == first.dtype
                and torch.equal(item, first)
                for item in items
            )
        if is_atom(first):
            return all(type(item) is type(first) and (item == first) is True for item in items)
        return all(item is first for item in items)


def is_mutable(node: Any) -> bool:
    """Return whether a node of an input tree is a container that can be changed in place."""
    if isinstance(node, list | MutableMapping):
        return True
    if isinstance(node, Mapping | tuple) or not dataclasses.is_dataclass(node) or isinstance(node, type):
        return False
    return not type(node).__dataclass_params__.frozen  # type: ignore[attr-defined]


def holds_mutable(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether a container among the inputs can be changed in place."""
    return any(map(_holds_mutable, args)) or any(map(_holds_mutable, kwargs.values()))


def _holds_mutable(node: Any) -> bool:
    values = values_of(node)  # None for a leaf
    return values is not None and (is_mutable(node) or any(map(_holds_mutable, values)))


def _contents_of(node: Any) -> list[tuple[Any, Any]]:
    """Return the keys and values of a mutable container."""
    if isinstance(node, Mapping):
        return list(node.items())
    if isinstance(node, list):
        return list(enumerate(node))
    return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]


def _same(now: list[tuple[Any, Any]], before: list[tuple[Any, Any]]) -> bool:
    return len(now) == len(before) and all(
        key == other and value is earlier for (key, value), (other, earlier) in zip(now, before, strict=True)
    )


def _fill(node: Any, items: list[tuple[Any, Any]]) -> None:
    """Replace the contents of a container."""
    if isinstance(node, list):
        node[:] = [value for _, value in items]
        return
    if isinstance(node, MutableMapping) and list(node) != [key for key, _ in items]:
        node.clear()
    for key, value in items:
        if isinstance(node, MutableMapping):
            node[key] = value
        else:
            setattr(node, key, value)
