"""Keras models as torch modules: variables are registered as parameters and buffers, and swapped in by a Keras scope."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import torch
from torch import Tensor, nn

from ...errors import WorkbenchWarning
from .extras import KEY, mask_of, with_extras

_OMITTED = object()


@dataclass(frozen=True)
class Place:
    """Location of the tensor of a Keras variable.

    Args:
        variable: variable of the Keras model.
        path: path of the module that holds its tensor.
        name: name of the tensor in that module.
        buffer: whether it is a buffer.
    """

    variable: Any
    path: str
    name: str
    buffer: bool


class LayerTensors(nn.Module):
    """Module that holds the tensors of one Keras layer, and reinitializes them.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._initializers: _Shared = _Shared({})
        self._layer = _Shared(layer)

    def __getstate__(self) -> dict[str, Any]:  # `_Shared` values are not copied
        return {name: value for name, value in self.__dict__.items() if not isinstance(value, _Shared)}

    @property
    def normalizes_batch(self) -> bool:
        """Whether a voter needs at least two rows in training, as for batch norm in torch."""
        layer = self._layer.value
        return isinstance(layer, keras.layers.BatchNormalization) and layer.trainable

    def reset_parameters(self) -> None:
        """Draw new weights, each from its own initializer."""
        for name, initializer in self._initializers.value.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                new = _fresh(initializer)(tuple(parameter.shape), keras.backend.standardize_dtype(parameter.dtype))
                with torch.no_grad():
                    parameter.copy_(new)


class KerasModule(nn.Module):
    """Torch module that calls a Keras model, or a function of Keras models, with its own parameters and buffers in place of their variables.

    The parameters are those of the Keras variables, and buffers share their memory, so that both sides see the same weights.

    Args:
        models: the Keras models.
        run: function to call; None for the model itself.
    """

    def __init__(self, models: list[Any], run: Callable[..., Any] | None = None) -> None:
        super().__init__()
        places: list[Place] = []
        seen: set[int] = set()
        for model in models:
            prefix = "" if run is None else _free(self._modules, _stem(model.name))
            self._add(model, prefix, places, seen)
        states = [v for model in models for v in model.variables if id(v) not in seen]
        self._calls = _Shared(_Calls(run or models[0], run is not None, tuple(places), tuple(states)))

    def _add(self, layer: Any, path: str, places: list[Place], seen: set[int]) -> None:
        holder: Any = LayerTensors(layer) if path else self
        if path:
            parent, _, name = path.rpartition(".")
            self.get_submodule(parent).add_module(name, holder)
        for buffer, variables in ((False, layer._trainable_variables), (True, layer._non_trainable_variables)):
            for variable in variables:
                if id(variable) in seen:
                    continue
                seen.add(id(variable))
                tensor = variable._value
                name = _free({**holder._parameters, **holder._buffers, **holder._modules}, variable.name)
                if buffer or not (tensor.is_floating_point() or tensor.is_complex()):
                    holder._buffers[name], buffer_here = tensor.detach(), True
                else:
                    holder._parameters[name], buffer_here = tensor, False
                    if path and (initializer := _initializer(layer, variable)) is not None:
                        holder._initializers.value[name] = initializer
                places.append(Place(variable, path, name, buffer_here))
        for inner in _inner(layer):
            if any(id(v) not in seen for v in inner.weights):
                name = _free(holder._modules, _stem(inner.name))
                self._add(inner, f"{path}.{name}" if path else name, places, seen)

    def __getstate__(self) -> dict[str, Any]:  # `_Shared` values are not copied
        return {name: value for name, value in self.__dict__.items() if not isinstance(value, _Shared)}

    @property
    def places(self) -> tuple[Place, ...]:
        """Locations of all variables, in the order of the layers."""
        return self._calls.value.places

    @property
    def owner(self) -> Any:
        """The wrapped Keras model that this module belongs to, shared by all copies."""
        return self._calls.value.owner

    def belong_to(self, model: Any) -> None:
        """Set the owner; a method, since a plain assignment would register it as a sub-module."""
        self._calls.value.owner = model

    @property
    def states(self) -> tuple[Any, ...]:
        """Seed variables, from which all branches draw in turn."""
        return self._calls.value.states

    @property
    def notes(self) -> set[str]:
        """Extras (losses added by layers, masks of the output) that were dropped by calls that do not collect them."""
        return self._calls.value.notes

    def leaves_extras(self, training: bool, args: tuple, kwargs: dict[str, Any]) -> type | None:
        """Return the type of the output if calls in this mode have extras, otherwise None; the first time, this runs the model once.

        Args:
            training: the mode.
            args, kwargs: arguments of a call.
        """
        calls = self._calls.value
        if training not in calls.output_types:
            with (
                torch.no_grad(),
                torch.random.fork_rng(),
                keras.StatelessScope(collect_losses=True) as scope,
            ):
                output = calls.run(*args, **{"training": training, **kwargs})
            has_extras = bool(scope.losses) or any(mask_of(leaf) is not None for leaf in keras.tree.flatten(output))
            calls.output_types[training] = type(output) if has_extras else None
        return calls.output_types[training]

    def forward(self, *args: Any, training: Any = _OMITTED, **kwargs: Any) -> Any:
        """Call the Keras model.

        Args:
            args, kwargs: as for the Keras model; with a true `kwargs[KEY]` the output includes extras.
            training: as for the Keras model, where None means its default; if omitted, the mode of this module.
        """
        calls, with_key = self._calls.value, kwargs.pop(KEY, False)
        if training is _OMITTED:
            training = self.training
        if not calls.is_function:
            kwargs["training"] = training
        current = [self._tensor_at(place) for place in calls.places]
        mapping = [(place.variable, tensor) for place, tensor in zip(calls.places, current, strict=True)]
        with _Scope(mapping, calls.states) as scope:
            initial = [scope.get_current_value(place.variable) for place in calls.places]
            output = calls.run(*args, **kwargs)
        for place, tensor, old in zip(calls.places, current, initial, strict=True):
            new = scope.get_current_value(place.variable)
            if new is old:
                continue
            if not place.buffer:
                raise RuntimeError(
                    f"the model assigns to its weight {place.path}.{place.name} when it is called, which branches share; use a variable with "
                    "trainable=False for values that change"
                )
            with torch.no_grad():
                tensor.copy_(new)
        for state in scope.states:
            new = scope.get_current_value(state)
            if new is not None:
                state.assign(new)
        masks = [mask_of(leaf) for leaf in keras.tree.flatten(output)]
        output = keras.tree.map_structure(_unmasked, output)
        if with_key:
            return with_extras(output, scope.losses, masks)
        dropped = {
            "losses that layers add": bool(scope.losses),
            "masks of the output": any(mask is not None for mask in masks),
        }
        calls.notes.update(extra for extra, is_present in dropped.items() if is_present)
        if calls.notes and self.training and torch.is_grad_enabled() and not calls.warned:
            calls.warned = True
            warnings.warn(
                f"this Keras model has {' and '.join(sorted(calls.notes))}, which only its own fit and train_on_batch include in the loss",
                WorkbenchWarning,
                stacklevel=2,
            )
        return output

    def _tensor_at(self, place: Place) -> Tensor:
        return getattr(self.get_submodule(place.path), place.name)


