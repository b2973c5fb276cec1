"""One branch: install its tensors in a clone, run the model there, read back what changed."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .clone import places
from .plan import Index, Plan
from .state import modules
from .tree import tensors, version


class Clone:
    """A module tree of its own for one branch.

    Args:
        root: a structural copy of the model.
        slots: id of a tensor that the tree holds -> slot name, for every taken-over parameter and for every buffer.
        buffers: the slot names that are buffers.
    """

    def __init__(self, root: nn.Module, slots: dict[int, str], buffers: set[str]) -> None:
        self.root = root
        self.tree = modules(root)
        self.places = places(root, slots)
        self.buffers = buffers
        self.home: dict[str, tuple[Any, Any]] = {}
        for container, key, slot in self.places:
            self.home.setdefault(slot, (container, key))

    def install(self, values: dict[str, Tensor]) -> None:
        for container, key, slot in self.places:
            if slot in values:
                container[key] = values[slot]

    def parameters(self) -> dict[int, str]:
        """id of every parameter in place -> its name, the taken-over ones included."""
        return {
            id(tensor): f"{path}.{name}" if path else name
            for path, module in self.tree.items()
            for name, tensor in module._parameters.items()
            if tensor is not None
        }


@dataclass
class Result:
    """What one branch gave."""

    output: Any
    buffers: dict[str, Tensor]  # the slots whose value changed
    taps: dict[str, Tensor] = field(default_factory=dict)


def call(clone: Clone, plan: Plan, index: Index, args: tuple, kwargs: dict[str, Any]) -> Result:
    """Run one branch on a clone."""
    values = {slot: rule.pick(plan.bank, index) for slot, rule in plan.rules.items()}
    with torch.inference_mode(False):  # what is written into must keep count of it, in inference mode as well
        for slot in clone.buffers:
            values[slot] = (values[slot] if slot in values else plan.bank.get(slot)).clone()
    return passed(clone, plan, values, index, args, kwargs)


def passed(
    clone: Clone, plan: Plan, values: dict[str, Tensor], index: Index, args: tuple, kwargs: dict[str, Any]
) -> Result:
    """Run the clone's forward with the given tensors; buffers among them must be the branch's own."""
    for intervention in plan.interventions:
        values = intervention.tensors(values, index)
        args, kwargs = intervention.inputs(args, kwargs)
    clone.install(values)
    versions = {slot: version(values[slot]) for slot in clone.buffers}
    with ExitStack() as stack:
        if plan.interventions:
            parameters, inputs = clone.parameters(), tensors((args, kwargs))
            state = {id(values[slot]) for slot in clone.buffers}
            for intervention in plan.interventions:
                context = intervention.active(parameters, state, inputs)
                if context is not None:
                    stack.enter_context(context)
        output = nn.Module._call_impl(
            clone.root, *args, **kwargs
        )  # with the model's own hooks, but past a __call__ of its class
    # batch norm does not count its writes into running statistics, so in training every buffer is taken for written
    training = any(module.training for module in clone.tree.values())
    new: dict[str, Tensor] = {}
    for slot in clone.buffers:
        container, key = clone.home[slot]
        value = container[key]
        if training or value is not values[slot] or version(value) != versions[slot]:
            new[slot] = value
    taps = {name: tensor for intervention in plan.interventions for name, tensor in intervention.taps.items()}
    return Result(output, new, taps)
