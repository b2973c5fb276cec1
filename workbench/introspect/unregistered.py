"""Tensors that a model holds without registering them: they are not moved with it, not saved and not trained."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import WorkbenchWarning
from .bytecode import attributes_assigned, containers_changed, methods_of, names_in
from .objects import CONTAINERS, access_code, attributes, is_scripted, parts

_STANDARD = frozenset(nn.Module().__dict__)
_MAX_DEPTH = 4
_MAX_NAMED = 4


@dataclass(frozen=True, eq=False)
class Unregistered:
    """A tensor that is neither a parameter nor a buffer.

    Args:
        name: path to the tensor, such as "encoder.scales[0]".
        tensor: the tensor.
        owner: the module that holds it.
        attribute: name of the attribute of the owner.
    """

    name: str
    tensor: Tensor
    owner: nn.Module
    attribute: str

    @property
    def requires_grad(self) -> bool:
        """Whether the tensor requires a gradient, and so was meant to be trained."""
        return self.tensor.requires_grad

    @property
    def is_computed(self) -> bool:
        """Whether the tensor was computed from tensors that require a gradient."""
        return self.tensor.grad_fn is not None


def unregistered(model: nn.Module) -> list[Unregistered]:
    """Return the tensors in attributes, lists, dicts and tuples of a model that are neither its parameters nor its buffers.

    Other references to registered tensors and views of them are left out, as is what forward leaves behind: attributes that it assigns to, and
    tensors with a graph that it does not read. In objects of other classes, only tensors that require a gradient are found.

    Args:
        model: the model, which is neither changed nor called.

    Returns:
        One entry for each tensor, in the order of the modules.

    Example:
        >>> import torch
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a = [torch.tensor(0.0), torch.tensor(1.0, requires_grad=True)]
        >>> [(entry.name, entry.requires_grad) for entry in unregistered(Net())]
        [('a[0]', False), ('a[1]', True)]
    """
    modules = {path: module for path, module in model.named_modules() if not is_scripted(module)}
    registered = _registered(list(modules.values()))
    assigned, changed, mentioned = _used_by_forward(list(modules.values()))
    entries: list[Unregistered] = []
    seen: set[int] = set()
    for path, module in modules.items():
        for attribute, value in attributes(module):
            if attribute in _STANDARD or attribute.startswith("_workbench") or attribute in assigned:
                continue
            if attribute in changed and not isinstance(value, Tensor):
                continue
            if f"{attribute}_orig" in module._parameters or f"{attribute}_g" in module._parameters:
                continue  # computed by a hook of torch (spectral norm, pruning, weight norm)
            for name, tensor, in_object in _tensors_in(value, f"{path}.{attribute}" if path else attribute, seen):
                is_left_behind = tensor.grad_fn is not None and attribute not in mentioned
                is_excluded = id(tensor) in registered or _storage(tensor) in registered or is_left_behind
                if not is_excluded and (tensor.requires_grad or not in_object):
                    entries.append(Unregistered(name, tensor, module, attribute))
    return entries


def assigned_in_forward(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the modules of a model, each with the names of attributes that forward passes assign to."""
    modules = [module for module in model.modules() if not is_scripted(module)]
    assigned = _used_by_forward(modules)[0]
    return [
        (module, name) for module in modules if not type(module).__module__.startswith("torch.") for name in assigned
    ]


def warn_unregistered(model: nn.Module) -> None:
    """Warn about the tensors that `unregistered` finds, once for each kind: computed ones, those that require a gradient, and others.

    Args:
        model: the model that is about to be wrapped.
    """
    entries = unregistered(model)
    for kind, message in (
        (
            (True, True),
            "which were computed before the call: all branches share them, and a training moves the tensors of the given model that they were "
            "computed from. Keep those as parameters, and compute them in forward",
        ),
        (
            (True, False),
            "which require a gradient but are no parameters: an optimizer made of wrapped.parameters() does not train them, and all branches "
            "share them. Assign an nn.Parameter to an attribute, or keep them in an nn.ParameterList or nn.ParameterDict",
        ),
        (
            (False, False),
            "which are neither parameters nor buffers: .to(device) does not move them and state_dict() does not save them. Use "
            "self.register_buffer(name, tensor); for a list, one buffer with its items stacked",
        ),
    ):
        names = [entry.name for entry in entries if (entry.requires_grad, entry.is_computed) == kind]
        if names:
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            warnings.warn(
                f"{type(model).__name__} holds tensors ({', '.join(names[:_MAX_NAMED])}{more}), {message}",
                WorkbenchWarning,
                stacklevel=4,  # the line that calls a wrapper
            )


def _registered(modules: list[nn.Module]) -> set[int]:
    """Ids and storages of the parameters and buffers of modules."""
    known: set[int] = set()
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                known |= {id(tensor), _storage(tensor)}
    return known - {0}


def _storage(tensor: Tensor) -> int:
    """The address of a tensor's memory, the same for all its views; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, lazy and other tensors without a storage
        return 0


def _tensors_in(value: object, name: str, seen: set[int], depth: int = 0) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, tensor, whether an object of another class holds it) for every tensor inside a value."""
    if isinstance(value, Tensor):
        yield name, value, False
        return
    if depth > _MAX_DEPTH or id(value) in seen or isinstance(value, nn.Module | type | types.ModuleType):
        return
    is_holder = isinstance(value, (*CONTAINERS, functools.partial, types.FunctionType))
    if not is_holder and type(value).__module__.startswith(("torch._", "builtins")):
        return
    for key, part in parts(value):
        seen.add(id(value))
        for inner_name, tensor, in_object in _tensors_in(part, name + access_code(value, key), seen, depth + 1):
            yield inner_name, tensor, in_object or not is_holder


# ---- attributes that forward uses, from its bytecode, since at wrap time there is no call to observe
def _used_by_forward(modules: list[nn.Module]) -> tuple[set[str], set[str], set[str]]:
    """Names of attributes that forward passes, or hooks on modules, assign to, whose containers they change, and that they mention."""
    codes: set[types.CodeType] = set()
    for module in modules:
        cls: Any = type(module)
        codes |= _codes_of_forward(cls)
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        codes |= {hook.__code__ for hook in hooks if hasattr(hook, "__code__")}
    assigned = {name for code in codes for name, _ in attributes_assigned(code)}
    changed = {name for code in codes for name in containers_changed(code)}
    return assigned, changed, {name for code in codes for name in names_in(code)}


@functools.cache
def _codes_of_forward(cls: Any) -> frozenset[types.CodeType]:
    """Code objects of a class's forward, and of the methods that it calls, directly or indirectly."""
    if cls.__module__.startswith("torch."):
        return frozenset()
    codes: dict[str, list[types.CodeType]] = {}
    for name, function in methods_of(cls):
        codes.setdefault(name, []).append(function.__code__)
    waiting, done = ["forward", "__call__"], {"__init__"}
    while waiting:
        name = waiting.pop()
        if name not in done:
            done.add(name)
            waiting += [called for code in codes.get(name, ()) for called in code.co_names]
    return frozenset(code for name in done - {"__init__"} for code in codes.get(name, ()))


__all__ = ["Unregistered", "assigned_in_forward", "unregistered", "warn_unregistered"]
