"""One call of a wrapped object: run the branches of a plan, combine their outputs and keep their side effects."""

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
from .dependence import DependenceTracker, has_reentrant_checkpoint, passed, reached
from .effects.branch_values import duplicate
from .effects.buffers import commit, merged_buffers
from .effects.containers import Containers
from .effects.inputs import InputEffects, are_plain, are_tensors, is_object, own_inputs, refuse_iterators
from .effects.random import values_unavailable, were_drawn
from .effects.reseeding import SeededNoiseError
from .executors import loop, traced
from .ladder import RUNGS, STRATEGIES, Ladder
from .plan import Bank, Index, Plan, Split
from .rank_one import FactoredWeightUsed
from .request import Request
from .results import Result, Running, StackedResults
from .selections import RowTracker, Tracked, refuse_other_rows, selected
from .state import BranchedState, unseal
from .surroundings import interruption, is_compiling_frames, is_exporting
from .tree import flatten, names, tensors, versions

PURITIES = ("once", "warn", "raise", "allow")


class Engine:
    """Runs the calls of one wrapped object, one at a time, since the branches share the clones.

    Args:
        root: the wrapped module.
        build: see `Clones`.
        originals: returns, by slot, the parameters of the given model that branches replace, and that outputs must no longer depend on.
        views: returns, by slot, the tensors of the first branch that the wrapped module shows, and that no other branch must use.
        entries: returns, by slot, the dict entries of the wrapped module that hold its tensor.
        forward: the method that a branch calls on the wrapped module itself.
    """

    def __init__(
        self,
        root: nn.Module,
        build: Build,
        originals: Callable[[], dict[str, Tensor]],
        views: Callable[[], dict[str, Tensor]],
        entries: Callable[[], traced.Entries],
        forward: Callable[..., Any],
    ) -> None:
        self.root, self._originals, self._views = root, originals, views
        self.lock = threading.RLock()
        self.clones = Clones(root, build)
        self.effects = InputEffects()
        self.ladder = Ladder(self.clones)
        self.traced = traced.TracedExecutor(entries, forward)
        # by mode and input dimensions: whether the model selects the rows of its outputs, so that every call must be tracked
        self.selects: dict[tuple[Any, ...], bool] = {}
        self._checked = False  # whether the autograd graph has shown which tensors the outputs depend on
        self._followed = False  # whether this was checked without gradients
        self._depended: set[bool] = set()  # whether by the graph: outputs have depended on what branches replace
        self._generation = 0  # of the clones that were checked last

    def run(
        self, plan: Plan, args: tuple, kwargs: dict[str, Any], strategy: str = "auto", receiver: Any = None
    ) -> tuple[Branched, Sequence[Result]]:
        """Run all branches of a plan.

        Args:
            plan: what differs between the branches.
            args, kwargs: the inputs, the same for all branches unless the plan deals their rows.
            strategy: "auto", the name of a rung, or "tune".
            receiver: see `Request`.

        Returns:
            The outputs with the axes of the plan in front, and the result of each branch, which holds its taps.
        """
        request = Request(plan, args, kwargs, self.clones, self.effects, receiver=receiver)
        compiling = torch.compiler.is_dynamo_compiling()
        if not compiling and not is_compiling_frames():
            return self.eager(request, strategy)
        if compiling and True not in self.selects.values() and self.traced.possible(request):
            results = list(self.traced.run(request))
            if results:
                branched = combine(plan, results)
                if plan.keep_state:
                    commit(*merged_buffers(plan, results))
                return branched, results
        from .executors import graph_break

        return graph_break.run(self, request, strategy)

    def eager(self, request: Request, strategy: str) -> tuple[Branched, Sequence[Result]]:
        """Run a request on clones, outside `torch.compile`; see `run`."""
        plan, clones = request.plan, self.clones
        if plan.state and is_exporting():
            raise ValueError(
                f"torch.export does not support {self.root._get_name()} with state=: each branch passes on its own, and an exported graph "
                "takes and returns tensors only. Export each voter by itself (wrapped.voters()), and pass on the state of each"
            )
        if not plan.keep_state and not are_tensors(request.args, request.kwargs):
            args, kwargs = own_inputs((request.args, request.kwargs))
            request = replace(request, args=args, kwargs=kwargs)
        with self.lock:
            clones.refresh()
            if self._generation != clones.generation:
                self._generation, self._checked, self._followed = clones.generation, False, False
            leaves = request.flat[0]
            if not are_plain(leaves):
                if plan.size > 1:
                    refuse_iterators(leaves)
                request.states(leaves)  # refuses states that other branches returned
            self.effects.written.refuse(leaves)
            clones.save()
            try:
                return self._complete(request, leaves, strategy)
            except BaseException:
                clones.reset()
                raise

    def _complete(self, request: Request, leaves: list[Any], strategy: str) -> tuple[Branched, Sequence[Result]]:
        """Run a request, check it and keep its side effects; it may raise at any point."""
        plan, clones = request.plan, self.clones
        new = self.root.training not in clones.watched and not values_unavailable()
        states_before = clones.sources(leaves).all() if new else None
        key = (request.training, *[leaf.dim() if isinstance(leaf, Tensor) else -1 for leaf in leaves])
        skipped = plan.size == 1 or bool(plan.dealt) or values_unavailable()
        selects = False if skipped else self.selects.get(key)
        check_request = request if request.receiver is None else replace(request, receiver=None)
        if selects is not False:
            # the passes that check this call must not see what it has put into objects
            if selects is None and any(map(is_object, leaves)):
                args, kwargs = own_inputs((request.args, request.kwargs))
                check_request = replace(check_request, args=args, kwargs=kwargs)
            request = replace(request, trackers=[], track_all=bool(selects))
        results, branched = self._execute(request, leaves, "loop" if selects else strategy, states_before)
        if selects is not False:
            self._check_rows(check_request, results, request.trackers or [], key)
        if selects is not False or request.receiver is not None:
            request = replace(request, trackers=None, track_all=False, receiver=None)
        request = self._hand_back(request, results)
        if states_before is not None:
            self._note_first(request, results[0], states_before, clones.sources(leaves).all())
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
        """Update the caller's lists and dicts from those of the branches.

        Returns:
            The request with its containers as they were before the call, for later checks.
        """
        passes = [results.inputs] if isinstance(results, StackedResults) else [result.inputs for result in results]
        containers = [each for each in passes if each is not None]
        if not containers:
            return request
        leaves, rebuild = request.flat
        args, kwargs = rebuild(leaves)
        if any(each.changed() for each in containers):
            Containers(request.args, request.kwargs).follow(request.plan, containers)
            self.effects.fills_containers = True
        self.effects.fills_containers = bool(self.effects.fills_containers)
        return replace(request, args=args, kwargs=kwargs)

    def _execute(
        self, request: Request, leaves: list[Any], strategy: str, states_before: Any
    ) -> tuple[Sequence[Result], Branched]:
        """Run the branches and combine their outputs; start again if the model uses a factored weight, or seeds torch under noise.

        Args:
            request, strategy: as for `eager`.
            leaves: leaves of the inputs.
            states_before: states of the random sources before the call, if this is the first call in its mode.

        Raises:
            RuntimeError: if the call would have to be started again and the model has written into its inputs.
        """
        plan, clones, dense_slots = request.plan, self.clones, self.clones.dense_slots
        states = [leaf for leaf in leaves if isinstance(leaf, BranchedState)]
        saved_states = [state.copy(share=True) for state in states]
        state_tensors = [tensor for state in states for tensor in state.tensors()]
        written, restarted, handled = versions([*leaves, *state_tensors]), False, sys.exc_info()[1]
        while True:
            n_dense_slots, was_running, seeds_noise = len(dense_slots), dense_slots.running, False
            dense_slots.running = True
            try:
                results = self.ladder.run(request, strategy)
                # combined before side effects are kept, since this raises if the outputs do not fit together
                branched = combine(plan, results)
                if len(dense_slots) == n_dense_slots:
                    return results, branched
            except BaseException as error:
                clones.forget()
                seeds_noise = isinstance(error, SeededNoiseError)
                starts_again = seeds_noise or isinstance(error, FactoredWeightUsed) or len(dense_slots) > n_dense_slots
                if not starts_again or interruption(error, handled):
                    raise
            finally:
                dense_slots.running = was_running
            if versions([*leaves, *state_tensors]) != written:
                cause = "seeds torch" if seeds_noise else f"uses weights directly ({', '.join(dense_slots)})"
                raise RuntimeError(
                    f"{self.root._get_name()} writes into its inputs and {cause}, so that the call cannot be started again; call once more "
                    "with new inputs"
                )
            for state, copied in zip(states, saved_states, strict=True):
                state.take(copied.copy(share=True))
            clones.forget()
            self.ladder.decisions.clear()
            if states_before is not None:
                clones.sources(leaves).restore(states_before)
            if seeds_noise:
                plan.draw_apart()
            elif restarted or len(dense_slots) == n_dense_slots:  # the model probably iterates over all its parameters
                dense_slots.update(plan.rules)
            restarted = True

    def _check_rows(
        self, request: Request, results: Sequence[Result], trackers: list[RowTracker], key: tuple[Any, ...]
    ) -> None:
        """Raise if the branches have selected different rows for an output.

        Args:
            request: the call.
            results: results of all branches.
            trackers: row trackers of the passes: of the first branch, or of all.
            key: key of the call in `selects`.

        Raises:
            OutputShapeError: if row i of an output is not the same item in all branches.
        """
        plan = request.plan
        if self.selects.get(key):
            passes = [(t, r.output) for t, r in zip(trackers[-plan.size :], results, strict=True)]
            refuse_other_rows(passes, selected(passes[0], plan.ragged, names))
            return
        self.selects[key] = False
        # if all branches ran in one pass, values of single branches could not be read there
        if RUNGS[self.ladder.decisions[self.ladder.kind].rung].at_once:
            if not (trackers and trackers[-1].ranks):
                return
            first_plan = replace(plan, axes=(), fixed={**plan.fixed, **plan.indices[0]}, chunk=None, folding=None)
            try:
                first = self._run_tracked(replace(request, plan=first_plan))
            except Exception:  # if a separate pass fails, the model is assumed to select no rows, as most do
                return
        else:
            first = [(trackers[-1], results[0].output)] if trackers else []
        if first and selected(first[0], plan.ragged, names):
            self.selects[key] = True
            passes = self._run_tracked(request)
            refuse_other_rows(passes, selected(first[0], plan.ragged, names))

    def _run_tracked(self, request: Request) -> list[Tracked]:
        """Run all branches once more with row trackers, on copies of the inputs; no side effect is kept."""
        leaves, rebuild = flatten((request.args, request.kwargs))
        sources = request.sources()
        states_before = sources.all()
        trackers: list[RowTracker] = []
        try:
            args, kwargs = rebuild(
                [leaf.detach().clone() if isinstance(leaf, Tensor) else duplicate(leaf) for leaf in leaves]
            )
            with self.clones.aside():
                results = loop.run(replace(request, args=args, kwargs=kwargs, trackers=trackers, track_all=True))
            return [(tracker, result.output) for tracker, result in zip(trackers, results, strict=True)]
        finally:
            sources.restore(states_before)

    def _note_first(self, request: Request, result: Result, before: Any, after: Any) -> None:
        """Record what the first call in a mode has shown, given the states of the random sources before and after."""
        mode, clones = request.training, self.clones
        clones.drew_outside_torch[mode] = were_drawn(before[1], after[1])
        clones.changed_buffers[mode] = frozenset(result.buffers)
        self.traced.note_first(request, request.clone(request.plan.indices[0]), were_drawn([*before], [*after]))

    def _keep(self, plan: Plan, results: Sequence[Result], branched: Branched) -> None:
        """Write the merged buffers, attributes and objects of the branches."""
        at_once = RUNGS[self.ladder.decisions[self.ladder.kind].rung].at_once
        targets, values = merged_buffers(plan, results)
        written = versions(targets)
        try:
            commit(targets, values)
            self.clones.keep(plan, at_once)
        except BaseException:
            if versions(targets) != written and not self.clones.kept:
                self.clones.keep(plan, at_once)  # buffers were written, so attributes must be kept too
            raise
        if not at_once and not plan.dealt and not all(isinstance(leaf, Tensor) for leaf in branched.leaves):
            columns = zip(*(flatten(result.output)[0] for result in results), strict=True)  # sealed states are leaves
            self.effects.remember_outputs([branch_key(plan, index) for index in plan.indices], columns)

    def _check_reach(self, request: Request, results: Sequence[Result]) -> None:
        """Check that the outputs depend on tensors that the methods own, once, and on none that these replace, anew after each change.

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
            self._checked = True
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
            # the graph of the layers inside a reentrant checkpoint is not known yet
            depends = not source_ids.isdisjoint(map(id, owned.values())) or has_reentrant_checkpoint(outputs)
        elif self._followed:
            return
        else:
            self._followed = True  # a later call with gradients is checked too, which also finds detached results
            stale, depends = self._follow(request, owned, index)
        if stale:
            raise UnreachedParametersError(
                f"the model uses {', '.join(sorted(stale)[:3])} by a reference that wrapping cannot replace (a global name, a partial "
                "function or an object that holds the tensor): the branches would not differ there. Access it through the module, as "
                "self.layer.weight, or in a hook through its argument"
            )
        # what a user switches off later, such as adapters, was reached before
        if owned and not depends and self._checked not in self._depended:
            raise UnreachedParametersError(
                f"no output depends on {', '.join(sorted(rules)[:4])}{' ...' if len(rules) > 4 else ''}, which should differ between the "
                "branches: these layers did not run, or their result is detached. Choose more layers"
            )
        self._depended.add(self._checked)

    def look(self, plan: Plan, args: tuple, kwargs: dict[str, Any]) -> None:
        """Run the only branch of a plan without gradients, so that its interventions can observe it; no side effect is kept."""
        with self.lock:
            self.clones.refresh()
            self._dry_run(Request(plan, args, kwargs, self.clones, self.effects))

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
        tracker = DependenceTracker(
            {*sources, *(id(tensor) for _, tensor in originals)},
            map(id, (*self.root.parameters(), *self.root.buffers())),
        )
        try:
            with self.clones.lent(plan, index):
                outputs = self._dry_run(probe, tracker)
            source_ids = frozenset[int]().union(*map(tracker.behind, outputs))
            # this pass runs without interventions, which may be what installs the owned tensors
            depends = bool(plan.interventions) or not source_ids.isdisjoint(sources)
            if not depends and not source_ids:
                # the model computes outside torch (numpy), or uses none of the tensors: change them and compare the outputs
                bank = Bank(lambda name: 1.5 * owned[name] + 0.1 if name in owned else plan.bank.get(name))
                old, new = self._dry_run(probe), self._dry_run(replace(probe, plan=replace(probe.plan, bank=bank)))
                depends = not all(map(torch.equal, old, new))
        except Exception:  # an operation that does not support dispatch modes
            return set(), True
        return {name for name, tensor in originals if id(tensor) in source_ids}, depends

    def _views_of_others(self, plan: Plan, index: Index) -> dict[str, Tensor]:
        """Return, by slot, the tensors of the first branch that the wrapped module shows and that a branch must not use."""
        rules = plan.rules
        others = [slot for slot in rules if any(index.get(axis) for axis in rules[slot].axes())]
        return {
            slot: view
            for slot, view in self._views().items()
            if slot in others and rules[slot].pick(plan.bank, index) is not view
        }

    def _dry_run(self, request: Request, mode: AbstractContextManager[Any] | None = None) -> list[Tensor]:
        """Return the output tensors of one branch, run without gradients and with `mode` active; no side effect is kept."""
        leaves, rebuild = flatten((request.args, request.kwargs))
        sources = request.sources()
        states_before = sources.all()
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
            sources.restore(states_before)
            if self.clones.impure:
                self.clones.forget()


def _of_other_heads(plan: Plan, index: Index) -> dict[str, Tensor]:
    """Return the tensors, by name, that the first of several heads has in place of those of a branch."""
    splits = [rule for rule in plan.rules.values() if isinstance(rule, Split)]
    heads = [(rule.options[0], rule.options[index.get(rule.axis, 0)]) for rule in splits]
    return {
        name: plan.bank.get(name) for first, own in heads for name in first.registered() if name not in own.registered()
    }


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
