"""Keras variables for the tensors of a wrapped torch module, for use by Keras optimizers and callbacks."""

from __future__ import annotations

from typing import Any

import keras
import torch

from ...engine.plan import Shared, Split, Stacked
from ..additions import MARK
from ..ownership import table_of


def variables_of(model: Any) -> list[Any]:
    """Return the weights of a wrapped Keras model: layer variables that no method took over, and new variables for what methods added."""
    wrapped = model._workbench_torch
    tensors = {**dict(wrapped.named_parameters()), **dict(wrapped.named_buffers())}
    # order in the file it was loaded from, in which optimizers number their state
    order = model.__dict__.get("_workbench_order")
    if order is not None:
        tensors = {name: tensors[name] for name in sorted(tensors, key=lambda name: order.get(name, len(order)))}
    key = tuple(map(id, tensors.values()))
    cached = model.__dict__.get("_workbench_variables")
    if cached is None or cached[0] != key:
        cached = model.__dict__["_workbench_variables"] = (
            key,
            [*tensors.values()],
            _variables(model, wrapped, tensors),
        )
    return list(cached[2])


def _variables(model: Any, wrapped: Any, tensors: dict[str, torch.Tensor]) -> list[Any]:
    places = {f"{p.path}.{p.name}" if p.path else p.name: p.variable for p in model._workbench_module.places}
    existing = {
        v._workbench_slot: v
        for v in (model.__dict__.get("_workbench_variables") or ((), (), ()))[2]
        if hasattr(v, "_workbench_slot")
    }
    out = []
    for name, tensor in tensors.items():
        if name in places:
            out.append(places[name])
            continue
        source = places.get(name.partition(MARK)[0])
        variable = existing[name] if name in existing else _variable(name, tensor, source, wrapped)
        variable._value, variable._shape = tensor, tuple(tensor.shape)  # what neo learns changes its shape
        out.append(variable)
    return out


def _variable(name: str, tensor: torch.Tensor, source: Any, wrapped: Any) -> Any:
    value = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
    variable: Any = keras.Variable(
        value,
        trainable=isinstance(tensor, torch.nn.Parameter),
        dtype=keras.backend.standardize_dtype(tensor.dtype),
        name=source.name if source is not None else name.replace(".", "_").replace("/", "_"),
    )
    variable._workbench_slot = name
    if source is not None:  # optimizers look at names and paths, so they follow those of the original variable
        variable._path = f"{source.path}{MARK}{name.partition(MARK)[2]}"
        variable._workbench_source = source
        rule = _rule_of(table_of(wrapped).record.rules.get(name.partition(MARK)[0]), name)
        if source.constraint is not None and variable.trainable:
            _check_rule(rule, f"{source.path} has a constraint, and its values", "constrained", name)
            variable.constraint = _EachRow(source.constraint) if isinstance(rule, Stacked) else source.constraint
        if source.regularizer is not None:
            variable.regularizer = _MeanOfRows(source, rule, name)
    return variable


def _rule_of(rule: Any, name: str) -> Any:
    """Return the rule that picks a tensor: `rule` itself, or one of its options if it is a `Split`; None if there is none."""
    options = rule.options if isinstance(rule, Split) else (rule,)
    return next((option for option in options if name in (option.registered() if option is not None else ())), None)


def _check_rule(rule: Any, what: str, done: str, name: str) -> None:
    if not isinstance(rule, Stacked | Shared):
        raise NotImplementedError(
            f"{what} in the branches cannot be {done} separately ({name}): leave it out, or wrap with share=None"
        )


class _MeanOfRows:
    """Regularizer that averages that of the original weight over voters, since each voter has a share of the rows of a batch."""

    def __init__(self, source: Any, rule: Any, name: str) -> None:
        self.source, self.rule, self.name = source, rule, name

    def __call__(self, value: Any) -> Any:
        _check_rule(self.rule, f"{self.source.path} has a regularizer, and its values", "regularized", self.name)
        value = keras.ops.convert_to_tensor(value)
        rows = value if isinstance(self.rule, Stacked) else value[None]
        return torch.stack([keras.ops.sum(self.source.regularizer(row)) for row in rows]).mean()


class _EachRow(keras.constraints.Constraint):
    """Constraint that applies that of the original weight to each voter."""

    def __init__(self, constraint: Any) -> None:
        self.constraint = constraint

    def __call__(self, w: Any) -> Any:
        return torch.stack(
            [keras.ops.convert_to_tensor(self.constraint(row)) for row in keras.ops.convert_to_tensor(w)]
        )


__all__ = ["variables_of"]
