"""Predictions without Python overhead: repeated calls run as one recorded graph of all branches if that gives the same answers."""

from __future__ import annotations

import contextlib
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

from ...engine.effects.private_random import CPU, random_states, restore_random
from ...engine.traced_graph import Graph, RefusedError, share_memory
from ...engine.tree import counting_writes, is_float, versions
from ...errors import WorkbenchWarning
from ..outputs.options import has_detections
from ..ownership import engine_of, marks_of
from .call_forms import form_of, in_special_mode, leaves_of, rebuilding, torch_settings
from .feedback import marks_for
from .frozen import Frozen
from .predict import predict
from .traceable import Facts, UntraceableError
from .verdicts import Verdict

log = logging.getLogger("workbench")

# eager calls of a kind before a graph is recorded; recording and comparing the first runs take about as long as these
MIN_CALLS = 15
MIN_SHORT_CALLS = 1  # the same for short calls, whose graphs are recorded in the time of a few of them
SHORT_SECONDS = 0.001  # seconds up to which a call counts as short
MAX_EARLY_GRAPHS = 4  # maximal number of graphs recorded after MIN_SHORT_CALLS calls: an object with many kinds of calls sees few calls of each
MIN_FROZEN_CALLS = 1  # the same as MIN_CALLS inside a `frozen` block, where many calls are expected
N_COMPARED_RUNS = 4  # number of first runs of a graph that are compared with eager calls, in values and times
MAX_SECONDS = 0.05  # seconds beyond which Python's overhead is a small part, and the first runs of a graph take long
MAX_KINDS = 64  # maximal number of kinds of calls that are counted
MAX_MISSES = 100  # consecutive calls with a changed model after which all graphs are dropped
MAX_GRAPHS = 16  # maximal number of graphs per object


@dataclass
class _Recorded:
    """Recorded graph for calls of one kind, with its timings.

    Args:
        graph: returns the tensors of the answer, then the sum of each risk tensor.
        n_leaves: number of tensors in the answer.
        rebuild: function from these tensors to the answer.
        marks: marks to which predictions are added, None if means need not be recognized when they are passed back as inputs.
        runs: number of runs so far.
        seconds: times of the compared runs.
        eager_seconds: times of the eager calls they were compared with.
        verdicts: comparisons that are not known yet.
    """

    graph: Graph
    n_leaves: int
    rebuild: Callable[[Sequence[Tensor]], Any]
    marks: Any
    runs: int = 0
    seconds: list[float] = field(default_factory=list)
    eager_seconds: list[float] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)


@dataclass
class _Kind:
    """Calls with equal devices, shapes, strides and dtypes of inputs and equal options.

    Args:
        calls: number of eager calls so far.
        long: number of calls that took too long to record a graph.
        off: whether all further calls are eager.
        recorded: the graph, once there is one.
    """

    calls: int = 0
    long: int = 0
    off: bool = False
    recorded: _Recorded | None = None


class Taken:
    """Answer that a graph has computed."""

    __slots__ = ("answer",)

    def __init__(self, answer: Any) -> None:
        self.answer = answer


