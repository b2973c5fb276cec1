"""Requests to executors: run the branches of a plan on these inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from .branch import Clone
from .clones import Clones
from .effects.attributes import Attribute
from .effects.inputs import InputEffects, Key, are_tensors
from .effects.random import RandomSources, RandomStreams
from .plan import Index, Intervention, Plan
from .results import Result
from .selections import RowTracker
from .state import BranchedState
from .tree import flatten, tensors


@dataclass
class Request:
    """All that an executor gets to see of the engine.

    An executor calls `begin`, and runs each branch on its `clone`, `watching` it. What it cannot do right it refuses by any exception; the
    ladder undoes what the attempt has left, and tries the next rung.

    Args:
        plan: what differs between the branches.
        args, kwargs: the inputs.
        clones: of the model, one for each branch.
        effects: what forward is known to do to its inputs.
        first: whether an executor meets calls of this kind for the first time, and should look closer.
        autocast: the type of device that autocast is on for, if it is.
        trackers: collects what follows the passes, if any is to be followed.
        track_all: whether every pass is followed, not only that of the first branch.
    """

    plan: Plan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    clones: Clones
    effects: InputEffects
    first: bool = False
    autocast: str = ""
    trackers: list[RowTracker] | None = None  # collects what follows the passes, if any is to be followed
    track_all: bool = False  # whether every pass is followed, not only that of the first branch
    _flat: tuple[list[Any], Callable[..., Any]] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def flat(self) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        """The leaves of the inputs, and what puts leaves into their shape: see `flatten`."""
        if self._flat is None:
            args, kwargs, n = self.args, self.kwargs, len(self.args)
            if are_tensors(args, kwargs):  # the same, without a look for what is inside
                self._flat = (
                    [*args, *kwargs.values()],
                    lambda leaves: (tuple(leaves[:n]), dict(zip(kwargs, leaves[n:], strict=True))),
                )
            else:
                self._flat = flatten((args, kwargs))
        return self._flat

    @property
    def training(self) -> bool:
        """Whether the wrapped object is in training mode."""
        return self.clones.root.training

    @property
    def impure(self) -> frozenset[Attribute]:
        """The attributes that forward was seen to change."""
        return self.clones.impure

    def sources(self, leaves: list[Any] | None = None) -> RandomSources:
        """What the model may draw random numbers from; the leaves of the inputs spare a walk through them."""
        return self.clones.sources(tensors((self.args, self.kwargs)) if leaves is None else leaves)

    def states(self, leaves: list[Any]) -> dict[int, list[Any]]:
        """By place among the leaves of the inputs, the parts of a state for the branches."""
        return {i: leaf.of(self.plan) for i, leaf in enumerate(leaves) if isinstance(leaf, BranchedState)}

    def streams(self, sources: RandomSources) -> RandomStreams:
        """The random streams of the branches."""
        return RandomStreams(self.plan.axes, sources, self.clones.draws_outside_torch())

    def begin(self, at_once: bool = False) -> list[Key]:
        """Make the clones ready; with `at_once` only that of the first branch, which stands for all."""
        return self.clones.begin(self.plan, at_once)

    def clone(self, index: Index) -> Clone:
        """The clone of a branch, after `begin`."""
        return self.clones.of(self.plan, index)

    def watching(self, clone: Clone, first: bool) -> AbstractContextManager[None]:
        """Around the pass of a branch: notes what the first one changes, and lets the others start from what that was before."""
        watching = self.clones.watching(clone, self.plan, first)
        if self.trackers is None or not (first or self.track_all):
            return watching
        return self._tracking(watching, self.trackers)

    @contextmanager
    def _tracking(self, watching: AbstractContextManager[None], trackers: list[RowTracker]) -> Iterator[None]:
        exchanged = any(type(i).inputs is not Intervention.inputs for i in self.plan.interventions)
        trackers.append(RowTracker([] if exchanged else tensors((self.args, self.kwargs))))
        with watching, trackers[-1]:
            yield


Executor = Callable[[Request], Sequence[Result]]  # one result a branch, in the order of `plan.indices`
