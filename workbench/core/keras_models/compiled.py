"""What a model was compiled with, for its wrapped form: an optimizer and metrics of its own."""

from __future__ import annotations

from typing import Any

import keras


def compile_alike(new: Any, model: Any) -> None:
    """Compile a model as another one is, without sharing the state of optimizer and metrics.

    Raises:
        TypeError: if the class of the other one has its own way of being compiled.
    """
    for name in ("_compile_loss", "_compile_metrics", "_loss_tracker", "optimizer"):
        new.__dict__[name] = None
    new.__dict__.update(compiled=False, train_function=None, test_function=None, predict_function=None)
    if not model.compiled:
        return
    if type(new).compile is not keras.Model.compile:
        raise TypeError(
            f"{type(model).__name__} has its own compile, and was compiled before wrapping: wrap it first, and compile the wrapped model"
        )
    arguments = dict(model._compile_config.config)
    arguments["optimizer"] = _alike(keras.optimizers.get(arguments["optimizer"]))
    for name in ("metrics", "weighted_metrics"):
        if arguments[name] is not None:
            arguments[name] = keras.tree.map_structure(_alike, arguments[name])
    new.compile(**arguments)


def _alike(item: Any) -> Any:
    if isinstance(item, keras.optimizers.Optimizer | keras.metrics.Metric):
        return type(item).from_config(item.get_config())
    return item


__all__ = ["compile_alike"]
