"""Models of other frameworks, and the adapters that wrap them, which are imported only once their framework is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..introspect.objects import is_keras


def wrap_foreign(wrapper: Any, target: Any, method: str, at: str | None) -> Any:
    """The wrapped object or class of a model of Keras, None for anything else.

    Args:
        wrapper: the wrapper that was called.
        target: what it was called with.
        method, at: as given there.

    Raises:
        TypeError: if Keras does not run on torch, or if the model cannot be wrapped.
    """
    if not is_keras(target):
        return None
    from . import keras_models

    keras_models.check_backend(target)
    if method != "forward" or at is not None:
        raise ValueError(
            f"{'at' if at is not None else 'method'}= of a Keras model: it answers with risk where it is called. Wrap the whole model; or the "
            "part as a model of its own, and build the rest around what it gives"
        )
    return keras_models.wrap(wrapper, target)


def wrap_foreign_function(wrapper: Any, function: Callable[..., Any], modules: list[Any]) -> Any:
    """The wrapped form of a function that uses Keras models, None for one that uses none.

    Args:
        wrapper: the wrapper that was called.
        function: the function.
        modules: those that it uses.
    """
    if not any(map(is_keras, modules)):
        return None
    from . import keras_models

    return keras_models.wrap_function(wrapper, function, modules)


__all__ = ["wrap_foreign", "wrap_foreign_function"]
