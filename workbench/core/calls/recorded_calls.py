"""Predictions without Python: calls of a kind that has been seen often, as one graph of all branches, where that is sure to give the same."""

from __future__ import annotations

import logging
import math
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.effects.private_random import CPU, generator_of
from ...engine.traced_graph import Graph, RefusedError, same, share_memory
from ...engine.tree import is_float, versions
from ...errors import WorkbenchWarning
from ..outputs.options import has_detections
from ..ownership import engine_of, marks_of
from .call_forms import around, form_of, in_mode, leaves_of, rebuilding
from .feedback import marks_for
from .frozen import Frozen
from .predict import predict
from .traceable import Facts, UntraceableError

log = logging.getLogger("workbench")

LEAST_CALLS = 15  # of a kind before: making a graph, and its first runs, take about as long
LEAST_SHORT = 3  # of short calls, whose graphs are made in a few milliseconds; for the first of an object's graphs
SHORT = 0.001  # seconds of such a call
EARLY = 4  # graphs made so soon at most, for who asks in many forms asks few times in each
LEAST_FROZEN = 1  # of them inside of a `frozen` block, which says that more will come
TRIALS = 4  # calls that are taken both ways, for numbers and times
LONGEST = 0.005  # seconds of a call beyond which what Python takes does not count, and recording would hold much memory
KINDS = 64  # of calls that are counted
MISSES = 100  # calls in a row in which the model was not as it was recorded, before it is looked at anew
GRAPHS = 16  # made at most


@dataclass
class _Recorded:
    """A graph for calls of one kind.

    Args:
        graph: gives the tensors of an answer, and of those of its risks the sums.
        n_leaves: how many tensors are of the answer.
        rebuild: puts them into its shape.
        marks: whether what the call has averaged must be known when it comes back.
    """

    graph: Graph
    n_leaves: int
    rebuild: Callable[[Sequence[Tensor]], Any]
    marks: Any
    runs: int = 0
    seconds: list[float] = field(default_factory=list)
    eager_seconds: list[float] = field(default_factory=list)


@dataclass
class _Kind:
    """Calls with inputs of one form, which ask for the same.

    Args:
        calls: those so far that were taken as ever.
        long: how many of them took long when a graph was to be made.
        off: whether they are taken as ever from now on.
    """

    calls: int = 0
    long: int = 0
    off: bool = False
    recorded: _Recorded | None = None


class Taken:
    """What a graph has answered."""

    __slots__ = ("answer",)

    def __init__(self, answer: Any) -> None:
        self.answer = answer


