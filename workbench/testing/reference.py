"""What the branches of a wrapped model must give: plain models, built anew, with tensors set by hand, one after another."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.method import Call
from ..core.ownership import engine_of
from ..core.predict import plan_of
from ..engine.plan import Bank, Plan
from ..engine.run import Branched
from ..engine.tree import is_float, tensors
from .models import Tree, assert_structure, buffers, build, close, inputs, parameters, seeded
from .zoo import Case, leaves

Place = Mapping[str, int]  # axis -> position


@dataclass
class Branch:
    """What a plain model with the tensors of one branch gave.

    Args:
        place: the branch.
        model: the plain model.
        given: the inputs of the call, as it left them.
        values: the tensors that it used, as differentiable functions of the reference's state.
        output: its answer.
    """

    place: Any
    model: Any
    given: Any
    values: dict[str, Tensor]
    output: Any


class Reference:
    """Plain models with the tensors of a wrapped one; it never runs the wrapped object.

    Args:
        case: how to build them.
        wrapped: its tensors are copied now, so that it can be called and changed afterwards.
        dtype: precision of models and inputs.
    """

    def __init__(self, case: Case, wrapped: Any, dtype: torch.dtype = torch.float64) -> None:
        self.case, self.dtype = case, dtype
        held = {**dict(nn.Module.named_parameters(wrapped)), **dict(nn.Module.named_buffers(wrapped))}
        held = {name: tensor for name, tensor in held.items() if "@workbench" not in name}
        self.state = {name: tensor.detach().clone().requires_grad_(is_float(tensor)) for name, tensor in held.items()}
        self.learns = {name for name, parameter in nn.Module.named_parameters(wrapped) if parameter.requires_grad}
        self.rules = dict(wrapped._workbench.rules)

    def home(self, name: str, place: Place) -> tuple[str, int | None]:
        """Name and row of the registered tensor where a branch keeps a tensor of the plain model."""
        return self.rules[name].home(place) if name in self.rules else (name, None)

    def value(self, name: str, place: Place) -> Tensor:
        """The tensor that a branch uses, as a differentiable function of `state`."""
        return self.rules[name].pick(Bank(self.state.__getitem__), place) if name in self.rules else self.state[name]

    def run(self, plan: Plan, training: bool = False) -> list[Branch]:
        """All branches of a plan, with what its interventions do to tensors, inputs and activations."""
        branches: list[Branch] = []
        starts: dict[tuple[int, ...], Tensor] = {}
        for place in plan.indices:
            apart = tuple(place[axis.name] for axis in plan.axes if axis.randomness == "different")
            torch.set_rng_state(starts.setdefault(apart, torch.get_rng_state()))
            branches.append(self.branch(place, plan, training))
        return branches

    def branch(self, place: Place, plan: Plan, training: bool) -> Branch:
        """One pass of a plain model with a branch's tensors."""
        model, given = build(self.case, self.dtype, training), inputs(self.case, self.dtype)
        args, kwargs = given
        held = {**parameters(model), **buffers(model)}
        values = {
            name: self.value(name, place) for name in {**held, **self.rules}
        }  # interventions have rules of their own
        for intervention in plan.interventions:
            values = intervention.tensors(values, place)
            args, kwargs = intervention.inputs(args, kwargs)
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(values[name])
        for name, parameter in parameters(model).items():
            if is_float(parameter):
                parameter.requires_grad_(values[name].requires_grad and self.home(name, place)[0] in self.learns)
        with ExitStack() as stack:
            for intervention in plan.interventions:
                named = [(parameter, name) for name, parameter in parameters(model).items()]
                context = intervention.active(named, list(buffers(model).values()), tensors((args, kwargs)))
                if context is not None:
                    stack.enter_context(context)
            eager = getattr(model, "_orig_mod", model)  # compiled code runs past what watches the calls
            return Branch(place, model, given, values, eager(*args, **kwargs))

    def gradients(self, branches: list[Branch], objective: Tensor) -> dict[str, Tensor | None]:
        """The gradient of an objective on the branches' outputs, by name of the registered tensor."""
        objective.backward()
        pairs = [
            (branch.values[name], parameter.grad)
            for branch in branches
            for name, parameter in parameters(branch.model).items()
            if parameter.grad is not None and parameter.requires_grad
        ]
        torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
        return {name: tensor.grad for name, tensor in self.state.items()}

    def moved(self, branches: list[Branch]) -> dict[str, Tensor]:
        """The buffers after the run, by name: own rows each, shared ones the mean over the branches that share them."""
        found: dict[tuple[str, int | None], list[Tensor]] = {}
        for branch in branches:
            for name, value in buffers(branch.model).items():
                found.setdefault(self.home(name, branch.place), []).append(value)
        expected = {name: self.state[name].detach().clone() for name, _ in found}
        for (name, row), values in found.items():
            mean = torch.stack(values).sum(0) / len(values) if is_float(values[0]) else values[0]
            if row is None:
                expected[name] = mean.detach()
            else:
                expected[name][row] = mean.detach()
        return expected


def plan_for(wrapped: Any, training: bool, seed: int = 0) -> Plan:
    """The plan of a call that asks for risks."""
    with seeded(seed):
        return plan_of(wrapped, Call(training, True))


def run_engine(wrapped: Any, plan: Plan, given: Any, strategy: str, seed: int = 0) -> Branched:
    """The branches of a plan as the engine runs them, before anything is averaged."""
    with seeded(seed):
        args, kwargs = given
        branched, _ = engine_of(wrapped).run(plan, args, kwargs, strategy)
    return branched


def assert_branches(branched: Branched, branches: list[Branch], tolerance: float, values: bool = True) -> None:
    """Assert that the engine's branches are those of the plain models; with `values=False` in structure and shapes only."""
    first = branches[0].output
    assert_structure(branched.rebuild(branched.leaves), first, "branches")
    depth = len(branched.axes)
    answers: list[Tree] = [dict(leaves(branch.output)) for branch in branches]
    for (path, like), leaf in zip(leaves(first), branched.leaves, strict=True):
        what = f"branches {path}".strip()
        if not isinstance(like, Tensor):
            assert type(leaf) is type(like), f"{what}: {leaf!r}, not {like!r}"
            assert not isinstance(leaf, bool | int | float | str) or leaf == like, f"{what}: {leaf!r}, not {like!r}"
            continue
        assert leaf.shape[depth:] == like.shape, f"{what}: {tuple(leaf.shape)} for {tuple(like.shape)} each"
        assert leaf.dtype == like.dtype, f"{what}: {leaf.dtype}, not {like.dtype}"
        flat = leaf.reshape(len(branches), *like.shape)
        for row, branch, answer in zip(flat, branches, answers, strict=True):
            if not values:
                assert not is_float(row) or row.isfinite().all(), f"{what}: not finite in branch {dict(branch.place)}"
            else:
                close(row, answer[path], f"{what} of branch {dict(branch.place)}", tolerance)


__all__ = ["Branch", "Place", "Reference", "assert_branches", "plan_for", "run_engine"]
