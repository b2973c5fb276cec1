"""Reference for the branches of a wrapped model: plain models, built anew, with tensors set by hand, run one after another."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.calls.predict import plan_of
from ..core.method import Call
from ..core.ownership import engine_of
from ..engine.effects.random import RandomSources
from ..engine.plan import Bank, Intervention, Plan, Shared
from ..engine.run import Branched
from ..engine.tree import flatten, is_float, tensors
from .models import Tree, assert_structure, buffers, build, close, inputs, parameters, seeded
from .zoo import Case, leaves

Place = Mapping[str, int]  # axis -> position
BranchTensors = Callable[[Mapping[str, Tensor], Place], Mapping[str, Tensor]]


@dataclass
class Branch:
    """Run of a plain model with the tensors of one branch.

    Args:
        place: position of the branch by axis.
        model: the plain model.
        inputs: inputs of the call, as the call left them.
        values: tensors that the model used, as differentiable functions of the reference's state.
        output: output of the model.
    """

    place: Any
    model: Any
    inputs: Any
    values: dict[str, Tensor]
    output: Any


class NamedTensors:
    """The tensors of each branch, found in the state of a wrapped model by the names of its keys alone.

    | key                                | content                                                                              |
    |------------------------------------|--------------------------------------------------------------------------------------|
    | `fc.weight`                        | the tensor of all branches without their own                                         |
    | `fc.weight@vote`                   | one row for each branch along the axis `vote`; likewise `swag`, `snapshot`, any axis |
    | `fc.weight@vote_out`, `..@vote_in` | one row of rank-one factors for each branch, which multiply `fc.weight`              |
    | `fc.weight@sculpt`, `..@sculpt1`   | tensor of the first and second head next to the model's; with voters, `..@vote`      |
    | `...@swag_ready`                   | whether the rows along `swag` are in use yet                                         |

    Args:
        state: tensors by key.
        axes: names of the axes along which branches can differ.
    """

    def __init__(self, state: Mapping[str, Tensor], axes: Iterable[str]) -> None:
        self.state, self.axes = state, [axis for axis in axes if axis != "sculpt"]
        self._flags = {
            axis: [flag for key, flag in state.items() if key.endswith(f"@{axis}_ready")] for axis in self.axes
        }
        # number of keys of risk heads by the name that they replace
        self._heads = Counter(match[1] for key in state if (match := re.fullmatch(r"(.+)@sculpt\d*(@\w+)?", key)))

    def home(self, name: str, place: Place) -> tuple[str, int | None]:
        """Return the key of the tensor that a branch uses as `name`, and its row in it (None if it has no rows)."""
        if place.get("sculpt"):
            head = f"{name}@sculpt{place['sculpt'] - 1 or ''}"
            if any(key in self.state for key in (head, *(f"{head}@{axis}" for axis in self.axes))):
                name = head
        for axis in self.axes:
            flags = self._flags[axis]
            if f"{name}@{axis}" in self.state and (not flags or any(flags)):
                return f"{name}@{axis}", place.get(axis, 0)
        return name, None

    def value(self, name: str, place: Place) -> Tensor:
        """Return the tensor that a branch uses as `name`, as a differentiable function of the state."""
        key, row = self.home(name, place)
        tensor = self.state[key] if row is None else self.state[key][row]
        for axis in self.axes:
            for side, dim in (("out", 0), ("in", 1)):
                if (factors := self.state.get(f"{key}@{axis}_{side}")) is not None:
                    shape = [-1 if at == dim else 1 for at in range(tensor.dim())]
                    tensor = tensor * factors[place.get(axis, 0)].reshape(shape)
        return tensor

    def keys(self, name: str) -> set[str]:
        """Return all keys that some branch reads for `name`."""
        keys = {self.home(name, {"sculpt": head})[0] for head in range(1 + self._heads[name])}
        factors = {f"{key}@{axis}_{side}" for key in keys for axis in self.axes for side in ("out", "in")}
        return keys | (factors & self.state.keys())


class Reference:
    """A loop over plain models that are built anew and given the tensors of one branch each; no wrapped object runs in it.

    The models, the order and separation of the branches, and their tensors are independent of the code under test: the tensors are copied
    when the reference is made, and found by the names of their keys (`NamedTensors`), or by `tensors`. The number of branches and what
    happens besides replaced tensors (noise) are not independent: they come from the wrapper's own plan. So do the tensors of a method
    that names its keys in another way, unless `tensors` provides them (`by_rule` lists them). For these, the check is that the engine runs
    the branches as they are declared, not that they are declared correctly.

    Args:
        case: builds the models.
        wrapped: wrapped model; its tensors are copied now, so that it can be called and changed afterwards.
        dtype: precision of models and inputs.
        tensors: see `check_wrapper`.
    """

    def __init__(
        self, case: Case, wrapped: Any, dtype: torch.dtype = torch.float64, tensors: BranchTensors | None = None
    ) -> None:
        self.case, self.dtype, self.tensors = case, dtype, tensors
        trainable = {name for name, parameter in nn.Module.named_parameters(wrapped) if parameter.requires_grad}
        self.state = {
            name: tensor.detach().clone().requires_grad_(name in trainable)
            for name, tensor in [*nn.Module.named_parameters(wrapped), *nn.Module.named_buffers(wrapped)]
            if "@workbench" not in name
        }
        self.named = NamedTensors(self.state, [method.name for method in wrapped._workbench.methods])
        record = wrapped._workbench
        declared = {**{name: Shared(name) for name in record.slots}, **record.rules}
        # a slot with "@" is no tensor of the plain model, but one for an intervention
        self.by_rule = {
            name: rule
            for name, rule in declared.items()
            if "@" in name or set(rule.registered()) != self.named.keys(name)
        }

    def home(self, name: str, place: Place) -> tuple[str, int | None]:
        """Return key and row of the registered tensor in which a branch keeps a tensor of the plain model."""
        return self.by_rule[name].home(place) if name in self.by_rule else self.named.home(name, place)

    def values(self, names: Iterable[str], place: Place) -> dict[str, Tensor]:
        """Return the tensors that a branch uses, by their names in the plain model, as differentiable functions of `state`."""
        provided = {} if self.tensors is None else self.tensors(self.state, place)
        bank = Bank(self.state.__getitem__)
        return {
            name: provided[name]
            if name in provided
            else self.by_rule[name].pick(bank, place)
            if name in self.by_rule
            else self.named.value(name, place)
            for name in dict.fromkeys([*names, *self.by_rule])
        }

    def run(self, plan: Plan, training: bool = False) -> list[Branch]:
        """Run all branches of a plan, with its interventions on tensors, inputs and activations."""
        branches: list[Branch] = []
        sources = RandomSources(flatten(inputs(self.case, self.dtype))[0], [])
        starts: dict[tuple[int, ...], list[Any]] = {}
        for place in plan.indices:
            stream = tuple(place[axis.name] for axis in plan.axes if axis.randomness == "different")
            sources.restore_torch(starts.setdefault(stream, sources.torch()))
            branches.append(self.branch(place, plan.interventions, training))
        return branches

    def branch(self, place: Place, interventions: Iterable[Intervention], training: bool) -> Branch:
        """Run a plain model once with a branch's tensors."""
        model, arguments = build(self.case, self.dtype, training), inputs(self.case, self.dtype)
        args, kwargs = arguments
        registered = {**parameters(model), **buffers(model)}
        values = self.values(registered, place)
        for intervention in interventions:
            values = intervention.tensors(values, place)
            args, kwargs = intervention.inputs(args, kwargs, place)
        with torch.no_grad():
            for name, tensor in registered.items():
                value = values[name]
                tensor.copy_(value if value.shape == tensor.shape else value.reshape(tensor.shape))
        for name, parameter in parameters(model).items():
            if is_float(parameter):
                parameter.requires_grad_(values[name].requires_grad)
        with ExitStack() as stack:
            for intervention in interventions:
                named = [(parameter, name) for name, parameter in parameters(model).items()]
                context = intervention.active(named, list(buffers(model).values()), tensors((args, kwargs)))
                if context is not None:
                    stack.enter_context(context)
            eager = getattr(model, "_orig_mod", model)  # compiled code would bypass the interventions' hooks
            output = eager(*args, **kwargs)
        for intervention in reversed([*interventions]):
            output = intervention.output(output, place)
        return Branch(place, model, arguments, values, output)

    def gradients(self, branches: list[Branch], objective: Tensor) -> dict[str, Tensor | None]:
        """Return the gradient of an objective on the branches' outputs, by name of the registered tensor."""
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
        """Return the buffers after the run, by name: each row from its branch, shared ones as the mean over the branches that share them."""
        moved: dict[tuple[str, int | None], list[Tensor]] = {}
        for branch in branches:
            for name, value in buffers(branch.model).items():
                moved.setdefault(self.home(name, branch.place), []).append(value)
        expected = {name: self.state[name].detach().clone() for name, _ in moved}
        for (name, row), values in moved.items():
            mean = torch.stack(values).sum(0) / len(values) if is_float(values[0]) else values[0]
            if row is None:
                expected[name] = mean.detach()
            else:
                expected[name][row] = mean.detach()
        return expected


def plan_for(wrapped: Any, training: bool, seed: int = 0) -> Plan:
    """Return the plan of a call that asks for risks."""
    with seeded(seed):
        return plan_of(wrapped, Call(training, True))


def run_engine(wrapped: Any, plan: Plan, arguments: Any, strategy: str) -> Branched:
    """Return the branches of a plan as the engine runs them, before anything is averaged."""
    with seeded(0):
        args, kwargs = arguments
        branched, _ = engine_of(wrapped).run(plan, args, kwargs, strategy)
    return branched


def assert_branches(branched: Branched, branches: list[Branch], tolerance: float, values: bool = True) -> None:
    """Assert that the engine's branches equal those of the plain models; with `values=False` only in structure and shapes."""
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


__all__ = ["Branch", "BranchTensors", "NamedTensors", "Place", "Reference", "assert_branches", "plan_for", "run_engine"]
