"""New plain Keras models of the same architecture as a given one."""

from __future__ import annotations

import functools
import inspect
import random
from typing import Any

import keras
import numpy as np
from torch import Tensor

_GIVEN = "give the class a get_config that says all arguments of its constructor"


def new_like(model: Any) -> Any:
    """A new model of the class and architecture of another, built, with weights of its own.

    Args:
        model: a built Keras model.

    Raises:
        RuntimeError: if its config does not say all that its constructor needs, or gives another model.
    """
    cls: Any = type(model)
    drawn = random.getstate()  # which layers take the seeds of their initialisers from
    try:
        if cls.from_config.__func__ is not keras.Model.from_config.__func__ or _is_of_layers(cls):
            lambdas = any(isinstance(layer, keras.layers.Lambda) for layer in model._flatten_layers())
            options = {"clone_function": _another, "recursive": True} if lambdas else {}
            new = _built(keras.models.clone_model(_uncompiled(model), **options), model.get_build_config())
        else:
            new = rebuilt(cls, model.get_config(), model.get_build_config())
    except Exception as error:
        raise RuntimeError(
            f"no other {cls.__name__} could be made from the config of this one, so that voters cannot be given as plain models: {_GIVEN} "
            f"({error})"
        ) from error
    finally:
        random.setstate(drawn)
    if [tuple(v.shape) for v in new.weights] != [tuple(v.shape) for v in model.weights]:
        unlike: str | None = "weights"
    else:
        unlike = _difference(new, model)
    if unlike is not None:
        raise RuntimeError(
            f"another {cls.__name__} of the config of this one has other {unlike}, so that voters cannot be given as plain models: {_GIVEN} "
            "(that of Keras says the default values)"
        )
    return new


def _uncompiled(model: Any) -> Any:
    """The same model for who only looks at it, without its losses and metrics, which Keras would write out by name and not find again."""
    shown = object.__new__(type(model))
    shown.__dict__.update(vars(model), compiled=False)
    return shown


def _another(layer: Any) -> Any:
    """Another layer of the same config; a function, which Keras would write out and not read again unasked, is the same one."""
    if type(layer) is not keras.layers.Lambda:
        return type(layer).from_config(layer.get_config())
    return keras.layers.Lambda(
        layer.function, layer._output_shape, layer.mask, layer.arguments, name=layer.name, dtype=layer.dtype_policy
    )


def rebuilt(cls: Any, config: dict[str, Any], build: dict[str, Any] | None) -> Any:
    """A model from its config, whose constructor gets what it takes of all that Keras adds there.

    Args:
        cls: its class.
        config, build: what `get_config` and `get_build_config` said.
    """
    taken = inspect.signature(cls.__init__).parameters
    arguments = keras.saving.deserialize_keras_object(config)
    new = cls.__new__(cls)
    new.__init__(**{name: value for name, value in arguments.items() if name in taken})
    return _built(new, build)


def _built(model: Any, build: dict[str, Any] | None) -> Any:
    if build and not model.weights:
        model.build_from_config(build)
        model.built = True
    return model


def is_built(model: Any) -> bool:
    """Whether a model and all its layers have their weights."""
    return bool(model.weights) and all(layer.built for layer in model._flatten_layers())


def _is_of_layers(cls: Any) -> bool:
    return issubclass(cls, keras.Sequential) or cls.__name__ == "Functional"


def _difference(new: Any, model: Any) -> str | None:
    """In what two models of one config differ, if Keras made it: it has the default arguments of a constructor, also where others were given."""
    if not hasattr(type(model).get_config, "_is_default") or _is_of_layers(type(model)):
        return None
    layers = [
        [_unnamed(layer.get_config()) for layer in each._flatten_layers() if not isinstance(layer, keras.Model)]
        for each in (new, model)
    ]
    if layers[0] != layers[1]:
        return "layers"
    return next(
        (name for name in {**vars(new), **vars(model)} if name not in _blank() and not _alike(new, model, name)), None
    )


@functools.cache
def _blank() -> frozenset[str]:
    """What every model has."""
    model = keras.Model()
    model.compile("sgd", "mse")
    return frozenset(vars(model))


def _unnamed(config: Any) -> Any:
    if isinstance(config, dict):
        return {key: _unnamed(value) for key, value in config.items() if key not in ("name", "trainable")}
    return [*map(_unnamed, config)] if isinstance(config, list | tuple) else config


def _alike(new: Any, model: Any, name: str) -> bool:
    if name not in vars(new) or name not in vars(model):
        return name.startswith("_")  # what calls and trainings have left behind
    one, other = vars(new)[name], vars(model)[name]
    if isinstance(one, Tensor | np.ndarray):
        return type(one) is type(other) and np.array_equal(
            keras.ops.convert_to_numpy(one), keras.ops.convert_to_numpy(other)
        )
    if isinstance(one, bool | int | float | complex | str | bytes | None) or callable(one):
        return type(one) is type(other) and (one is other or one == other or isinstance(one, keras.layers.Layer))
    return type(one) is type(other)


__all__ = ["is_built", "new_like", "rebuilt"]
