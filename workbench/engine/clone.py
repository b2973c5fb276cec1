"""Structural copies: new module objects that share the tensors of the old ones, so that copying a model of any size takes milliseconds."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from ..introspect.objects import (
    ATOM_TYPES,
    CONTAINERS,
    HOOKS,
    MUTABLE,
    attributes,
    is_atom,
    is_bare,
    is_generator,
    is_scripted,
    is_set,
    parts,
)


def eager(module: nn.Module) -> nn.Module:
    """Return the original of a module that `torch.compile` wraps: branches run eagerly, and the user may compile the wrapped object."""
    while isinstance(original := module.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
        module = original
    return module


def structural_copy(
    root: nn.Module, keep: Callable[[str], bool] = lambda name: True, shared_attributes: Set[str] = frozenset()
) -> nn.Module:
    """Return a new tree of module objects that shares all tensors with the old one.

    Lists, partial functions, bound methods and closures that refer to modules of the old tree refer to their copies in the new one. Objects
    that cannot be copied (locks, files, scripted modules) are shared.

    Args:
        root: the module to copy; it is not changed.
        keep: function of the name of a parameter, buffer or sub-module: whether to include it.
        shared_attributes: names of attributes of `root` that are not copied.
    """
    root = eager(root)
    memo: dict[int, Any] = {}
    pairs: list[tuple[nn.Module, nn.Module]] = []

    def copy_shell(module: nn.Module) -> None:
        if id(module) in memo:
            return
        inner = eager(module)
        if inner is not module:
            copy_shell(inner)
            memo[id(module)] = memo[id(inner)]
            return
        if is_scripted(module):
            memo[id(module)] = module
            return
        new = object.__new__(type(module))
        memo[id(module)] = new
        pairs.append((module, new))
        for name, child in module._modules.items():
            if child is not None and keep(name):
                copy_shell(child)

    copy_shell(root)
    seen: set[int] = set()
    shared = {id(old): left_out(old) for old, _ in pairs}
    if id(root) in shared:  # it is not scripted
        shared[id(root)] |= shared_attributes
    if any(vars(old)[kind] for old, _ in pairs for kind in HOOKS):  # whose functions may hold a list of the model
        for old, _ in pairs:
            for name, value in vars(old).items():
                if type(value) in MUTABLE and name not in shared[id(old)]:
                    share(value, memo, seen)
                    memo[id(value)] = _copy_value(value, memo)
    contents = [list(attributes(old)) for old, _ in pairs]
    for (old, _), named in zip(pairs, contents, strict=True):
        for name, value in named:
            if not is_bare(value) and name not in shared[id(old)]:
                share(value, memo, seen)
    for (old, new), named in zip(pairs, contents, strict=True):
        _fill(new, old, named, keep, shared[id(old)], memo)
    return memo[id(root)]


def _fill(
    new: nn.Module,
    old: nn.Module,
    named: Sequence[tuple[str, Any]],
    keep: Callable[[str], bool],
    shared: Set[str],
    memo: dict[int, Any],
) -> None:
    """Give a new module the contents of the old one.

    Args:
        new: the new module, without contents.
        old: the old one.
        named: its attributes.
        keep: as for `structural_copy`.
        shared: names of attributes that are not copied.
        memo: copies of all modules and shared objects by id.
    """
    state = new.__dict__
    state.update(dict.fromkeys(old.__dict__))  # in the order of the old one
    state.pop("_engine", None)
    state["_parameters"] = {name: tensor for name, tensor in old._parameters.items() if keep(name)}
    state["_buffers"] = {name: tensor for name, tensor in old._buffers.items() if keep(name)}
    state["_modules"] = {name: memo.get(id(child)) for name, child in old._modules.items() if keep(name)}
    for name, value in named:
        if type(value) in ATOM_TYPES or name in shared:
            copied = value
        elif name == "_non_persistent_buffers_set":  # one per module; deepcopy is slow with sets
            copied = set(value)
        else:
            copied = _copy_value(value, memo)
        if name in state:
            state[name] = copied
        else:
            object.__setattr__(new, name, copied)
    state["_compiled_call_impl"] = None  # made for the old object by Module.compile()


# `__getstate__` of an object and, in newer versions of torch, of a module: the latter only drops what Module.compile() has made
_ALL_ATTRIBUTES = (object.__getstate__, nn.Module.__getstate__)


def copy_tensor(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return a copy of a tensor, which stays tied to those with the same memo.

    `copy.deepcopy` supports neither tensors that an earlier call left attached to its autograd graph nor compressed sparse ones.
    """
    if tensor.is_leaf and tensor.layout is torch.strided:
        return copy.deepcopy(tensor, memo)
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone()
    copied: Tensor = memo[id(tensor)]
    return copied


