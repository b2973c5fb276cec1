"""One pass of a branch on its copy of the model: install its tensors, run the model, collect the buffers it has written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .branch import Clone, is_batched
from .effects.containers import Containers, holds_mutable
from .plan import Index, Plan
from .results import Result
from .state import seal, unseal
from .tree import tensors, version


def refuse_recomputing(
    why: str = "activation checkpointing recomputes outside this pass",
) -> AbstractContextManager[None]:
    """Return a context manager for a pass that cannot be repeated in the backward pass; activation checkpointing raises inside it.

    Args:
        why: the error message.
    """
    return _disabled_recomputing(why) if torch.is_grad_enabled() else nullcontext()


@contextmanager
def _disabled_recomputing(why: str) -> Iterator[None]:
    with torch.autograd.graph.disable_saved_tensors_hooks(why):
        try:
            yield
        except RuntimeError as error:
            if why not in str(error):
                raise
            raise RuntimeError(why) from None


def run_branch(
    clone: Clone,
    plan: Plan,
    values: dict[str, Tensor],
    index: Index,
    args: tuple,
    kwargs: dict[str, Any],
    mode: AbstractContextManager[Any] | None = None,
    sealed: bool = False,
) -> Result:
    """Run one branch on a clone.

    Args:
        clone: the clone to run on.
        plan: the plan, whose interventions are applied.
        values: tensors to install, by slot; buffers among them must be the branch's own.
        index: index of the branch.
        args, kwargs: the inputs.
        mode: context manager to enter around the model itself, inside the interventions.
        sealed: whether the inputs contain sealed state.
    """
    picked = values
    for intervention in plan.interventions:
        values = intervention.tensors(values, index)
        args, kwargs = intervention.inputs(args, kwargs, index)
    clone.install(values)
    versions = {slot: _count_writes(values[slot]) for slot in clone.buffers}
    if not plan.interventions and mode is None:
        args, kwargs, containers = _unseal_inputs(args, kwargs, sealed)
        output = seal(clone.call_model(plan, *args, **kwargs), plan.state)
        clone.refuse_replaced(values)
        return Result(output, _written_buffers(clone, values, versions), inputs=containers)
    with ExitStack() as stack:
        if plan.interventions:
            # a compiled function of the model would hide its layers, or keep those of this pass; without torch's compiler, whose import takes a
            # second, there is none
            if "torch._dynamo" in sys.modules and not torch.compiler.is_compiling():
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            parameters, inputs = clone.parameters(), tensors((args, kwargs))
            if inputs:
                # what an earlier call has left behind, such as a table of positions, is no activation of this one
                inputs += clone.left_behind()
            state = [*(values[slot] for slot in clone.buffers), *clone.constants()]
            for intervention in plan.interventions:
                context = intervention.active(parameters, state, inputs)
                if context is not None:
                    stack.enter_context(context)
                    if intervention.draws:  # checkpointing would draw other noise in the backward pass
                        why = (
                            "noise on activations cannot be drawn again where activation checkpointing recomputes them in the backward pass, "
                            f"as any hooks of saved tensors might (save_on_cpu, too): {intervention.checkpoint_remedy}"
                        )
                        stack.enter_context(refuse_recomputing(why))
        if mode is not None:
            stack.enter_context(mode)
        args, kwargs, containers = _unseal_inputs(args, kwargs, sealed)
        output = seal(clone.call_model(plan, *args, **kwargs), plan.state)
    clone.refuse_replaced(values)
    for intervention in reversed(plan.interventions):
        output = intervention.output(output, index)
    written = _written_buffers(clone, values, versions)
    if values is not picked and not torch.is_grad_enabled():  # no backward pass needs the tensors of this pass
        clone.install({slot: value for slot, value in picked.items() if slot not in clone.buffers})
    taps = {name: tensor for intervention in plan.interventions for name, tensor in intervention.taps.items()}
    return Result(output, written, taps, containers)


def _unseal_inputs(
    args: tuple, kwargs: dict[str, Any], sealed: bool
) -> tuple[tuple[Any, ...], dict[str, Any], Containers | None]:
    """Return the inputs without seals, and the containers among them that the model may fill."""
    unsealed = unseal((args, kwargs)) if sealed else (args, kwargs)
    return (*unsealed, Containers(args, kwargs, unsealed) if holds_mutable(args, kwargs) else None)


def _written_buffers(clone: Clone, values: dict[str, Tensor], versions: dict[str, int]) -> dict[str, Tensor]:
    """Return the buffers that a pass has changed, by slot."""
    if not clone.buffers:
        return {}
    # batch norm does not count its writes into running statistics, so in training mode every buffer counts as written
    training = any(module.training for module in clone.tree.values())
    written: dict[str, Tensor] = {}
    for slot in clone.buffers:
        container, key = clone.first_place[slot]
        value = container[key]
        if training or value is not values[slot] or _count_writes(value) != versions[slot]:
            written[slot] = value
    return written


def _count_writes(tensor: Tensor) -> int:
    """Return the version counter of a tensor, for a batched tensor that of the tensor it wraps."""
    while is_batched(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return version(tensor)
