"""New plain Keras models of the same architecture as a given one."""

from __future__ import annotations

import inspect
from typing import Any

import keras


def new_like(model: Any) -> Any:
    """A new model of the class and architecture of another, built, with weights of its own.

    Args:
        model: a built Keras model.

    Raises:
        RuntimeError: if its config does not say all that its constructor needs, or gives weights of other shapes.
    """
    cls: Any = type(model)
    try:
        if cls.from_config.__func__ is not keras.Model.from_config.__func__ or _is_of_layers(model):
            new = keras.models.clone_model(model)
        else:
            taken = inspect.signature(cls.__init__).parameters
            config = keras.saving.deserialize_keras_object(model.get_config())
            new = cls.__new__(cls)
            new.__init__(**{name: value for name, value in config.items() if name in taken})
        if not new.weights:
            new.build_from_config(model.get_build_config())
    except Exception as error:
        raise RuntimeError(
            f"no other {cls.__name__} could be made from the config of this one, so that voters cannot be given as plain models: give the class "
            f"a get_config that says all arguments of its constructor ({error})"
        ) from error
    if [tuple(v.shape) for v in new.weights] != [tuple(v.shape) for v in model.weights]:
        raise RuntimeError(
            f"another {cls.__name__} of the same config has other weights, so that voters cannot be given as plain models: give the class a "
            "get_config that says all arguments of its constructor"
        )
    return new


def _is_of_layers(model: Any) -> bool:
    return isinstance(model, keras.Sequential) or type(model).__name__ == "Functional"


__all__ = ["new_like"]
