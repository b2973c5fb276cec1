"""Isolation of a diagnosis: copies of a model to run, and everything restored afterwards."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import random
import types
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..core.function import Function
from ..engine.clone import copy_tensor, places, structural_copy
from ..engine.tree import version
from ..introspect.bytecode import globals_assigned
from ..introspect.locations import user_methods
from ..introspect.objects import CONTAINERS, attributes, is_scripted, parts
from ..introspect.references import globals_of
from ..introspect.source_lines import is_user_class

_MAX_DEPTH = 4
_CODE = types.FunctionType | types.MethodType | types.BuiltinFunctionType | functools.partial
_UNSET = object()  # stands for a variable that does not exist
Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


# ---- copies
def copy_with_tensors(model: nn.Module) -> nn.Module:
    """Return a copy of a model with its own tensors; tied ones stay tied.

    Args:
        model: the model, which is not changed; the copy shares its scripted parts.
    """
    if is_scripted(model):
        return model
    new = structural_copy(model)
    memo: dict[int, Any] = {}
    for container, key, _ in places(new):
        container[key] = copy_tensor(container[key], memo)
    return new


# ---- random generators
def generators(model: nn.Module) -> dict[tuple[str, str], Generator]:
    """Return the random generators that modules or their code hold: (path, attribute) or ("", name of a global) -> generator."""
    by_name: dict[tuple[str, str], Generator] = {}
    for path, module in model.named_modules():
        if not is_scripted(module):
            by_name.update({(path, name): v for name, v in attributes(module) if isinstance(v, Generator)})
    for function in user_functions(model):
        by_name.update({("", name): v for name, v in globals_of(function) if isinstance(v, Generator)})
    return by_name


def comparable_state(generator: Generator) -> Any:
    """Return the state of a random generator, in a form that can be compared."""
    state = _state(generator)
    if isinstance(state, Tensor):
        return state.cpu().numpy().tobytes()
    return state if isinstance(generator, random.Random) else repr(state)


def numpy_state() -> Any:
    """Return the state of NumPy's global generator, in a form that can be compared."""
    state: Any = np.random.get_state()  # noqa: NPY002
    return state[1].tobytes(), state[2:]


def _state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


# ---- variables that the code of a model uses outside of it
def wrapped_function(model: nn.Module) -> Any:
    """Return the user's function that a module was made from, None for other modules."""
    return model._held.function if isinstance(model, Function) else None


def user_functions(model: nn.Module) -> list[types.FunctionType]:
    """Return the user-written code of a model: methods of its classes, and the function that was wrapped."""
    methods = [method for cls in dict.fromkeys(type(m) for m in model.modules()) for method in user_methods(cls)]
    function = wrapped_function(model)
    function = getattr(function, "func", function)
    function = getattr(function, "__func__", function)
    return [*methods, function] if isinstance(function, types.FunctionType) else methods


