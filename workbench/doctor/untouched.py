"""Copies to run, and a safety net under the original: after a diagnosis everything is as it was before."""

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
from ..engine.clone import attributes, is_scripted, places, structural_copy
from ..engine.tree import version
from ..introspect.bytecode import globals_assigned
from ..introspect.locations import user_methods
from ..introspect.objects import CONTAINERS, parts
from ..introspect.references import globals_of
from ..introspect.source_lines import is_user_class

_DEEP = 4
_CODE = types.FunctionType | types.MethodType | types.BuiltinFunctionType | functools.partial
Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def separate(model: nn.Module) -> nn.Module:
    """A copy of a model with tensors of its own; tied ones stay tied.

    Args:
        model: it is not changed; scripted parts of it are shared.
    """
    if is_scripted(model):
        return model
    new = structural_copy(model)
    memo: dict[int, Any] = {}
    made: dict[int, Tensor] = {}
    for container, key, _ in places(new):
        tensor = container[key]
        if id(tensor) not in made:
            # what an earlier call left behind may hang on its graph, which has no copy
            made[id(tensor)] = copy.deepcopy(tensor, memo) if tensor.is_leaf else tensor.detach().clone()
        container[key] = made[id(tensor)]
    return new


def read(generator: Generator) -> Any:
    """The state of a random generator, to be compared or set again."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().cpu().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state(legacy=False))
    return repr(generator.bit_generator.state)


def read_numpy() -> Any:
    """The state of NumPy's global generator, to be compared."""
    state: Any = np.random.get_state()  # noqa: NPY002
    return state[1].tobytes(), state[2:]


def generators(model: nn.Module) -> dict[tuple[str, str], Generator]:
    """Random generators that modules or the code of their classes hold: (path, attribute) or ("", name of a global) -> generator."""
    found: dict[tuple[str, str], Generator] = {}
    for path, module in model.named_modules():
        if not is_scripted(module):
            found.update({(path, name): v for name, v in attributes(module) if isinstance(v, Generator)})
    for function in functions(model):
        for name, value in globals_of(function):
            if isinstance(value, Generator):
                found["", name] = value
    return found


def function_of(model: nn.Module) -> Any:
    """The user's function inside a module that was made of it, None for other modules."""
    return model._held.function if isinstance(model, Function) else None


def functions(model: nn.Module) -> list[types.FunctionType]:
    """What the user wrote of the model: methods of its classes, and the function that was wrapped."""
    found = [function for cls in dict.fromkeys(type(m) for m in model.modules()) for function in user_methods(cls)]
    core = function_of(model)
    core = getattr(core, "func", core)
    core = getattr(core, "__func__", core)
    return [*found, core] if isinstance(core, types.FunctionType) else found


def outside(model: nn.Module) -> dict[tuple[Any, str], Any]:
    """What the code of a model reaches outside of it: (dict of globals or class, name) -> value."""
    found: dict[tuple[Any, str], Any] = {}
    for function in functions(model):
        for name, value in globals_of(function):
            if not isinstance(value, types.ModuleType | types.FunctionType | types.BuiltinFunctionType | type):
                found[_Globals(function.__globals__), name] = value
        for name, _ in globals_assigned(function.__code__):
            found.setdefault((_Globals(function.__globals__), name), function.__globals__.get(name, _MISSING))
    for cls in dict.fromkeys(base for m in model.modules() for base in type(m).__mro__):
        if is_user_class(cls):
            for name, value in vars(cls).items():
                if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                    found[cls, name] = value
    return found


_MISSING = object()


class _Globals:
    """A dict of globals as a key."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Globals) and other.names is self.names

    def __hash__(self) -> int:
        return id(self.names)


def look_up(holder: Any, name: str) -> Any:
    """The present value of what `outside` found."""
    return holder.names.get(name, _MISSING) if isinstance(holder, _Globals) else vars(holder).get(name, _MISSING)


def _put(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, _Globals):
        if value is _MISSING:
            holder.names.pop(name, None)
        else:
            holder.names[name] = value
    elif value is _MISSING:
        delattr(holder, name)
    else:
        setattr(holder, name, value)


class _Contents:
    """Containers and objects as they are now, to be filled again."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}

    def add(self, value: Any, depth: int = 0) -> None:
        if depth > _DEEP or id(value) in self._kept or isinstance(value, nn.Module | Tensor | type | types.ModuleType):
            return
        if isinstance(value, dict):
            self._kept[id(value)] = (value, dict(dict.items(value)))  # past what a class of its own may do there
        elif isinstance(value, list | set | deque):
            self._kept[id(value)] = (value, list(value))
        elif type(getattr(value, "__dict__", None)) is dict and not isinstance(value, tuple | frozenset | _CODE):
            self.add(value.__dict__, depth)
            return
        if isinstance(value, CONTAINERS):
            for _, part in list(parts(value)):
                self.add(part, depth + 1)

    def restore(self) -> None:
        for value, kept in self._kept.values():
            if isinstance(value, dict):
                now = dict(dict.items(value))
                if list(now) != list(kept) or any(now[key] is not item for key, item in kept.items()):
                    value.clear()
                    value.update(kept)
                continue
            same = len(value) == len(kept) and all(a is b for a, b in zip(value, kept, strict=True))
            if same:
                continue
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(kept)


class Beyond:
    """What the code of a model reaches outside of it, as it is now; `restore` puts it back."""

    def __init__(self, model: nn.Module) -> None:
        self._bound = outside(model)
        self._generators = [(each, copy.deepcopy(_state(each))) for each in generators(model).values()]
        self._contents = _Contents()
        for value in self._bound.values():
            self._contents.add(value)

    def restore(self) -> None:
        for (holder, name), value in self._bound.items():
            if look_up(holder, name) is not value:
                _put(holder, name, value)
        self._contents.restore()
        for generator, state in self._generators:
            _set(generator, state)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Puts back what running copies of a model may have changed: random states, globals, and what copies share with the model."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    theirs, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002
    beyond, contents = Beyond(model), _Contents()
    for module in model.modules():
        if not is_scripted(module):
            contents.add(module.__dict__)
    training = {module: module.training for module in model.modules()}
    tensors = [*model.parameters(), *model.buffers(), *(c[k] for c, k, _ in places(model))]
    kept = {id(t): (t, t.detach().clone(), version(t), t.grad if t.is_leaf else None) for t in tensors if not _lazy(t)}
    try:
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings(), torch.inference_mode(False):
            warnings.simplefilter("ignore")
            with torch.enable_grad(), contextlib.redirect_stdout(io.StringIO()):
                yield
    finally:
        random.setstate(theirs)
        np.random.set_state(numbers)  # noqa: NPY002
        beyond.restore()
        contents.restore()
        for module, mode in training.items():
            if module.training is not mode:
                module.training = mode
        for tensor, value, before, grad in kept.values():
            if version(tensor) != before or not torch.equal(_bits(tensor), _bits(value)):
                with torch.no_grad():
                    tensor.copy_(value)
            if tensor.is_leaf and tensor.grad is not grad:
                tensor.grad = grad


def _lazy(tensor: Tensor) -> bool:
    return is_lazy(tensor) or tensor.layout != torch.strided


def _bits(tensor: Tensor) -> Tensor:
    """For comparing with NaN equal to NaN."""
    return torch.nan_to_num(tensor.detach()) if tensor.is_floating_point() or tensor.is_complex() else tensor.detach()


def _state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.bit_generator.state


def _set(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
