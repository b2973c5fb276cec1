"""The executor inside `torch.compile`: all branches become one graph, in which the compiler joins what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..branch import Clone, Result
from ..plan import Plan
from ..rank_one import Opener
from ..tree import tensors, tree_map

if TYPE_CHECKING:
    from ..run import Engine

Homes = dict[str, list[tuple[dict[str, Any], str]]]


class Seen:
    """What eager calls have shown, by mode (training or not), which speaks for tracing the branches.

    Args:
        homes: the dict entries of the wrapped module that hold each slot.
        forward: the method that a branch calls, on the wrapped module itself.
    """

    def __init__(self, homes: Callable[[], Homes], forward: Callable[..., Any]) -> None:
        self.homes, self.forward = homes, forward
        self.inside = False  # whether a branch is being traced
        self.trails: dict[tuple[bool, type], tuple] = {}  # by intervention: the call sites it met
        self._draws: dict[bool, bool] = {}  # whether forward draws random numbers
        self._contained: dict[bool, bool] = {}  # whether all tensors that branches replace stand in modules only

    def note(self, engine: Engine, clone: Clone, result: Result, draws: bool) -> None:
        """After the first call in a mode."""
        mode = engine.root.training
        self._draws[mode] = draws
        forward = clone.root.__dict__.get(clone.method)
        own = clone.root._forward_hooks or clone.root._forward_pre_hooks or type(forward) not in (type(None), Opener)
        homes = self.homes()
        count = sum(len(homes[slot]) for slot in {slot for _, _, slot in clone.places})
        self._contained[mode] = not own and len(clone.places) == count

    def follow(self, engine: Engine, plan: Plan) -> None:
        """After every eager call."""
        for intervention in plan.interventions:
            self.trails[engine.root.training, type(intervention)] = intervention.trail

    def traceable(self, engine: Engine, plan: Plan) -> bool:
        """Whether `torch.compile` may see the branches."""
        mode = engine.root.training
        if mode not in self._draws or engine.impure or engine.writes_inputs or engine.objects.changes:
            return False
        if any((mode, type(intervention)) not in self.trails for intervention in plan.interventions):
            return False
        repeats = any(axis.randomness != "different" and axis.size > 1 for axis in plan.axes)
        return self._contained[mode] and not (repeats and self._draws[mode])


def run(engine: Engine, plan: Plan, args: tuple, kwargs: dict[str, Any]) -> Iterator[Result]:
    """All branches, one after another, on the wrapped object itself; none if the model breaks the graph.

    Dynamo sees every assignment, so that a branch's tensors can be put into the object and taken out again. A generator, since Dynamo traces it
    as a whole or not at all.

    Yields:
        One result a branch, in the order of `plan.indices`.
    """
    if not torch.compiler.is_dynamo_compiling():
        return
    homes: Homes = engine.seen.homes()
    moving = engine.moving[engine.root.training]
    for index in plan.indices:
        values = {slot: rule.pick(plan.bank, index) for slot, rule in plan.rules.items()}
        for slot in moving:
            values[slot] = (values[slot] if slot in values else plan.bank.get(slot)).clone()
        given, named = args, kwargs
        if plan.dealt:
            rows = plan.rows[index[plan.dealt]]
            given, named = tree_map(
                lambda leaf, rows=rows: leaf.index_select(0, rows) if isinstance(leaf, Tensor) and leaf.dim() else leaf,
                (args, kwargs),
            )
        for intervention in plan.interventions:
            values = intervention.tensors(values, index)
            given, named = intervention.inputs(given, named)
        before = [(held, key, held[key], values[slot]) for slot in values for held, key in homes.get(slot, ())]
        engine.seen.inside = True
        try:
            for held, key, _, value in before:
                held[key] = value
            with ExitStack() as stack:
                if plan.interventions:
                    parameters: list[tuple[Tensor, str]] = [(p, name) for name, p in engine.root.named_parameters()]
                    parameters += [(values[slot], slot) for slot in values if slot not in moving]
                    state = list(engine.root.buffers())
                    for intervention in plan.interventions:
                        context = intervention.active(parameters, state, tensors((given, named)))
                        if context is not None:
                            stack.enter_context(context)
                output = engine.seen.forward(*given, **named)
            buffers = {slot: homes[slot][0][0][homes[slot][0][1]] for slot in moving}
        finally:
            for held, key, value, _ in before:
                held[key] = value
            engine.seen.inside = False
        if any(i.trail != engine.seen.trails[engine.root.training, type(i)] for i in plan.interventions):
            # Dynamo hides some calls from modes, so that sites would be missed or mistaken
            torch._dynamo.graph_break("workbench: inside torch.compile the layers with noise are not the same")
        yield Result(output, buffers, {name: tensor for i in plan.interventions for name, tensor in i.taps.items()})