def sparse_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the sparse buffers of a module by name: they are no slots, but constants that all branches share."""
    buffers = [] if is_scripted(module) else [*module._buffers.items()]
    return [(name, buffer) for name, buffer in buffers if buffer is not None and buffer.layout is not torch.strided]


def left_out(module: nn.Module) -> set[str]:
    """Return the attributes that a class excludes from its copies by `__getstate__`, such as a module's trainer: they are shared.

    Functions are copied, since those of a metric of torchmetrics, which excludes them to be pickled, work on the module itself.
    """
    if type(module).__getstate__ in _ALL_ATTRIBUTES:
        return set()
    try:
        state = module.__getstate__()
    except Exception:  # the class does not support copying
        return set()
    if not isinstance(state, dict):
        return set()
    return {
        name
        for name, value in module.__dict__.items()
        if state.get(name) is not value
        and not isinstance(value, Tensor | list | dict | set | deque | types.FunctionType | types.MethodType)
    }


def _copy_value(value: Any, memo: dict[int, Any]) -> Any:
    if type(value) is OrderedDict and not value:  # fast path: most modules hold a dozen empty ones for hooks
        return memo.setdefault(id(value), OrderedDict())  # of which the handle of a hook may hold a weak reference
    return value if is_atom(value) or is_generator(value) else deep_copy(value, memo, {})


def deep_copy(value: Any, memo: dict[int, Any], replacements: Mapping[int, Any]) -> Any:
    """Return a deep copy of a value, or the value itself if it holds locks, handles and the like, which cannot be copied.

    What a failed attempt has left in the memo is removed, since other values would get objects from it that are half made.

    Args:
        value: any object.
        memo: as for `copy.deepcopy`, for all values that are copied together.
        replacements: id of an object -> its copy, added to the memo.
    """
    before = len(memo)
    memo.update(replacements)
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        for key in list(memo)[before:]:
            del memo[key]
        return value


def share(value: Any, memo: dict[int, Any], seen: set[int]) -> None:
    """Fill the memo of `copy.deepcopy`: tensors and generators are shared, functions with modules in their closure are rebound.

    Weak references to modules, which `copy.deepcopy` keeps, refer to the copies of these.
    """
    if is_bare(value) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor) or is_generator(value):
        memo.setdefault(id(value), value)
    elif isinstance(value, types.FunctionType) or type(value) is weakref.ref:
        if (new := _closure_content(value, memo)) is not value:
            memo[id(value)] = new
    elif (
        isinstance(value, types.MethodType)
        and (function := _closure_content(value.__func__, memo)) is not value.__func__
    ):
        share(value.__self__, memo, seen)
        memo[id(value)] = types.MethodType(function, _copy_value(value.__self__, memo))
    elif isinstance(value, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
        pairs = list(value.items())
        share(pairs, memo, seen)
        memo[id(value)] = type(value)(copy.deepcopy(pairs, memo))
    elif id(value) not in memo:
        for _, item in parts(value):
            share(item, memo, seen)


def rebound(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """Return the function with modules in its closure and defaults replaced by their copies in `memo`; itself if there are none."""
    closure = function.__closure__ or ()
    old_defaults = (function.__defaults__, function.__kwdefaults__)
    defaults = [_closure_content(values, memo) for values in old_defaults]
    cells = []
    for cell in closure:
        if not is_set(cell):
            cells.append(cell)
            continue
        content = cell.cell_contents
        new = content if content is function else _closure_content(content, memo)
        cells.append(cell if new is content else types.CellType(new))
    if all(new is old for new, old in zip((*cells, *defaults), (*closure, *old_defaults), strict=True)):
        return function
    copied = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults[0], tuple(cells))
    copied.__kwdefaults__ = defaults[1]
    copied.__dict__.update(function.__dict__)
    return copied


def _closure_content(content: Any, memo: dict[int, Any]) -> Any:
    """Return the content of a closure cell for the new tree.

    Modules, alone or in a list, tuple or dict, weak references to them, functions bound to them, and copied containers are replaced by
    their copies.
    """
    if isinstance(content, nn.Module) or (type(content) in MUTABLE and id(content) in memo):
        return memo.get(id(content), content)
    if type(content) in (list, tuple, dict) and content:
        items = list(content.values() if isinstance(content, dict) else content)
        held = [
            _closure_content(item, memo) if isinstance(item, nn.Module) or type(item) in MUTABLE else item
            for item in items
        ]
        if id(content) in memo or all(new is old for new, old in zip(held, items, strict=True)):
            return memo.get(id(content), content)
        memo[id(content)] = dict(zip(content, held, strict=True)) if isinstance(content, dict) else type(content)(held)
        return memo[id(content)]
    if type(content) is weakref.ref:
        target = content()
        return content if memo.get(id(target), target) is target else weakref.ref(memo[id(target)])
    if isinstance(content, types.FunctionType):
        return rebound(content, memo)
    if isinstance(content, types.MethodType):
        function, owner = _closure_content(content.__func__, memo), _closure_content(content.__self__, memo)
        same = function is content.__func__ and owner is content.__self__
        return content if same else types.MethodType(function, owner)
    if isinstance(content, types.BuiltinMethodType) and type(content.__self__) in MUTABLE:
        return getattr(_closure_content(content.__self__, memo), content.__name__)
    if isinstance(content, functools.partial):
        old = (content.func, *content.args, *content.keywords.values())
        function, *items = (_closure_content(item, memo) for item in old)
        if all(a is b for a, b in zip((function, *items), old, strict=True)):
            return content
        args, values = items[: len(content.args)], items[len(content.args) :]
        return functools.partial(function, *args, **dict(zip(content.keywords, values, strict=True)))
    return content


class _ReplacingItems:
    """Writable view of the items of a tuple or the arguments of a partial function; writing replaces the immutable holder."""

    def __init__(self, container: Any, key: Any) -> None:
        self.container, self.key = container, key

    def __getitem__(self, i: int) -> Any:
        holder = self.container[self.key]
        return holder.args[i] if isinstance(holder, functools.partial) else holder[i]

    def __setitem__(self, i: int, value: Any) -> None:
        holder = self.container[self.key]
        if isinstance(holder, functools.partial):
            args = (*holder.args[:i], value, *holder.args[i + 1 :])
            holder.__setstate__((holder.func, args, holder.keywords, holder.__dict__))  # type: ignore[attr-defined]
        else:
            items = (*holder[:i], value, *holder[i + 1 :])
            self.container[self.key] = type(holder)._make(items) if hasattr(holder, "_make") else type(holder)(items)


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return what users have set on a tensor, such as `weight._no_weight_decay = True`, which torch's operations leave out."""
    if type(tensor) not in (Tensor, nn.Parameter):  # subclasses keep parts of their values there
        return {}
    return {name: value for name, value in vars(tensor).items() if name not in ("__deepcopy__", "_is_param")}


