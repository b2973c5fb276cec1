"""Tensors of a plan with the branch axes in front, the inputs of a pass under vmap."""

from __future__ import annotations

import torch
from torch import Tensor

from ..branch import Clone
from ..plan import Plan

BranchedTensor = tuple[Tensor, tuple[str, ...]]  # a tensor with branch axes in front, and the names of these axes


def branched_tensors(plan: Plan, clone: Clone, start: int, count: int) -> dict[str, BranchedTensor]:
    """Return, by slot, the tensors with the branch axes in front; of the outermost axis only `count` branches from `start` on.

    Weights that are installed as factors are returned as three tensors with keys "slot@0", "slot@1" and "slot@2".
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
    """Return whether each model along the outer of two axes has its own trunk, with heads along the inner axis."""
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
    """Return `branched_tensors` of one model with heads, from rows of the bank, whose gradients are stacked once for all models."""
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
    """Select fixed positions and permute the remaining axes into the plan's order.

    Args:
        tensor: tensor with `axes` in front.
        axes: names of its leading axes.
        fixed: positions of fixed axes.
        active: order of the plan's axes, by name.
    """
    for position in reversed(range(len(axes))):  # an inactive axis is fixed at one position
        if axes[position] not in active:
            tensor = tensor.select(position, fixed.get(axes[position], 0))
    names = [name for name in axes if name in active]
    # outermost axis first: with another order of batch dimensions, functorch writes batch norm's statistics into a copy
    order = sorted(range(len(names)), key=lambda i: active[names[i]])
    if order != list(range(len(names))):
        tensor = tensor.permute(*order, *range(len(names), tensor.dim()))
    return tensor, tuple(names[i] for i in order)


def _branched_buffers(
    plan: Plan, clone: Clone, branched: dict[str, BranchedTensor], count: int
) -> dict[str, BranchedTensor]:
    """Return the buffers of the branches by slot, as copies if the pass may write into them."""
    axes_of_rules = {name for slot, rule in plan.rules.items() if slot in clone.first_place for name in rule.axes()}
    training = any(module.training for module in clone.tree.values())
    # in training mode noise affects running statistics, so each branch needs its own
    axes = [axis for axis in plan.axes if axis.name not in axes_of_rules] if training else []
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
                if axes:
                    tensor = tensor.expand((*sizes, *tensor.shape))
                buffers[slot] = tensor.clone(), tuple(axis.name for axis in axes)
    return buffers


__all__ = ["BranchedTensor", "branched_tensors", "heads_on_trunks", "tensors_of_one"]
