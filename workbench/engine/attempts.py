"""Attempts to run an executor, which leave no trace if it refuses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .effects.inputs import are_plain, is_object
from .effects.outside import outside_undone
from .effects.parameters import undo_writes
from .effects.random import were_drawn
from .executors import loop
from .plan import Plan
from .request import Request
from .results import Result
from .state import BranchedState, unseal
from .tree import flatten, tensors, versions


def _no_obstacle(root: nn.Module, plan: Plan) -> str:
    return ""


@dataclass(frozen=True)
class Executor:
    """A way to run the branches, and what it can run.

    Args:
        run: function of a request that returns one result per branch, in the order of `plan.indices`, or raises.
        obstacle: function (module, plan) -> reason why the executor cannot run the plan on this module, "" if none is known.
        at_once: whether all branches run in one pass, on the clone of the first branch.
        trunk_only: whether the executor pays off only for branches that share a trunk.
        needs_rules: whether it refuses operations that have no batching rule.
    """

    run: Callable[[Request], Sequence[Result]]
    obstacle: Callable[[nn.Module, Plan], str] = _no_obstacle
    at_once: bool = False
    trunk_only: bool = False
    needs_rules: bool = False


class SpoiledInputsError(Exception):
    """Raised if an executor failed after it had changed the inputs, so that no other executor can be tried."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def attempt(executor: Executor, request: Request) -> Sequence[Result]:
    """Run a request by an executor; the first of its kind on copies of the inputs, to detect a model that writes into them.

    Inference mode, if it is on, is replaced by no_grad: tensors created in inference mode do not count in-place writes.

    Raises:
        SpoiledInputsError: if the executor failed and the inputs have changed.
        Exception: any other refusal of the executor; its side effects are undone.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return attempt(executor, request)
    if not request.first and are_plain(request.flat[0]):
        return _attempt_again(executor, request)
    first, clones = request.first, request.clones
    leaves, rebuild = request.flat
    states = [leaf for leaf in leaves if isinstance(leaf, BranchedState)]
    inputs = list(map(_copy_leaf, leaves)) if first else leaves
    saved_states = [] if first else [state.copy(share=True) for state in states]
    tried = request
    if first:
        args, kwargs = rebuild(inputs)
        tried = replace(request, args=args, kwargs=kwargs)
    versions_before = _versions(inputs)
    objects = [leaf for leaf in inputs if is_object(leaf)]
    if objects and request.effects.changes_objects is not False:
        raise RuntimeError(f"a {type(objects[0]).__name__} is among the inputs, which forward may change")
    sources = clones.sources(leaves) if first else None
    before = None if sources is None else sources.all()
    draws_once = first and executor.at_once and any(a.randomness != "same" and a.size > 1 for a in request.plan.axes)
    undo = undo_writes(clones.root) if first else None
    random_before = sources.outside_vmap() if sources is not None and draws_once else []
    try:
        results = executor.run(tried)
        if first and _versions(inputs) != versions_before:
            raise RuntimeError("the model writes into its inputs")
        if first and request.autocast and executor.at_once:
            _refuse_other_dtypes(request, results)
        if sources is not None and draws_once and were_drawn(random_before, sources.outside_vmap()):
            raise RuntimeError(
                "the model draws from numpy's or Python's random numbers or from a generator of its own, which vmap would do once for all"
            )
        if first:
            for state, copied in zip(states, (leaf for leaf in inputs if isinstance(leaf, BranchedState)), strict=True):
                state.take(copied)  # the model may have changed a cache in place
        return results
    except Exception as error:
        clones.forget()  # a failed pass may have left invalid tensors in its clone
        if undo is not None:
            undo()
            request.plan.bank.forget_rows()
        if sources is not None and before is not None:
            sources.restore(before)
        elif _versions(inputs) != versions_before:
            raise SpoiledInputsError(error) from None
        for state, copied in zip(states, saved_states, strict=False):
            state.take(copied)
        raise


def _attempt_again(executor: Executor, request: Request) -> Sequence[Result]:
    """Do what `attempt` does for plain tensors after the first call of a kind."""
    before = versions(request.flat[0])
    try:
        return executor.run(request)
    except Exception as error:
        request.clones.forget()
        if versions(request.flat[0]) != before:
            raise SpoiledInputsError(error) from None
        raise


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, BranchedState):
        return leaf.copy()
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _versions(leaves: list[Any]) -> list[int]:
    """Return the version counter of each tensor among the leaves, including those inside states."""
    inside = [tensor for leaf in leaves if isinstance(leaf, BranchedState) for tensor in leaf.tensors()]
    return versions([*leaves, *inside])


def _refuse_other_dtypes(request: Request, results: Sequence[Result]) -> None:
    """Raise RuntimeError if outputs have other dtypes under autocast than those of a branch that runs by itself."""
    plan = request.plan
    fixed = {**plan.fixed, **{axis.name: 0 for axis in plan.axes}}
    sources = request.sources()
    before = sources.all()
    try:
        single_plan = replace(plan, axes=(), fixed=fixed, dealt="", rows=(), keep_state=False)
        single = replace(_with_copies(request), plan=single_plan, first=False, receiver=None)
        with outside_undone(request.clones.root, single_plan, single.flat[0]) as watch, watch:
            expected = tensors(unseal(loop.run(single)[0].output))
    finally:
        sources.restore(before)
    for tensor, wanted in zip(tensors(results[0].output), expected, strict=True):
        if tensor.dtype != wanted.dtype:
            raise RuntimeError(f"autocast gives {tensor.dtype} where a branch by itself has {wanted.dtype}")


def _with_copies(request: Request) -> Request:
    """Return the request on copies of its tensors."""
    leaves, rebuild = flatten((request.args, request.kwargs))
    args, kwargs = rebuild(list(map(_copy_leaf, leaves)))
    return replace(request, args=args, kwargs=kwargs)


def seconds(executor: Executor, request: Request) -> float:
    """Return the seconds that an executor takes for a request, backward pass included; random generators are restored."""
    clones = request.clones
    leaves = flatten((request.args, request.kwargs))[0]
    sources = clones.sources(leaves)
    before = sources.all()
    start = _now(leaves)
    try:
        copies = executor.run is loop.run or any(isinstance(leaf, BranchedState) for leaf in leaves)
        tried = _with_copies(request) if copies else request
        results = loop.run(tried) if executor.run is loop.run else attempt(executor, tried)
        outputs = [leaf for result in results for leaf in tensors(result.output) if leaf.requires_grad]
        parameters = [p for p in clones.root.parameters() if p.requires_grad]
        if outputs and parameters:
            torch.autograd.grad([leaf.abs().sum() for leaf in outputs], parameters, allow_unused=True)
        return _now(leaves) - start
    finally:
        sources.restore(before)
        request.plan.bank.forget_rows()
        if clones.impure:
            clones.forget()


def _now(leaves: list[Any]) -> float:
    if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves):
        torch.cuda.synchronize()
    return time.perf_counter()
