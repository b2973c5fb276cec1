"""One training at a time for every parameter, whichever thread asks for it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn

P = ParamSpec("P")
R = TypeVar("R")

# Ids of the parameters, and who trains them, in the order of their beginnings. There is no lock that Ctrl-C could leave behind: what one call
# does to a dictionary is done whole, and of two trainings the later sees the earlier.
_TRAININGS: dict[object, tuple[set[int], threading.Thread]] = {}


def one_at_a_time(train: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Refuse a second training of a model's parameters while the first goes on: steps of both would mix.

    Args:
        train: train(wrapped, ...), which raises a RuntimeError where one of the parameters is being trained.
    """

    @functools.wraps(train)
    def alone(wrapped: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        parameters = {id(p) for p in wrapped.parameters()} if isinstance(wrapped, nn.Module) else set()
        training, thread = object(), threading.current_thread()
        try:
            _TRAININGS[training] = parameters, thread
            for earlier, (others, other) in _TRAININGS.copy().items():
                if earlier is training:
                    break
                # a thread trains one model at a time: what stands there of its own, or of one that has ended, an interrupt has left
                if other is not thread and other.is_alive() and parameters & others:
                    raise RuntimeError(
                        f"{type(wrapped).__name__} is being trained already, in thread {other.name}: wait for its end, or train a copy "
                        "(copy.deepcopy) of it"
                    )
            return train(wrapped, *args, **kwargs)
        finally:
            _TRAININGS.pop(training, None)

    return alone
