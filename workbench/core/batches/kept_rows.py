"""Test whether a model keeps a value of each row from call to call, such as a hidden state, so that its rows must not be dealt anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.effects.attributes import modules
from ...engine.effects.branch_values import duplicate, tensors_in
from ...engine.tree import flatten, is_float
from ...introspect.objects import tensors_and_generators
from ..ownership import engine_of, table_of
from ..saving.extraction import extract

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def kept_by_row(wrapped: Any, few: Inputs, whole: Inputs, restart: Callable[[], None]) -> str:
    """Return the name of an attribute in which the model keeps something of each row that its next call uses; "" if there is none.

    Copies of the first branch answer; neither the model nor the inputs change.

    Args:
        wrapped: the wrapped object.
        few: inputs of some rows.
        whole: inputs of more rows.
        restart: sets the random sources back to one state.
    """
    once, other = _copy(wrapped), _copy(wrapped)

    def answers(model: nn.Module, inputs: Inputs) -> list[Tensor]:
        restart()
        args, kwargs = duplicate(inputs)
        call = model if wrapped._workbench.method == "forward" else getattr(model, wrapped._workbench.method)
        return [leaf for leaf in flatten(call(*args, **kwargs))[0] if is_float(leaf)]

    with torch.no_grad():
        first = answers(once, few)
        answers(other, whole)
        shapes, shapes_of_other = _shapes(once), _shapes(other)
        kept = [name for name, shape in shapes.items() if shape != shapes_of_other.get(name)]
        if not kept:
            return ""
        try:
            again = answers(once, few)
        except Exception:  # the model takes nothing after these rows but what continues them
            return kept[0]
    alike = len(first) == len(again) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)
        for a, b in zip(first, again, strict=True)
    )
    return "" if alike else kept[0]


def _copy(wrapped: Any) -> nn.Module:
    """Return a plain copy of the first branch, with its present attributes and with buffers of its own."""
    model = extract(engine_of(wrapped).clones.first(), table_of(wrapped), {}, False)
    for module in model.modules():
        module._buffers.update({name: None if b is None else b.clone() for name, b in module._buffers.items()})
    return model


def _shapes(model: nn.Module) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of the tensors that each attribute holds, without registered ones."""
    return {
        f"{path}.{name}".lstrip("."): [
            tuple(item.shape) for item in tensors_and_generators(value) if isinstance(item, Tensor)
        ]
        for (path, name), value in tensors_in(modules(model)).items()
    }
