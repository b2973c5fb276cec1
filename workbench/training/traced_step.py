"""Training steps replayed from a graph of the loss and gradients of all branches, where every step is certain to be the same computation."""

from __future__ import annotations

import logging
import operator
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.core.batches.rows import Batch
from workbench.core.ownership import engine_of
from workbench.core.wrapped import Wrapped
from workbench.engine.effects.private_random import generators_of
from workbench.engine.traced_graph import Graph, same, share_memory
from workbench.errors import WorkbenchWarning
from workbench.introspect.source_lines import user_stacklevel
from workbench.training.running_loss import Sent, send
from workbench.training.traceable import StepFacts, UntraceableError

log = logging.getLogger("workbench")

MIN_STEPS = 200  # remaining steps that make recording worthwhile: it takes as long as about a hundred steps
EAGER_STEPS = 2  # steps before recording, in which the engine inspects the model
TRIALS = 4  # steps that are run both ways, to compare numbers and times
LONG_STEP = 0.05  # seconds per step above which Python's overhead is a small part, so that recording needs more remaining steps:
MIN_LONG_STEPS = 800  # recording and trying a graph takes about eight long steps
MAX_GRAPHS = 3  # graphs recorded at most, if the model keeps changing
RUN_TO_RUN = 8.0  # differences allowed between a graph and an eager step, relative to those between two eager steps


