"""Models that seed their random numbers in forward, so that each branch alone would draw the same ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch

from ..surroundings import Reverted
from .private_random import CPU, draws_privately, generator_of, is_shared
from .random import comparable

_SETS_STATE = frozenset({"manual_seed", "seed", "set_state", "graphsafe_set_state"})


class SeedWatch(Reverted):
    """Context manager that notices whether code of this thread sets the state of one of torch's generators.

    `torch.manual_seed`, `torch.set_rng_state` and `torch.random.fork_rng` end in a method of a generator, which is written in C and which only
    a profiler sees. What this package sets itself does not count. If a profiler written in C is running, nothing is noticed.
    """

    def __init__(self) -> None:
        self.seen = False
        self.shared = False  # whether one was a default generator
        self._previous: Any = None
        self._watching = False

    def begin(self) -> None:
        self._previous = sys.getprofile()
        if self._previous is None or callable(self._previous):
            self._watching = True
            sys.setprofile(self._note)

    def revert(self) -> None:
        if self._watching:
            self._watching = False
            sys.setprofile(self._previous)

    def refuse(self) -> None:
        """Raise RuntimeError if a state was set."""
        if self.seen:
            raise RuntimeError(
                "the model seeds its random numbers itself, so that all branches draw the same, which vmap would not do"
            )

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if (
            event == "c_call"
            and argument.__name__ in _SETS_STATE
            and isinstance(argument.__self__, torch.Generator)
            and not str(frame.f_globals.get("__name__", "")).startswith("workbench.")
        ):
            self.seen = True
            self.shared = self.shared or is_shared(argument.__self__)
        if self._previous is not None:
            self._previous(frame, event, argument)


@contextmanager
def refused_in_threads() -> Iterator[None]:
    """Context manager for a pass; refuses a model that seeds torch's generators while this thread draws from private ones."""
    seeds = SeedWatch()
    with seeds if draws_privately() else nullcontext():
        yield
    if seeds.shared:
        raise RuntimeError(
            "the model seeds torch's random numbers in forward, which in a thread would change those of all other cells, and not its own: "
            "train in the main thread (workbench.fit in a cell of its own, or block=True)"
        )


class SeededNoiseError(Exception):
    """Raised after a pass in which the model has seeded the generator that noise is drawn from, so that the noise would repeat."""


class CallSeeds:
    """Seeds, one per call, of draws apart from a model that seeds torch's generators; they start again when the user seeds these."""

    def __init__(self) -> None:
        self._first, self._calls = 0, 0
        self._left: tuple[int, Any] | None = None  # seed and state of the generator after the last call

    def next(self) -> int:
        """Return the seed of a call."""
        if self._seeded_since():
            self._first, self._calls = int(torch.randint(2**62, ()).item()), 0
        self._calls += 1
        generator = torch.Generator().manual_seed(self._first + self._calls)
        return int(torch.randint(2**62, (), generator=generator).item())

    def note_end(self) -> None:
        """Note how the call has left torch's generator."""
        generator = generator_of(CPU)
        self._left = generator.initial_seed(), comparable(generator.get_state())

    def _seeded_since(self) -> bool:
        """Return whether the user has seeded torch's generator since the last call, perhaps as the model does, and drawn nothing yet."""
        generator = generator_of(CPU)
        seed, state = generator.initial_seed(), comparable(generator.get_state())
        unused = comparable(torch.Generator().manual_seed(seed).get_state())
        return self._left is None or seed != self._left[0] or state == unused != self._left[1]
