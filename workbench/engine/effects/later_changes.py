"""Attributes that forward changes in a later call only, as an argument or a flag tells it to (`output_attentions=True`)."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from ...introspect.objects import HOOKS
from .attributes import LEFT_OUT, Attribute, Tree, changed, fingerprint
from .contents import Contents

_RECREATED = ("_flat_weights", "_flat_weight_refs")  # whenever weights are installed
_END = (object(),)  # after the values of all modules, so that one more or less is seen


class LaterChanges:
    """Snapshot of the attributes of a clone, which each pass of a model that has changed none so far is compared with.

    Args:
        tree: the modules of the clone.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree, self._marks = tree, fingerprint(tree)
        self._look()

    def _look(self) -> None:
        layers = [module for module in self._tree.values() if _only_gets_attributes(module)]
        skipped = set(map(id, layers))
        self._layers = [*map(vars, layers)]
        self._n_attributes = sum(map(len, self._layers))
        self._holders: list[Collection[Any]] = [
            _Others(contents) if any(name in contents for name in _RECREATED) else contents.values()
            for contents in (vars(module) for module in self._tree.values() if id(module) not in skipped)
        ]
        self._holders.append(_END)
        self._items = list(itertools.chain.from_iterable(self._holders))
        self._objects = Contents(self._tree, frozenset())

    def take(self) -> frozenset[Attribute]:
        """Return the attributes that have changed since this was called last."""
        if (
            sum(map(len, self._layers)) == self._n_attributes
            and all(map(operator.is_, itertools.chain.from_iterable(self._holders), self._items))
            and self._objects.unchanged()
        ):
            return frozenset()
        before, self._marks = self._marks, fingerprint(self._tree)
        self._look()
        return changed(before, self._marks)


def _only_gets_attributes(module: nn.Module) -> bool:
    """Return whether a module is a layer of torch's without hooks, whose own code sets no attribute; another module may add one to it."""
    contents = vars(module)
    return type(module).__module__.startswith("torch.nn.modules.") and not any(contents[kind] for kind in HOOKS)


class _Others(Collection[Any]):
    """Live view of the attributes of a module, without those that the engine handles itself."""

    def __init__(self, contents: dict[str, Any]) -> None:
        self._contents = contents

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Any]:
        return (value for name, value in self._contents.items() if name not in LEFT_OUT)

    def __contains__(self, item: object) -> bool:
        return any(value is item for value in self)


__all__ = ["LaterChanges"]
