"""What is made of a Keras model, of a class of them, and of a function that uses some; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from torch import nn

from ...introspect.objects import is_keras
from .model import WrappedKeras, wrapped_twin
from .tensors import KerasModule, refuse_layers


def check_backend(target: Any) -> None:
    """Refuse Keras models that do not run on torch.

    Raises:
        TypeError: if Keras runs on another backend.
    """
    backend = keras.backend.backend()
    if backend != "torch":
        name = target.__name__ if isinstance(target, type) else type(target).__name__
        raise TypeError(
            f"{name} is a Keras model on the {backend} backend, and only those on torch can be wrapped: set the environment variable "
            'KERAS_BACKEND=torch (os.environ["KERAS_BACKEND"] = "torch") before Keras is imported, and restart the program'
        )


def wrap(wrapper: Any, target: Any) -> Any:
    """The wrapped form of a Keras model, or the class whose instances are built wrapped.

    Args:
        wrapper: the wrapper; it may be one more on a wrapped model.
        target: a Keras model or a subclass of `keras.Model`.

    Raises:
        TypeError: if it is a layer and no model, or if it has its own `compile`.
        ValueError: if a part of it cannot be run with other variables.
    """
    cls = target if isinstance(target, type) else type(target)
    if not issubclass(cls, keras.Model):
        raise TypeError(
            f"{cls.__name__} is a Keras layer and no model: wrap the model that it is part of, or keras.Sequential([layer])"
        )
    if isinstance(target, type):
        return _decorated(target, wrapper)
    if isinstance(target, WrappedKeras):
        return wrapped_twin(target.unwrap_shared(), (*target.wrappers, wrapper), target)
    return wrapped_twin(target, (wrapper,))


def wrap_function(wrapper: Any, function: Callable[..., Any], modules: list[Any]) -> Any:
    """The wrapped form of a function that uses Keras models: a torch module over their variables, in evaluation mode as Keras calls are.

    Args:
        wrapper: the wrapper.
        function: it calls the models.
        modules: those that it uses.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    for module in modules:
        if not is_keras(module):
            raise TypeError(
                f"{name} uses Keras models and the {type(module).__name__} of torch, whose parameters are swapped in other ways: wrap a "
                "function of one kind, or each model by itself"
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


class _Past:
    """What `super(Net, self).name` finds in the methods of a decorated class: those of the user's class are passed over."""

    def __init__(self, cls: type, name: str) -> None:
        self.cls, self.name = cls, name

    def __get__(self, instance: Any, owner: type) -> Any:
        return getattr(super(self.cls, owner if instance is None else instance), self.name)


def _decorated(cls: type[nn.Module], wrapper: Any) -> type[nn.Module]:
    meta: Any = type(cls)

    class Built(meta):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return wrapped_twin(super().__call__(*args, **kwargs), (wrapper,), decorated=True)

    hidden = ("__dict__", "__weakref__", "__slots__")
    namespace = {name: value for name, value in vars(cls).items() if name not in hidden}
    past: Any = {name: _Past(cls, name) for name, value in namespace.items() if hasattr(value, "__get__")}
    past["__init_subclass__"] = classmethod(lambda cls, **kwargs: None)
    namespace.pop("__init_subclass__", None)
    return Built(cls.__name__, (type("Past", (), past), cls), namespace)


__all__ = ["check_backend", "wrap", "wrap_function"]
