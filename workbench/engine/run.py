"""One call of a wrapped object: run the branches of a plan, combine their outputs and keep their side effects."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NonTensorOutputError, NotDealableError, OutputShapeError, UnreachedParametersError
from .clones import Build, Clones, branch_key
from .combine import Branched, combine
from .dispatch import EXECUTORS, STRATEGIES, Dispatcher
from .effects.branch_values import duplicate
from .effects.buffers import commit, merged_buffers
from .effects.containers import Containers
from .effects.inputs import InputEffects, are_plain, are_tensors, is_object, own_inputs, refuse_iterators
from .effects.outside import outside_undone
from .effects.parameters import explain_write
from .effects.random import values_unavailable, were_drawn
from .effects.reseeding import SeededNoiseError
from .executors import loop, traced
from .plan import Plan
from .rank_one import FactoredWeightUsed
from .reach import Reach, dry_run
from .request import Receiver, Request
from .results import Result, StackedResults
from .selections import RowTracker, Tracked, refuse_other_rows, selected
from .state import BranchedState
from .surroundings import interruption, is_compiling_frames, is_exporting
from .tree import flatten, names, versions

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
        self.root = root
        self.lock = threading.RLock()
        self.clones = Clones(root, build)
        self.effects = InputEffects()
        self.dispatcher = Dispatcher(self.clones)
        self.traced = traced.TracedExecutor(entries, forward)
        # by mode and input dimensions: whether the model selects the rows of its outputs, so that every call must be tracked
        self.selects: dict[tuple[Any, ...], bool] = {}
        self.reach = Reach(root, self.clones, originals, views)

    def run(
        self,
        plan: Plan,
        args: tuple,
        kwargs: dict[str, Any],
        strategy: str = "auto",
        receiver: Callable[[], Receiver] | None = None,
    ) -> tuple[Branched, Sequence[Result]]:
        """Run all branches of a plan.

        Args:
            plan: what differs between the branches.
            args, kwargs: the inputs, the same for all branches unless the plan deals their rows.
            strategy: "auto", the name of an executor, or "tune".
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
            self.reach.refresh()
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
            self._keep(plan, results, branched, first=new)
        elif clones.impure:
            clones.forget()
        if self.reach.is_due():
            clones.save()
            self.reach.check(request, results)
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
                results = self.dispatcher.run(request, strategy)
                # combined before side effects are kept, since this raises if the outputs do not fit together
                branched = combine(plan, results)
                if len(dense_slots) == n_dense_slots:
                    return results, branched
            except BaseException as error:
                clones.forget()
                seeds_noise = isinstance(error, SeededNoiseError)
                starts_again = seeds_noise or isinstance(error, FactoredWeightUsed) or len(dense_slots) > n_dense_slots
                if not starts_again or interruption(error, handled):
                    if isinstance(error, RuntimeError):
                        explain_write(self.root, error)
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
            self.dispatcher.decisions.clear()
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
        if EXECUTORS[self.dispatcher.decisions[self.dispatcher.kind].executor].at_once:
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
            inputs = [leaf.detach().clone() if isinstance(leaf, Tensor) else duplicate(leaf) for leaf in leaves]
            args, kwargs = rebuild(inputs)
            with self.clones.aside(), outside_undone(self.root, request.plan, inputs) as watch, watch:
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

    def _keep(self, plan: Plan, results: Sequence[Result], branched: Branched, first: bool) -> None:
        """Write the merged buffers, attributes and objects of the branches; `first` in the first call in its mode."""
        at_once = EXECUTORS[self.dispatcher.decisions[self.dispatcher.kind].executor].at_once
        clones = self.clones
        targets, values = merged_buffers(plan, results, clones.allow_resize, clones.is_table, first, self.root.training)
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

    def look(self, plan: Plan, args: tuple, kwargs: dict[str, Any]) -> None:
        """Run the only branch of a plan without gradients, so that its interventions can observe it; no side effect is kept."""
        with self.lock:
            self.clones.refresh()
            dry_run(Request(plan, args, kwargs, self.clones, self.effects))


__all__ = [
    "EXECUTORS",
    "PURITIES",
    "STRATEGIES",
    "Branched",
    "Engine",
    "NonTensorOutputError",
    "NotDealableError",
    "OutputShapeError",
    "UnreachedParametersError",
]
