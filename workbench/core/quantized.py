"""Quantized layers, whose frozen weights consist of more than the values of one tensor.

Layers of bitsandbytes keep scales in attributes of the parameter; the first call moves them into the layer (8 bits) or repacks them for the
processor (4 bits). Since branches and the given model share parameters, this would happen only once for all of them, so each copy of the model
gets its own parameter objects over the same memory.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
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


# ---- scales of bitsandbytes in four bits, which its layers write into a state and do not load from one
# part of the name of the settings among them, bytes of a JSON text
PACKED = ".quant_state.bitsandbytes__"


def scales_of(weight: Any) -> list[Tensor]:
    """Return the tensors by which a four-bit weight of bitsandbytes is scaled; empty for other weights."""
    state = weight.__dict__.get("quant_state") if nn.Parameter in type(weight).__mro__[1:] else None
    return [] if state is None else _tensors(state)


def _tensors(state: Any) -> list[Tensor]:
    states = [state] if state.state2 is None else [state, state.state2]
    parts = [part for one in states for part in (one.absmax, one.code, one.offset)]
    return [part for part in parts if isinstance(part, Tensor)]


@dataclass
class Scales:
    """The scales in a state for the four-bit layers of a model, checked and not yet copied.

    Args:
        pairs: tensors of the model, each with the tensor of the state to copy.
        missing: names that the state lacks.
        errors: messages about scales that do not fit.
    """

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @classmethod
    def taken(cls, model: nn.Module, state: dict[str, Any], prefix: str) -> Scales:
        """Remove the scales from a state, and check them.

        Args:
            model: the model that loads it.
            state: state_dict, changed in place.
            prefix: prefix of the names of this model.
        """
        new = cls()
        for name, weight in model.named_parameters():
            if not (present := scales_of(weight)):
                continue
            stem = f"{prefix}{name}."
            parts = {key.removeprefix(stem): state.pop(key) for key in [*state] if key.startswith(stem)}
            if not parts:
                new.missing += [f"{stem}absmax"] if f"{prefix}{name}" in state else []
                continue
            kind = weight.__dict__["quant_state"]
            try:
                saved: Any = type(kind).from_dict(parts, weight.device)
                values = _tensors(saved)
            except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
                new.errors.append(f"the scales of {prefix}{name} are none of bitsandbytes in four bits ({error!r}).")
                continue
            facts = ("quant_type", "blocksize", "dtype", "shape", "nested")
            unlike = [fact for fact in facts if getattr(saved, fact) != getattr(kind, fact)]
            if unlike or [value.shape for value in values] != [part.shape for part in present]:
                fact = unlike[0] if unlike else "absmax"
                there, here = (getattr(one, fact) if unlike else list(one.absmax.shape) for one in (saved, kind))
                new.errors.append(
                    f"{prefix}{name} is quantized otherwise: {fact} is {there} in the state, {here} here."
                )
                continue
            new.pairs += zip(present, values, strict=True)
        return new

    def write(self) -> None:
        """Copy the scales into the model."""
        with torch.no_grad():
            for present, value in self.pairs:
                present.copy_(value)


def _is_of(value: object, package: str) -> bool:
    return type(value).__module__.partition(".")[0] == package


def own_copy(parameter: Tensor) -> Tensor:
    """Return an independent copy of a parameter, with the class and attributes of a quantized one."""
    if nn.Parameter in type(parameter).__mro__[1:]:
        return copy.deepcopy(parameter)
    return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


def is_quantized(weight: Tensor) -> bool:
    """Return whether a weight is quantized: a tensor subclass of several parts (torchao), or integers with scales in attributes."""
    scaled = nn.Parameter in type(weight).__mro__[1:] and not weight.is_floating_point() and not weight.is_complex()
    return scaled or is_traceable_wrapper_subclass(weight)


@contextmanager
def left_alone(model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context manager that excludes quantized weights of several parts while a wrapped model is moved or cast.

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
        except Exception as raised:  # not every quantized class supports moves and casts
            error, new = raised, None
        if new is None or (new.device, new.dtype) != (weight.device, weight.dtype):
            raise RuntimeError(
                f"{name!r} of {type(model).__name__} is quantized ({type(weight).__name__}), and cannot be moved or cast once branches share "
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


def refuse_quantized(table: Table, slots: Iterable[str], action: str, remedy: str) -> None:
    """Raise TypeError if one of the slots holds a quantized weight.

    Args:
        table: ownership table of the model.
        slots: slots to check.
        action: why that is a problem, for the message.
        remedy: what to do instead, for the message.
    """
    for slot in slots:
        weight = table.value(slot)
        if is_quantized(weight):
            raise TypeError(
                f"{slot!r} of {type(table.root).__name__} is quantized ({type(weight).__name__}), and {action}: {remedy}"
            )


def refuse_unfrozen(table: Table, slots: Iterable[str]) -> None:
    """Refuse voters with weights that a layer of optimum-quanto still rounds in each call, and expects in parts in a state.

    Raises:
        TypeError: if one of the slots is such a weight.
    """
    for slot in slots:
        path, attribute = table.record.slots[slot].owners[0]
        layer = table.module(path)
        rounds = _is_of(layer, "optimum") and getattr(layer, "weight_qtype", None) is not None
        if attribute == "weight" and rounds and not is_quantized(table.value(slot)):
            raise TypeError(
                f"{path or 'the model itself'!r} is a {type(layer).__name__} of optimum-quanto that is not frozen: its {slot!r} is still a "
                "tensor of floating-point numbers, of which the layer takes no state with one for each voter. Freeze it, "
                "optimum.quanto.freeze(model), and requires_grad_(False) its weight, so that all voters share it; or "
                "leave it out when you quantize, by exclude="
            )


__all__ = [
    "PACKED",
    "Scales",
    "is_quantized",
    "left_alone",
    "own_copy",
    "own_scales",
    "refuse_quantized",
    "refuse_unfrozen",
    "scales_of",
]