def refuse_layers(model: Any) -> None:
    """Raise ValueError if a layer is wrapped, a torch module or a stateful RNN, whose tensors branches could not have for themselves."""
    for layer in model._flatten_layers():
        if "_workbench_plain" in vars(layer):
            raise ValueError(
                f"the layer {layer.name!r} of the Keras model {model.name!r} is wrapped already: wrap the whole model or that part, not both"
            )
        if any(cls.__name__ == "TorchModuleWrapper" for cls in type(layer).__mro__):
            inner = type(layer.module).__name__
            raise ValueError(
                f"the layer {layer.name!r} of the Keras model {model.name!r} is the torch module {inner}, which does not use its parameters "
                "through Keras, so that branches would not differ there: write the layer in Keras, or the whole model in torch, and wrap that"
            )
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ValueError(
                f"the layer {layer.name!r} of the Keras model {model.name!r} is stateful, and its one state cannot be that of every branch: use "
                "return_state=True in place of stateful=True, let the model take and return the state, and wrap with state= to hand it on"
            )


class _Scope(keras.StatelessScope):
    """Scope of one branch, which also keeps the seeds of generators that belong to no layer, such as the global one of `keras.random`.

    Args:
        mapping: pairs of a variable and its tensor in this branch.
        states: seed variables of the layers.
    """

    def __init__(self, mapping: list[tuple[Any, Tensor]], states: tuple[Any, ...]) -> None:
        super().__init__(state_mapping=mapping, collect_losses=True)
        self.states = [*states]
        self._known = {id(variable) for variable, _ in mapping} | set(map(id, states))

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable = update[0]
        if id(variable) not in self._known:
            if variable.name != "seed_generator_state":
                raise RuntimeError(
                    f"the model assigns to the variable {variable.path} when it is called, which is none of its weights, so that branches "
                    "cannot have their own: create it with add_weight(trainable=False)"
                )
            self._known.add(id(variable))
            self.states.append(variable)
        super().add_update(update)


class _Shared:
    """Holder of a value that is shared by all copies of a module."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self


class _Calls:
    """State of the calls of a Keras model: what to call, locations of variables, and what earlier calls have shown."""

    def __init__(self, run: Any, is_function: bool, places: tuple[Place, ...], states: tuple[Any, ...]) -> None:
        self.run, self.is_function, self.places, self.states = run, is_function, places, states
        self.notes: set[str] = set()
        self.owner: Any = None
        self.warned = False  # whether a warning about dropped extras was issued
        self.output_types: dict[bool, type | None] = {}  # training mode -> type of the output if calls have extras


def _inner(layer: Any) -> Iterator[Any]:
    """Yield the layers inside a layer, in the order of the model."""
    ordered = layer.layers if isinstance(layer, keras.Model) else []
    known = set(map(id, ordered))
    yield from ordered
    yield from (inner for inner in layer._layers if id(inner) not in known)


def _stem(name: str) -> str:
    """Return a layer name without the number that Keras appends to make it unique in the process."""
    return re.sub(r"\W", "_", re.sub(r"_\d+$", "", name)) or "layer"


def _free(taken: Any, name: str) -> str:
    name, n = re.sub(r"\W", "_", name) or "variable", 0
    while (numbered := f"{name}_{n}" if n else name) in taken:
        n += 1
    return numbered


def _unmasked(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and hasattr(leaf, "_keras_mask"):
        del leaf._keras_mask
    return leaf


def _initializer(layer: Any, variable: Any) -> Any:
    """Return a layer's initializer of a variable, found by Keras naming conventions; None if there is none."""
    for name in (variable.name, variable.name.removesuffix("_kernel")):
        initializer = getattr(layer, f"{name}_initializer", None)
        if isinstance(initializer, keras.initializers.Initializer):
            return initializer
    return None


def _fresh(initializer: Any) -> Any:
    """Return an initializer with a new seed, since those of Keras return the same numbers at every call."""
    config = initializer.get_config()
    if "seed" in config:
        config["seed"] = int(torch.randint(2**31 - 1, ()))
    return type(initializer).from_config(config)


__all__ = ["KerasModule", "Place", "refuse_layers"]
