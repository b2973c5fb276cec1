"""Wrapping of Keras models, of classes of them, and of functions that use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from torch import nn

from ...introspect.objects import is_keras
from ..decorated import namespace_and_past
from .model import WrappedKeras, wrapped_twin
from .tensors import KerasModule, refuse_layers


def check_backend(target: Any) -> None:
    """Raise TypeError if Keras does not run on the torch backend."""
    backend = keras.backend.backend()
    if backend != "torch":
        name = target.__name__ if isinstance(target, type) else type(target).__name__
        raise TypeError(
            f"{name} is a Keras model on the {backend} backend, and only those on torch can be wrapped: set the environment variable "
            'KERAS_BACKEND=torch (os.environ["KERAS_BACKEND"] = "torch") before importing Keras, and restart the program'
        )


def wrap(wrapper: Any, target: Any) -> Any:
    """Wrap a Keras model, or a class so that its instances are wrapped on construction.

    Args:
        wrapper: the wrapper.
        target: a Keras model, which may already be wrapped, or a subclass of `keras.Model`.

    Raises:
        TypeError: if the target is a layer but not a model, or is compiled and overrides `compile`.
        ValueError: if a part of it cannot run with other variables.
    """
    cls = target if isinstance(target, type) else type(target)
    if not issubclass(cls, keras.Model):
        raise TypeError(
            f"{cls.__name__} is a Keras layer, not a model: wrap the model that it is part of, or keras.Sequential([layer])"
        )
    if isinstance(target, type):
        return _decorated(target, wrapper)
    if isinstance(target, WrappedKeras):
        return wrapped_twin(target.unwrap_shared(), (*target.wrappers, wrapper), target)
    return wrapped_twin(target, (wrapper,))


def wrap_function(wrapper: Any, function: Callable[..., Any], modules: list[Any]) -> Any:
    """Wrap a function that uses Keras models, as a torch module over their variables, in evaluation mode like calls in Keras.

    Args:
        wrapper: the wrapper.
        function: function that calls the models.
        modules: modules that the function uses.

    Raises:
        TypeError: if it also uses torch modules, or Keras runs on another backend.
        ValueError: if a model is already wrapped, or has no weights yet.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    for module in modules:
        if not is_keras(module):
            raise TypeError(
                f"{name} uses Keras models and the torch module {type(module).__name__}, which cannot be wrapped together: wrap a function of "
                "one kind, or each model separately"
            )
        check_backend(module)
        if isinstance(module, WrappedKeras):
            raise ValueError(f"{name} uses a model that is wrapped already: wrap the function or the model, not both")
        if not module.built or not module.weights:
            raise ValueError(
                f"{name} uses the Keras model {module.name!r}, which has no weights yet: call it once before wrapping"
            )
        refuse_layers(module)
    return wrapper(KerasModule(modules, function).eval())


def _decorated(cls: type[nn.Module], wrapper: Any) -> type[nn.Module]:
    meta: Any = type(cls)

    class Built(meta):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return wrapped_twin(super().__call__(*args, **kwargs), (wrapper,), decorated=True)

    namespace, past = namespace_and_past(cls)
    return Built(cls.__name__, (past, cls), namespace)


__all__ = ["check_backend", "wrap", "wrap_function"]
