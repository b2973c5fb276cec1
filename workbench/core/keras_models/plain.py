"""New plain Keras models of the same architecture as a given one."""

from __future__ import annotations

import functools
import inspect
import random
from typing import Any

import keras
import numpy as np
from torch import Tensor

_REMEDY = "give the class a get_config that returns all arguments of its constructor"


def new_like(model: Any) -> Any:
    """Create a built model with the class and architecture of another, with its own weights.

    Args:
        model: a built Keras model.

    Raises:
        RuntimeError: if its config is incomplete, or yields a different model.
    """
    cls: Any = type(model)
    random_state = random.getstate()  # layers draw the seeds of their initializers from `random`
    try:
        if cls.from_config.__func__ is not keras.Model.from_config.__func__ or _is_of_layers(cls):
            lambdas = any(isinstance(layer, keras.layers.Lambda) for layer in model._flatten_layers())
            options = {"clone_function": _clone_layer, "recursive": True} if lambdas else {}
            new = _built(keras.models.clone_model(_uncompiled(model), **options), model.get_build_config())
        else:
            new = rebuilt(cls, model.get_config(), model.get_build_config())
    except Exception as error:
        raise RuntimeError(
            f"no new {cls.__name__} could be made from the config of this one, so that voters cannot be returned as plain models: {_REMEDY} "
            f"({error})"
        ) from error
    finally:
        random.setstate(random_state)
    if [tuple(v.shape) for v in new.weights] != [tuple(v.shape) for v in model.weights]:
        unlike: str | None = "weights"
    else:
        unlike = _difference(new, model)
    if unlike is not None:
        raise RuntimeError(
            f"a new {cls.__name__} with the config of this one has other {unlike}, so that voters cannot be returned as plain models: {_REMEDY} "
            "(the default get_config of Keras returns default values)"
        )
    return new


def _uncompiled(model: Any) -> Any:
    """Return a shallow copy without losses and metrics, which Keras would serialize by name and fail to find again."""
    uncompiled = object.__new__(type(model))
    uncompiled.__dict__.update(vars(model), compiled=False)
    return uncompiled


def _clone_layer(layer: Any) -> Any:
    """Return a new layer with the same config; functions of Lambda layers are shared, since Keras refuses to deserialize them by default."""
    if type(layer) is not keras.layers.Lambda:
        return type(layer).from_config(layer.get_config())
    return keras.layers.Lambda(
        layer.function, layer._output_shape, layer.mask, layer.arguments, name=layer.name, dtype=layer.dtype_policy
    )


def rebuilt(cls: Any, config: dict[str, Any], build: dict[str, Any] | None) -> Any:
    """Build a model from its config; entries that the constructor does not accept, which Keras adds, are dropped.

    Args:
        cls: class of the model.
        config, build: return values of `get_config` and `get_build_config`.
    """
    parameters = inspect.signature(cls.__init__).parameters
    arguments = keras.saving.deserialize_keras_object(config)
    new = cls.__new__(cls)
    new.__init__(**{name: value for name, value in arguments.items() if name in parameters})
    return _built(new, build)


def _built(model: Any, build: dict[str, Any] | None) -> Any:
    if build and not model.weights:
        model.build_from_config(build)
        model.built = True
    return model


def is_built(model: Any) -> bool:
    """Return whether a model and all its layers have weights."""
    return bool(model.weights) and all(layer.built for layer in model._flatten_layers())


def _is_of_layers(cls: Any) -> bool:
    return issubclass(cls, keras.Sequential) or cls.__name__ == "Functional"


def _difference(new: Any, model: Any) -> str | None:
    """Return in what two models with the same config differ, or None.

    Only the default `get_config` of Keras is checked, which may return default values of arguments instead of the actual ones.
    """
    if not hasattr(type(model).get_config, "_is_default") or _is_of_layers(type(model)):
        return None
    layers = [
        [_unnamed(layer.get_config()) for layer in each._flatten_layers() if not isinstance(layer, keras.Model)]
        for each in (new, model)
    ]
    if layers[0] != layers[1]:
        return "layers"
    return next(
        (
            name
            for name in {**vars(new), **vars(model)}
            if name not in _default_attributes() and not _alike(new, model, name)
        ),
        None,
    )


@functools.cache
def _default_attributes() -> frozenset[str]:
    """Return the names of the attributes that every compiled model has."""
    model = keras.Model()
    model.compile("sgd", "mse")
    return frozenset(vars(model))


def _unnamed(config: Any) -> Any:
    if isinstance(config, dict):
        return {key: _unnamed(value) for key, value in config.items() if key not in ("name", "trainable")}
    return [*map(_unnamed, config)] if isinstance(config, list | tuple) else config


def _alike(new: Any, model: Any, name: str) -> bool:
    if name not in vars(new) or name not in vars(model):
        return name.startswith("_")  # private attributes set by calls and trainings may differ
    value, original = vars(new)[name], vars(model)[name]
    if isinstance(value, Tensor | np.ndarray):
        return type(value) is type(original) and np.array_equal(
            keras.ops.convert_to_numpy(value), keras.ops.convert_to_numpy(original)
        )
    if isinstance(value, bool | int | float | complex | str | bytes | None) or callable(value):
        return type(value) is type(original) and (
            value is original or value == original or isinstance(value, keras.layers.Layer)
        )
    return type(value) is type(original)


__all__ = ["is_built", "new_like", "rebuilt"]
