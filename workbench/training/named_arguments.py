"""Errors about arguments of `fit` that say what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from workbench.core.settings import hint

# how other libraries call them
ELSEWHERE = {
    "callbacks": "callback",
    "early_stopping": "patience",
    "learning_rate": "lr",
    "logger": "log_to",
    "loss": "criterion",
    "loss_fn": "criterion",
    "n_epochs": "epochs",
    "random_state": "seed",
    "verbose": "progress",
}

P = ParamSpec("P")
R = TypeVar("R")


def naming_arguments(train: Callable[P, R]) -> Callable[P, R]:
    """Raise TypeError for unknown keyword arguments, with those that there are, and for inputs and targets that are given apart.

    Args:
        train: train(wrapped, data, *, ...).
    """
    parameters = inspect.signature(train).parameters
    options = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    leading = len(parameters) - len(options)

    @functools.wraps(train)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in parameters:
                meant = ELSEWHERE.get(name)
                advice = f"it is called {meant} here" if meant in options else hint(name, options)
                raise TypeError(f"{train.__name__} has no argument {name!r}: {advice}")
        if len(args) > leading:
            raise TypeError(
                f"{train.__name__} takes the model and the data, and everything else by name; inputs and targets are one pair, "
                f"{train.__name__}(wrapped, (x, y))"
            )
        return train(*args, **kwargs)

    return wrapper