@dataclass
class Step:
    """Loss and gradients of one batch."""

    loss: Tensor
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor | None]

    def backward(self) -> None:
        """Set the gradient of each parameter."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient


@dataclass
class _Recorded:
    """A graph for batches of one signature.

    Args:
        graph: computes the loss, and the gradients of some of the parameters.
        places: indices of these parameters.
    """

    graph: Graph
    places: list[int]
    runs: int = 0
    seconds: list[float] = field(default_factory=list)
    eager_seconds: list[float] = field(default_factory=list)


class TracedStep:
    """Replays the steps of one training from a graph, where that is correct and faster; `take` returns None if a step must run eagerly.

    A graph is recorded only for models of known layers (`StepFacts`), and used as long as none of these facts has changed. Its first runs, and
    then every run whose number is a power of two, are compared with an eager step, including buffers and random draws: bitwise on the CPU, and
    within rounding on a GPU (see `_close`). Apart from its first runs, no step waits for a GPU: later comparisons are read when they are done.

    Args:
        wrapped: the model.
        criterion: the criterion it is trained with.
        loss: function that computes the loss of a batch eagerly, or several losses whose sum is minimized.
    """

    def __init__(self, wrapped: Wrapped, criterion: Any, loss: Callable[[Batch], Tensor]) -> None:
        self.wrapped, self.criterion, self.loss = wrapped, criterion, loss
        self.off = ""  # the reason why graphs are no longer used; "" while they are
        self.replays = 0  # number of steps replayed from a graph
        self._facts: StepFacts | None = None
        self._seen: dict[Any, int] = {}  # number of batches per signature since the facts were last recorded
        self._recorded: dict[Any, _Recorded | None] = {}  # by signature; None: slower than eager steps
        self._n_recorded = 0
        self._last_time = 0.0  # time of the last call of `take`
        # results of comparisons on their way from a GPU, with the number of the run
        self._comparisons: list[tuple[Sent, int]] = []

    def take(self, batch: Batch, remaining: int) -> Step | None:
        """Return the loss and gradients of a batch, or None if the step must run eagerly.

        Args:
            batch: the rows.
            remaining: number of steps left in this training, including this one.
        """
        if self._comparisons:
            self._read_comparisons()
        if self.off:
            return None
        now, last_time, self._last_time = time.perf_counter(), self._last_time, time.perf_counter()
        if self._facts is not None and not self._facts.hold():
            self._facts = None
            self._recorded.clear()
            self._seen.clear()
        signature = _signature(batch)
        parameters = self.wrapped.parameters() if self._facts is None else self._facts.parameters
        if signature is None or any(p.grad is not None for p in parameters):
            return None
        seen = self._seen[signature] = self._seen.get(signature, 0) + 1
        if signature in self._recorded:
            recorded = self._recorded[signature]
            return None if recorded is None else self._replay(recorded, signature, batch)
        share = seen / sum(self._seen.values())
        is_long = last_time and now - last_time > LONG_STEP
        if seen <= EAGER_STEPS or remaining * share < (MIN_LONG_STEPS if is_long else MIN_STEPS):
            return None
        try:
            self._record(signature, batch)
        except UntraceableError as error:
            self._stop(str(error))
            return None
        except Exception as error:  # torch can't trace this step
            self._stop(f"{type(error).__name__}: {error}")
            return None
        return self._replay(self._recorded[signature], signature, batch)

    def _stop(self, reason: str) -> None:
        log.debug("%s: steps run eagerly (%s)", self.wrapped._workbench_name(), reason)
        self.off = reason
        self._recorded.clear()
        self._facts = None

    def _record(self, signature: Any, batch: Batch) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UntraceableError("outside of the main thread, random draws come from other generators")
        if self._n_recorded >= MAX_GRAPHS:
            raise UntraceableError("the model keeps changing")
        self._n_recorded += 1
        facts = StepFacts(self.wrapped, self.criterion) if self._facts is None else self._facts
        if {batch.x.device, batch.y.device} != {facts.device}:
            raise UntraceableError("the rows are on another device than the model")
        engine = engine_of(self.wrapped)
        if engine.clones.impure:
            raise UntraceableError("forward changes attributes")
        places: list[int] = []

        def step(x: Tensor, y: Tensor) -> list[Tensor]:
            loss = self.loss(Batch(None, x, y))
            gradients = torch.autograd.grad(loss.sum(), facts.parameters, allow_unused=True)
            places[:] = [i for i, gradient in enumerate(gradients) if gradient is not None]
            # contiguous, as `backward` would store them
            return [loss.detach(), *(gradient.contiguous() for gradient in gradients if gradient is not None)]

        state = _State(facts)
        try:
            graph = Graph(step, [*facts.parameters, *facts.frozen], facts.buffers, (batch.x, batch.y))
        finally:
            state.restore()
        if not facts.hold() or engine.clones.impure:
            raise UntraceableError("forward changes the model")
        self._facts = facts
        self._recorded[signature] = _Recorded(graph, places)

    def _replay(self, recorded: _Recorded | None, signature: Any, batch: Batch) -> Step | None:
        facts = self._facts
        if recorded is None or facts is None:
            return None
        recorded.runs += 1
        graph, runs = recorded.graph, recorded.runs
        must_compare = runs <= TRIALS or runs & (runs - 1) == 0
        is_trial = runs <= TRIALS
        state = _State(facts) if must_compare or graph.writes or graph.draws else None
        start = _now(facts.device) if is_trial else 0.0
        try:
            loss, *gradients = graph.run(batch.x, batch.y)
        except Exception as error:  # if the batch is at fault, the eager step raises the proper error
            if state is not None:
                state.restore()
            self._stop(f"{type(error).__name__}: {error}")
            return None
        all_gradients: list[Tensor | None] = [None] * len(facts.parameters)
        for i, gradient in zip(recorded.places, gradients, strict=True):
            all_gradients[i] = gradient
        step = Step(loss, facts.parameters, all_gradients)
        if not must_compare or state is None:
            self.replays += 1
            return step
        if is_trial:
            recorded.seconds.append(_now(facts.device) - start)
        shares_memory = share_memory(
            [loss, *gradients], [*facts.parameters, *facts.frozen, *facts.buffers, batch.x, batch.y]
        )
        try:
            eager = self._compare(step, shares_memory, state, recorded, batch, facts)
        except torch.OutOfMemoryError:  # an eager step alone may fit
            for parameter in facts.parameters:
                parameter.grad = None
            state.restore()
            self._stop("there is too little memory to compare a graph with an eager step")
            return None
        if runs == TRIALS and not self.off and not _faster(recorded):
            self._recorded[signature] = None
        self.replays += 1
        return eager

    def _compare(
        self, step: Step, shares_memory: bool, state: _State, recorded: _Recorded, batch: Batch, facts: StepFacts
    ) -> Step:
        """Run the eager step as well, stop if it differs, and return it.

        Args:
            step: what the graph has computed.
            shares_memory: whether its results share memory with each other or with something else.
            state: state before the step.
            recorded: the graph.
            batch, facts: rows and facts of the step.
        """
        runs = recorded.runs
        is_trial = runs <= TRIALS
        traced = _Outcome(step, _State(facts))
        state.restore()
        start = _now(facts.device) if is_trial else 0.0
        eager_step = self._eager_step(batch, facts)
        if is_trial:
            recorded.eager_seconds.append(_now(facts.device) - start)
        eager = _Outcome(eager_step, _State(facts))
        if shares_memory or not traced.matches(eager):
            self._report_difference(runs)
        elif facts.device.type == "cpu":
            if not traced.equals(eager):
                self._report_difference(runs)
        else:
            state.restore()
            again = _Outcome(self._eager_step(batch, facts), _State(facts))
            eager.state.restore()
            self._comparisons.append((send(_close(traced.tensors, eager.tensors, again.tensors)), runs))
            if is_trial:
                self._read_comparisons(wait=True)
        return eager_step

    def _read_comparisons(self, wait: bool = False) -> None:
        """Stop if a graph differed from an eager step, as far as results of comparisons have arrived from the GPU."""
        while self._comparisons:
            (equal, arrived), runs = self._comparisons[0]
            if arrived is not None and not arrived.query():
                if not wait:
                    return
                arrived.synchronize()
            del self._comparisons[0]
            if not equal.item():
                self._report_difference(runs)

    def _eager_step(self, batch: Batch, facts: StepFacts) -> Step:
        loss = self.loss(batch)
        loss.sum().backward()
        step = Step(loss.detach(), facts.parameters, [parameter.grad for parameter in facts.parameters])
        for parameter in facts.parameters:
            parameter.grad = None
        return step

    def _report_difference(self, runs: int) -> None:
        self._comparisons.clear()
        self._stop("an eager step gave other numbers")
        if runs > TRIALS:
            warnings.warn(
                f"{self.wrapped._workbench_name()}: something outside of the model changed what a training step computes, and since some step "
                f'after number {runs // 2} the steps were replayed without this change. Train again with strategy="eager"',
                WorkbenchWarning,
                stacklevel=user_stacklevel(),
            )


def _faster(recorded: _Recorded) -> bool:
    return min(recorded.seconds) < min(recorded.eager_seconds)


def _now(device: torch.device) -> float:
    """Return the time when all work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _State:
    """What a step changes besides gradients: buffers, and the states of the random generators."""

    def __init__(self, facts: StepFacts) -> None:
        self._buffers = facts.buffers
        self.values = [buffer.clone() for buffer in facts.buffers]
        self._generators = list(generators_of(facts.device).values())
        self.random = [generator.get_state() for generator in self._generators]

    def restore(self) -> None:
        for generator, state in zip(self._generators, self.random, strict=True):
            generator.set_state(state)
        with torch.no_grad():
            for buffer, value in zip(self._buffers, self.values, strict=True):
                buffer.copy_(value)


