"""The tensors of a plan with the axes of its branches in front, as a pass under vmap takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..branch import Clone
from ..plan import Plan

BranchedTensor = tuple[Tensor, tuple[str, ...]]  # a tensor with branch axes in front, and their names


def branched_tensors(plan: Plan, clone: Clone, start: int, count: int) -> dict[str, BranchedTensor]:
    """For each slot its tensor with the branch axes in front, and their names; of the outermost axis only `count` branches from `start` on.

    Where a layer takes its weight in factors, those of each, by slot and number.
    """
    factored = clone.factored_slots(plan)
    rules = {slot: rule for slot, rule in plan.rules.items() if slot not in factored}
    rules.update({f"{slot}@{i}": factor for slot in factored for i, factor in enumerate(plan.rules[slot].factors)})
    active = {axis.name: i for i, axis in enumerate(plan.axes)}
    order = tuple(active)
    branched: dict[str, BranchedTensor] = {}
    for slot, rule in rules.items():
        tensor, axes = rule.dense(plan.bank)
        if axes and axes != order:
            tensor, axes = _along_axes(tensor, axes, plan.fixed, active)
        if axes and active[axes[0]] == 0 and count < tensor.shape[0]:
            tensor = tensor.narrow(0, start, count)
        branched[slot] = tensor, axes
    if clone.buffers:
        branched.update(_branched_buffers(plan, clone, branched, count))
    return branched


def heads_on_trunks(plan: Plan) -> bool:
    """Whether each model along the outer of two axes has a trunk of its own, with heads along the inner one."""
    if len(plan.axes) != 2 or not plan.axes[1].own_first or plan.axes[0].randomness == "same" or plan.shares_trunk:
        return False
    if (
        plan.dealt
        or plan.state
        or plan.ragged is not None
        or plan.interventions
        or any(rule.factors for rule in plan.rules.values())
    ):
        return False
    return any(plan.axes[1].name not in rule.axes() for rule in plan.rules.values())


def tensors_of_one(plan: Plan, clone: Clone) -> dict[str, BranchedTensor]:
    """As `branched_tensors`, of one model with heads; by rows of the bank, whose gradients are put together once for all models."""
    (heads,) = plan.axes
    branched: dict[str, BranchedTensor] = {}
    for slot, rule in plan.rules.items():
        if heads.name in rule.axes():
            rows = [rule.pick(plan.bank, {**plan.fixed, heads.name: i}) for i in range(heads.size)]
            branched[slot] = torch.stack(rows), (heads.name,)
        else:
            branched[slot] = rule.pick(plan.bank, plan.fixed), ()
    if clone.buffers:
        branched.update(_branched_buffers(plan, clone, branched, heads.size))
    return branched


def _along_axes(tensor: Tensor, axes: tuple[str, ...], fixed: dict[str, int], active: dict[str, int]) -> BranchedTensor:
    """A tensor with those of its axes in front that the plan runs along, in the plan's order.

    Args:
        tensor: it has `axes` in front.
        axes: their names.
        fixed: positions along axes that are held.
        active: number of each axis that the plan runs along, outermost first.
    """
    for position in reversed(range(len(axes))):  # an axis that is not active stands at its fixed position
        if axes[position] not in active:
            tensor = tensor.select(position, fixed.get(axes[position], 0))
    names = [name for name in axes if name in active]
    # outermost axis first: functorch writes batch norm's statistics into a copy where batch dimensions lie otherwise
    order = sorted(range(len(names)), key=lambda i: active[names[i]])
    if order != list(range(len(names))):
        tensor = tensor.permute(*order, *range(len(names), tensor.dim()))
    return tensor, tuple(names[i] for i in order)


def _branched_buffers(
    plan: Plan, clone: Clone, branched: dict[str, BranchedTensor], count: int
) -> dict[str, BranchedTensor]:
    """The buffers of the branches; copies of those that the pass may write into."""
    ruled = {name for slot, rule in plan.rules.items() if slot in clone.first_place for name in rule.axes()}
    training = any(module.training for module in clone.tree.values())
    # noise reaches the statistics in training, so each branch needs its own
    axes = [axis for axis in plan.axes if axis.name not in ruled] if training else []
    sizes = [count if axis.name == plan.axes[0].name else axis.size for axis in axes]
    buffers: dict[str, BranchedTensor] = {
        slot: (plan.bank.get(slot), ()) for slot in clone.buffers - clone.copied_buffers - branched.keys()
    }
    with torch.inference_mode(False):
        for slot in clone.copied_buffers:
            if slot in branched:
                tensor, names = branched[slot]
                buffers[slot] = tensor.clone(memory_format=torch.contiguous_format), names
            else:
                tensor = plan.bank.get(slot)
                buffers[slot] = tensor.expand((*sizes, *tensor.shape)).clone(), tuple(axis.name for axis in axes)
    return buffers


__all__ = ["BranchedTensor", "branched_tensors", "heads_on_trunks", "tensors_of_one"]
