"""Random streams of branches that run one after another: different, the same, or forbidden, as with `randomness` in `torch.func.vmap`."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..clone import is_generator
from ..plan import Axis
from ..surroundings import is_symbolic
from .private_random import CPU, generator_of, has_generator


def devices(leaves: list[Any]) -> list[torch.device]:
    """Return the devices of tensors among the leaves that have a random generator, without the CPU."""
    others = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_cpu}
    return sorted(filter(has_generator, others), key=str)


def find_generators(tree: dict[str, nn.Module]) -> list[Any]:
    """Return the generators that modules hold as attributes, also inside lists and dicts."""
    generators: dict[int, Any] = {}

    def collect(value: Any, depth: int) -> None:
        if is_generator(value):
            generators[id(value)] = value
        elif depth and isinstance(value, list | tuple):
            for item in value:
                collect(item, depth - 1)
        elif depth and isinstance(value, dict):
            for item in value.values():
                collect(item, depth - 1)

    for module in tree.values():
        for name, value in module.__dict__.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                collect(value, 2)
    return list(generators.values())


class RandomSources:
    """Generators that a model may draw random numbers from: torch's, Python's, numpy's, and those it holds itself.

    Args:
        leaves: leaves of the inputs, which determine the devices.
        generators: generators that the model holds.
    """

    def __init__(self, leaves: list[Any], generators: list[Any]) -> None:
        self._devices, self._generators = devices(leaves), generators

    def hold(self, generator: Any) -> bool:
        """Return whether a generator is one of these: the CPU's or one that the model holds."""
        return any(generator is known for known in (generator_of(CPU), *self._generators))

    def torch(self) -> list[Any]:
        """Return the states of torch's generators: the CPU's, then each device's."""
        return [generator_of(device).get_state() for device in (CPU, *self._devices)]

    def outside_torch(self) -> list[Any]:
        """Return the states of Python's, numpy's and the model's own generators."""
        numpy: Any = sys.modules.get("numpy")
        return [
            random.getstate(),
            None if numpy is None else numpy.random.get_state(legacy=False),
            *(_state(generator) for generator in self._generators),
        ]

    def outside_vmap(self) -> list[Any]:
        """Return the states of `outside_torch` that belong to no `torch.Generator`; vmap draws from these once for all branches."""
        python, numpy, *states = self.outside_torch()
        pairs = zip(self._generators, states, strict=True)
        return [python, numpy, *(state for generator, state in pairs if not isinstance(generator, torch.Generator))]

    def all(self) -> tuple[list[Any], list[Any]]:
        """Return the states of `torch` and of `outside_torch`."""
        return self.torch(), self.outside_torch()

    def restore_torch(self, states: list[Any]) -> None:
        """Restore the states that `torch` returned."""
        for device, value in zip((CPU, *self._devices), states, strict=True):
            generator_of(device).set_state(value)

    def restore(self, states: tuple[list[Any], list[Any]]) -> None:
        """Restore the states that `all` returned."""
        torch_states, (python, numpy, *others) = states
        self.restore_torch(torch_states)
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)
        for generator, value in zip(self._generators, others, strict=True):
            _set(generator, value)


def values_unavailable() -> bool:
    """Return whether values of tensors cannot be read: under torch.compile, torch.export, make_fx and the like, and in function transforms."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None or is_symbolic()


def were_drawn(before: list[Any], after: list[Any]) -> bool:
    """Return whether numbers were drawn between two states; False if values of tensors cannot be read."""
    if values_unavailable():
        return False
    return comparable(before) != comparable(after)


def comparable(value: Any) -> Any:
    """Return a generator's state in a form that can be compared with `==`."""
    if isinstance(value, Tensor):
        return value.numpy().tobytes()
    if hasattr(value, "tobytes"):
        return value.tobytes()
    if isinstance(value, dict):
        return tuple((key, comparable(item)) for key, item in value.items())
    return tuple(map(comparable, value)) if isinstance(value, list | tuple) and len(value) < 16 else value


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "get_state"):  # numpy's RandomState
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state  # numpy's Generator, or a bit generator


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator | random.Random) or hasattr(generator, "set_state"):
        (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


class RandomStreams:
    """Sets the random stream of each pass by its index.

    Args:
        axes: axes of the run.
        sources: generators that the model may draw from.
        outside_torch: whether the model draws from generators other than torch's. Reading their states takes longer than a small network.
    """

    def __init__(self, axes: tuple[Axis, ...], sources: RandomSources, outside_torch: bool) -> None:
        self._states: Callable[[], Any] = sources.all if outside_torch else sources.torch
        self._restore: Callable[[Any], None] = sources.restore if outside_torch else sources.restore_torch
        self._same = {axis.name for axis in axes if axis.randomness in ("same", "error") and axis.size > 1}
        self._error = any(axis.randomness == "error" for axis in axes)
        self.differ = any(axis.randomness == "different" and axis.size > 1 for axis in axes)
        self._starts: dict[tuple, Any] = {}

    def branch(self, index: Mapping[str, int]) -> AbstractContextManager[None]:
        """Return a context manager for one pass; along a "same" axis every pass starts from the random state of the first."""
        return self._repeated(index) if self._same else nullcontext()

    @contextmanager
    def _repeated(self, index: Mapping[str, int]) -> Iterator[None]:
        key = tuple((name, i) for name, i in index.items() if name not in self._same)
        if key in self._starts:
            self._restore(self._starts[key])
        else:
            self._starts[key] = self._states()
        yield
        if self._error and were_drawn([*self._starts[key]], [*self._states()]):
            raise RuntimeError(
                'the model draws random numbers, which randomness="error" forbids; use randomness="different" (each sample its own) or '
                '"same" (all samples alike)'
            )
