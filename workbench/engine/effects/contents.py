"""Contents of lists, dicts, arrays and other objects that modules hold, which users may change in place between calls."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import types
from array import array
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ...introspect.objects import CONTAINERS, attributes, is_atom, is_generator, parts, slots
from ..clone import left_out
from .attributes import LEFT_OUT, Attribute, Tree

# attributes that torch sets on every module: registered tensors and modules, and hooks
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__) | LEFT_OUT
_IMMUTABLE = (tuple, frozenset, types.MethodType, functools.partial)


class Contents:
    """Snapshot of the contents of objects that modules refer to, at any depth.

    Clones have copies of these objects, so changes to the originals must be detected. Tensors, functions and modules are not included: clones
    share them, or changes to them are detected elsewhere.

    Args:
        tree: the modules.
        ignore: attributes to leave out.
    """

    def __init__(self, tree: Tree, ignore: frozenset[Attribute]) -> None:
        self._holders: list[Collection[Any]] = []
        self._memory: list[tuple[Any, bytes]] = []  # arrays and their contents
        seen = {id(module) for module in tree.values()}
        for path, module in tree.items():
            shared = left_out(module)
            for name, value in attributes(module):
                if name not in _MODULE_ATTRIBUTES and name not in shared and (path, name) not in ignore:
                    self._add(value, seen)
        # strong references, so that no new object reuses the id of one of them
        self._items = list(itertools.chain.from_iterable(self._holders))

    def _add(self, value: Any, seen: set[int]) -> None:
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if is_atom(item) or isinstance(item, Tensor | types.FunctionType) or is_generator(item) or id(item) in seen:
                continue
            seen.add(id(item))
            if (memory := _memory(item)) is not None:
                self._memory.append((item, memory))
                continue
            holders = list(_holders(item))
            self._holders += holders
            waiting += itertools.chain.from_iterable(holders)
            if not holders:
                waiting += (part for _, part in parts(item))

    def unchanged(self) -> bool:
        """Return whether every object still has the same contents."""
        return (
            sum(map(len, self._holders)) == len(self._items)
            and all(map(operator.is_, itertools.chain.from_iterable(self._holders), self._items))
            and all(_memory(item) == memory for item, memory in self._memory)
        )


def _memory(value: Any) -> bytes | None:
    """Return the bytes of an array, None for other objects."""
    if isinstance(value, bytearray | array):
        return bytes(value)
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype.hasobject:
        return None
    return value.tobytes()


def _holders(value: Any) -> Iterator[Collection[Any]]:
    """Yield live views of the contents of a mutable object, and nothing for an immutable one."""
    if isinstance(value, _IMMUTABLE):
        return
    if isinstance(value, dict):
        yield from (dict.keys(value), dict.values(value))
    elif isinstance(value, CONTAINERS):
        yield value
    if hasattr(value, "__dict__"):
        yield from (vars(value).keys(), vars(value).values())
    if names := slots(value):
        yield _Slots(value, names)


class _Slots(Collection[Any]):
    """Live view of the values in an object's `__slots__`."""

    def __init__(self, holder: Any, names: Iterable[str]) -> None:
        self._holder, self._names = holder, tuple(names)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self._holder, name, None) for name in self._names)

    def __contains__(self, item: object) -> bool:
        return any(value is item for value in self)
