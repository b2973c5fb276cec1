"""The universal executor: one pass a branch, each on a clone of the model that keeps its tensors installed.

They stay installed because a model may be run again in the backward pass (activation checkpointing, reversible layers); swapping them out
after the forward pass would give such a model silently wrong gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .body import Result, call
from .plan import Plan
from .random import Streams
from .tree import flatten, version

if TYPE_CHECKING:
    from .run import Engine


def versions(leaves: list[Any]) -> list[int]:
    """How often each tensor among the leaves was written in place."""
    return [version(leaf) for leaf in leaves]


def run(engine: Engine, plan: Plan, args: tuple, kwargs: dict[str, Any]) -> list[Result]:
    """All branches, one after another.

    Returns:
        One result a branch, in the order of `plan.indices()`.
    """
    results: list[Result] = []
    leaves, rebuild = flatten((args, kwargs))
    streams = Streams(plan.axes, leaves)
    for k, index in enumerate(plan.indices()):
        last = k == plan.size - 1  # it works on the caller's own tensors: what the model writes there is written once
        given = leaves
        if plan.dealt:
            given = [_rows(leaf, plan.rows[index[plan.dealt]]) for leaf in leaves]
        elif not last and engine.writes_inputs is not False:
            given = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        before = versions(given)
        with streams.branch(index), engine.attributes(k):
            results.append(call(engine.clone(k), plan, index, *rebuild(given)))
        if versions(given) != before:
            if engine.writes_inputs is False and not last:
                raise RuntimeError(
                    "the model wrote into its inputs, which it did not do in its first call, so the other branches would see other inputs; "
                    "copy the input at the start of forward"
                )
            engine.writes_inputs = True
    engine.writes_inputs = bool(engine.writes_inputs)
    return results


def _rows(leaf: Any, rows: Tensor) -> Any:
    return leaf.index_select(0, rows.to(leaf.device)) if isinstance(leaf, Tensor) and leaf.dim() else leaf
