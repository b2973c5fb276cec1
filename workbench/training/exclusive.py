"""One training at a time for every parameter, whichever thread asks for it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn

P = ParamSpec("P")
R = TypeVar("R")

_LOCK = threading.Lock()
_TRAINED: dict[int, str] = {}  # id of a parameter -> name of the thread that trains it


def one_at_a_time(train: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Refuse a second training of a model's parameters while the first goes on: steps of both would mix.

    Args:
        train: train(wrapped, ...), which raises a RuntimeError where one of the parameters is being trained.
    """

    @functools.wraps(train)
    def alone(wrapped: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        parameters = {id(p) for p in wrapped.parameters()} if isinstance(wrapped, nn.Module) else set()
        with _LOCK:
            if busy := parameters & _TRAINED.keys():
                raise RuntimeError(
                    f"{type(wrapped).__name__} is being trained already, in thread {_TRAINED[busy.pop()]}: wait for its end, or train a "
                    "copy (copy.deepcopy) of it"
                )
            _TRAINED.update(dict.fromkeys(parameters, threading.current_thread().name))
        try:
            return train(wrapped, *args, **kwargs)
        finally:
            with _LOCK:
                for number in parameters:
                    _TRAINED.pop(number, None)

    return alone
