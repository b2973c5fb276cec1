"""Detection of models that seed their random numbers in forward, so that each branch alone would draw the same ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from ..surroundings import Reverted
from .random import comparable

PASSES = 3  # number of passes after which states are compared
_SETS_STATE = frozenset({"manual_seed", "seed", "set_state", "graphsafe_set_state"})


class SeedWatch(Reverted):
    """Context manager that notices whether code of this thread sets the state of one of torch's generators.

    `torch.manual_seed`, `torch.set_rng_state` and `torch.random.fork_rng` end in a method of a generator, which is written in C and which only
    a profiler sees. What this package sets itself does not count. If a profiler written in C is running, nothing is noticed.
    """

    def __init__(self) -> None:
        self.seen = False
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
        if self._previous is not None:
            self._previous(frame, event, argument)


class RepeatedNoise(Reverted):
    """Context manager for each pass of a loop over passes with noise; refuses noise that the model's own seeds make the same in every pass.

    Args:
        states: returns the states of torch's generators.
    """

    def __init__(self, states: Callable[[], list[Any]]) -> None:
        self._states = states
        self._seeds = SeedWatch()
        self._ends = [comparable(states())]  # before the first pass and after each of the first few

    def begin(self) -> None:
        if len(self._ends) <= PASSES:
            self._seeds.begin()

    def revert(self) -> None:
        self._seeds.revert()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if any(error) or len(self._ends) > PASSES:
            return
        self._ends.append(comparable(self._states()))
        if self._seeds.seen and self._ends[-1] == self._ends[-2]:
            raise RuntimeError(
                "the model seeds torch's random numbers in forward, so that the noise is the same in each pass and there would be no risk; "
                "let it draw from a generator of its own, torch.randn(..., generator=generator), or seed inside torch.random.fork_rng()"
            )
