"""Models that write into their parameters in forward, such as a target network that follows by moving averages."""

from __future__ import annotations

import functools
import types
from typing import Any, TypeGuard

from torch import Tensor, nn

from .bytecode import keywords_in, methods_of, names_in, stores_in_place, unwrapped

# names of torch functions that write into their first argument
IN_PLACE = frozenset(
    [
        *(name for name in dir(Tensor) if name.endswith("_") and not name.endswith("__") and name != "requires_grad_"),
        *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
    ]
)
_PAST_GRADIENTS = frozenset({"data", "no_grad", "set_grad_enabled", "inference_mode"})


def is_bounded(module: nn.Module) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    """Return whether a module is an embedding with a `max_norm`: it scales rows that are too long in place, before it looks them up."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None


def writes_parameters(model: nn.Module) -> bool:
    """Return whether forward may write into parameters: a function that it calls writes in place, and into `.data` or without gradients.

    Args:
        model: the model, which is neither changed nor called.

    Example:
        >>> class Clipped(nn.Linear):
        ...     def forward(self, x):
        ...         self.weight.data.clamp_(-1, 1)
        ...         return super().forward(x)
        >>> writes_parameters(Clipped(2, 1)), writes_parameters(nn.Linear(2, 1))
        (True, False)
    """
    codes: dict[str, set[types.CodeType]] = {}
    for cls in {*map(type, model.modules())}:
        for name, code in _functions(getattr(cls, "_plain_class", cls)):
            codes.setdefault(name, set()).add(code)
    waiting, called = ["forward", "__call__"], {"__init__"}
    while waiting:
        name = waiting.pop()
        if name not in called:
            called.add(name)
            waiting += [mentioned for code in codes.get(name, ()) for mentioned in names_in(code)]
    return any(_writes(frozenset(codes[name])) for name in codes.keys() & called - {"__init__"})


@functools.cache
def _functions(cls: Any) -> tuple[tuple[str, types.CodeType], ...]:
    """Return the names and codes of a class's methods and of the functions of their modules that they mention, all with their decorators."""
    functions = dict.fromkeys(methods_of(cls))
    for _, method in [*functions]:
        for name in names_in(method.__code__):
            helper = method.__globals__.get(name)
            if isinstance(helper, types.FunctionType) and not helper.__module__.startswith("torch."):
                functions |= dict.fromkeys((name, function) for function in unwrapped(helper))
    return tuple((name, function.__code__) for name, function in functions)


@functools.cache
def _writes(codes: frozenset[types.CodeType]) -> bool:
    decorated = any(code.co_name == "decorate_context" for code in codes)  # as by torch.no_grad()
    if any("max_norm" in keywords_in(code) for code in codes):  # of torch.nn.functional.embedding
        return True
    past_gradients = decorated or any(not _PAST_GRADIENTS.isdisjoint(names_in(code)) for code in codes)
    return past_gradients and any(map(_in_place, codes))


def _in_place(code: types.CodeType) -> bool:
    names = names_in(code)
    foreach = any(name.startswith("_foreach_") and name.endswith("_") for name in names)
    return foreach or not IN_PLACE.isdisjoint(names) or stores_in_place(code)


__all__ = ["IN_PLACE", "is_bounded", "writes_parameters"]
