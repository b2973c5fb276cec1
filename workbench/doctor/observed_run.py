"""Observed run of a copy of a model: what torch functions did, and what the run changed."""

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
# attributes that every module has or that the wrapped model manages; recurrent layers rebuild the lists of their weights
_INTERNAL = frozenset([*nn.Module().__dict__, "_workbench", "_engine", "_flat_weights", "_flat_weight_refs"])


@dataclass
class ExampleCall:
    """A model and one call of it.

    Args:
        model: the plain model.
        name: its name in findings.
        args, kwargs: the inputs.
    """

    model: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of the inputs."""
        return tree_map(copy_leaf, (self.args, self.kwargs))

    def n_rows(self) -> int | None:
        """Return the common number of rows of the inputs, None if there is none."""
        lengths = {leaf.shape[0] for leaf in tensors((self.args, self.kwargs)) if leaf.dim()}
        return lengths.pop() if len(lengths) == 1 else None


def copy_leaf(leaf: Any) -> Any:
    """Return a copy of a leaf of the inputs, which the model may write into."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


class ObservedRun:
    """One run of a copy of the model in one mode.

    Args:
        call: the model and its inputs.
        training: the mode.
        inputs: replace those of the call.
        calm: skip dropout, and let batch norm use its running statistics.
        record: keep the values computed from inputs, instead of checking what changes.
        watch: keys of the values to check after every line.
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
        # not if the mode is the same: single modules may be in another one, and stay in it
        if training != self.model.training:
            self.model.train(training)
        for module in self.model.modules() if calm else ():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.training = False
        paths = {id(module): path for path, module in reversed(list(self.model.named_modules()))}
        args, kwargs = inputs or call.inputs()
        self.leaves = flatten((args, kwargs))[0]
        outside = OutsideState(call.model)  # restored below, so that each run starts from the same globals
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
        """Call the same copy once more, and return the keys of the values that differ from those after the first call."""
        outside = OutsideState(self.call.model)
        with contextlib.suppress(Exception):  # only the first call is diagnosed, and it succeeded
            call_model(self.model, *self.call.inputs())
        after = self._values()
        outside.restore()
        return [key for key in after if self.after.get(key, MISSING) != after[key]]

    def changed(self) -> list[Any]:
        """Return the keys of the values that the call changed."""
        return [
            key
            for key in dict.fromkeys([*self.before, *self.after])
            if self.before.get(key, MISSING) != self.after.get(key, MISSING)
        ]

    def float_outputs(self) -> list[Tensor]:
        """Return the floating-point leaves of the output."""
        return [leaf for leaf in flatten(self.output)[0] if is_float(leaf)]

    def maker(self, leaf: Any) -> str:
        """Return the name of the torch function that made an output, "" if none was seen."""
        maker = self.calls.maker(leaf) if isinstance(leaf, Tensor) else None
        return maker.name if maker is not None else ""

    # ---- values that a call may change
    def _values(self) -> dict[Any, Any]:
        """Current snapshots of everything that a call may change, by key."""
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
        """A function that returns the current snapshot of one value."""
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
        module = self.model.get_submodule(path)
        if kind == "buffer":
            return lambda: SameObject(module._buffers.get(name))
        return lambda: snapshot(module.__dict__.get(name, MISSING))


class SameObject:
    """An object and its version: equal to itself, unless it was written in place. Holding the object keeps its id from being reused."""

    def __init__(self, value: Any) -> None:
        self.value, self.version = value, version(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and other.value is self.value and other.version == self.version

    __hash__ = None  # type: ignore[assignment]


# unlike the engine's `mark`, which consists of ids for speed, a snapshot holds lengths and plain values, which findings report
def snapshot(value: Any, depth: int = 3, objects: bool = True) -> Any:
    """Return a snapshot of a value: two are equal exactly if nothing was changed; with `objects`, also inside objects of other classes."""
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
