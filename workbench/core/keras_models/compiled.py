"""Compilation of a wrapped model like the plain one, with a separate optimizer and metrics."""

from __future__ import annotations

from typing import Any

import keras


def compile_alike(new: Any, model: Any) -> None:
    """Compile a model like another one, without sharing the state of optimizer and metrics.

    Args:
        new: the model to compile.
        model: the compiled or uncompiled model to follow.

    Raises:
        TypeError: if the model's class overrides `compile`, or the config of its optimizer is incomplete.
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
    arguments["optimizer"] = _copied(keras.optimizers.get(arguments["optimizer"]))
    for name in ("metrics", "weighted_metrics"):
        if arguments[name] is not None:
            arguments[name] = keras.tree.map_structure(_copied, arguments[name])
    new.compile(**arguments)


def _copied(item: Any) -> Any:
    """Return a new object with the same config; a metric with an incomplete config is shared, since every use resets it."""
    if isinstance(item, keras.optimizers.Optimizer):
        new = item.from_config(item.get_config())
        if unlike := _difference(new, item):
            raise TypeError(
                f"the config of the optimizer {type(item).__name__} does not include its {unlike}, so that it cannot be recreated for the "
                f"wrapped model: let get_config of the class return {unlike}, or wrap the model first, and compile the wrapped model"
            )
        for name in _DECAY:  # not included in configs
            if name in vars(_innermost(item)):
                setattr(_innermost(new), name, getattr(_innermost(item), name))
        return new
    if isinstance(item, keras.metrics.Metric):
        try:
            new = item.from_config(item.get_config())
        except Exception:
            return item
        return item if _difference(new, item) else new
    return item


def build_optimizer(model: Any) -> None:
    """Create the variables of a wrapped model's optimizer if needed; weights excluded from decay are excluded for all voters."""
    optimizer = model.optimizer
    if optimizer is None or optimizer.built:
        return
    inner, variables = _innermost(optimizer), model.trainable_variables
    excluded = vars(inner).get("_exclude_from_weight_decay", ())
    also_excluded = {id(v) for v in variables if id(getattr(v, "_workbench_source", v)) in excluded}
    if also_excluded:
        inner._exclude_from_weight_decay = {*excluded, *also_excluded}
    optimizer.build(variables)


def _innermost(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _difference(new: Any, original: Any) -> str | None:
    """Return the name of the first public number or string attribute in which two objects with the same config differ; None without any."""
    names = [name for name, value in vars(original).items() if isinstance(value, bool | int | float | str | None)]
    return next(
        (n for n in names if n[0] != "_" and n not in _STATE and vars(new).get(n) != getattr(original, n)), None
    )


_DECAY = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
_STATE = ("built", "name", "auto_name")  # attributes that change with use or that Keras numbers


__all__ = ["build_optimizer", "compile_alike"]