class RecordedCalls:
    """Answers calls of one wrapped object by recorded graphs where that is correct and faster; all other calls are eager.

    Graphs are recorded only for models of known layers (`Facts`), in evaluation mode and without gradients. They are used as long as nothing
    of the model has changed, which every call checks. The first runs of a graph, and then runs number 8, 16, 32, ..., are compared
    with eager calls (`Verdict`), random draws included; on a GPU no call waits for this.

    Args:
        wrapped: the wrapped object.
    """

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self.off = ""  # reason why no graph is used any more
        self.replays = 0  # number of calls answered by a graph
        self._kinds: dict[Any, _Kind] = {}
        self._facts: Facts | None = None
        self._torch_settings: tuple[Any, ...] = ()
        self._misses = self._made = 0
        self.making = threading.Lock()

    def begin(
        self, args: tuple, kwargs: dict[str, Any], risk: bool, tile: bool | None, frozen: Frozen | None
    ) -> Taken | Trial | None:
        """Begin a call.

        Args:
            args, kwargs: the inputs.
            risk, tile: the options `return_risk` and `tile_and_reduce`.
            frozen: the `frozen` block around the call, None if there is none.

        Returns:
            The answer of a graph; or a trial whose `end` must be called with the answer of the eager call; or None for an eager call.
        """
        if self.off or self._wrapped.training or (frozen is None and torch.is_grad_enabled()) or in_special_mode():
            return None
        if tile is False:  # each call deals rows anew
            return None
        names: tuple[str, ...] = ()
        if kwargs:
            args, names = (*args, *kwargs.values()), tuple(kwargs)
        key = form_of(args)
        if key is None:
            return None
        key = (key, names, risk, tile, torch.is_inference_mode_enabled())
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MAX_KINDS:
                self._kinds = {key: kind for key, kind in self._kinds.items() if kind.recorded is not None}
            kind = self._kinds[key] = _Kind()
        if kind.off:
            return None
        recorded = kind.recorded
        if recorded is None:
            kind.calls += 1
            min_calls = MIN_CALLS if frozen is None else MIN_FROZEN_CALLS
            early = MIN_SHORT_CALLS < kind.calls <= min_calls and self._made < MAX_EARLY_GRAPHS
            if (kind.calls > min_calls or early) and self._made < MAX_GRAPHS:
                return _First(self, kind, args, names, risk, tile, early)
            return None
        if not self.hold(frozen):
            self._misses += 1
            if self._misses >= MAX_MISSES:
                self.forget()
            return None
        self._misses = 0
        return self._replayed(kind, recorded, args, risk, tile)

    def hold(self, frozen: Frozen | None) -> bool:
        """Return whether the object, and its `frozen` block, are unchanged since graphs were recorded."""
        return (
            self._facts is not None
            and self._facts.hold()
            and self._torch_settings == torch_settings()
            and (frozen is None or frozen.same_numbers())
        )

    def buffers(self) -> Iterator[Tensor]:
        """Return the buffers of the object."""
        return nn.Module.buffers(self._wrapped)

    def forget(self) -> None:
        """Drop all graphs and counts."""
        self._kinds, self._facts, self._misses = {}, None, 0

    def stop(self, reason: str) -> None:
        """Use no graphs for this object any more."""
        log.debug("%s: calls are eager from now on (%s)", self._wrapped._workbench_name(), reason)
        self.off = reason
        self.forget()

    def skip(self, kind: _Kind, reason: str) -> None:
        """Use no graph for calls of one kind any more."""
        log.debug("%s: calls of one kind are eager from now on (%s)", self._wrapped._workbench_name(), reason)
        kind.off, kind.recorded = True, None

    def warn_of_difference(self, runs: int) -> None:
        """Warn that a graph has given other answers than eager calls."""
        warnings.warn(
            f"{self._wrapped._workbench_name()}: something outside of the model has changed what its calls compute, and some calls after "
            f"number {runs // 2} of their kind were answered without that change. Answers are right from now on; repeat the calls since then",
            WorkbenchWarning,
            stacklevel=2,
        )

    def _replayed(
        self, kind: _Kind, recorded: _Recorded, args: tuple, risk: bool, tile: bool | None
    ) -> Taken | Trial | None:
        graph = recorded.graph
        if graph.draws and threading.current_thread() is not threading.main_thread():
            return None  # other threads draw from private generators
        if any(map(marks_of(self._wrapped).of, args)):
            return None  # a mean was passed back as input: the eager call raises
        if recorded.verdicts and not self.judged(recorded):
            return None
        runs = recorded.runs = recorded.runs + 1
        compares = runs <= N_COMPARED_RUNS or not runs & (runs - 1)
        before = random_states(graph.devices) if graph.draws else []
        start = time.perf_counter() if compares else 0.0
        try:
            results = graph.run(*args)
        except Exception as error:  # the eager call raises if the call is at fault
            restore_random(before)
            self.skip(kind, f"{type(error).__name__}: {error}")
            return None
        n = recorded.n_leaves
        if len(results) > n and "nan" not in self._wrapped._workbench.warned and any(map(_is_nan, results[n:])):
            restore_random(before)
            return None  # the eager call warns of NaN
        if compares:
            recorded.seconds.append(time.perf_counter() - start)
            after = random_states(graph.devices) if graph.draws else []
            restore_random(before)
            return _Comparison(self, kind, args, recorded, results[:n], after)
        self.replays += 1
        answer = recorded.rebuild(results)
        if recorded.marks is not None:
            recorded.marks.add(answer[0] if risk else answer)
        return Taken(answer)

    def judged(self, recorded: _Recorded) -> bool:
        """Act on the verdicts that are known, and return whether the graph may go on."""
        for verdict in [verdict for verdict in recorded.verdicts if verdict.is_known()]:
            with contextlib.suppress(ValueError):  # another thread was first
                recorded.verdicts.remove(verdict)
            if not verdict.is_same():
                self.stop("an eager call gave other numbers")
                if verdict.run > N_COMPARED_RUNS:
                    self.warn_of_difference(verdict.run)
                return False
        return recorded.runs != N_COMPARED_RUNS or not recorded.verdicts

    def record(
        self, kind: _Kind, args: tuple, names: tuple[str, ...], risk: bool, tile: bool | None, answer: Any
    ) -> None:
        """Record a graph for calls of a kind.

        Args:
            kind: the kind.
            args: inputs of an eager call.
            names: keywords of the last of them.
            risk, tile: its options.
            answer: its answer.

        Raises:
            UntraceableError: if no call of this object can be recorded.
            RefusedError: if calls of this kind cannot be recorded.
        """
        wrapped = self._wrapped
        if wrapped._workbench.strategy != "auto":
            raise UntraceableError("a strategy was chosen")
        if has_detections(wrapped._workbench.output):
            raise UntraceableError("boxes are matched by values that Python reads")
        facts = self._facts
        if facts is None or not facts.hold():
            facts = Facts(wrapped, training=False)
        clones = engine_of(wrapped).clones
        if clones.impure:
            raise UntraceableError("forward changes attributes")
        settings = torch_settings()
        if facts is not self._facts or settings != self._torch_settings:
            self._kinds = {key: each for key, each in self._kinds.items() if each.recorded is None}
        tensors = [*facts.parameters, *facts.frozen, *facts.buffers]
        leaves = leaves_of(answer)
        devices = {tensor.device for tensor in args}
        if facts.device is not None and devices != {facts.device}:
            raise RefusedError("an input is on another device than the model")
        if share_memory(leaves, [*tensors, *args]):
            raise RefusedError("the answer shares memory with an input, a parameter or another part of it")

        n_positional = len(args) - len(names)

        def call(*batch: Tensor) -> list[Tensor]:
            kwargs = dict(zip(names, batch[n_positional:], strict=True))
            answer_again = predict(wrapped, batch[:n_positional], kwargs, risk, tile)
            # on other devices, eager calls look for no NaN either: they would wait
            looked_at = [leaf for leaf in leaves_of(answer_again[1]) if is_float(leaf) and leaf.is_cpu] if risk else []
            sums = [leaf.sum() for leaf in looked_at]
            return [*leaves_of(answer_again), *sums]

        # loops take those of tensors created in inference mode, by an operation that cannot be recorded
        counting = {id(tensor): counting_writes(tensor) for tensor in args}
        warned, states = wrapped._workbench.warned, random_states(dict.fromkeys((CPU, *devices)))
        already_warned = "nan" in warned
        warned.add("nan")  # suppresses the check for NaN, which is done outside the graph
        self._made += 1
        try:
            graph = Graph(call, tensors, [], [counting[id(tensor)] for tensor in args])
        finally:
            restore_random(states)
            if not already_warned:
                warned.discard("nan")
        if not facts.hold() or clones.impure:
            raise UntraceableError("forward changes the model")
        self._facts, self._torch_settings = facts, settings
        marks = marks_for(wrapped, risk, answer[0] if risk else answer)
        kind.recorded = _Recorded(graph, len(leaves), rebuilding(answer), marks)


