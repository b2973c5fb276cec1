"""Attributes that forward changes, found by comparing fingerprints before and after a pass."""

from __future__ import annotations

import itertools
import operator
import sys
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from ...introspect.objects import HOOKS, is_graph
from ..clone import is_scripted, left_out
from ..tree import version

# attributes that the engine handles itself, and the weight lists that recurrent layers recreate whenever weights are installed
LEFT_OUT = frozenset(
    {"_parameters", "_buffers", "_modules", "_workbench", "_engine", "training", "_flat_weights", "_flat_weight_refs"}
)
_MISSING = object()
_TRAINING = operator.attrgetter("training")
DEEP = 8  # depth of the mark of an object that forward is known to change, or that is an input
Attribute = tuple[str, str]  # module path, attribute name
Tree = dict[str, nn.Module]
Values = dict[Attribute, Any]


def modules(root: nn.Module) -> Tree:
    """Return every module below `root` by path, shared modules once, without scripted ones."""
    return {path: module for path, module in root.named_modules() if not is_scripted(module)}


def modes_of(tree: Tree) -> list[bool]:
    """Return whether each module is in training mode."""
    return list(map(_TRAINING, tree.values()))


def attributes(tree: Tree) -> Iterator[tuple[Attribute, Any]]:
    """Yield every attribute that is not a registered tensor or module and that copies of the module do not share."""
    for path, module in tree.items():
        shared = left_out(module)
        for name, value in module.__dict__.items():
            if name not in LEFT_OUT and name not in shared:
                yield (path, name), value


def mark(value: Any, depth: int = 3, seen: set[int] | None = None) -> Any:
    """Return a value that stays equal exactly as long as the object is unchanged: identity and version of tensors, contents of others.

    Args:
        value: any object.
        depth: how many levels of contained objects are compared by their contents; deeper ones count by identity.
        seen: ids of the objects visited so far.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, Tensor):
        return "tensor", id(value), version(value)
    seen = set() if seen is None else seen
    opaque = isinstance(value, nn.Module | type) or (callable(value) and not is_graph(value))
    if not depth or opaque or id(value) in seen:
        return id(value)
    seen.add(id(value))
    if isinstance(value, list | tuple | set | frozenset | deque):
        return type(value).__name__, tuple(mark(item, depth - 1, seen) for item in value)
    if isinstance(value, dict):
        return "dict", tuple((key, mark(item, depth - 1, seen)) for key, item in value.items())
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.ndarray):
        return "array", value.tobytes() if value.nbytes < 1 << 20 else id(value)
    if hasattr(value, "__dict__"):
        return "object", id(value), tuple((key, mark(item, depth - 1, seen)) for key, item in vars(value).items())
    return id(value)


def fingerprint(tree: Tree, only: frozenset[Attribute] | None = None) -> Values:
    """Return the mark of every attribute; with `only`, of those attributes, to a greater depth."""
    if only is None:
        return {key: mark(value) for key, value in attributes(tree)}
    return {key: mark(value, DEEP) for key, value in attributes(tree) if key in only}


def changed(before: Values, after: Values) -> frozenset[Attribute]:
    """Return the attributes that differ, were added or were removed between two fingerprints."""
    return frozenset(
        key for key in before.keys() | after.keys() if before.get(key, _MISSING) != after.get(key, _MISSING)
    )


def described(tree: Tree, only: frozenset[Attribute] | None = None) -> dict[Attribute, str]:
    """Return readable descriptions of attributes, for messages."""
    return {key: _describe_value(value) for key, value in attributes(tree) if only is None or key in only}


def _describe_value(value: Any) -> str:
    if isinstance(value, Tensor):
        shape = "x".join(map(str, value.shape)) or "scalar"
        return (
            f"{shape} tensor {value.tolist()}" if value.numel() <= 4 else f"{shape} tensor (version {version(value)})"
        )
    if isinstance(value, list | tuple | deque) and any(isinstance(item, Tensor) for item in value):
        return f"{type(value).__name__} of {len(value)}: [{', '.join(map(_describe_value, value))}]"[:120]
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:70]} ... ({type(value).__name__})"


def difference(before: dict[Attribute, str], after: dict[Attribute, str], names: frozenset[Attribute]) -> str:
    """Return the changes as text, one line per attribute: `encoder.steps: 0 -> 1`."""
    lines = []
    for path, name in sorted(names):
        old_text, new = before.get((path, name), "(not there)"), after.get((path, name), "(gone)")
        if old_text == new:
            new = "(changed inside)"
        lines.append(f"  {path}.{name}: {old_text} -> {new}" if path else f"  {name}: {old_text} -> {new}")
    return "\n".join(lines)


_END = (object(),)  # after the contents of all holders, so that there are as many as before if it is met where it was


class ModuleContents:
    """Snapshot of the objects that modules hold, for a fast check at every call whether they are still the same.

    Args:
        tree: the modules.
        ignore: attributes that may change; their values are not kept alive.
    """

    def __init__(self, tree: Tree, ignore: frozenset[Attribute]) -> None:
        kinds = ("_parameters", "_buffers", "_modules", *HOOKS)
        self._holders: list[Collection[Any]] = []  # live views of the values
        self._items: list[Any] = []  # strong references, so that no new object reuses the id of one of them
        for path, module in tree.items():
            contents = module.__dict__
            self._holders += (contents.values(), *(contents[kind].values() for kind in kinds))
            self._items += [value for name, value in contents.items() if (path, name) not in ignore]
            self._items += itertools.chain.from_iterable(contents[kind].values() for kind in kinds)
        self._holders.append(_END)
        self._items += _END

    def unchanged(self) -> bool:
        """Return whether nothing was replaced, added or removed; False if attributes are ignored, for which `structure` must be used."""
        return all(map(operator.is_, itertools.chain.from_iterable(self._holders), self._items))


def structure(tree: Tree, ignore: frozenset[Attribute], modes: bool = True) -> tuple:
    """Return a cheap fingerprint by identity, which changes when a parameter, a sub-module or an attribute is replaced.

    Args:
        tree: the modules.
        ignore: attributes that may change.
        modes: whether the modules' training mode is included.
    """
    ignored: dict[str, set[str]] = {path: set() for path, _ in ignore}
    for path, name in ignore:
        ignored[path].add(name)
    facts: list[Any] = []
    for path, module in tree.items():
        contents = module.__dict__
        if path in ignored or not modes:
            skip = {*ignored.get(path, ()), "_engine", *(() if modes else ("training",))}
            facts.append(tuple((name, id(value)) for name, value in contents.items() if name not in skip))
        else:
            facts.append(tuple(map(id, contents.values())))
        facts.append(tuple(map(id, contents["_parameters"].values())))
        facts.append(tuple(map(id, contents["_buffers"].values())))
        facts.append(tuple(map(id, contents["_modules"].values())))
        facts.append(tuple(len(contents[kind]) for kind in HOOKS))
    return tuple(facts)
