"""The universal executor: one pass a branch, each on a clone of the model that keeps its tensors installed.

They stay installed because a model may be run again in the backward pass (activation checkpointing, reversible layers); swapping them out
after the forward pass would give such a model silently wrong gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...errors import NotDealableError
from ..branch import Result, call
from ..effects.attributes import mark
from ..effects.objects import DEPTH
from ..effects.random import Streams
from ..plan import Plan
from ..tree import flatten, version

if TYPE_CHECKING:
    from ..run import Engine


def versions(leaves: list[Any]) -> list[int]:
    """How often each tensor among the leaves was written in place."""
    return [version(leaf) for leaf in leaves]


def run(engine: Engine, plan: Plan, args: tuple, kwargs: dict[str, Any], first: bool = False) -> list[Result]:
    """All branches, one after another.

    Returns:
        One result a branch, in the order of `plan.indices`.
    """
    results: list[Result] = []
    leaves, rebuild = flatten((args, kwargs))
    streams = Streams(plan.axes, engine.sources(leaves), engine.draws_elsewhere())
    keys = engine.begin(plan)
    objects = engine.objects.branches(leaves, keys, apart=bool(plan.dealt))
    held = [i for i, own in enumerate(objects) if own is not None]
    for k, index in enumerate(plan.indices):
        last = k == plan.size - 1  # it works on the caller's own tensors: what the model writes there is written once
        given = leaves
        if plan.dealt:
            given = [_rows(leaf, plan.rows[index[plan.dealt]]) for leaf in leaves]
        elif not last and engine.writes_inputs is not False:
            given = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if held:
            given = [own[keys[k]] if own is not None else leaf for leaf, own in zip(given, objects, strict=True)]
        before = versions(given)
        marks = [mark(given[i], DEPTH) for i in held]
        clone = engine.clone(plan, index)
        # the caller's own lists and dicts as well, where nothing in them was exchanged
        inputs = (args, kwargs) if last and all(a is b for a, b in zip(given, leaves, strict=True)) else rebuild(given)
        with streams.branch(index), engine.watching(clone, plan, k == 0):
            results.append(call(clone, plan, plan.values(index, clone), index, *inputs))
        if not last and (written := results[-1].buffers.keys() - clone.own):
            raise RuntimeError(
                f"the model wrote into its buffer {min(written)}, which it did not do in its first call in this mode, so the other branches "
                "would start from another one; write into it always, or in training mode only"
            )
        if versions(given) != before:
            if engine.writes_inputs is False and not last:
                raise RuntimeError(
                    "the model wrote into its inputs, which it did not do in its first call, so the other branches would see other inputs; "
                    "copy the input at the start of forward"
                )
            engine.writes_inputs = True
        if [mark(given[i], DEPTH) for i in held] != marks:
            if engine.objects.changes is False and not last:
                raise RuntimeError(
                    "the model changed an object among its inputs, which it did not do in its first call, so the other branches would see "
                    "another one; start with a new wrapped object, or copy it at the start of forward"
                )
            engine.objects.changes = True
    engine.writes_inputs = bool(engine.writes_inputs)
    if held:
        engine.objects.changes = bool(engine.objects.changes)
        if engine.objects.changes and plan.dealt:
            raise NotDealableError("the model changes an object among its inputs")
        if engine.objects.changes:
            for own in objects:
                if own is not None:
                    engine.objects.remember(keys, [own[key] for key in keys])
    return results


def _rows(leaf: Any, rows: Tensor) -> Any:
    return (
        leaf.index_select(0, rows.to(leaf.device, non_blocking=True))
        if isinstance(leaf, Tensor) and leaf.dim()
        else leaf
    )