class _Outcome:
    """Everything that a step has computed or changed."""

    def __init__(self, step: Step, state: _State) -> None:
        self.state = state
        self.tensors = [step.loss, *step.gradients, *state.values]

    def matches(self, other: _Outcome) -> bool:
        """Return whether everything is equal that can be compared without waiting for a GPU."""
        return all(map(torch.equal, self.state.random, other.state.random)) and all(
            map(operator.eq, map(_form, self.tensors), map(_form, other.tensors))
        )

    def equals(self, other: _Outcome) -> bool:
        return all(map(same, self.tensors, other.tensors))


def _form(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def _close(traced: Sequence[Tensor | None], eager: Sequence[Tensor | None], again: Sequence[Tensor | None]) -> Tensor:
    """Return whether the tensors of a graph are those of an eager step up to rounding [], on their device.

    On a GPU even two eager steps may differ, where sums of atomic additions are rounded in the order in which threads finish. A graph may
    differ by half of the digits relative to the largest number of each tensor, and by several times as much as two eager steps do: gradients
    that are mathematically zero, such as those of a bias before batch norm, consist of rounding errors. Steps that compute something else are
    further off.
    """
    close = []
    for a, b, c in zip(traced, eager, again, strict=True):
        if a is None or b is None or c is None or not b.numel():
            continue
        if not (b.is_floating_point() or b.is_complex()):
            close.append((a == b).all())
            continue
        allowed = torch.finfo(b.dtype).eps ** 0.5 * _largest(b) + RUN_TO_RUN * _largest(b - c)
        close.append((((a - b).abs() <= allowed) | (a == b) | (a.isnan() & b.isnan())).all())
    return torch.stack(close).all()


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest finite absolute value []."""
    size = tensor.abs()
    return size.where(size.isfinite(), 0.0).max()


def _signature(batch: Batch) -> Any:
    """Return what all batches of one graph have in common (shapes, strides, dtypes); None for batches that can't be traced."""
    if type(batch.x) is not Tensor or type(batch.y) is not Tensor:
        return None
    tensors = batch.x, batch.y
    if any(t.layout is not torch.strided or t.requires_grad or t.is_conj() or t.is_neg() for t in tensors):
        return None
    return (batch.x is batch.y, *((t.shape, t.stride(), t.dtype, t.device) for t in tensors))


__all__ = ["Step", "TracedStep"]
