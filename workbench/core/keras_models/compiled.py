"""What a model was compiled with, for its wrapped form: an optimizer and metrics of its own."""

from __future__ import annotations

from typing import Any

import keras


def compile_alike(new: Any, model: Any) -> None:
    """Compile a model as another one is, without sharing the state of optimizer and metrics.

    Raises:
        TypeError: if the class of the other one has its own way of being compiled, or its optimizer's config leaves something out.
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
    """Another one of the same configuration; a metric that has none that says all of it is used by both models, as each use starts anew."""
    if isinstance(item, keras.optimizers.Optimizer):
        new = item.from_config(item.get_config())
        if unlike := _difference(new, item):
            raise TypeError(
                f"the config of the optimizer {type(item).__name__} does not say its {unlike}, so that the wrapped model cannot have one like "
                f"it: give the class a get_config that says {unlike}, or wrap the model first, and compile the wrapped model"
            )
        for name in _DECAY:  # which no config says
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
    """Make the variables of a wrapped model's optimizer, if it has none; weights left out of the decay are left out for all voters."""
    optimizer = model.optimizer
    if optimizer is None or optimizer.built:
        return
    inner, variables = _innermost(optimizer), model.trainable_variables
    left_out = vars(inner).get("_exclude_from_weight_decay", ())
    alike = {id(v) for v in variables if id(getattr(v, "_workbench_source", v)) in left_out}
    if alike:
        inner._exclude_from_weight_decay = {*left_out, *alike}
    optimizer.build(variables)


def _innermost(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _difference(new: Any, original: Any) -> str | None:
    """The first public attribute, a number or text, in which two objects of one config differ."""
    names = [name for name, value in vars(original).items() if isinstance(value, bool | int | float | str | None)]
    return next(
        (n for n in names if n[0] != "_" and n not in _STATE and vars(new).get(n) != getattr(original, n)), None
    )


_DECAY = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
_STATE = ("built", "name", "auto_name")  # what use leaves behind, and Keras numbers


__all__ = ["build_optimizer", "compile_alike"]
