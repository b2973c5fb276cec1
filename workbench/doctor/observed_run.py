"""Run of a copy of a model that is observed: what torch functions did, and what is another after it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.tree import flatten, is_float, tensors, tree_map, version
from ..introspect.locations import call_model
from ..introspect.objects import is_scripted
from ..introspect.source_lines import is_user_class
from .isolation import (
    OutsideState,
    comparable_state,
    copy_with_tensors,
    current_value,
    generators,
    numpy_state,
    outside_values,
)
from .tracers import CallTracer, LineTracer

MISSING = object()
# what every module has and what the wrapped model sees to itself; recurrent layers make the lists of their weights anew
_INTERNAL = frozenset([*nn.Module().__dict__, "_workbench", "_engine", "_flat_weights", "_flat_weight_refs"])


@dataclass
class ExampleCall:
    """A model and one call of it.

    Args:
        model: the plain model.
        name: what it is called.
        args, kwargs: the inputs.
    """

    model: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of the inputs."""
        return tree_map(copy_leaf, (self.args, self.kwargs))

    def n_rows(self) -> int | None:
        """The common number of rows of the inputs, None if there is none."""
        lengths = {leaf.shape[0] for leaf in tensors((self.args, self.kwargs)) if leaf.dim()}
        return lengths.pop() if len(lengths) == 1 else None


def copy_leaf(leaf: Any) -> Any:
    """A leaf of the inputs that may be written into."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


class ObservedRun:
    """One run of a copy of the model in one mode.

    Args:
        call: what is run.
        training: the mode.
        inputs: other inputs than those of the call.
        calm: leave dropout out, and let batch norm use its running statistics.
        record: keep values computed from inputs, instead of looking at what changes.
        watch: keys of what is looked at after every line.
    """

    def __init__(
        self,
        call: ExampleCall,
        training: bool,
        inputs: Any = None,
        calm: bool = False,
        record: bool = False,
        watch: list[Any] | None = None,
    ) -> None:
        self.call, self.training = call, training
        self.model = copy_with_tensors(call.model)
        if training != self.model.training:
            self.model.train(training)  # else single modules may be in another mode, and stay there
        for module in self.model.modules() if calm else ():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.training = False
        paths = {id(module): path for path, module in reversed(list(self.model.named_modules()))}
        args, kwargs = inputs or call.inputs()
        self.leaves = flatten((args, kwargs))[0]
        outside = OutsideState(call.model)  # so that each run finds the globals as the first one did
        self.before = {} if record else self._values()
        self.calls = CallTracer(paths, self.leaves, list(self.model.parameters()), calm, record)
        self.lines = LineTracer(paths, {key: self._probe(key) for key in watch or ()})
        self.output: Any = None
        self.error: Exception | None = None
        try:
            with ExitStack() as stack:
                stack.enter_context(self.lines)
                if not watch:
                    stack.enter_context(self.calls)
                self.output = call_model(self.model, args, kwargs)
        except Exception as error:
            self.error = error
        self.after = {} if record else self._values()
        outside.restore()

    def repeat(self) -> list[Any]:
        """Call the same copy once more; keys of what is another than after the first call."""
        outside = OutsideState(self.call.model)
        with contextlib.suppress(Exception):  # the first call went well, and is what is looked at
            call_model(self.model, *self.call.inputs())
        after = self._values()
        outside.restore()
        return [key for key in after if self.after.get(key, MISSING) != after[key]]

    def changed(self) -> list[Any]:
        """Keys of what is another after the call."""
        return [
            key
            for key in dict.fromkeys([*self.before, *self.after])
            if self.before.get(key, MISSING) != self.after.get(key, MISSING)
        ]

    def float_outputs(self) -> list[Tensor]:
        """The floating leaves of the output."""
        return [leaf for leaf in flatten(self.output)[0] if is_float(leaf)]

    def maker(self, leaf: Any) -> str:
        """The name of the torch function that made an output, "" if none was seen."""
        maker = self.calls.maker(leaf) if isinstance(leaf, Tensor) else None
        return maker.name if maker is not None else ""

    # ---- what may change
    def _values(self) -> dict[Any, Any]:
        keys: list[Any] = [("random", "torch"), ("random", "numpy"), ("random", "random")]
        keys += [("input", i) for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        keys += [("generator", *key) for key in generators(self.model)]
        keys += [("outside", *key) for key in outside_values(self.model)]
        for path, module in self.model.named_modules():
            if is_scripted(module) or not is_user_class(type(module)):
                continue
            keys += [("attribute", path, name) for name in module.__dict__ if name not in _INTERNAL]
            if not isinstance(module, nn.modules.batchnorm._NormBase):
                keys += [("buffer", path, name) for name in module._buffers]
        return {key: self._probe(key)() for key in keys}

    def _probe(self, key: Any) -> Callable[[], Any]:
        kind, *rest = key
        if kind == "random":
            states: dict[str, Callable[[], Any]] = {
                "torch": lambda: torch.get_rng_state().numpy().tobytes(),
                "numpy": numpy_state,
                "random": random.getstate,
            }
            return states[rest[0]]
        if kind == "input":
            return lambda: version(self.leaves[rest[0]])
        if kind == "generator":
            generator = generators(self.model)[rest[0], rest[1]]
            return lambda: comparable_state(generator)
        if kind == "outside":
            return lambda: snapshot(current_value(*rest), objects=False)
        path, name = rest
        module = self.model.get_submodule(path) if path else self.model
        if kind == "buffer":
            return lambda: SameObject(module._buffers.get(name))
        return lambda: snapshot(module.__dict__.get(name, MISSING))


class SameObject:
    """An object as it is now: equal to itself, unless it was written in place. It is held, so that no id comes again."""

    def __init__(self, value: Any) -> None:
        self.value, self.version = value, version(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and other.value is self.value and other.version == self.version

    __hash__ = None  # type: ignore[assignment]


# beside the engine's `mark`, which is made of ids for speed: this one holds lengths and plain values, for the words of a finding
def snapshot(value: Any, depth: int = 3, objects: bool = True) -> Any:
    """What is equal before and after exactly if nothing was changed; with `objects` also inside objects of other classes."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return type(value), value if value == value else "nan"
    if depth and isinstance(value, list | tuple | set | frozenset):
        return type(value), len(value), [snapshot(item, depth - 1, objects) for item in value]
    if depth and isinstance(value, dict):
        return dict, len(value), [(snapshot(k, 0), snapshot(item, depth - 1, objects)) for k, item in dict.items(value)]
    inside = objects and depth and not isinstance(value, nn.Module | Tensor | type)
    if inside and type(getattr(value, "__dict__", None)) is dict:
        return SameObject(value), [(key, snapshot(item, depth - 1)) for key, item in vars(value).items()]
    return SameObject(value)
