"""Models of other frameworks, and the adapters that wrap them, which are imported only once their framework is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import require
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


def save_foreign(outer: list[Any], wrapped: Any, path: Path) -> bool:
    """Write a file of another framework; False for any other file.

    Args:
        outer: what stands around the model, the outermost first.
        wrapped: the model.
        path: the file.

    Raises:
        ValueError: if the model is not of the framework that the file is of.
    """
    if path.suffix != ".keras":
        return False
    model = None
    if "keras" in sys.modules:
        from . import keras_models

        model = keras_models.model_of(wrapped)
    if model is None:
        raise ValueError(
            f"{path} would be a file of Keras, and {type(wrapped).__name__} is no wrapped Keras model, nor the as_torch() of one: give a path "
            "that ends otherwise, such as .safetensors"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    model._write(path, outer)
    return True


def load_foreign(path: Path, model: Any, wrapper: Any) -> Any:
    """The wrapped model of a file of another framework, None for any other file.

    Args:
        path: the file.
        model, wrapper: None: such a file builds the model and the wrappers itself.

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
        raise FileNotFoundError(f"{path} is not there")
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
