"""Values that each branch has of its own, apart from tensors: attributes that forward changes, and objects among its inputs."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from ...introspect.objects import HOOKS, MUTABLE, is_atom, is_bare, is_generator, parts, tensors_and_generators
from ..clone import deep_copy
from .attributes import Attribute, Tree, Values, attributes

_REGISTRIES = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)  # dicts of a module's hooks
_PLACE = "_workbench_place"  # attribute of a tensor: where a branch registers it


class MISSING:
    """Stands for an attribute that is not there; a class, since copies and pickles keep its identity."""


def duplicate(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a copy that shares no memory with the value; tensors are cloned within the autograd graph, uncopyable objects are shared.

    Args:
        value: any object.
        memo: id of an object -> its replacement in the copy. What is copied is added, so that values with an object in common have
            its copy in common.
    """
    if is_atom(value) or is_generator(value):
        return value
    memo = {} if memo is None else memo
    replacements = {
        id(item): item.clone() if isinstance(item, Tensor) else item
        for item in tensors_and_generators(value)
        if id(item) not in memo
    }
    return deep_copy(value, memo, replacements)


def get_values(names: frozenset[Attribute], tree: Tree) -> Values:
    """Return the values of the named attributes, `MISSING` for those that do not exist."""
    return {(path, name): tree[path].__dict__.get(name, MISSING) for path, name in names if path in tree}


def set_values(values: Values, tree: Tree) -> None:
    """Set attributes, and delete those whose value is `MISSING`."""
    for (path, name), value in values.items():
        if path in tree:
            if value is MISSING:
                tree[path].__dict__.pop(name, None)
            else:
                tree[path].__dict__[name] = value


def copy_values(values: Values, source: Tree, target: Tree) -> Values:
    """Copy attribute values for another tree: modules and registered tensors become those of the target, other tensors are cloned.

    The clone of a tensor that the target has not registered, since it has one for all branches, says where it was registered, so that it
    becomes that of a branch again, also after the target was copied or pickled.
    """
    if not values:
        return {}
    values = with_hooks(values, source, target)
    memo: dict[int, Any] = {}
    places: dict[int, tuple[str, str, str]] = {}  # id of a registered tensor -> module path, kind, and name
    for path, module in source.items():
        if path in target:
            memo[id(module)] = target[path]
            for kind in ("_parameters", "_buffers"):
                places.update({id(t): (path, kind, n) for n, t in module.__dict__[kind].items() if t is not None})
    if any(module.__dict__[kind] for module in source.values() for kind in HOOKS):
        # handles of hooks hold weak references to all of these dicts, and can't be copied again once one of them is gone
        for path, module in source.items():
            for name in vars(module).keys() & _REGISTRIES if path in target else ():
                if (path, name) not in values:
                    memo[id(vars(module)[name])] = vars(target[path])[name]
    for item in (item for value in values.values() for item in tensors_and_generators(value)):
        place = places.get(id(item)) or getattr(item, _PLACE, None)
        if place is not None and isinstance(item, Tensor):
            path, kind, name = place
            registered = target[path].__dict__[kind].get(name) if path in target else None
            if registered is None:
                # parameters have no graph to keep, in which views of a changed base could not be cloned
                with torch.set_grad_enabled(torch.is_grad_enabled() and kind == "_buffers"):
                    registered = item.clone()
                setattr(registered, _PLACE, place)
            memo[id(item)] = registered
    return {name: value if value is MISSING else duplicate(value, memo) for name, value in values.items()}


def with_hooks(values: Values, source: Tree, target: Tree) -> Values:
    """Return the values with the hooks of sub-modules that write into an object among them, so that these write into its copy."""
    hooks = {
        (path, kind): module.__dict__[kind]
        for path, module in source.items()
        for kind in HOOKS
        if path and path in target and module.__dict__[kind] and (path, kind) not in values
    }
    if not hooks:
        return values
    objects: set[int] = set()
    waiting = [value for value in values.values() if value is not MISSING]
    while waiting:
        item = waiting.pop()
        if is_bare(item) or isinstance(item, Tensor | nn.Module | types.FunctionType) or id(item) in objects:
            continue
        objects.add(id(item))
        waiting.extend(part for _, part in parts(item))
    return values | {name: hook for name, hook in hooks.items() if _reaches(hook, objects, functions=False)}


def held_elsewhere(root: nn.Module, tree: Tree, changes: frozenset[Attribute], before: Values) -> frozenset[Attribute]:
    """Return the attributes that hold a list, dict or set that forward changes as another attribute.

    Args:
        root: the wrapped module.
        tree: the modules of the branch.
        changes: the attributes that forward changes.
        before: values before the pass of attributes that were replaced by copies for it.

    Raises:
        RuntimeError: if a hook holds one, or a function as one of its variables: these are not copied with the attributes.
    """
    values = [*get_values(changes, tree).values(), *(before[name] for name in changes if name in before)]
    contents = {id(value) for value in values if isinstance(value, MUTABLE)}
    if not contents:
        return frozenset()
    copied: set[Attribute] = set()
    for (path, name), value in attributes(tree):
        if (path, name) in changes or not _reaches(value, contents, functions=True):
            continue
        if name in HOOKS or not _reaches(value, contents, functions=False):
            function = "a hook" if name in HOOKS else f"the function {name}"
            names = ", ".join(sorted(f"{path}.{name}".lstrip(".") for path, name in changes))
            raise RuntimeError(
                f"{function} of {path or root._get_name()} holds a list or dict that forward changes as an attribute ({names}), of which each "
                "branch has its own: let it reach the list through the module, for example as a method of the module"
            )
        copied.add((path, name))
    return frozenset(copied)


def _reaches(value: Any, wanted: set[int], functions: bool) -> bool:
    """Return whether an object with one of these ids is a value, or in it; variables of functions count only if asked for."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if id(item) in wanted:
            return True
        if is_atom(item) or isinstance(item, Tensor | nn.Module) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, types.BuiltinMethodType):
            waiting += [item.__self__] * functions
        elif not isinstance(item, types.FunctionType):
            waiting += [part for _, part in parts(item)]
        elif functions:
            waiting += [part for _, part in parts(item)]
            waiting += [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
    return False


def transfer(names: frozenset[Attribute], source: Tree, target: Tree) -> None:
    """Copy attribute values from one tree to another."""
    set_values(copy_values(get_values(names, source), source, target), target)


def holds_tensors(value: Any) -> bool:
    """Return whether there is a tensor anywhere inside the value."""
    return _holds_other(value, set())


def tensors_in(tree: Tree) -> Values:
    """Return the attributes that hold, at any depth, a tensor that no module has registered."""
    known = {id(t) for m in tree.values() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None}
    return {name: value for name, value in attributes(tree) if _holds_other(value, known)}


def _holds_other(value: Any, known: set[int]) -> bool:
    """Return whether a value holds a tensor whose id is not known."""
    if is_bare(value):
        return False
    return any(isinstance(item, Tensor) and id(item) not in known for item in tensors_and_generators(value))
