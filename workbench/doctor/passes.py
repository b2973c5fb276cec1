"""One call of a copy of a model, and what is another after it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.clone import is_scripted
from ..engine.tree import flatten, is_float, tensors, tree_map, version
from ..introspect.locations import call_model
from ..introspect.source_lines import is_user_class
from .untouched import Beyond, generators, look_up, outside, read, read_numpy, separate
from .watching import Calls, Lines

MISSING = object()
# what every module has and what the wrapped model sees to itself; recurrent layers make the lists of their weights anew
_OWN = frozenset([*nn.Module().__dict__, "_workbench", "_engine", "_flat_weights", "_flat_weight_refs"])


@dataclass
class Subject:
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
        return tree_map(copied, (self.args, self.kwargs))

    def rows(self) -> int | None:
        """The common number of rows of the inputs, None if there is none."""
        lengths = {leaf.shape[0] for leaf in tensors((self.args, self.kwargs)) if leaf.dim()}
        return lengths.pop() if len(lengths) == 1 else None


def copied(leaf: Any) -> Any:
    """A leaf of the inputs that may be written into."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


class Pass:
    """One call of a copy of the model in one mode.

    Args:
        subject: what is called.
        training: the mode.
        inputs: other inputs than the subject's.
        calm: leave dropout out, and let batch norm use its running statistics.
        record: keep values computed from inputs, instead of looking at what changes.
        watch: keys of what is looked at after every line.
    """

    def __init__(
        self,
        subject: Subject,
        training: bool,
        inputs: Any = None,
        calm: bool = False,
        record: bool = False,
        watch: list[Any] | None = None,
    ) -> None:
        self.subject, self.training = subject, training
        self.model = separate(subject.model)
        if training != self.model.training:
            self.model.train(training)  # else single parts may be in another mode, and stay there
        for module in self.model.modules() if calm else ():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.training = False
        self.paths = {id(module): path for path, module in reversed(list(self.model.named_modules()))}
        args, kwargs = inputs or subject.inputs()
        self.leaves = flatten((args, kwargs))[0]
        beyond = Beyond(subject.model)  # so that each pass finds the globals as the first one did
        self.before = {} if record else self._values()
        probes = {key: self._probe(key) for key in watch or ()}
        self.calls = Calls(self.paths, self.leaves, list(self.model.parameters()), calm, record)
        self.lines = Lines(self.paths, probes)
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
        beyond.restore()

    def again(self) -> list[Any]:
        """Call the same copy once more; keys of what is another than after the first call."""
        beyond = Beyond(self.subject.model)
        with contextlib.suppress(Exception):  # the first call went well, and is what is looked at
            call_model(self.model, *self.subject.inputs())
        after = self._values()
        beyond.restore()
        return [key for key in after if self.after.get(key, MISSING) != after[key]]

    def changed(self) -> list[Any]:
        """Keys of what is another after the call."""
        return [
            key
            for key in dict.fromkeys([*self.before, *self.after])
            if self.before.get(key, MISSING) != self.after.get(key, MISSING)
        ]

    def floats(self) -> list[Tensor]:
        """The floating leaves of the output."""
        return [leaf for leaf in flatten(self.output)[0] if is_float(leaf)]

    # ---- what may change
    def _values(self) -> dict[Any, Any]:
        keys: list[Any] = [("random", "torch"), ("random", "numpy"), ("random", "random")]
        keys += [("input", i) for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        keys += [("generator", *key) for key in generators(self.model)]
        keys += [("outside", *key) for key in outside(self.model)]
        for path, module in self.model.named_modules():
            if is_scripted(module) or not is_user_class(type(module)):
                continue
            keys += [("attribute", path, name) for name in module.__dict__ if name not in _OWN]
            if not isinstance(module, nn.modules.batchnorm._NormBase):
                keys += [("buffer", path, name) for name in module._buffers]
        return {key: self._probe(key)() for key in keys}

    def _probe(self, key: Any) -> Callable[[], Any]:
        kind, *rest = key
        if kind == "random":
            return {"torch": lambda: _Bytes(torch.get_rng_state()), "numpy": read_numpy, "random": random.getstate}[
                rest[0]
            ]
        if kind == "input":
            return lambda: version(self.leaves[rest[0]])
        if kind == "generator":
            each = generators(self.model)[rest[0], rest[1]]
            return lambda: read(each)
        if kind == "outside":
            return lambda: printed(look_up(*rest), objects=False)
        path, name = rest
        module = self.model.get_submodule(path) if path else self.model
        if kind == "buffer":
            return lambda: Same(module._buffers.get(name))
        return lambda: printed(module.__dict__.get(name, MISSING))


class _Bytes:
    """The values of a tensor, to be compared."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bytes) and torch.equal(self.tensor, other.tensor)

    __hash__ = None  # type: ignore[assignment]


class Same:
    """An object as it is now: equal to itself, unless it was written in place. It is held, so that no id comes again."""

    def __init__(self, value: Any) -> None:
        self.value, self.version = value, version(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value and other.version == self.version

    __hash__ = None  # type: ignore[assignment]


def printed(value: Any, depth: int = 3, objects: bool = True) -> Any:
    """What is equal before and after exactly if nothing was changed; with `objects` also inside objects of other classes."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return type(value), value if value == value else "nan"
    if depth and isinstance(value, list | tuple | set | frozenset):
        return type(value), len(value), [printed(item, depth - 1, objects) for item in value]
    if depth and isinstance(value, dict):
        return dict, len(value), [(printed(k, 0), printed(item, depth - 1, objects)) for k, item in dict.items(value)]
    inside = objects and depth and not isinstance(value, nn.Module | Tensor | type)
    if inside and type(getattr(value, "__dict__", None)) is dict:
        return Same(value), [(key, printed(item, depth - 1)) for key, item in vars(value).items()]
    return Same(value)
