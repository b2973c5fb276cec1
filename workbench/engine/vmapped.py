"""The fast executor: one pass under nested `torch.vmap`, which carries the branch axis physically and so is right, or raises."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .body import Result, passed
from .plan import Plan
from .state import changed, fingerprint, held_tensors, put_back
from .tree import flatten

if TYPE_CHECKING:
    from .run import Engine

_RECOMPUTES = "activation checkpointing recomputes outside vmap"


def run(engine: Engine, plan: Plan, args: tuple, kwargs: dict[str, Any]) -> list[Result]:
    """All branches in one pass.

    What comes before the first tensor that differs between branches is computed once.

    Returns:
        One result a branch, in the order of `plan.indices()`.
    """
    clone = engine.clone(0)
    slots: list[str] = []
    stacked: list[Tensor] = []
    names: list[tuple[str, ...]] = []
    active = {axis.name for axis in plan.axes}
    outer = {axis.name: i for i, axis in enumerate(plan.axes)}
    noisy = tuple(
        axis.name for axis in plan.axes if axis.name not in {n for rule in plan.rules.values() for n in rule.axes()}
    )
    for slot, rule in plan.rules.items():
        tensor, axes = rule.dense(plan.bank)
        for position in reversed(range(len(axes))):  # an axis that is not active stands at its fixed position
            if axes[position] not in active:
                tensor = tensor.select(position, plan.fixed.get(axes[position], 0))
        own = [name for name in axes if name in active]
        # outermost axis first: functorch writes batch norm's statistics into a copy where batch dimensions lie otherwise
        order = sorted(range(len(own)), key=lambda i: outer[own[i]])
        slots.append(slot)
        stacked.append(tensor.permute(*order, *range(len(own), tensor.dim())))
        names.append(tuple(own[i] for i in order))
    training = any(module.training for module in clone.tree.values())
    with torch.inference_mode(False):
        for slot in clone.buffers:
            if slot in slots:
                at = slots.index(slot)
                stacked[at] = stacked[at].clone(memory_format=torch.contiguous_format)
                continue
            apart = noisy if training else ()  # noise reaches the statistics, so each branch needs its own
            sizes = [axis.size for axis in plan.axes if axis.name in apart]
            tensor = plan.bank.get(slot)
            slots.append(slot)
            stacked.append(tensor.expand((*sizes, *tensor.shape)).clone())
            names.append(apart)

    shape: dict[str, Any] = {}

    def once(values: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor], dict[tuple, Tensor]]:
        engine.sync(clone)
        recorded = engine.impure.get(engine.mode())
        before = fingerprint(clone.tree) if recorded is None else {}
        result = passed(clone, plan, dict(zip(slots, values, strict=True)), plan.fixed, args, kwargs)
        if recorded is None:
            recorded = engine.impure[engine.mode()] = changed(before, fingerprint(clone.tree))
        leaves, shape["rebuild"] = flatten(result.output)
        shape["static"] = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return outputs, result.buffers, result.taps, held_tensors(recorded, clone.tree)

    def nest(level: int, values: list[Tensor], axes: list[tuple[str, ...]], token: Tensor) -> Any:
        if level == len(plan.axes):
            return once(values)
        axis = plan.axes[level]
        dims = [own.index(axis.name) if axis.name in own else None for own in axes]
        rest = [tuple(name for name in own if name != axis.name) for own in axes]
        return torch.vmap(
            lambda tensors, seed: nest(level + 1, tensors, rest, seed),
            in_dims=(dims, 0),
            randomness=axis.randomness,
        )(values, token.new_zeros(axis.size))

    refuse = torch.autograd.graph.disable_saved_tensors_hooks(_RECOMPUTES) if torch.is_grad_enabled() else nullcontext()
    with refuse, _NoAttention() if len(plan.axes) > 1 else nullcontext():
        outputs, buffers, taps, held = nest(0, stacked, names, torch.zeros(()))
    depth = len(plan.axes)
    put_back({place: _first(tensor, depth) for place, tensor in held.items()}, clone.tree)

    results = []
    for index in plan.indices():
        place = tuple(index[axis.name] for axis in plan.axes)
        tensors = iter(outputs)
        leaves = [next(tensors)[place] if static is None else static[0] for static in shape["static"]]
        results.append(
            Result(
                shape["rebuild"](leaves),
                {slot: tensor[place] for slot, tensor in buffers.items()},
                {name: tensor[place] for name, tensor in taps.items()},
            )
        )
    return results


class _NoAttention(TorchFunctionMode):
    """Refuses attention under two vmaps at once, where fused attention crashes the interpreter (torch 2.13, CPU)."""

    def __torch_function__(
        self, function: Any, kinds: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "attention" in (name := getattr(function, "__name__", "")):
            raise RuntimeError(f"{name} cannot run under two vmaps at once")
        return function(*args, **(kwargs or {}))


def _first(tensor: Tensor, depth: int) -> Tensor:
    for _ in range(depth):
        tensor = tensor[0]
    return tensor
