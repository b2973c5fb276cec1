"""One call of a wrapped object: from a plan to the outputs of all its branches, and what is kept of what they did."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NonTensorOutputError, NotDealableError, OutputShapeError, UnreachedParametersError
from .branch import Result, Together
from .branches import Branches, Build, branch_key
from .combine import Branched, combined
from .dependence import reached
from .effects.branch_values import duplicate
from .effects.buffers import Buffers
from .effects.objects import Objects, refuse_iterators
from .effects.random import moved, valueless
from .executors import loop, traced
from .ladder import RUNGS, STRATEGIES, Decision, Kind, execute
from .plan import Bank, Plan
from .rank_one import Unfactored
from .tree import flatten, tensors

PURITIES = ("once", "warn", "raise", "allow")


class Engine(Branches):
    """Runs one wrapped object; one call at a time, since the branches share the clones.

    Args:
        root: the wrapped module.
        build: see `Branches`.
        originals: taken-over parameters of the given model that must not be reached any more, by slot.
        homes: the dict entries of the wrapped module that hold each slot.
        forward: the method that a branch calls, on the wrapped module itself.
    """

    def __init__(
        self,
        root: nn.Module,
        build: Build,
        originals: Callable[[], dict[int, str]],
        homes: Callable[[], traced.Homes],
        forward: Callable[..., Any],
    ) -> None:
        super().__init__(root, build)
        self._originals = originals
        self.lock = threading.RLock()
        self.writes_inputs: bool | None = None  # unknown before the first call
        self.objects = Objects()
        self.decisions: dict[Kind, Decision] = {}
        self.kind: Kind  # of the last call
        self.seen = traced.Seen(homes, forward)
        self._checked = False  # whether outputs depend on what they should
        self._looked = False  # whether frozen tensors have shown as much of that as they can

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
        if not torch.compiler.is_dynamo_compiling():
            return self.eager(plan, args, kwargs, strategy)
        if self.seen.traceable(self, plan):
            results = list(traced.run(self, plan, args, kwargs))
            if results:
                branched = combined(plan, results)
                if plan.keep_state:
                    _keep_buffers(plan, results)
                return branched, results
        from .executors import graph_break as outside

        return outside.run(self, plan, args, kwargs, strategy)

    def eager(
        self, plan: Plan, args: tuple, kwargs: dict[str, Any], strategy: str
    ) -> tuple[Branched, Sequence[Result]]:
        """As `run`, on clones."""
        with self.lock:
            self.refresh()
            leaves = flatten((args, kwargs))[0]
            if plan.size > 1:
                refuse_iterators(leaves)
            self.save()
            new = self.root.training not in self.watched and not valueless()
            before = self.sources(leaves).all() if new else None
            results, branched = self._executed(plan, args, kwargs, leaves, strategy, before)
            if before is not None:
                after = self.sources(leaves).all()
                draws = moved([*before], [*after])
                self.elsewhere[self.root.training] = moved(before[1], after[1])
                self.moving[self.root.training] = frozenset(results[0].buffers)
                self.seen.note(self, self.clone(plan, plan.indices[0]), results[0], draws)
            self.seen.follow(self, plan)
            if plan.keep_state:
                self._keep(plan, results, branched)
            elif self.impure:
                self.forget()
            if not self._checked:
                self._check_reach(plan, results, args, kwargs)
        return branched, results

    def _executed(
        self, plan: Plan, args: tuple, kwargs: dict[str, Any], leaves: list[Any], strategy: str, before: Any
    ) -> tuple[Sequence[Result], Branched]:
        """The results of the branches; once more with whole tensors where the model itself uses a factored weight.

        Args:
            plan, args, kwargs, strategy: as for `run`.
            leaves: of the inputs.
            before: the states of what the model draws random numbers from, if it is new.
        """
        versions, restarted = loop.versions(leaves), False
        while True:
            known = len(self.whole)
            try:
                with self.whole.during():
                    results = execute(self, plan, args, kwargs, strategy)
                    # before anything is kept, since it may find that the branches do not fit together
                    branched = combined(plan, results)
                if len(self.whole) == known:
                    return results, branched
            except BaseException as error:
                self.forget()
                if len(self.whole) == known and not isinstance(error, Unfactored):
                    raise
            if loop.versions(leaves) != versions:
                raise RuntimeError(
                    f"{self.root._get_name()} writes into its inputs before it uses the weight of a layer ({', '.join(self.whole)}) by itself, "
                    "so that the call cannot be started again; call once more with new inputs"
                )
            self.forget()
            self.decisions.clear()
            if before is not None:
                self.sources(leaves).restore(before)
            if restarted or len(self.whole) == known:  # a model that goes through all its parameters
                self.whole.update(plan.rules)
            restarted = True

    def _keep(self, plan: Plan, results: Sequence[Result], branched: Branched) -> None:
        _keep_buffers(plan, results)
        alone = self.decisions[self.kind].rung in ("vmap", "rescue")
        self.keep(plan, alone)
        if not alone and not plan.dealt and not all(isinstance(leaf, Tensor) for leaf in branched.leaves):
            columns = zip(*(flatten(result.output)[0] for result in results), strict=True)
            self.objects.kept([branch_key(plan, index) for index in plan.indices], columns)

    def _check_reach(self, plan: Plan, results: Sequence[Result], args: tuple, kwargs: dict[str, Any]) -> None:
        """Once: do the outputs depend on the tensors that the methods own, and on none of those that they have replaced?"""
        rules = {slot: rule for slot, rule in plan.rules.items() if rule.axes()}
        index = plan.indices[-1]
        if not rules or not any(index.values()):
            return
        if valueless():
            return  # the graph is not the one that is looked at here
        own = [plan.bank.get(name) for rule in rules.values() for name in rule.names(index)]
        frozen = bool(own) and not any(tensor.requires_grad for tensor in own)  # no graph can show them
        if frozen and self._looked:
            return
        last = results[-1]
        if not torch.is_grad_enabled():
            last = self._with_gradients(
                replace(plan, axes=(), fixed=index, dealt="", bank=Bank(plan.bank.get), interventions=()), args, kwargs
            )
        outputs = [leaf for leaf in tensors(last.output) if leaf.requires_grad]
        self._looked = True
        if not outputs:
            return
        self._checked = not frozen
        found = reached(outputs)
        # what comes in may have been computed by the given model itself
        before = reached([leaf for leaf in tensors((args, kwargs)) if leaf.requires_grad])
        stale = sorted(name for key, name in self._originals().items() if key in found and key not in before)
        if stale:
            raise UnreachedParametersError(
                f"the model uses {', '.join(stale[:3])} of the model that was given, by a reference that does not move "
                "along (a partial function or an object that holds the tensor): the branches would not differ there. Reach it through "
                "the module, as self.layer.weight"
            )
        if own and not frozen and found.isdisjoint(map(id, own)):
            raise UnreachedParametersError(
                f"no output depends on {', '.join(sorted(rules)[:4])}{' ...' if len(rules) > 4 else ''}, which should differ between the "
                "branches: these layers did not run, or their result is detached. Choose more layers"
            )

    def _with_gradients(self, plan: Plan, args: tuple, kwargs: dict[str, Any]) -> Result:
        """One branch once more, with gradients, for looking only."""
        leaves, rebuild = flatten((args, kwargs))
        sources = self.sources(leaves)
        before = sources.all()
        self.save()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                copies = rebuild(
                    [duplicate(leaf) if not isinstance(leaf, Tensor) else leaf.detach().clone() for leaf in leaves]
                )
                return loop.run(self, plan, *copies)[0]
        finally:
            sources.restore(before)
            if self.impure:
                self.forget()


def _keep_buffers(plan: Plan, results: Sequence[Result]) -> None:
    if not (results.buffers if isinstance(results, Together) else any(result.buffers for result in results)):
        return
    buffers = Buffers()
    for index, result in zip(plan.indices, results, strict=True):
        for slot, value in result.buffers.items():
            name, row = plan.rules[slot].home(index) if slot in plan.rules else (slot, None)
            buffers.add(name, row, value.detach())
    buffers.merge(plan.bank)


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