class Trial(ABC):
    """Eager call whose answer is needed for recording or for comparison.

    Args:
        calls: the recorded calls of the object.
        kind: kind of the call.
        args: its inputs, those given by keyword last.
    """

    def __init__(self, calls: RecordedCalls, kind: _Kind, args: tuple) -> None:
        self._calls, self._kind, self._args = calls, kind, args
        self._start = time.perf_counter()

    @abstractmethod
    def end(self, answer: Any) -> None:
        """Receive the answer of the eager call."""


class _First(Trial):
    """Eager call after which a graph is recorded.

    Args:
        calls, kind, args: see `Trial`.
        names: keywords of the last inputs.
        risk, tile: options of the call.
        early: whether to record only if the call is short.
    """

    def __init__(
        self,
        calls: RecordedCalls,
        kind: _Kind,
        args: tuple,
        names: tuple[str, ...],
        risk: bool,
        tile: bool | None,
        early: bool,
    ) -> None:
        super().__init__(calls, kind, args)
        self._names, self._risk, self._tile, self._early = names, risk, tile, early
        self._before = self._writes(), [leaf.clone() for leaf in self._inference_tensors()]

    def end(self, answer: Any) -> None:
        calls, kind = self._calls, self._kind
        seconds = time.perf_counter() - self._start
        versions_before, copies_before = self._before
        # during comparisons, both the graph and the eager call would write
        if self._writes() != versions_before or not all(map(torch.equal, self._inference_tensors(), copies_before)):
            calls.skip(kind, "forward writes into an input or a buffer")
            return
        if self._early and seconds > SHORT_SECONDS:
            return
        if seconds > MAX_SECONDS:
            kind.long += 1  # counted, since a single slow call may be due to other load
            kind.off = kind.long >= N_COMPARED_RUNS
            return
        if not calls.making.acquire(blocking=False):
            return
        try:
            calls.record(kind, self._args, self._names, self._risk, self._tile, answer)
        except UntraceableError as error:
            calls.stop(str(error))
        except Exception as error:  # any error of torch while recording
            calls.skip(kind, f"{type(error).__name__}: {error}")
        finally:
            calls.making.release()

    def _writes(self) -> list[int]:
        return versions([*self._args, *self._calls.buffers()])

    def _inference_tensors(self) -> list[Tensor]:
        """Return the tensors created in inference mode, for which torch does not count writes.

        Only those on the CPU: comparing others would wait, and writes into them by torch's operations are seen while a graph is recorded.
        """
        return [leaf for leaf in (*self._args, *self._calls.buffers()) if leaf.is_inference() and leaf.is_cpu]


