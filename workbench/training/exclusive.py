"""Lock against training the same parameters in two threads at once, or inside their own training."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn

P = ParamSpec("P")
R = TypeVar("R")

# Ids of the parameters and the thread of each training, in order of their start. There is no lock that Ctrl-C could leave behind: single
# dictionary operations are atomic, and of two trainings the later one sees the earlier one.
_TRAININGS: dict[object, tuple[set[int], threading.Thread]] = {}


def one_at_a_time(train: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Refuse a second training of a model's parameters while another one is running: their steps would mix.

    Args:
        train: train(wrapped, ...); the decorated function raises RuntimeError if one of the parameters is being trained.
    """

    @functools.wraps(train)
    def wrapper(wrapped: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        parameters = {id(p) for p in wrapped.parameters()} if isinstance(wrapped, nn.Module) else set()
        training, thread = object(), threading.current_thread()
        try:
            _TRAININGS[training] = parameters, thread
            for earlier, (earlier_parameters, earlier_thread) in _TRAININGS.copy().items():
                if earlier is training:
                    break
                if earlier_thread is thread and _encloses(earlier) and _trained(wrapped) & earlier_parameters:
                    raise RuntimeError(
                        f"{type(wrapped).__name__} is being trained by the fit that called this one, as its callback: the weights would change "
                        "under its optimizer. Train after it has ended, or train a copy (copy.deepcopy)"
                    )
                # other entries of this thread and those of an ended thread are left over from an interrupt
                if earlier_thread is not thread and earlier_thread.is_alive() and parameters & earlier_parameters:
                    raise RuntimeError(
                        f"{type(wrapped).__name__} is already being trained in thread {earlier_thread.name}: wait for it to finish, or train "
                        "a copy of it (copy.deepcopy)"
                    )
            return train(wrapped, *args, **kwargs)
        finally:
            _TRAININGS.pop(training, None)

    return wrapper


def _encloses(training: object) -> bool:
    """Return whether this call is made during a training of the same thread: its frame can't be left over, as its entry can."""
    frame = sys._getframe(2).f_back
    while frame is not None and frame.f_locals.get("training") is not training:
        frame = frame.f_back
    return frame is not None


def _trained(wrapped: Any) -> set[int]:
    """Return the ids of the parameters that a training changes; frozen ones may be shared."""
    return {id(p) for p in wrapped.parameters() if p.requires_grad}
