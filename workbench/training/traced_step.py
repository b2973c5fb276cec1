"""Training steps without Python: loss and gradients of all branches as one graph, where a step is sure to be the same computation each time."""

from __future__ import annotations

import logging
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
from workbench.engine.effects.private_random import CPU, generator_of
from workbench.engine.traced_graph import Graph, same, share_memory
from workbench.errors import WorkbenchWarning
from workbench.introspect.source_lines import user_stacklevel
from workbench.training.traceable import StepFacts, UntraceableError

log = logging.getLogger("workbench")

LEAST_STEPS = 200  # that are to come, for making a graph takes as long as some hundred of them
EAGER_STEPS = 2  # before, in which the engine looks at the model
TRIALS = 4  # steps that are taken both ways, for numbers and times
LONGEST = 0.05  # seconds of a step beyond which Python is little of it, so that more steps must be to come:
LEAST_LONG = 800  # of which making a graph and trying it take about eight
GRAPHS = 3  # made at most, where the model is changed meanwhile


@dataclass
class Step:
    """Loss and gradients of one batch."""

    loss: Tensor
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor | None]

    def backward(self) -> None:
        """Give each parameter its gradient."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient


@dataclass
class _Recorded:
    """A graph for batches of one form.

    Args:
        graph: gives the loss, and the gradients of some of the parameters.
        places: which of the parameters these are.
    """

    graph: Graph
    places: list[int]
    runs: int = 0
    seconds: list[float] = field(default_factory=list)
    eager_seconds: list[float] = field(default_factory=list)


class TracedStep:
    """Takes the steps of one training by a graph, where that is right and faster; `take` gives None for a step to be taken as ever.

    A graph is made for models of known layers only (`StepFacts`), and used while nothing of them has changed. Its first runs, and then those at
    powers of two, are compared with steps as ever to the last bit, buffers and random draws included.

    Args:
        wrapped: the model.
        criterion: what it is trained with.
        loss: the loss of a batch, as ever.
    """

    def __init__(self, wrapped: Wrapped, criterion: Any, loss: Callable[[Batch], Tensor]) -> None:
        self.wrapped, self.criterion, self.loss = wrapped, criterion, loss
        self.off = ""  # why no step is taken by a graph any more
        self.replays = 0  # steps taken by a graph
        self._facts: StepFacts | None = None
        self._seen: dict[Any, int] = {}  # by form, batches since the facts were looked at
        self._recorded: dict[Any, _Recorded | None] = {}  # None: slower than a step as ever
        self._made = 0
        self._last = 0.0  # when the last step came

    def take(self, batch: Batch, remaining: int) -> Step | None:
        """Loss and gradients of a batch.

        Args:
            batch: its rows.
            remaining: steps to come in this training, this one included.
        """
        if self.off:
            return None
        now, before, self._last = time.perf_counter(), self._last, time.perf_counter()
        if self._facts is not None and not self._facts.hold():
            self._facts = None
            self._recorded.clear()
            self._seen.clear()
        form = _form(batch)
        parameters = self.wrapped.parameters() if self._facts is None else self._facts.parameters
        if form is None or any(p.grad is not None for p in parameters):
            return None
        seen = self._seen[form] = self._seen.get(form, 0) + 1
        if form in self._recorded:
            recorded = self._recorded[form]
            return None if recorded is None else self._replayed(recorded, form, batch)
        share = seen / sum(self._seen.values())
        long = before and now - before > LONGEST
        if seen <= EAGER_STEPS or remaining * share < (LEAST_LONG if long else LEAST_STEPS):
            return None
        try:
            self._record(form, batch)
        except UntraceableError as error:
            self._stop(str(error))
            return None
        except Exception as error:  # whatever torch has against it
            self._stop(f"{type(error).__name__}: {error}")
            return None
        return self._replayed(self._recorded[form], form, batch)

    def _stop(self, reason: str) -> None:
        log.debug("%s: steps are taken as ever (%s)", self.wrapped._workbench_name(), reason)
        self.off = reason
        self._recorded.clear()
        self._facts = None

    def _record(self, form: Any, batch: Batch) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UntraceableError("not in the main thread, where random draws come from other generators")
        if self._made >= GRAPHS:
            raise UntraceableError("the model is changed again and again")
        self._made += 1
        facts = StepFacts(self.wrapped, self.criterion) if self._facts is None else self._facts
        engine = engine_of(self.wrapped)
        if engine.clones.impure:
            raise UntraceableError("forward changes attributes")
        places: list[int] = []

        def step(x: Tensor, y: Tensor) -> list[Tensor]:
            loss = self.loss(Batch(None, x, y))
            gradients = torch.autograd.grad(loss, facts.parameters, allow_unused=True)
            places[:] = [i for i, gradient in enumerate(gradients) if gradient is not None]
            # as they are where `backward` has put them
            return [loss.detach(), *(gradient.contiguous() for gradient in gradients if gradient is not None)]

        state = _State(facts)
        try:
            graph = Graph(step, [*facts.parameters, *facts.frozen], facts.buffers, (batch.x, batch.y))
        finally:
            state.restore()
        if not facts.hold() or engine.clones.impure:
            raise UntraceableError("forward changes the model")
        self._facts = facts
        self._recorded[form] = _Recorded(graph, places)

    def _replayed(self, recorded: _Recorded | None, form: Any, batch: Batch) -> Step | None:
        facts = self._facts
        if recorded is None or facts is None:
            return None
        recorded.runs += 1
        graph, runs = recorded.graph, recorded.runs
        compares = runs <= TRIALS or runs & (runs - 1) == 0
        state = _State(facts) if compares or graph.writes or graph.draws else None
        start = time.perf_counter()
        try:
            loss, *gradients = graph.run(batch.x, batch.y)
        except Exception as error:  # a step as ever says what is wrong, if anything is
            if state is not None:
                state.restore()
            self._stop(f"{type(error).__name__}: {error}")
            return None
        every: list[Tensor | None] = [None] * len(facts.parameters)
        for place, gradient in zip(recorded.places, gradients, strict=True):
            every[place] = gradient
        step = Step(loss, facts.parameters, every)
        if not compares or state is None:
            self.replays += 1
            return step
        recorded.seconds.append(time.perf_counter() - start)
        shared = share_memory([loss, *gradients], [*facts.parameters, *facts.frozen, *facts.buffers, batch.x, batch.y])
        after = _State(facts)
        state.restore()
        start = time.perf_counter()
        eager = self._as_ever(batch, facts)
        recorded.eager_seconds.append(time.perf_counter() - start)
        if shared or not (
            step.loss.equal(eager.loss) and _equal(step.gradients, eager.gradients) and after.equals(_State(facts))
        ):
            self._tell_difference(runs)
        elif runs == TRIALS and not _faster(recorded):
            self._recorded[form] = None
        self.replays += 1
        return eager

    def _as_ever(self, batch: Batch, facts: StepFacts) -> Step:
        loss = self.loss(batch)
        loss.backward()
        step = Step(loss.detach(), facts.parameters, [parameter.grad for parameter in facts.parameters])
        for parameter in facts.parameters:
            parameter.grad = None
        return step

    def _tell_difference(self, runs: int) -> None:
        self._stop("a step as ever gave other numbers")
        if runs > TRIALS:
            warnings.warn(
                f"{self.wrapped._workbench_name()}: something outside of the model has changed what its steps compute, and since some step "
                f'after number {runs // 2} of this training they were taken without it. Train once more with strategy="eager"',
                WorkbenchWarning,
                stacklevel=user_stacklevel(),
            )


def _faster(recorded: _Recorded) -> bool:
    return min(recorded.seconds) < min(recorded.eager_seconds)


class _State:
    """What a step changes beside gradients: buffers, and where random draws stand."""

    def __init__(self, facts: StepFacts) -> None:
        self._buffers = facts.buffers
        self._values = [buffer.clone() for buffer in facts.buffers]
        self._generator = generator_of(CPU)
        self._random = self._generator.get_state()

    def restore(self) -> None:
        self._generator.set_state(self._random)
        with torch.no_grad():
            for buffer, value in zip(self._buffers, self._values, strict=True):
                buffer.copy_(value)

    def equals(self, other: _State) -> bool:
        return self._random.equal(other._random) and _equal(self._values, other._values)


def _equal(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    return all(map(same, some, others))


def _form(batch: Batch) -> Any:
    """What batches of one graph have in common; None for those that have none."""
    if type(batch.x) is not Tensor or type(batch.y) is not Tensor:
        return None
    tensors = batch.x, batch.y
    if any(
        not t.is_cpu or t.layout is not torch.strided or t.requires_grad or t.is_conj() or t.is_neg() for t in tensors
    ):
        return None
    return (batch.x is batch.y, *((t.shape, t.stride(), t.dtype) for t in tensors))


__all__ = ["Step", "TracedStep"]