class _Globals:
    """A dict of globals, hashable by identity."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Globals) and other.names is self.names

    def __hash__(self) -> int:
        return id(self.names)


def outside_values(model: nn.Module) -> dict[tuple[Any, str], Any]:
    """Return the variables that the code of a model uses outside of it: (dict of globals or class, name) -> value."""
    values: dict[tuple[Any, str], Any] = {}
    for function in user_functions(model):
        holder = _Globals(function.__globals__)
        for name, value in globals_of(function):
            if not isinstance(value, types.ModuleType | types.FunctionType | types.BuiltinFunctionType | type):
                values[holder, name] = value
        for name, _ in globals_assigned(function.__code__):
            values.setdefault((holder, name), current_value(holder, name))
    for cls in dict.fromkeys(base for m in model.modules() for base in type(m).__mro__ if is_user_class(base)):
        for name, value in vars(cls).items():
            if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                values[cls, name] = value
    return values


def current_value(holder: Any, name: str) -> Any:
    """Return the current value of one of `outside_values`."""
    names = holder.names if isinstance(holder, _Globals) else vars(holder)
    return names.get(name, _UNSET)


def _assign(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, _Globals):
        if value is _UNSET:
            holder.names.pop(name, None)
        else:
            holder.names[name] = value
    elif value is _UNSET:
        delattr(holder, name)
    else:
        setattr(holder, name, value)


# ---- restoring
class _ContainerContents:
    """The current contents of containers and objects; `restore` puts them back."""

    def __init__(self) -> None:
        self._contents: dict[int, tuple[Any, Any]] = {}

    def add(self, value: Any, depth: int = 0) -> None:
        is_atom = isinstance(value, nn.Module | Tensor | type | types.ModuleType)
        if depth > _MAX_DEPTH or id(value) in self._contents or is_atom:
            return
        if isinstance(value, CONTAINERS):
            if isinstance(value, dict | list | set | deque):
                items = dict(parts(value)) if isinstance(value, dict) else list(value)
                self._contents[id(value)] = (value, items)
            for _, part in list(parts(value)):
                self.add(part, depth + 1)
        elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, _CODE):
            self.add(value.__dict__, depth)

    def restore(self) -> None:
        for value, items in self._contents.values():
            if isinstance(value, dict):
                now = dict(parts(value))
                is_same = list(now) == list(items) and all(now[key] is item for key, item in items.items())
            else:
                is_same = len(value) == len(items) and all(a is b for a, b in zip(value, items, strict=True))
            if not is_same:
                value.clear()
                (value.update if isinstance(value, dict | set) else value.extend)(items)


class OutsideState:
    """The current variables that the code of a model uses outside of it; `restore` puts them back."""

    def __init__(self, model: nn.Module) -> None:
        self._values = outside_values(model)
        self._generators = [(each, copy.deepcopy(_state(each))) for each in generators(model).values()]
        self._contents = _ContainerContents()
        for value in self._values.values():
            self._contents.add(value)

    def restore(self) -> None:
        for (holder, name), value in self._values.items():
            if current_value(holder, name) is not value:
                _assign(holder, name, value)
        self._contents.restore()
        for generator, state in self._generators:
            _set_state(generator, state)


class _TensorValues:
    """The current values and gradients of a model's tensors; `restore` puts them back."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers(), *(c[k] for c, k, _ in places(model))]
        self._values = {
            id(t): (t, t.detach().clone(), version(t), t.grad if t.is_leaf else None)
            for t in tensors
            if not is_lazy(t) and t.layout == torch.strided
        }

    def restore(self) -> None:
        for tensor, value, before, grad in self._values.values():
            if version(tensor) != before or not torch.equal(_without_nan(tensor), _without_nan(value)):
                with torch.no_grad():
                    tensor.copy_(value)
            if tensor.is_leaf and tensor.grad is not grad:
                tensor.grad = grad


def _without_nan(tensor: Tensor) -> Tensor:
    """A tensor whose NaN are replaced, so that two NaN compare equal."""
    return torch.nan_to_num(tensor.detach()) if tensor.is_floating_point() or tensor.is_complex() else tensor.detach()


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore at the end what running copies of a model may change: random states, globals, and what copies share with the model."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python_random_state, numpy_random_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    outside, contents = OutsideState(model), _ContainerContents()
    for module in model.modules():
        if not is_scripted(module):
            contents.add(module.__dict__)
    modes = {module: module.training for module in model.modules()}
    tensors = _TensorValues(model)
    try:
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings(), torch.inference_mode(False):
            warnings.simplefilter("ignore")
            with torch.enable_grad(), contextlib.redirect_stdout(io.StringIO()):
                yield
    finally:
        random.setstate(python_random_state)
        np.random.set_state(numpy_random_state)  # noqa: NPY002
        outside.restore()
        contents.restore()
        for module, mode in modes.items():
            if module.training is not mode:
                module.training = mode
        tensors.restore()
