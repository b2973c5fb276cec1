"""What a forward pass changes beside its output: found once in each mode, kept as if the model had been called once."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import WorkbenchWarning
from .clone import is_scripted
from .plan import Bank
from .tree import version

# what the engine sees to itself, and the lists of weights that recurrent layers make anew whenever other weights are put in
_OWN = frozenset(
    {"_parameters", "_buffers", "_modules", "_workbench", "_engine", "training", "_flat_weights", "_flat_weight_refs"}
)
_MISSING = object()
Attribute = tuple[str, str]  # module path, attribute name


def modules(root: nn.Module) -> dict[str, nn.Module]:
    """Every module below `root` by path, the copies of shared ones left out, scripted ones as well."""
    return {path: module for path, module in root.named_modules() if not is_scripted(module)}


def _print(value: Any, depth: int = 2) -> Any:
    """A value that is equal before and after exactly if nothing was changed: identity and version for tensors, contents for containers."""
    if isinstance(value, Tensor):
        return "tensor", id(value), version(value)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if depth and isinstance(value, list | tuple | set | frozenset):
        return type(value).__name__, len(value), tuple(_print(item, depth - 1) for item in value)
    if depth and isinstance(value, dict):
        return "dict", tuple((key, _print(item, depth - 1)) for key, item in value.items())
    return id(value)


def fingerprint(tree: dict[str, nn.Module]) -> dict[Attribute, Any]:
    """What the attributes of all modules hold, contents of containers included."""
    return {
        (path, name): _print(value)
        for path, module in tree.items()
        for name, value in module.__dict__.items()
        if name not in _OWN
    }


def structure(tree: dict[str, nn.Module], ignore: frozenset[Attribute] = frozenset()) -> tuple:
    """A cheap fingerprint by identity: it changes when somebody replaces a parameter, a sub-module or an attribute."""
    ignored: dict[str, set[str]] = defaultdict(set)
    for path, name in ignore:
        ignored[path].add(name)
    facts: list[Any] = []
    for path, module in tree.items():
        held = module.__dict__
        if path in ignored:
            facts.append(
                tuple(
                    (name, id(value)) for name, value in held.items() if name not in ignored[path] and name != "_engine"
                )
            )
        else:
            facts.append(tuple(map(id, held.values())))
        facts.append(tuple(map(id, held["_parameters"].values())))
        facts.append(tuple(map(id, held["_buffers"].values())))
        facts.append(tuple(map(id, held["_modules"].values())))
        facts.append((len(held["_forward_hooks"]), len(held["_forward_pre_hooks"]), len(held["_backward_hooks"])))
    return tuple(facts)


def changed(before: dict[Attribute, Any], after: dict[Attribute, Any]) -> frozenset[Attribute]:
    """The attributes that differ, appeared or went away between two fingerprints."""
    return frozenset(
        key for key in before.keys() | after.keys() if before.get(key, _MISSING) != after.get(key, _MISSING)
    )


def transfer(attributes: frozenset[Attribute], source: dict[str, nn.Module], target: dict[str, nn.Module]) -> None:
    """Give the modules of one tree the attribute values of another; references to modules follow, tensors are shared."""
    if not attributes:
        return
    memo: dict[int, Any] = {id(module): target[path] for path, module in source.items() if path in target}
    for path, name in attributes:
        if path not in source or path not in target:
            continue
        value = source[path].__dict__.get(name, _MISSING)
        if value is _MISSING:
            target[path].__dict__.pop(name, None)
        else:
            target[path].__dict__[name] = _transferred(value, memo)


def _transferred(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return value
    if type(value) in (list, tuple, set):
        return type(value)(_transferred(item, memo) for item in value)
    if type(value) is dict:
        return {key: _transferred(item, memo) for key, item in value.items()}
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # not copyable: both trees share it
        return value


def held_tensors(attributes: frozenset[Attribute], tree: dict[str, nn.Module]) -> dict[tuple, Tensor]:
    """The tensors inside the named attributes, by attribute and place."""
    found: dict[tuple, Tensor] = {}

    def look(value: Any, place: tuple) -> None:
        if isinstance(value, Tensor):
            found[place] = value
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                look(item, (*place, i))
        elif isinstance(value, dict):
            for key, item in value.items():
                look(item, (*place, key))

    for path, name in attributes:
        if path in tree and name in tree[path].__dict__:
            look(tree[path].__dict__[name], (path, name))
    return found


def put_back(values: dict[tuple, Tensor], tree: dict[str, nn.Module]) -> None:
    """Set tensors at the places that `held_tensors` named."""
    for (path, name, *place), value in values.items():
        holder: Any = tree[path].__dict__
        keys = [name, *place]
        chain = [holder]
        for key in keys[:-1]:
            chain.append(chain[-1][key])
        for depth in range(len(keys) - 1, -1, -1):
            if isinstance(chain[depth], tuple):  # rebuilt from the inside out
                items = list(chain[depth])
                items[keys[depth]] = value
                value = type(chain[depth])(items)
            else:
                chain[depth][keys[depth]] = value
                break


class Buffers:
    """Collects the buffers of all branches and merges them once.

    A buffer that a method has given an axis keeps one row for each of its branches. Over all other axes a floating buffer takes the mean:
    for running statistics, whose update is linear, the mean of n updates is the one update with the mean statistic. Counters must agree.
    """

    def __init__(self) -> None:
        self._new: dict[tuple[str, int | None], list[Tensor]] = defaultdict(list)

    def add(self, name: str, row: int | None, value: Tensor) -> None:
        self._new[name, row].append(value)

    @torch.no_grad()
    def merge(self, bank: Bank) -> None:
        for (name, row), values in self._new.items():
            target = bank.get(name) if row is None else bank.get(name)[row]
            if len(values) == 1 or all(value is values[0] for value in values):
                new = values[0]
            elif target.is_floating_point() or target.is_complex():
                new = torch.stack(values).mean(0)
            else:
                new = values[0]
                if any(not torch.equal(new, value) for value in values[1:]):
                    warnings.warn(
                        f"buffer {name!r} holds whole numbers that differ between branches; the first branch's are kept",
                        WorkbenchWarning,
                        stacklevel=2,
                    )
            if new.shape != target.shape:
                raise RuntimeError(
                    f"buffer {name!r} changed its shape in forward from {tuple(target.shape)} to {tuple(new.shape)}; "
                    "register it with its final shape before wrapping"
                )
            target.copy_(new)
