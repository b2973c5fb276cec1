"""The universal executor: one pass per branch, each on a clone of the model that keeps its tensors installed.

The tensors stay installed because parts of a model may run again in the backward pass (activation checkpointing, reversible layers); removing
them after the forward pass would silently give wrong gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...errors import NotDealableError
from ..branch import Clone
from ..branch_pass import run_branch
from ..effects.inputs import Key, object_mark
from ..effects.random import values_unavailable
from ..effects.reseeding import SeededNoiseError, SeedWatch
from ..effects.written import check_written
from ..plan import Index, Plan
from ..request import Request
from ..results import Result, folded, with_axes
from ..state import BranchedState, Sealed, own_sealed
from ..tree import counting_writes, flatten, versions

Objects = list[dict[Key, Any] | None]  # by leaf of the inputs: the objects of all branches, None for other leaves


def run(request: Request) -> list[Result]:
    """Run all branches one after another.

    Returns:
        One result per branch, in the order of `plan.indices`.
    """
    plan, effects = request.plan, request.effects
    results: list[Result] = []
    leaves, rebuild = request.flat
    sources = request.sources(leaves)
    streams = request.streams(sources)
    keys = request.begin()
    objects = effects.objects_of_branches(leaves, keys, copy_first=bool(plan.dealt))
    places = [i for i, by_branch in enumerate(objects) if by_branch is not None]
    for leaf in leaves:
        if isinstance(leaf, BranchedState):
            leaf.unshare()
    states = request.states(leaves)
    passes: list[list[Any]] = []  # for each branch: its input leaves that it has written into, None elsewhere
    saved = leaves
    # outputs are folded only if no later check needs them
    keeps_none = plan.folding is not None and request.trackers is None and effects.writes_tensors is False
    folding = plan.folding() if keeps_none and plan.folding is not None else None
    receive = None if request.receiver is None else request.receiver()
    watches_seeds = (
        any(intervention.draws_as_model for intervention in plan.interventions)
        and request.training not in request.clones.watched
        and not values_unavailable()
    )
    for k, index in enumerate(plan.indices):
        last = k == plan.size - 1  # it uses the caller's tensors, so that in-place writes reach the caller once
        branch_leaves = _leaves_of_branch(leaves, plan, index, copy=not last and effects.writes_tensors is not False)
        if last and effects.writes_tensors is not False and plan.size > 1 and not plan.dealt:
            saved = _leaves_of_branch(leaves, plan, index, copy=True)
        for i in places:
            if branch_leaves[i] is leaves[i]:
                branch_leaves[i] = objects[i][keys[k]]  # type: ignore[index]
        for i, parts in states.items():
            branch_leaves[i] = Sealed(parts[k])
        written, marks = versions(branch_leaves), [object_mark(branch_leaves[i]) for i in places]
        clone = request.clones.at(keys[k])
        args, kwargs = rebuild(branch_leaves)
        seeds = SeedWatch() if watches_seeds and k == 0 else nullcontext()
        with streams.branch(index), request.watching(clone, first=k == 0), seeds:
            results.append(run_branch(clone, plan, clone.values(plan, index), index, args, kwargs, sealed=bool(states)))
        if isinstance(seeds, SeedWatch) and seeds.shared:
            raise SeededNoiseError
        if folding is not None:
            results[-1].output = folded(folding, results[-1].output, len(plan.axes))
        if receive is not None:
            output_leaves, rebuild_output = flatten(results[-1].output)
            receive(with_axes(output_leaves, len(plan.axes)), rebuild_output)
        if not last:
            _refuse_new_buffers(clone, results[-1])
        now = versions(branch_leaves)
        passes.append([leaf if now[i] != written[i] else None for i, leaf in enumerate(branch_leaves)])
        if now != written:
            _note_written_tensors(request, last)
        if [object_mark(branch_leaves[i]) for i in places] != marks:
            _note_changed_objects(request, last)
    if effects.writes_tensors and plan.size > 1:
        _check_written(request, leaves, saved, passes, results)
    effects.writes_tensors = bool(effects.writes_tensors)
    if places:
        _keep_objects(request, keys, objects)
    return results


def _leaves_of_branch(leaves: list[Any], plan: Plan, index: Index, copy: bool) -> list[Any]:
    """Return the input leaves of a branch: its rows if rows are dealt, otherwise all leaves, with `copy` as copies."""
    if plan.dealt:
        rows = plan.rows[index[plan.dealt]]
        values = [select_rows(leaf, rows) for leaf in leaves] if plan.cut is None else plan.cut(leaves, rows)
    else:
        values = [leaf.clone() if copy and isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return list(map(counting_writes, values))


def select_rows(leaf: Any, rows: Tensor) -> Any:
    """Return the given rows of a tensor; other leaves and scalars are returned unchanged."""
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    return leaf.index_select(0, rows.to(leaf.device, non_blocking=True))


def _refuse_new_buffers(clone: Clone, result: Result) -> None:
    if written := result.buffers.keys() - clone.copied_buffers:
        raise RuntimeError(
            f"the model wrote into its buffer {min(written)}, which it did not do in its first call in this mode, so the other branches "
            "would start from another one; write into it always, or in training mode only"
        )


def _check_written(
    request: Request, leaves: list[Any], saved: list[Any], passes: list[list[Any]], results: list[Result]
) -> None:
    """Check that the branches have written the same into input tensors; on an error, restore the caller's tensors."""
    try:
        states = check_written(request.plan, leaves, passes, [result.output for result in results])
    except BaseException:
        with torch.no_grad():
            for leaf, copied, written in zip(leaves, saved, passes[-1], strict=True):
                if written is not None and copied is not leaf:
                    written.copy_(copied)
        raise
    if states:  # the last branch has used the caller's tensors, so that its state shares memory with them
        results[-1].output = own_sealed(results[-1].output)
    for leaf in states if request.plan.keep_state else ():
        request.effects.written.add(leaf)


def _note_written_tensors(request: Request, last: bool) -> None:
    if request.effects.writes_tensors is False and not last:
        raise RuntimeError(
            "the model wrote into its inputs, which it did not do in its first call, so the other branches would see other inputs; "
            "copy the input at the start of forward"
        )
    request.effects.writes_tensors = True


def _note_changed_objects(request: Request, last: bool) -> None:
    if request.effects.changes_objects is False and not last:
        raise RuntimeError(
            "the model changed an object among its inputs, which it did not do in its first call, so the other branches would see "
            "another one; start with a new wrapped object, or copy it at the start of forward"
        )
    request.effects.changes_objects = True


def _keep_objects(request: Request, keys: Sequence[Key], objects: Objects) -> None:
    """Store the objects of the branches for later calls if forward changes them."""
    effects = request.effects
    effects.changes_objects = bool(effects.changes_objects)
    if not effects.changes_objects:
        return
    if request.plan.dealt:
        raise NotDealableError("the model changes an object among its inputs")
    for by_branch in objects:
        if by_branch is not None:
            effects.remember(keys, [by_branch[key] for key in keys])
