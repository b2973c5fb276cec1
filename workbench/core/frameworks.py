"""Dispatch to the adapters for models of other frameworks (Keras), which are imported only if needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import require
from ..introspect.objects import is_keras


def wrap_foreign(wrapper: Any, target: Any, method: str, at: str | None) -> Any:
    """Wrap a Keras model or a class of Keras models; return None for anything else.

    Args:
        wrapper: the wrapper that was called.
        target, method, at: its arguments.

    Raises:
        TypeError: if Keras does not run on torch, or if the model cannot be wrapped.
    """
    if not is_keras(target):
        return None
    from . import keras_models

    keras_models.check_backend(target)
    if method != "forward" or at is not None:
        raise ValueError(
            f"{'at' if at is not None else 'method'}= is not supported for a Keras model, which answers with risk when it is called. Wrap the "
            "whole model; or make the part a model, wrap that, and build the rest on its outputs"
        )
    return keras_models.wrap(wrapper, target)


def wrap_foreign_function(wrapper: Any, function: Callable[..., Any], modules: list[Any]) -> Any:
    """Wrap a function that uses Keras models; return None if it uses none.

    Args:
        wrapper: the wrapper that was called.
        function: the function.
        modules: modules that the function uses.
    """
    if not any(map(is_keras, modules)):
        return None
    from . import keras_models

    return keras_models.wrap_function(wrapper, function, modules)


def save_foreign(outer: list[Any], wrapped: Any, path: Path) -> bool:
    """Write a file in the format of another framework (.keras); return False for any other path.

    Args:
        outer: modules around the model, such as a calibration, outermost first.
        wrapped: the wrapped model.
        path: path of the file.

    Raises:
        ValueError: if the model is not of that framework.
    """
    if path.suffix != ".keras":
        return False
    model = None
    if "keras" in sys.modules:
        from . import keras_models

        model = keras_models.model_of(wrapped)
    if model is None:
        raise ValueError(
            f"{path} would be a Keras file, and {type(wrapped).__name__} is neither a wrapped Keras model nor the as_torch() of one: give a "
            "path with another ending, such as .safetensors"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    model._write(path, outer)
    return True


def load_foreign(path: Path, model: Any, wrapper: Any) -> Any:
    """Load a wrapped model from a file of another framework (.keras); return None for any other path.

    Args:
        path: path of the file.
        model, wrapper: must be None, since the file contains both.

    Raises:
        FileNotFoundError: if there is no such file.
        TypeError: if a model is given, or Keras does not run on torch.
        ValueError: if the file is of a plain model.
    """
    if path.suffix != ".keras":
        return None
    if model is not None or wrapper is not None:
        raise TypeError(f"{path} builds its model and wrappers itself: load(path)")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    keras = require("keras", "keras")
    from . import keras_models

    keras_models.check_backend(keras.Model)
    loaded = keras.saving.load_model(path)
    if not isinstance(loaded, keras_models.WrappedKeras):
        raise ValueError(
            f"{path} holds a plain Keras model: keras.saving.load_model(path), and wrap that (vote with finetune=True starts every voter there)"
        )
    return loaded


__all__ = ["load_foreign", "save_foreign", "wrap_foreign", "wrap_foreign_function"]
