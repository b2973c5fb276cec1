"""The executor inside `torch.compile`: all branches become one graph, in which the compiler merges common subexpressions."""

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

Entries = dict[str, list[tuple[dict[str, Any], str]]]  # by slot: dict entries that hold its tensor


class TracedExecutor:
    """Runs the branches on the wrapped object itself, if earlier calls in the same mode (training or not) have shown that this is correct.

    Args:
        entries: returns, by slot, the dict entries of the wrapped module that hold its tensor.
        forward: the method that a branch calls on the wrapped module itself.
    """

    def __init__(self, entries: Callable[[], Entries], forward: Callable[..., Any]) -> None:
        self.entries, self.forward = entries, forward
        self.inside = False  # whether a branch is being traced
        self.trails: dict[tuple[bool, type], tuple] = {}  # by mode and type of intervention: the call sites it met
        self._draws: dict[bool, bool] = {}  # by mode: whether forward draws random numbers
        self._contained: dict[bool, bool] = {}  # by mode: whether modules are the only holders of replaced tensors

    def note_first(self, request: Request, clone: Clone, draws: bool) -> None:
        """Record what the first call in a mode has shown.

        Args:
            request: the request.
            clone: the clone of the first branch.
            draws: whether forward has drawn random numbers.
        """
        self._draws[request.training] = draws
        forward = clone.root.__dict__.get(clone.method)
        hooked = clone.root._forward_hooks or clone.root._forward_pre_hooks
        replaced = forward is not None and not isinstance(forward, LayerForward)
        entries = self.entries()
        count = sum(len(entries[slot]) for slot in {slot for _, _, slot in clone.places})
        self._contained[request.training] = not (hooked or replaced) and len(clone.places) == count

    def note(self, request: Request) -> None:
        """Record the call sites that the interventions of an eager call met."""
        for intervention in request.plan.interventions:
            self.trails[request.training, type(intervention)] = intervention.trail

    def knows(self, training: bool) -> bool:
        """Return whether there was a first call in this mode."""
        return training in self._draws

    def possible(self, request: Request) -> bool:
        """Return whether the branches of a request can be traced by `torch.compile`."""
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
        """Run all branches one after another; yields nothing if the model breaks the graph.

        Dynamo sees every assignment, so a branch's tensors can be installed in the object and removed again. This is a generator since Dynamo
        traces a generator as a whole or not at all.

        Yields:
            One result per branch, in the order of `plan.indices`.
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
                # Dynamo hides some calls from function modes, so that call sites would be missed or confused
                torch._dynamo.graph_break("workbench: inside torch.compile the layers with noise are not the same")
            yield Result(output, buffers, {name: tensor for i in plan.interventions for name, tensor in i.taps.items()})


def _inputs(request: Request, plan: Plan, index: Index) -> tuple[tuple, dict[str, Any]]:
    """Return the inputs of a branch: its rows if rows are dealt, otherwise all."""
    if not plan.dealt:
        return request.args, request.kwargs
    rows = plan.rows[index[plan.dealt]]
    return tree_map(
        lambda leaf: leaf.index_select(0, rows) if isinstance(leaf, Tensor) and leaf.dim() else leaf,
        (request.args, request.kwargs),
    )