class RecordedCalls:
    """Takes calls of one wrapped object by graphs, where that is right and faster.

    A graph is made for models of known layers only (`Facts`), in evaluation mode and without gradients, and used while nothing of them has
    changed, which each call finds out. Its first runs, and then those at powers of two, are compared with calls as ever to the last bit, random
    draws included.

    Args:
        wrapped: the object.
    """

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self.off = ""  # why no call is taken by a graph any more
        self.replays = 0  # calls taken by a graph
        self._kinds: dict[Any, _Kind] = {}
        self._facts: Facts | None = None
        self._around: tuple[Any, ...] = ()
        self._misses = self._made = 0
        self.making = threading.Lock()

    def begin(self, args: tuple, risk: bool, tile: bool | None, frozen: Frozen | None) -> Taken | Trial | None:
        """Answer a call; or say what is to hear of the answer that the call gives as ever, if anything is.

        Args:
            args: its inputs.
            risk, tile: what it asks for.
            frozen: the block that it is in, if it is in one.
        """
        if self.off or self._wrapped.training or (frozen is None and torch.is_grad_enabled()) or in_mode():
            return None
        if tile is False:  # rows are dealt out anew in each call
            return None
        key = form_of(args)
        if key is None:
            return None
        key = (key, risk, tile, torch.is_inference_mode_enabled())
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= KINDS:
                self._kinds = {key: kind for key, kind in self._kinds.items() if kind.recorded is not None}
            kind = self._kinds[key] = _Kind()
        if kind.off:
            return None
        recorded = kind.recorded
        if recorded is None:
            kind.calls += 1
            least = LEAST_CALLS if frozen is None else LEAST_FROZEN
            soon = LEAST_SHORT < kind.calls <= least and self._made < EARLY
            if (kind.calls > least or soon) and self._made < GRAPHS:
                return _First(self, kind, args, risk, tile, soon)
            return None
        if not self.hold(frozen):
            self._misses += 1
            if self._misses >= MISSES:
                self.forget()
            return None
        self._misses = 0
        return self._replayed(kind, recorded, args, risk, tile)

    def hold(self, frozen: Frozen | None) -> bool:
        """Whether the object, and a block that it is frozen in, are as they were when graphs were made."""
        return (
            self._facts is not None
            and self._facts.hold()
            and self._around == around()
            and (frozen is None or frozen.same_numbers())
        )

    def buffers(self) -> Iterator[Tensor]:
        """Those of the object."""
        return nn.Module.buffers(self._wrapped)

    def forget(self) -> None:
        """Make graphs anew, if at all."""
        self._kinds, self._facts, self._misses = {}, None, 0

    def stop(self, reason: str) -> None:
        """Take all calls as ever from now on."""
        log.debug("%s: calls are taken as ever (%s)", self._wrapped._workbench_name(), reason)
        self.off = reason
        self.forget()

    def skip(self, kind: _Kind, reason: str) -> None:
        """Take calls of one kind as ever from now on."""
        log.debug("%s: calls of a kind are taken as ever (%s)", self._wrapped._workbench_name(), reason)
        kind.off, kind.recorded = True, None

    def tell_difference(self, runs: int) -> None:
        """Warn of answers that were other ones than those of calls as ever."""
        warnings.warn(
            f"{self._wrapped._workbench_name()}: something outside of the model has changed what its calls compute, and since some call after "
            f"number {runs // 2} of its kind they were answered without it. From now on they are right; ask again for those since then",
            WorkbenchWarning,
            stacklevel=2,
        )

    def _replayed(
        self, kind: _Kind, recorded: _Recorded, args: tuple, risk: bool, tile: bool | None
    ) -> Taken | Trial | None:
        graph = recorded.graph
        if graph.draws and threading.current_thread() is not threading.main_thread():
            return None  # where random draws come from other generators
        if any(map(marks_of(self._wrapped).of, args)):
            return None  # a call as ever says what is wrong with that
        runs = recorded.runs = recorded.runs + 1
        compares = runs <= TRIALS or not runs & (runs - 1)
        before = generator_of(CPU).get_state() if graph.draws else None
        start = time.perf_counter() if compares else 0.0
        try:
            results = graph.run(*args)
        except Exception as error:  # a call as ever says what is wrong, if anything is
            _restore(before)
            self.skip(kind, f"{type(error).__name__}: {error}")
            return None
        n = recorded.n_leaves
        if len(results) > n and "nan" not in self._wrapped._workbench.told and any(map(_is_nan, results[n:])):
            _restore(before)
            return None  # a call as ever tells it
        if compares:
            recorded.seconds.append(time.perf_counter() - start)
            after = generator_of(CPU).get_state() if graph.draws else None
            _restore(before)
            return _Comparison(self, kind, args, recorded, results[:n], after)
        self.replays += 1
        answer = recorded.rebuild(results)
        if recorded.marks is not None:
            recorded.marks.add(answer[0] if risk else answer)
        return Taken(answer)

    def record(self, kind: _Kind, args: tuple, risk: bool, tile: bool | None, answer: Any) -> None:
        """Make a graph for calls of a kind, given what one of them has answered as ever.

        Raises:
            UntraceableError: calls of this object may compute something else each time.
            RefusedError: those of this kind can't be taken from a graph.
        """
        wrapped = self._wrapped
        if wrapped._workbench.strategy != "auto":
            raise UntraceableError("a strategy was chosen")
        if has_detections(wrapped._workbench.output):
            raise UntraceableError("boxes are matched by what Python reads of them")
        facts = self._facts
        if facts is None or not facts.hold():
            facts = Facts(wrapped, training=False)
        clones = engine_of(wrapped).clones
        if clones.impure:
            raise UntraceableError("forward changes attributes")
        if facts is not self._facts:
            self._kinds = {key: each for key, each in self._kinds.items() if each.recorded is None}
        tensors = [*facts.parameters, *facts.frozen, *facts.buffers]
        leaves = leaves_of(answer)
        if share_memory(leaves, [*tensors, *args]):
            raise RefusedError("the answer lies in the memory of an input, a parameter or another part of it")

        def call(*batch: Tensor) -> list[Tensor]:
            again = predict(wrapped, batch, {}, risk, tile)
            sums = [leaf.sum() for leaf in leaves_of(again[1]) if is_float(leaf)] if risk else []
            return [*leaves_of(again), *sums]

        warned, state = wrapped._workbench.told, generator_of(CPU).get_state()
        knew = "nan" in warned
        warned.add("nan")  # which is looked for outside of the graph
        self._made += 1
        try:
            graph = Graph(call, tensors, [], args)
        finally:
            _restore(state)
            if not knew:
                warned.discard("nan")
        if not facts.hold() or clones.impure:
            raise UntraceableError("forward changes the model")
        self._facts, self._around = facts, around()
        marks = marks_for(wrapped, risk, answer[0] if risk else answer)
        kind.recorded = _Recorded(graph, len(leaves), rebuilding(answer), marks)


