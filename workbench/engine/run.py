"""One call of a wrapped object: from a plan to the outputs of all its branches, and what is kept of what they did."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NonTensorOutputError, NotDealableError, OutputShapeError, UnreachedParametersError
from .clones import Build, Clones, branch_key
from .combine import Branched, combine
from .dependence import Followed, reached
from .effects.branch_values import duplicate
from .effects.buffers import BufferMerger, commit
from .effects.containers import Containers
from .effects.inputs import InputEffects, are_tensors, is_object, own_inputs, refuse_iterators
from .effects.random import values_unavailable, were_drawn
from .executors import loop, traced
from .ladder import RUNGS, STRATEGIES, Ladder
from .plan import Bank, Index, Plan
from .rank_one import FactoredWeightUsed
from .request import Request
from .results import Result, Running, StackedResults
from .selections import RowTracker, Tracked, refuse_other_rows, selected
from .state import BranchedState, unseal
from .surroundings import interruption
from .tree import flatten, names, tensors, versions

PURITIES = ("once", "warn", "raise", "allow")


class Engine:
    """Runs one wrapped object; one call at a time, since the branches share the clones.

    Args:
        root: the wrapped module.
        build: see `Clones`.
        originals: taken-over parameters of the given model that must not be reached any more, by slot.
        entries: by slot the dict entries of the wrapped module that hold it.
        forward: the method that a branch calls, on the wrapped module itself.
    """

    def __init__(
        self,
        root: nn.Module,
        build: Build,
        originals: Callable[[], dict[str, Tensor]],
        entries: Callable[[], traced.Entries],
        forward: Callable[..., Any],
    ) -> None:
        self.root, self._originals = root, originals
        self.lock = threading.RLock()
        self.clones = Clones(root, build)
        self.effects = InputEffects()
        self.ladder = Ladder(self.clones)
        self.traced = traced.TracedExecutor(entries, forward)
        # by mode and inputs: whether the model selects the rows of its outputs, so that every call must be followed
        self.selects: dict[tuple[Any, ...], bool] = {}
        self._checked = False  # whether the graph has shown that outputs depend on what they should
        self._followed = False  # whether that was looked at without gradients

    def run(
        self, plan: Plan, args: tuple, kwargs: dict[str, Any], strategy: str = "auto"
    ) -> tuple[Branched, Sequence[Result]]:
        """Run all branches of a plan.

        Args:
            plan: what differs between the branches.
            args, kwargs: the inputs, the same for all branches unless the plan deals their rows.
            strategy: "auto", the name of a rung, or "tune".

        Returns:
            The outputs with the axes of the plan in front, and the single results for who needs their taps.
        """
        request = Request(plan, args, kwargs, self.clones, self.effects)
        if not torch.compiler.is_dynamo_compiling():
            return self.eager(request, strategy)
        if True not in self.selects.values() and self.traced.possible(request):
            results = list(self.traced.run(request))
            if results:
                branched = combine(plan, results)
                if plan.keep_state:
                    commit(*_merged_buffers(plan, results))
                return branched, results
        from .executors import graph_break

        return graph_break.run(self, request, strategy)

    def eager(self, request: Request, strategy: str) -> tuple[Branched, Sequence[Result]]:
        """As `run`, on clones."""
        plan, clones = request.plan, self.clones
        if plan.state and torch.compiler.is_exporting():
            raise ValueError(
                f"torch.export cannot take {self.root._get_name()} with state=: each branch hands on its own, and an exported graph takes and "
                "gives tensors only. Export each voter by itself (wrapped.voters()), and hand on the state of each"
            )
        if not plan.keep_state and not are_tensors(request.args, request.kwargs):
            args, kwargs = own_inputs((request.args, request.kwargs))
            request = replace(request, args=args, kwargs=kwargs)
        with self.lock:
            clones.refresh()
            leaves = request.flat[0]
            if plan.size > 1:
                refuse_iterators(leaves)
            request.states(leaves)  # refuses those of other branches
            self.effects.written.refuse(leaves)
            clones.save()
            try:
                return self._complete(request, leaves, strategy)
            except BaseException:
                clones.reset()
                raise

    def _complete(self, request: Request, leaves: list[Any], strategy: str) -> tuple[Branched, Sequence[Result]]:
        """The call itself, which may end before its time."""
        plan, clones = request.plan, self.clones
        new = self.root.training not in clones.watched and not values_unavailable()
        before = clones.sources(leaves).all() if new else None
        key = (request.training, *[leaf.dim() if isinstance(leaf, Tensor) else -1 for leaf in leaves])
        skipped = plan.size == 1 or bool(plan.dealt) or values_unavailable()
        selects = False if skipped else self.selects.get(key)
        looked = request
        if selects is not False:
            # a pass to look at would see what this call has put into objects
            if selects is None and any(map(is_object, leaves)):
                args, kwargs = own_inputs((request.args, request.kwargs))
                looked = replace(request, args=args, kwargs=kwargs)
            request = replace(request, trackers=[], track_all=bool(selects))
        results, branched = self._execute(request, leaves, "loop" if selects else strategy, before)
        if selects is not False:
            self._check_rows(looked, results, request.trackers or [], key)
            request = replace(request, trackers=None, track_all=False)
        request = self._hand_back(request, results)
        if before is not None:
            self._note_first(request, results[0], before, clones.sources(leaves).all())
        self.traced.note(request)
        if plan.keep_state:
            self._keep(plan, results, branched)
        elif clones.impure:
            clones.forget()
        if not self._checked and (torch.is_grad_enabled() or not self._followed):
            clones.save()
            self._check_reach(request, results)
        return branched, results

    def _hand_back(self, request: Request, results: Sequence[Result]) -> Request:
        """Let the caller's lists and dicts follow those of the branches.

        Returns:
            The request with containers as they were, for who looks at it later.
        """
        passes = [results.inputs] if isinstance(results, StackedResults) else [result.inputs for result in results]
        filled = [each for each in passes if each is not None]
        if not filled:
            return request
        leaves, rebuild = request.flat
        args, kwargs = rebuild(leaves)
        if any(each.changed() for each in filled):
            Containers(request.args, request.kwargs).follow(request.plan, filled)
            self.effects.fills_containers = True
        self.effects.fills_containers = bool(self.effects.fills_containers)
        return replace(request, args=args, kwargs=kwargs)

    def _execute(
        self, request: Request, leaves: list[Any], strategy: str, before: Any
    ) -> tuple[Sequence[Result], Branched]:
        """The results of the branches; once more with whole tensors where the model itself uses a factored weight.

        Args:
            request, strategy: as for `eager`.
            leaves: of the inputs.
            before: the states of what the model draws random numbers from, if it is new.
        """
        plan, clones, dense_slots = request.plan, self.clones, self.clones.dense_slots
        states = [leaf for leaf in leaves if isinstance(leaf, BranchedState)]
        kept = [state.copy(share=True) for state in states]
        inside = [tensor for state in states for tensor in state.tensors()]
        written, restarted, handled = versions([*leaves, *inside]), False, sys.exc_info()[1]
        while True:
            known, outer = len(dense_slots), dense_slots.running
            dense_slots.running = True
            try:
                results = self.ladder.run(request, strategy)
                # before anything is kept, since it may find that the branches do not fit together
                branched = combine(plan, results)
                if len(dense_slots) == known:
                    return results, branched
            except BaseException as error:
                clones.forget()
                if interruption(error, handled) or (
                    len(dense_slots) == known and not isinstance(error, FactoredWeightUsed)
                ):
                    raise
            finally:
                dense_slots.running = outer
            if versions([*leaves, *inside]) != written:
                raise RuntimeError(
                    f"{self.root._get_name()} writes into its inputs before it uses the weight of a layer ({', '.join(dense_slots)}) by itself, "
                    "so that the call cannot be started again; call once more with new inputs"
                )
            for state, copied in zip(states, kept, strict=True):
                state.take(copied.copy(share=True))
            clones.forget()
            self.ladder.decisions.clear()
            if before is not None:
                clones.sources(leaves).restore(before)
            if restarted or len(dense_slots) == known:  # a model that goes through all its parameters
                dense_slots.update(plan.rules)
            restarted = True

    def _check_rows(
        self, request: Request, results: Sequence[Result], trackers: list[RowTracker], key: tuple[Any, ...]
    ) -> None:
        """Refuse outputs whose rows the branches have selected, each its own.

        Args:
            request: the call.
            results: of all branches.
            trackers: what has followed their passes: that of the first, or all.
            key: of the call in `selects`.
        """
        plan = request.plan
        if self.selects.get(key):
            passes = [(t, r.output) for t, r in zip(trackers[-plan.size :], results, strict=True)]
            refuse_other_rows(passes, selected(passes[0], plan.ragged, names))
            return
        self.selects[key] = False
        if RUNGS[
            self.ladder.decisions[self.ladder.kind].rung
        ].at_once:  # numbers of single branches are out of reach there
            if not (trackers and trackers[-1].ranks):
                return
            one = replace(plan, axes=(), fixed={**plan.fixed, **plan.indices[0]}, chunk=None, folding=None)
            try:
                first = self._run_tracked(replace(request, plan=one))
            except Exception:  # what cannot be run for looking only is taken for what most models are
                return
        else:
            first = [(trackers[-1], results[0].output)] if trackers else []
        if first and selected(first[0], plan.ragged, names):
            self.selects[key] = True
            passes = self._run_tracked(request)
            refuse_other_rows(passes, selected(first[0], plan.ragged, names))

    def _run_tracked(self, request: Request) -> list[Tracked]:
        """All branches once more on copies of the inputs, for looking only."""
        leaves, rebuild = flatten((request.args, request.kwargs))
        sources = request.sources()
        before = sources.all()
        trackers: list[RowTracker] = []
        try:
            args, kwargs = rebuild(
                [leaf.detach().clone() if isinstance(leaf, Tensor) else duplicate(leaf) for leaf in leaves]
            )
            with self.clones.aside():
                results = loop.run(replace(request, args=args, kwargs=kwargs, trackers=trackers, track_all=True))
            return [(tracker, result.output) for tracker, result in zip(trackers, results, strict=True)]
        finally:
            sources.restore(before)

    def _note_first(self, request: Request, result: Result, before: Any, after: Any) -> None:
        """What the first call in a mode has shown, given the states of the random sources before and after."""
        mode, clones = request.training, self.clones
        clones.drew_outside_torch[mode] = were_drawn(before[1], after[1])
        clones.changed_buffers[mode] = frozenset(result.buffers)
        self.traced.note_first(request, request.clone(request.plan.indices[0]), were_drawn([*before], [*after]))

    def _keep(self, plan: Plan, results: Sequence[Result], branched: Branched) -> None:
        at_once = RUNGS[self.ladder.decisions[self.ladder.kind].rung].at_once
        targets, values = _merged_buffers(plan, results)
        written = versions(targets)
        try:
            commit(targets, values)
            self.clones.keep(plan, at_once)
        except BaseException:
            if versions(targets) != written and not self.clones.kept:  # one without the other would be half a call
                self.clones.keep(plan, at_once)
            raise
        if not at_once and not plan.dealt and not all(isinstance(leaf, Tensor) for leaf in branched.leaves):
            columns = zip(*(flatten(result.output)[0] for result in results), strict=True)  # states are sealed
            self.effects.remember_outputs([branch_key(plan, index) for index in plan.indices], columns)

    def _check_reach(self, request: Request, results: Sequence[Result]) -> None:
        """Once: do the outputs depend on the tensors that the methods own, and on none of those that they have replaced?"""
        plan = request.plan
        rules = {slot: rule for slot, rule in plan.rules.items() if rule.axes()}
        index = plan.indices[-1]
        if not rules or not any(index.values()):
            return
        if values_unavailable():
            return  # the graph is not the one that is looked at here
        owned = {name: plan.bank.get(name) for rule in rules.values() for name in rule.names(index)}
        last = flatten(unseal(results[-1].output))[0]
        every = [leaf for leaf in last if isinstance(leaf, Tensor)]
        if not any(leaf.numel() if isinstance(leaf, Tensor) else isinstance(leaf, Running) for leaf in last):
            return  # no box was found, say: another call will show it
        # an input that is handed out with requires_grad tells nothing where no graph is made
        outputs = [leaf for leaf in every if leaf.requires_grad and (torch.is_grad_enabled() or not leaf.is_leaf)]
        if outputs and any(tensor.requires_grad for tensor in owned.values()):
            self._checked = True
            behind = reached(outputs)
            # what comes in may have been computed by the given model itself
            before = reached([leaf for leaf in tensors((request.args, request.kwargs)) if leaf.requires_grad])
            stale = {name for name, tensor in self._originals().items() if id(tensor) in behind - before}
            differ = not behind.isdisjoint(map(id, owned.values()))
        elif self._followed:
            return
        else:
            self._followed = True  # gradients may show more: they end where a result is detached
            stale, differ = self._follow(request, owned, index)
        if stale:
            raise UnreachedParametersError(
                f"the model uses {', '.join(sorted(stale)[:3])} of the model that was given, by a reference that does not move "
                "along (a partial function or an object that holds the tensor): the branches would not differ there. Reach it through "
                "the module, as self.layer.weight"
            )
        if owned and not differ:
            raise UnreachedParametersError(
                f"no output depends on {', '.join(sorted(rules)[:4])}{' ...' if len(rules) > 4 else ''}, which should differ between the "
                "branches: these layers did not run, or their result is detached. Choose more layers"
            )

    def look(self, plan: Plan, args: tuple, kwargs: dict[str, Any]) -> None:
        """Run the one branch of a plan without gradients, for its interventions to look; nothing else changes by it."""
        with self.lock:
            self.clones.refresh()
            self._look(Request(plan, args, kwargs, self.clones, self.effects))

    def _follow(self, request: Request, owned: dict[str, Tensor], index: Index) -> tuple[set[str], bool]:
        """By one branch once more, without gradients, since the model may have no code for them.

        Args:
            request: the call.
            owned: what the methods own of the branch, by name.
            index: the branch.

        Returns:
            The slots whose replaced tensors the outputs depend on, and whether they depend on any of those that are owned.
        """
        plan = request.plan
        originals = self._originals()  # kept, or another tensor could get the id of one that goes meanwhile
        bank = Bank(plan.bank.get)
        alone = replace(plan, axes=(), fixed=dict(index), dealt="", bank=bank, interventions=(), folding=None)
        one, sources = replace(request, plan=alone), set(map(id, owned.values()))
        following = Followed(
            {*sources, *map(id, originals.values())}, map(id, (*self.root.parameters(), *self.root.buffers()))
        )
        try:
            outputs = self._look(one, following)
            behind = frozenset[int]().union(*map(following.behind, outputs))
            # an intervention may put the tensors in their places, which the branch that is looked at goes without
            differ = bool(plan.interventions) or not behind.isdisjoint(sources)
            if not differ and not behind:  # out of sight on the way, or never used
                changed = Bank(lambda name: 1.5 * owned[name] + 0.1 if name in owned else plan.bank.get(name))
                present, other = self._look(one), self._look(replace(one, plan=replace(one.plan, bank=changed)))
                differ = not all(map(torch.equal, present, other))
        except Exception:  # an operation that does not go together with looking on
            return set(), True
        return {name for name, tensor in originals.items() if id(tensor) in behind}, differ

    def _look(self, request: Request, mode: AbstractContextManager[Any] | None = None) -> list[Tensor]:
        """The outputs of one branch, run without gradients for looking only; `mode` is active meanwhile."""
        leaves, rebuild = flatten((request.args, request.kwargs))
        sources = request.sources()
        before = sources.all()
        self.clones.save()
        try:
            with torch.no_grad():
                args, kwargs = rebuild(
                    [leaf.detach().clone() if isinstance(leaf, Tensor) else duplicate(leaf) for leaf in leaves]
                )
                with mode or nullcontext():
                    result = loop.run(replace(request, args=args, kwargs=kwargs))[0]
            return tensors(unseal(result.output))
        finally:
            sources.restore(before)
            if self.clones.impure:
                self.clones.forget()


def _merged_buffers(plan: Plan, results: Sequence[Result]) -> tuple[list[Tensor], list[Tensor]]:
    """The buffers that the branches have written into, and what they become."""
    if not (results.buffers if isinstance(results, StackedResults) else any(result.buffers for result in results)):
        return [], []
    merger = BufferMerger()
    for index, result in zip(plan.indices, results, strict=True):
        for slot, value in result.buffers.items():
            name, row = plan.rules[slot].home(index) if slot in plan.rules else (slot, None)
            merger.add(name, row, value.detach())
    return merger.merge(plan.bank)


__all__ = [
    "PURITIES",
    "RUNGS",
    "STRATEGIES",
    "Branched",
    "Engine",
    "NonTensorOutputError",
    "NotDealableError",
    "OutputShapeError",
    "UnreachedParametersError",
]
