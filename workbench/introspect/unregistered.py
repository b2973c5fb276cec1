"""Tensors that a model holds without having registered them: they do not move, are not saved, and nothing trains them."""

from __future__ import annotations

import dis
import functools
import types
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..engine.clone import attributes, is_scripted
from ..errors import WorkbenchWarning

_STANDARD = frozenset(nn.Module().__dict__)
_MUTATORS = frozenset(
    ["append", "appendleft", "extend", "insert", "add", "update", "setdefault", "pop", "popleft", "clear"]
)
_DEEP = 4


@dataclass(frozen=True, eq=False)
class Unregistered:
    """A tensor that is neither a parameter nor a buffer.

    Args:
        name: where it is, such as "encoder.scales[0]".
        tensor: the tensor.
        owner: the module that holds it.
        attribute: under which name.
    """

    name: str
    tensor: Tensor
    owner: nn.Module
    attribute: str

    @property
    def requires_grad(self) -> bool:
        """Whether it was meant to be trained."""
        return self.tensor.requires_grad


def unregistered(model: nn.Module) -> list[Unregistered]:
    """The tensors in attributes, lists, dicts and tuples of a model that are no parameters or buffers of it.

    Left out are other references to registered tensors and views of them, and what forward leaves behind: tensors that hang on a graph, and
    attributes that it assigns to. Objects of other classes are looked into for tensors that require a gradient only.

    Args:
        model: it is not changed, and not called.

    Returns:
        One entry for each tensor, in the order of the modules.

    Example:
        >>> import torch
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a = [torch.tensor(0.0), torch.tensor(1.0, requires_grad=True)]
        >>> [(found.name, found.requires_grad) for found in unregistered(Net())]
        [('a[0]', False), ('a[1]', True)]
    """
    modules = {path: module for path, module in model.named_modules() if not is_scripted(module)}
    known: set[int] = set()
    for module in modules.values():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                known |= {id(tensor), _storage(tensor)}
    known.discard(0)
    assigned, changed = _written(modules.values())
    found: list[Unregistered] = []
    seen: set[int] = set()
    for path, module in modules.items():
        for attribute, value in attributes(module):
            if attribute in _STANDARD or attribute.startswith("_workbench") or attribute in assigned:
                continue
            if attribute in changed and not isinstance(value, Tensor):
                continue
            if f"{attribute}_orig" in module._parameters or f"{attribute}_g" in module._parameters:
                continue  # computed by a hook of torch (spectral norm, pruning, weight norm)
            name = f"{path}.{attribute}" if path else attribute
            for place, tensor, inside in _inside(value, name, seen):
                if id(tensor) in known or _storage(tensor) in known or tensor.grad_fn is not None:
                    continue
                if tensor.requires_grad or not inside:
                    found.append(Unregistered(place, tensor, module, attribute))
    return found


def warn_unregistered(model: nn.Module, stacklevel: int = 4) -> None:
    """One warning that names the tensors which `unregistered` finds.

    Args:
        model: the model that is about to be wrapped.
        stacklevel: as in `warnings.warn`; by default the line that calls a wrapper.
    """
    found = unregistered(model)
    for wanted, message in (
        (
            True,
            "which require a gradient but are no parameters: an optimizer made of wrapped.parameters() does not train them, and all branches "
            "share them. Assign an nn.Parameter to an attribute, or keep them in an nn.ParameterList or nn.ParameterDict",
        ),
        (
            False,
            "which are neither parameters nor buffers: .to(device) does not move them and state_dict() does not save them. Use "
            "self.register_buffer(name, tensor); for a list, one buffer with its items stacked",
        ),
    ):
        names = [entry.name for entry in found if entry.requires_grad is wanted]
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            warnings.warn(
                f"{type(model).__name__} holds tensors ({', '.join(names[:4])}{more}), {message}",
                WorkbenchWarning,
                stacklevel=stacklevel,
            )


