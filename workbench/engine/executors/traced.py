"""The executor inside `torch.compile`: all branches become one graph, in which the compiler joins what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ..branch import Clone
from ..effects.containers import holds_mutable
from ..plan import Index, Plan
from ..rank_one import LayerForward
from ..request import Request
from ..results import Result
from ..state import states_in
from ..tree import tensors, tree_map

Entries = dict[str, list[tuple[dict[str, Any], str]]]  # by slot the dict entries of the wrapped module that hold it


class TracedExecutor:
    """Runs the branches on the wrapped object itself, if earlier calls in the same mode (training or not) have shown that it is right to.

    Args:
        entries: by slot the dict entries of the wrapped module that hold it.
        forward: the method that a branch calls, on the wrapped module itself.
    """

    def __init__(self, entries: Callable[[], Entries], forward: Callable[..., Any]) -> None:
        self.entries, self.forward = entries, forward
        self.inside = False  # whether a branch is being traced
        self.trails: dict[tuple[bool, type], tuple] = {}  # by intervention: the call sites it met
        self._draws: dict[bool, bool] = {}  # whether forward draws random numbers
        self._contained: dict[bool, bool] = {}  # whether all tensors that branches replace stand in modules only

    def note_first(self, request: Request, clone: Clone, draws: bool) -> None:
        """After the first call in a mode."""
        self._draws[request.training] = draws
        forward = clone.root.__dict__.get(clone.method)
        hooked = clone.root._forward_hooks or clone.root._forward_pre_hooks
        replaced = type(forward) not in (type(None), LayerForward)
        entries = self.entries()
        count = sum(len(entries[slot]) for slot in {slot for _, _, slot in clone.places})
        self._contained[request.training] = not (hooked or replaced) and len(clone.places) == count

    def note(self, request: Request) -> None:
        """After every eager call."""
        for intervention in request.plan.interventions:
            self.trails[request.training, type(intervention)] = intervention.trail

    def knows(self, training: bool) -> bool:
        """Whether a first call in this mode has shown what the model does."""
        return training in self._draws

    def possible(self, request: Request) -> bool:
        """Whether `torch.compile` may see the branches."""
        mode, plan = request.training, request.plan
        if (
            mode not in self._draws
            or request.impure
            or plan.state
            or plan.cut
            or states_in((request.args, request.kwargs))
        ):
            return False
        effects = request.effects
        if effects.writes_tensors or effects.changes_objects:
            return False
        if effects.fills_containers is not False and holds_mutable(request.args, request.kwargs):
            return False
        if any((mode, type(intervention)) not in self.trails for intervention in plan.interventions):
            return False
        repeats = any(axis.randomness != "different" and axis.size > 1 for axis in plan.axes)
        return self._contained[mode] and not (repeats and self._draws[mode])

    def run(self, request: Request) -> Iterator[Result]:
        """All branches, one after another; none if the model breaks the graph.

        Dynamo sees every assignment, so that a branch's tensors can be put into the object and taken out again. A generator, since Dynamo
        traces it as a whole or not at all.

        Yields:
            One result a branch, in the order of `plan.indices`.
        """
        if not torch.compiler.is_dynamo_compiling():
            return
        plan, root = request.plan, request.clones.root
        entries: Entries = self.entries()
        changed_buffers = request.clones.changed_buffers[root.training]
        for index in plan.indices:
            values = {slot: rule.pick(plan.bank, index) for slot, rule in plan.rules.items()}
            for slot in changed_buffers:
                values[slot] = (values[slot] if slot in values else plan.bank.get(slot)).clone()
            args, kwargs = _inputs(request, plan, index)
            for intervention in plan.interventions:
                values = intervention.tensors(values, index)
                args, kwargs = intervention.inputs(args, kwargs, index)
            swaps = [
                (holder, key, holder[key], values[slot]) for slot in values for holder, key in entries.get(slot, ())
            ]
            self.inside = True
            try:
                for holder, key, _, value in swaps:
                    holder[key] = value
                with ExitStack() as stack:
                    if plan.interventions:
                        parameters: list[tuple[Tensor, str]] = [(p, name) for name, p in root.named_parameters()]
                        parameters += [(values[slot], slot) for slot in values if slot not in changed_buffers]
                        state = list(root.buffers())
                        for intervention in plan.interventions:
                            context = intervention.active(parameters, state, tensors((args, kwargs)))
                            if context is not None:
                                stack.enter_context(context)
                    output = self.forward(*args, **kwargs)
                for intervention in reversed(plan.interventions):
                    output = intervention.output(output, index)
                buffers = {slot: entries[slot][0][0][entries[slot][0][1]] for slot in changed_buffers}
            finally:
                for holder, key, value, _ in swaps:
                    holder[key] = value
                self.inside = False
            if any(i.trail != self.trails[root.training, type(i)] for i in plan.interventions):
                # Dynamo hides some calls from modes, so that sites would be missed or mistaken
                torch._dynamo.graph_break("workbench: inside torch.compile the layers with noise are not the same")
            yield Result(output, buffers, {name: tensor for i in plan.interventions for name, tensor in i.taps.items()})


def _inputs(request: Request, plan: Plan, index: Index) -> tuple[tuple, dict[str, Any]]:
    """The inputs of a branch: its rows if they are dealt."""
    if not plan.dealt:
        return request.args, request.kwargs
    rows = plan.rows[index[plan.dealt]]
    return tree_map(
        lambda leaf: leaf.index_select(0, rows) if isinstance(leaf, Tensor) and leaf.dim() else leaf,
        (request.args, request.kwargs),
    )
