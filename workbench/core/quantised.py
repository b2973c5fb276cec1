"""Quantised layers, whose frozen weights consist of more than the values of one tensor.

Layers of bitsandbytes keep scales in attributes of the parameter; the first call moves them into the layer (8 bits) or repacks them for the
processor (4 bits). Since branches and the given model share parameters, this would happen only once for all of them, so each copy of the model
gets its own parameter objects over the same memory.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..engine.clone import places

if TYPE_CHECKING:
    from .ownership import Table


def own_scales(model: nn.Module) -> None:
    """Give the bitsandbytes layers of a structural copy their own parameter objects over the same memory, ready for calls."""
    layers: list[Any] = [module for module in model.modules() if _is_of(module, "bitsandbytes")]
    layers = [layer for layer in layers if nn.Parameter in type(layer._parameters.get("weight")).__mro__[1:]]
    weights = {id(layer.weight): layer.weight for layer in layers}
    owned = {key: _own_scales(weight) for key, weight in weights.items()}
    for container, key, name in places(model, {key: str(key) for key in weights}) if weights else ():
        container[key] = owned[int(name)]
    for layer in layers:
        if hasattr(layer, "quant_state"):
            layer.quant_state = layer.weight.quant_state
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            # a call without gradients would pack the weight for a kernel without backward pass, and later training would use it
            layer.support_avx512bf16_for_cpu = False
        if getattr(layer.weight, "CB", None) is not None and hasattr(layer, "init_8bit_state"):
            # like `init_8bit_state`, except that the scales stay where `load_state_dict` looks for them
            layer.state.CB, layer.state.SCB, layer.weight.CB = layer.weight.CB, layer.weight.SCB, None


def _own_scales(weight: Any) -> Any:
    new = type(weight)._make_subclass(type(weight), weight.data, weight.requires_grad)
    new.__dict__.update(weight.__dict__)
    state = new.__dict__.get("quant_state")
    if state is not None:
        new.quant_state = copy.copy(state)
        if getattr(state, "packing_format_for_cpu", False):
            functional = importlib.import_module("bitsandbytes.functional")
            new.data, new.quant_state = functional._convert_weight_packed_for_cpu_inverse(new.data, new.quant_state)
    return new


def _is_of(thing: object, package: str) -> bool:
    return type(thing).__module__.partition(".")[0] == package


def own_copy(parameter: Tensor) -> Tensor:
    """Return an independent copy of a parameter, with the class and attributes of a quantised one."""
    if nn.Parameter in type(parameter).__mro__[1:]:
        return copy.deepcopy(parameter)
    return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


def is_quantised(weight: Tensor) -> bool:
    """Return whether a weight is quantised: a tensor subclass of several parts (torchao), or integers with scales in attributes."""
    scaled = nn.Parameter in type(weight).__mro__[1:] and not weight.is_floating_point() and not weight.is_complex()
    return scaled or is_traceable_wrapper_subclass(weight)


@contextmanager
def left_alone(model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context manager that excludes quantised weights of several parts while a wrapped model is moved or cast.

    Torch cannot swap tensors of these classes while branches refer to them.

    Args:
        model: the wrapped model.
        change: function that returns the moved or cast tensor.

    Raises:
        RuntimeError: if `change` would change one of these weights; nothing is changed then.
    """
    weights = {
        id(p): (name, p)
        for name, p in model.named_parameters()
        if is_traceable_wrapper_subclass(p) and not _is_of(p, "torch")  # tensor subclasses of torch itself are shards
    }
    for name, weight in weights.values():
        error = None
        try:
            new = change(weight)
        except Exception as raised:  # not every quantised class supports moves and casts
            error, new = raised, None
        if new is None or (new.device, new.dtype) != (weight.device, weight.dtype):
            raise RuntimeError(
                f"{name!r} of {type(model).__name__} is quantised ({type(weight).__name__}), and cannot be moved or cast once branches share "
                "it: move the plain model, and wrap it then"
            ) from error
    references = list(places(model, {key: str(key) for key in weights})) if weights else []
    try:
        for container, key, _ in references:
            container[key] = None
        yield
    finally:
        for container, key, name in references:
            container[key] = weights[int(name)][1]


def refuse_quantised(table: Table, slots: Iterable[str], action: str, remedy: str) -> None:
    """Raise TypeError if one of the slots holds a quantised weight.

    Args:
        table: ownership table of the model.
        slots: slots to check.
        action: why that is a problem, for the message.
        remedy: what to do instead, for the message.
    """
    for slot in slots:
        weight = table.value(slot)
        if is_quantised(weight):
            raise TypeError(
                f"{slot!r} of {type(table.root).__name__} is quantised ({type(weight).__name__}), and {action}: {remedy}"
            )


__all__ = ["is_quantised", "left_alone", "own_copy", "own_scales", "refuse_quantised"]