def _storage(tensor: Tensor) -> int:
    """The address of a tensor's memory, the same for all its views; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, lazy and other tensors without a storage
        return 0


def _inside(value: object, name: str, seen: set[int], depth: int = 0) -> Iterator[tuple[str, Tensor, bool]]:
    """(where, tensor, whether an object of another class holds it) for every tensor inside a value."""
    if isinstance(value, Tensor):
        yield name, value, False
        return
    if depth > _DEEP or id(value) in seen or isinstance(value, nn.Module | type | types.ModuleType):
        return
    parts: list[tuple[str, object]] = []
    other = False
    if isinstance(value, dict):
        parts = [(f"{name}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = [(f"{name}.{field}", item) for field, item in zip(value._fields, value, strict=True)]
    elif isinstance(value, list | tuple | deque):
        parts = [(f"{name}[{i}]", item) for i, item in enumerate(value)]
    elif isinstance(value, set | frozenset):
        parts = [(f"{name}{{...}}", item) for item in value]
    elif isinstance(value, functools.partial):
        parts = [(f"{name}.args[{i}]", item) for i, item in enumerate(value.args)]
        parts += [(f"{name}.keywords[{key!r}]", item) for key, item in value.keywords.items()]
    elif isinstance(value, types.FunctionType):
        for free, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                parts.append((f"{name}: {free}", cell.cell_contents))
            except ValueError:  # a variable that is not set yet
                continue
    elif hasattr(value, "__dict__") and not type(value).__module__.startswith(("torch._", "builtins")):
        other = True
        parts = [(f"{name}.{key}", item) for key, item in vars(value).items()]
    if not parts:
        return
    seen.add(id(value))
    for place, item in parts:
        for where, tensor, inside in _inside(item, place, seen, depth + 1):
            yield where, tensor, inside or other


# ---- what forward writes, by its bytecode: at wrap time there is no call to be watched
def _written(modules: Iterable[nn.Module]) -> tuple[frozenset[str], frozenset[str]]:
    """Names of attributes that the forward passes of modules, or hooks on them, assign to; and of those whose containers they change."""
    assigned: set[str] = set()
    changed: set[str] = set()
    for module in modules:
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        cls: Any = type(module)
        for a, c in [_of_class(cls), *(_of_code(h.__code__) for h in hooks if hasattr(h, "__code__"))]:
            assigned |= a
            changed |= c
    return frozenset(assigned), frozenset(changed)


@functools.cache
def _of_class(cls: Any) -> tuple[frozenset[str], frozenset[str]]:
    if cls.__module__.startswith("torch."):
        return frozenset(), frozenset()
    todo, done = ["forward", "__call__"], {"__init__", "__call__" if cls.__call__ is nn.Module.__call__ else ""}
    assigned: set[str] = set()
    changed: set[str] = set()
    while todo:  # what forward calls, and what that calls
        name = todo.pop()
        for base in cls.__mro__ if name not in done else ():
            function = getattr(vars(base).get(name), "__func__", vars(base).get(name))
            function = getattr(function, "fget", function)
            function = getattr(function, "__wrapped__", function)
            if isinstance(function, types.FunctionType) and not base.__module__.startswith("torch."):
                a, c = _of_code(function.__code__)
                assigned |= a
                changed |= c
                todo += function.__code__.co_names
        done.add(name)
    return frozenset(assigned), frozenset(changed)


@functools.cache
def _of_code(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    assigned = {str(step.argval) for step in steps if step.opname == "STORE_ATTR"}
    changed = {str(step.argval) for i, step in enumerate(steps) if "LOAD_ATTR" in step.opname and _changes(steps, i)}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            a, c = _of_code(constant)
            assigned |= a
            changed |= c
    return frozenset(assigned), frozenset(changed)


def _changes(steps: list[dis.Instruction], i: int) -> bool:
    """Whether the container that step i loads is changed by a method or by an item that is set."""
    if i + 1 < len(steps) and steps[i + 1].argval in _MUTATORS:
        return True
    depth = 1  # of the stack, from the container on
    for step in steps[i + 1 :]:
        effect = dis.stack_effect(step.opcode, step.arg, jump=False)
        if depth == 2 and effect < 0:
            return step.opname == "STORE_SUBSCR"
        depth += effect
        if depth < 2:
            return False
    return False


__all__ = ["Unregistered", "unregistered", "warn_unregistered"]