class Trial(ABC):
    """A call that is taken as ever, whose answer is wanted.

    Args:
        calls: who wants it.
        kind: of the call.
        args: its inputs.
    """

    def __init__(self, calls: RecordedCalls, kind: _Kind, args: tuple) -> None:
        self._calls, self._kind, self._args = calls, kind, args
        self._start = time.perf_counter()

    @abstractmethod
    def end(self, answer: Any) -> None:
        """What it has answered."""


class _First(Trial):
    """The call after which a graph is made.

    Args:
        risk, tile: what it asks for.
        soon: whether only if it is short.
    """

    def __init__(
        self, calls: RecordedCalls, kind: _Kind, args: tuple, risk: bool, tile: bool | None, soon: bool
    ) -> None:
        super().__init__(calls, kind, args)
        self._risk, self._tile, self._soon = risk, tile, soon
        self._before = self._writes(), [leaf.clone() for leaf in self._uncounted()]

    def end(self, answer: Any) -> None:
        calls, kind = self._calls, self._kind
        seconds = time.perf_counter() - self._start
        counts, copies = self._before
        # a graph that is compared would write once more
        if self._writes() != counts or not all(map(torch.equal, self._uncounted(), copies)):
            calls.skip(kind, "forward writes into an input or a buffer")
            return
        if self._soon and seconds > SHORT:
            return
        if seconds > LONGEST:
            kind.long += 1  # or something else kept the processor
            kind.off = kind.long >= TRIALS
            return
        if not calls.making.acquire(blocking=False):
            return
        try:
            calls.record(kind, self._args, self._risk, self._tile, answer)
        except UntraceableError as error:
            calls.stop(str(error))
        except Exception as error:  # whatever torch has against it
            calls.skip(kind, f"{type(error).__name__}: {error}")
        finally:
            calls.making.release()

    def _writes(self) -> list[int]:
        return versions([*self._args, *self._calls.buffers()])

    def _uncounted(self) -> list[Tensor]:
        """What was made in inference mode, so that torch keeps no count of writes."""
        return [leaf for leaf in (*self._args, *self._calls.buffers()) if leaf.is_inference()]


class _Comparison(Trial):
    """A call that a graph has answered as well.

    Args:
        recorded: the graph.
        results: the tensors of its answer.
        random: the state of the random generator that it leaves, if it draws.
    """

    def __init__(
        self,
        calls: RecordedCalls,
        kind: _Kind,
        args: tuple,
        recorded: _Recorded,
        results: Sequence[Tensor],
        random: Tensor | None,
    ) -> None:
        super().__init__(calls, kind, args)
        self._recorded, self._results, self._random = recorded, results, random

    def end(self, answer: Any) -> None:
        recorded, calls = self._recorded, self._calls
        recorded.eager_seconds.append(time.perf_counter() - self._start)
        equal = self._random is None or self._random.equal(generator_of(CPU).get_state())
        try:
            equal = (
                equal
                and all(map(_same, self._results, leaves := leaves_of(answer)))
                and len(leaves) == recorded.n_leaves
            )
        except RefusedError:
            equal = False
        if equal:
            if recorded.runs == TRIALS and not _is_faster(recorded):
                calls.skip(self._kind, "a graph is slower")
            return
        calls.stop("a call as ever gave other numbers")
        if recorded.runs > TRIALS:
            calls.tell_difference(recorded.runs)


def _is_faster(recorded: _Recorded) -> bool:
    return min(recorded.seconds) < min(recorded.eager_seconds)


def _same(result: Tensor, other: Tensor) -> bool:
    """To the last bit, and lying in memory alike."""
    return result.dtype is other.dtype and result.stride() == other.stride() and same(result, other)


def _is_nan(total: Tensor) -> bool:
    return math.isnan(abs(total) if total.is_complex() else total)


def _restore(state: Tensor | None) -> None:
    if state is not None:
        generator_of(CPU).set_state(state)


__all__ = ["RecordedCalls", "Taken", "Trial"]
