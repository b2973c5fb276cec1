"""Check that the outputs of a branch depend on its own tensors, and not on those of the given model or of another branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnreachedParametersError
from .clones import Clones
from .dependence import DependenceTracker, has_reentrant_checkpoint, passed, reached
from .effects.branch_values import duplicate
from .effects.outside import outside_undone
from .effects.random import values_unavailable
from .executors import loop
from .plan import Bank, Index, Plan, RankOne, Split
from .request import Request
from .results import Result, Running, StackedResults
from .state import unseal
from .tree import flatten, tensors

Tensors = Callable[[], dict[str, Tensor]]


class Reach:
    """Checks once what the outputs depend on: by their autograd graph, or without gradients by running a branch again; anew after each change.

    Args:
        root: the wrapped module.
        clones: its clones.
        originals, views: as for `Engine`.
    """

    def __init__(self, root: nn.Module, clones: Clones, originals: Tensors, views: Tensors) -> None:
        self.root, self.clones, self._originals, self._views = root, clones, originals, views
        self._by_graph = False  # whether the autograd graph has shown which tensors the outputs depend on
        self._by_run = False  # whether this was checked without gradients
        self._depended: set[bool] = set()  # whether by the graph: outputs have depended on what branches replace
        self._generation = 0  # of the clones that were checked last

    def refresh(self) -> None:
        """Check again from now on if the clones were made anew."""
        if self._generation != self.clones.generation:
            self._generation, self._by_graph, self._by_run = self.clones.generation, False, False

    def is_due(self) -> bool:
        """Return whether a call like this one has not been checked yet."""
        return not self._by_graph and (torch.is_grad_enabled() or not self._by_run)

    def check(self, request: Request, results: Sequence[Result]) -> None:
        """Check that the outputs of a call depend on tensors that the methods own, and on none that these replace.

        Raises:
            UnreachedParametersError: if they do not.
        """
        plan = request.plan
        rules = {slot: rule for slot, rule in plan.rules.items() if rule.axes()}
        index = plan.indices[-1]
        if not rules or not any(index.values()):
            return
        if values_unavailable():
            return  # the autograd graph of the outputs cannot be inspected under a function transform or a compiler
        owned = {name: plan.bank.get(name) for rule in rules.values() for name in rule.names(index)}
        last = flatten(unseal(results[-1].output))[0]
        candidates = [leaf for leaf in last if isinstance(leaf, Tensor)]
        if not any(leaf.numel() if isinstance(leaf, Tensor) else isinstance(leaf, Running) for leaf in last):
            return  # all outputs are empty, such as no boxes: a later call will show it
        # without a graph, an output that requires gradients can only be an input that was passed through
        outputs = [leaf for leaf in candidates if leaf.requires_grad and (torch.is_grad_enabled() or not leaf.is_leaf)]
        # values put in by `functional_call` may be computed, and the graph names only the leaves behind them
        leaves = all(tensor.is_leaf for tensor in owned.values())
        if outputs and leaves and any(tensor.requires_grad for tensor in owned.values()):
            self._by_graph = True
            source_ids = reached(outputs)
            # inputs may have been computed by the given model itself
            input_ids = reached([leaf for leaf in tensors((request.args, request.kwargs)) if leaf.requires_grad])
            heads = _of_other_heads(plan, index)
            if heads and isinstance(results, StackedResults):  # all branches have one graph
                stale, _ = self._follow(request, owned, index)
            else:
                originals = {**heads, **self._originals()}
                stale = {name for name, tensor in originals.items() if id(tensor) in source_ids - input_ids}
                views = self._views_of_others(plan, index)
                stale |= passed(outputs, views) - passed(tensors((request.args, request.kwargs)), views)
                stale |= _without_factors(plan, index, source_ids - input_ids)
            # the graph of the layers inside a reentrant checkpoint is not known yet
            depends = not source_ids.isdisjoint(map(id, owned.values())) or has_reentrant_checkpoint(outputs)
        elif self._by_run:
            return
        else:
            self._by_run = True  # a later call with gradients is checked too, which also finds detached results
            stale, depends = self._follow(request, owned, index)
        if stale:
            raise UnreachedParametersError(
                f"the model uses {', '.join(sorted(stale)[:3])} by a reference that wrapping cannot replace (a global name, a partial "
                "function or an object that holds the tensor): the branches would not differ there. Access it through the module, as "
                "self.layer.weight, or in a hook through its argument"
            )
        # what a user switches off later, such as adapters, was reached before
        if owned and not depends and self._by_graph not in self._depended:
            raise UnreachedParametersError(
                f"no output depends on {', '.join(sorted(rules)[:4])}{' ...' if len(rules) > 4 else ''}, which should differ between the "
                "branches: these layers did not run, or their result is detached. Wrap with example=x, inputs of the model, which shows the "
                "layers that run last, or choose more layers"
            )
        self._depended.add(self._by_graph)

    def _follow(self, request: Request, owned: dict[str, Tensor], index: Index) -> tuple[set[str], bool]:
        """Find dependences by running one branch once more without gradients, since the model may not support them.

        Args:
            request: the call.
            owned: tensors of the branch that the methods own, by name.
            index: the branch.

        Returns:
            The slots whose original tensors the outputs depend on, and whether the outputs depend on any owned tensor.
        """
        plan = request.plan
        heads, views = _of_other_heads(plan, index), self._views_of_others(plan, index)
        originals = [*self._originals().items(), *heads.items(), *views.items()]  # held here so that ids stay unique
        bank = Bank(plan.bank.get)
        branch_plan = replace(plan, axes=(), fixed=dict(index), dealt="", bank=bank, interventions=(), folding=None)
        probe, sources = replace(request, plan=branch_plan), set(map(id, owned.values()))
        shared_weights = {id(plan.bank.get(rule.name)) for rule in _factored(plan, index).values()}
        tracker = DependenceTracker(
            {*sources, *(id(tensor) for _, tensor in originals), *shared_weights},
            map(id, (*self.root.parameters(), *self.root.buffers())),
        )
        try:
            with self.clones.lent(plan, index):
                outputs = dry_run(probe, tracker)
            source_ids = frozenset[int]().union(*map(tracker.behind, outputs))
            # this pass runs without interventions, which may be what installs the owned tensors
            depends = bool(plan.interventions) or not source_ids.isdisjoint(sources)
            if not depends and not source_ids:
                # the model computes outside torch (numpy), or uses none of the tensors: change them and compare the outputs
                bank = Bank(lambda name: 1.5 * owned[name] + 0.1 if name in owned else plan.bank.get(name))
                old, new = dry_run(probe), dry_run(replace(probe, plan=replace(probe.plan, bank=bank)))
                depends = not all(map(torch.equal, old, new))
        except Exception:  # an operation that does not support dispatch modes
            return set(), True
        stale = {name for name, tensor in originals if id(tensor) in source_ids}
        return stale | _without_factors(plan, index, source_ids), depends

    def _views_of_others(self, plan: Plan, index: Index) -> dict[str, Tensor]:
        """Return, by slot, the tensors of the first branch that the wrapped module shows and that a branch must not use."""
        rules = plan.rules
        others = [slot for slot in rules if any(index.get(axis) for axis in rules[slot].axes())]
        return {
            slot: view
            for slot, view in self._views().items()
            if slot in others and rules[slot].pick(plan.bank, index) is not view
        }


def dry_run(request: Request, mode: AbstractContextManager[Any] | None = None) -> list[Tensor]:
    """Return the output tensors of one branch, run without gradients and with `mode` active; no side effect is kept."""
    leaves, rebuild = flatten((request.args, request.kwargs))
    sources = request.sources()
    states_before = sources.all()
    request.clones.save()
    try:
        with torch.no_grad():
            inputs = [leaf.detach().clone() if isinstance(leaf, Tensor) else duplicate(leaf) for leaf in leaves]
            args, kwargs = rebuild(inputs)
            with outside_undone(request.clones.root, request.plan, inputs) as watch, watch, mode or nullcontext():
                result = loop.run(replace(request, args=args, kwargs=kwargs))[0]
        return tensors(unseal(result.output))
    finally:
        sources.restore(states_before)
        if request.clones.impure:
            request.clones.forget()


def _factored(plan: Plan, index: Index) -> dict[str, RankOne]:
    """Return the rules, by slot, by which a branch scales a shared weight."""
    rules = {
        slot: rule.options[index.get(rule.axis, 0)] if isinstance(rule, Split) else rule
        for slot, rule in plan.rules.items()
    }
    return {slot: rule for slot, rule in rules.items() if isinstance(rule, RankOne)}


def _without_factors(plan: Plan, index: Index, source_ids: Set[int]) -> set[str]:
    """Return the slots whose shared weight is among the sources of the outputs while the factors of the branch are not."""
    return {
        slot
        for slot, rule in _factored(plan, index).items()
        if id(plan.bank.get(rule.name)) in source_ids
        and (factor := plan.bank.get(rule.left)).requires_grad
        and id(factor) not in source_ids
    }


def _of_other_heads(plan: Plan, index: Index) -> dict[str, Tensor]:
    """Return the tensors, by name, that the first of several heads has in place of those of a branch."""
    splits = [rule for rule in plan.rules.values() if isinstance(rule, Split)]
    heads = [(rule.options[0], rule.options[index.get(rule.axis, 0)]) for rule in splits]
    return {
        name: plan.bank.get(name)
        for first, chosen in heads
        for name in first.registered()
        if name not in chosen.registered()
    }


__all__ = ["Reach", "dry_run"]
