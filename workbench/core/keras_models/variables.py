"""Keras variables over the tensors of a wrapped torch module, so that Keras' optimizers and callbacks see them."""

from __future__ import annotations

from typing import Any

import keras
import torch

from ...engine.plan import Stacked
from ..ownership import MARK, table_of


def variables_of(model: Any) -> list[Any]:
    """The weights of a wrapped Keras model: the variables of the layers that no method took over, and new ones over what methods have added."""
    wrapped = model._workbench_torch
    tensors = {**dict(wrapped.named_parameters()), **dict(wrapped.named_buffers())}
    order = model.__dict__.get("_workbench_order")  # of the file that it was loaded from, which optimizers count by
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
    known = {
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
        variable = known[name] if name in known else _variable(name, tensor, source, wrapped)
        variable._value = tensor
        out.append(variable)
    return out


def _variable(name: str, tensor: torch.Tensor, source: Any, wrapped: Any) -> Any:
    value = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
    variable: Any = keras.Variable(
        value,
        trainable=isinstance(tensor, torch.nn.Parameter),
        dtype=keras.backend.standardize_dtype(tensor.dtype),
        name=name.replace(".", "_").replace("/", "_"),
    )
    variable._workbench_slot = name
    if source is not None:
        variable._workbench_source = source
        if source.constraint is not None and variable.trainable:
            if not isinstance(table_of(wrapped).record.rules.get(name.partition(MARK)[0]), Stacked):
                raise NotImplementedError(
                    f"{source.path} has a constraint, and its values in the branches are none that can be constrained one by one ({name}): "
                    "leave the constraint out, or wrap by vote alone with share=None"
                )
            variable.constraint = _EachRow(source.constraint)
    return variable


class _EachRow(keras.constraints.Constraint):
    """The constraint of a weight, on that of each voter."""

    def __init__(self, constraint: Any) -> None:
        self.constraint = constraint

    def __call__(self, w: Any) -> Any:
        return torch.stack(
            [keras.ops.convert_to_tensor(self.constraint(row)) for row in keras.ops.convert_to_tensor(w)]
        )


__all__ = ["variables_of"]
