"""Request to an executor: run the branches of a plan on given inputs."""

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
from .selections import RowTracker
from .state import BranchedState
from .tree import flatten, tensors

Receiver = Callable[[list[Any], Callable[[list[Any]], Any]], None]  # takes leaves with the axes in front, and rebuild


@dataclass
class Request:
    """Everything an executor sees of the engine.

    An executor calls `begin`, then runs each branch on its `clone` inside `watching`. It refuses what it cannot compute correctly by raising
    any exception; the dispatcher then undoes the side effects of the attempt and tries the next executor.

    Args:
        plan: what differs between the branches.
        args, kwargs: the inputs.
        clones: clones of the model, one per branch.
        effects: known side effects of forward on its inputs.
        first: whether this is the executor's first call of its kind, in which it should check more.
        autocast: device type for which autocast is enabled, "" if it is not.
        trackers: list to which row trackers are appended; None: passes are not tracked.
        track_all: whether every pass is tracked, not only that of the first branch.
        receiver: factory of a function that gets the outputs of branches as soon as they have run; an attempt to run that fails is followed by
            another one with a new function. None: nobody waits for them. Executors that run all branches at once do without.
    """

    plan: Plan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    clones: Clones
    effects: InputEffects
    first: bool = False
    autocast: str = ""
    trackers: list[RowTracker] | None = None
    track_all: bool = False
    receiver: Callable[[], Receiver] | None = None
    _flat: tuple[list[Any], Callable[..., Any]] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def flat(self) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        """The leaves of the inputs and the function that rebuilds inputs from leaves: see `flatten`."""
        if self._flat is None:
            args, kwargs, n = self.args, self.kwargs, len(self.args)
            if are_tensors(args, kwargs):  # same result as `flatten`, faster
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
        """The attributes that forward was observed to change."""
        return self.clones.impure

    def sources(self, leaves: list[Any] | None = None) -> RandomSources:
        """Return the sources that the model may draw random numbers from.

        Args:
            leaves: leaves of the inputs, if they are at hand; this saves flattening the inputs.
        """
        return self.clones.sources(tensors((self.args, self.kwargs)) if leaves is None else leaves)

    def states(self, leaves: list[Any]) -> dict[int, list[Any]]:
        """Return the branches' parts of each state among the inputs, by leaf index."""
        return {i: leaf.of(self.plan) for i, leaf in enumerate(leaves) if isinstance(leaf, BranchedState)}

    def streams(self, sources: RandomSources) -> RandomStreams:
        """Return the random streams of the branches."""
        return RandomStreams(self.plan.axes, sources, self.clones.draws_outside_torch())

    def begin(self, at_once: bool = False) -> list[Key]:
        """Prepare the clones and return their keys. With `at_once` only the first branch's clone is prepared, on which all branches run."""
        return self.clones.begin(self.plan, at_once)

    def clone(self, index: Index) -> Clone:
        """Return the clone of a branch; call `begin` before."""
        return self.clones.of(self.plan, index)

    def watching(self, clone: Clone, first: bool) -> AbstractContextManager[None]:
        """Return a context manager for the pass of a branch.

        It notes which attributes the first branch changes, and lets the other branches start from the values before that change.
        """
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