def places(
    root: nn.Module, wanted: Mapping[int, str] | None = None, copies: Iterable[Any] = ()
) -> list[tuple[Any, Any, str]]:
    """Return every dict entry and list item below `root` that holds one of the wanted tensors.

    Args:
        root: the module to search: parameters, buffers, (nested) containers in attributes, such as the flat weights of an LSTM, and
            unregistered modules inside these.
        wanted: id of a tensor -> its name; None: all tensors, with the name "".
        copies: values below `root` that nothing else holds, in whose objects, too, entries may be replaced.

    Returns:
        Triples (container, key, name), for use as `container[key] = other`.
    """
    entries: list[tuple[Any, Any, str]] = []
    seen: set[int] = set()

    def add_entry(container: Any, key: Any, tensor: Tensor) -> None:
        if wanted is None or id(tensor) in wanted:
            entries.append((container, key, "" if wanted is None else wanted[id(tensor)]))

    def search(container: Any, depth: int, objects: bool = False) -> None:
        if id(container) in seen or depth > 5:
            return
        seen.add(id(container))
        for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if is_bare(value):
                continue
            if isinstance(value, Tensor):
                add_entry(container, key, value)
            elif isinstance(value, dict | list) and key != "_modules":
                search(value, depth + 1, objects)
            elif isinstance(value, tuple | functools.partial):
                items = _ReplacingItems(container, key)
                for i, item in enumerate(value.args if isinstance(value, functools.partial) else value):
                    if isinstance(item, Tensor):
                        add_entry(items, i, item)
                    elif isinstance(item, dict | list):
                        search(item, depth + 2, objects)
                if isinstance(value, functools.partial):
                    search(value.keywords, depth + 1, objects)
            elif objects and not isinstance(value, nn.Module) and isinstance(getattr(value, "__dict__", None), dict):
                search(vars(value), depth + 1, objects)

    held = [value for value in copies if not isinstance(value, Tensor | tuple)]  # named, since `seen` has its id
    search(held, -1, objects=True)
    for module in with_unregistered(root):
        if not is_scripted(module):
            search(module.__dict__, 0)
    return entries


def with_unregistered(root: nn.Module) -> list[nn.Module]:
    """Return all modules below `root`, including unregistered ones in containers held by attributes."""
    modules_by_id = {id(module): module for module in root.modules()}
    waiting: list[Any] = [module.__dict__ for module in modules_by_id.values()]
    seen: set[int] = set()
    while waiting:
        container = waiting.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        for item in dict.values(container) if isinstance(container, dict) else container:
            if is_bare(item):
                continue
            if isinstance(item, nn.Module):
                new = [module for module in item.modules() if id(module) not in modules_by_id]
                modules_by_id.update((id(module), module) for module in new)
                waiting += [module.__dict__ for module in new]
            elif isinstance(item, CONTAINERS):
                waiting.append(item)
    return [*modules_by_id.values()]