class _Comparison(Trial):
    """Eager call that is compared with the answer of a graph.

    Args:
        calls, kind, args: see `Trial`.
        recorded: the graph.
        results: tensors of the graph's answer.
        random: states of the random generators after the graph, none if it does not draw.
    """

    def __init__(
        self,
        calls: RecordedCalls,
        kind: _Kind,
        args: tuple,
        recorded: _Recorded,
        results: Sequence[Tensor],
        random: list[tuple[torch.Generator, Tensor]],
    ) -> None:
        super().__init__(calls, kind, args)
        self._recorded, self._results, self._random = recorded, results, random

    def end(self, answer: Any) -> None:
        recorded, calls = self._recorded, self._calls
        recorded.eager_seconds.append(time.perf_counter() - self._start)
        drew_the_same = all(generator.get_state().equal(state) for generator, state in self._random)
        try:
            leaves = leaves_of(answer) if drew_the_same else []
        except RefusedError:
            leaves = []
        try:
            verdict = Verdict(self._results, leaves, recorded.runs)
        except Exception as error:  # such as too little memory; the eager answer is there
            calls.skip(self._kind, f"{type(error).__name__}: {error}")
            return
        recorded.verdicts.append(verdict)
        calls.judged(recorded)
        if not calls.off and recorded.runs == N_COMPARED_RUNS and not _is_faster(recorded):
            calls.skip(self._kind, "a graph is slower")


def _is_faster(recorded: _Recorded) -> bool:
    return min(recorded.seconds) < min(recorded.eager_seconds)


def _is_nan(total: Tensor) -> bool:
    return math.isnan(abs(total) if total.is_complex() else total)


__all__ = ["RecordedCalls", "Taken", "Trial"]
