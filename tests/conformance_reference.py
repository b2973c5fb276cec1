"""What a wrapped model must answer, from plain models alone.

A reference never runs the wrapped object: it builds the plain model anew for each branch, copies the branch's tensors into
it by their names in the `state_dict` (`fc.weight@vote` has one row for each voter, `fc.weight@sculpt` belongs to the risk
head, ...), calls it, and does the arithmetic of risks itself.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from conformance_table import ROWS, Wrapping, seeded
from torch import Tensor, nn
from zoo import Case, leaves, modules

from workbench.engine.tree import tree_map

Tree = dict[str, Any]  # path of a leaf -> leaf


# ---- models and inputs ----------------------------------------------------------------------------------------------


def parts(model: Any) -> dict[str, nn.Module]:
    """The modules of a case by the prefix that their tensors have in a wrapped one."""
    if isinstance(model, nn.Module):
        return {"": getattr(model, "_orig_mod", model) if isinstance(model, torch._dynamo.OptimizedModule) else model}
    held = inspect.getclosurevars(model).nonlocals
    return {f"{name}.": module for name, module in held.items() if isinstance(module, nn.Module)}


def parameters(model: Any) -> dict[str, nn.Parameter]:
    return {prefix + name: p for prefix, module in parts(model).items() for name, p in module.named_parameters()}


def buffers(model: Any) -> dict[str, Tensor]:
    return {prefix + name: b for prefix, module in parts(model).items() for name, b in module.named_buffers()}


def state(model: Any) -> dict[str, Tensor]:
    """The state_dict of a case, as it is to be loaded into a wrapped one."""
    if isinstance(model, nn.Module):
        return model.state_dict()
    return {prefix + name: t for prefix, module in parts(model).items() for name, t in module.state_dict().items()}


def build(case: Case, dtype: torch.dtype = torch.float64, training: bool = False) -> Any:
    """The plain model of a case in another precision and mode."""
    model = case.build()
    for module in parts(model).values():
        if dtype not in {p.dtype for p in module.parameters()}:
            module.to(dtype)
    for module in modules(model):
        module.train(training)
    return model


def inputs(case: Case, dtype: torch.dtype = torch.float64, rows: int = ROWS, seed: int = 0) -> Any:
    """Inputs (args, kwargs) in another precision, tensors of their own at every call."""
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf,
        case.inputs(seed, rows),
    )


def is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


# ---- the reference --------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A branch: the voter, the sample and the head (0 predicts, 1 is the risk head)."""

    voter: int
    sample: int
    head: int


@dataclasses.dataclass
class Branch:
    """What a plain model with the tensors of one branch gave."""

    place: Place
    model: Any
    given: Any
    values: dict[str, Tensor]
    output: Any


class Reference:
    """Plain models with the tensors of a wrapped one.

    Args:
        case: How to build them.
        wrapping: How the wrapped model was made.
        wrapped: Its tensors are copied now, so that it can be called and changed afterwards.
        dtype: Precision of models and inputs.
    """

    def __init__(self, case: Case, wrapping: Wrapping, wrapped: Any, dtype: torch.dtype = torch.float64) -> None:
        self.case, self.wrapping, self.dtype = case, wrapping, dtype
        self.state = {
            name: tensor.detach().clone().requires_grad_(tensor.is_floating_point())
            for name, tensor in wrapped.state_dict().items()
            if "@workbench" not in name
        }
        self.learns = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}

    def home(self, name: str, place: Place) -> tuple[str, int | None]:
        """Key and row in the state_dict where a branch keeps a tensor of the plain model."""
        heads = {key.removesuffix("@vote") for key in self.state}
        base = f"{name}@sculpt" if place.head and f"{name}@sculpt" in heads else name
        return (f"{base}@vote", place.voter) if f"{base}@vote" in self.state else (base, None)

    def value(self, name: str, place: Place) -> Tensor:
        """The tensor that a branch uses, as a differentiable function of `state`."""
        key, row = self.home(name, place)
        tensor = self.state[key] if row is None else self.state[key][row]
        if (left := self.state.get(f"{key}@vote_out")) is not None:
            shape = (-1, *[1] * (tensor.dim() - 1))
            tensor = tensor * left[place.voter].reshape(shape)
            if (right := self.state.get(f"{key}@vote_in")) is not None:
                tensor = tensor * right[place.voter].reshape(1, -1, *shape[2:])
        return tensor

    def run(self, training: bool = False, noise: float = 0.0, seed: int = 0) -> list[Branch]:
        """All branches, with the noise of sample on weights or inputs where there is some."""
        heads = 2 if "aleatoric" in self.wrapping.kinds else 1
        branches = []
        with seeded(seed):
            for place in map(
                Place._make, itertools.product(range(self.wrapping.voters), range(self.wrapping.samples), range(heads))
            ):
                model = build(self.case, self.dtype, training)
                tensors = {**parameters(model), **buffers(model)}
                values = {name: self.value(name, place) for name in tensors}
                if noise and self.wrapping.where == "weights":
                    values.update(
                        {
                            name: value * (1 + noise * torch.randn_like(value))
                            for name, value in values.items()
                            if name in parameters(model) and value.dim() >= 2
                        }
                    )
                given = inputs(self.case, self.dtype)
                if noise and self.wrapping.where == "inputs":
                    given = tree_map(lambda x: x + noise * torch.randn_like(x) if is_float(x) else x, given)
                with torch.no_grad():
                    for name, tensor in tensors.items():
                        tensor.copy_(values[name])
                for name, parameter in parameters(model).items():
                    parameter.requires_grad_(self.home(name, place)[0] in self.learns)
                args, kwargs = given
                branches.append(Branch(place, model, given, values, model(*args, **kwargs)))
        return branches

    def reduced(self, branches: list[Branch]) -> tuple[Tree, dict[str, Tree]]:
        """Prediction and risks by the law of total variance, by path; leaves that are not floating: of all answers."""
        prediction: Tree = {}
        risks: dict[str, Tree] = {kind: {} for kind in self.wrapping.variances}
        outputs = [(b.place, dict(leaves(b.output))) for b in branches]
        for path, first in outputs[0][1].items():
            answers = [output[path] for place, output in outputs if place.head == 0]
            if not is_float(first):
                prediction[path] = answers
                continue
            stack = torch.stack(answers)
            mean = stack.sum(0) / len(answers)
            prediction[path] = mean if len(answers) > 1 else stack[0]
            variances = {"epistemic": (stack - mean).square().sum(0) / len(answers)}
            raw = [output[path] for place, output in outputs if place.head == 1]
            if raw:
                variances["aleatoric"] = torch.stack([(F.softplus(r) + 1e-9) ** 2 for r in raw]).sum(0) / len(raw)
            if len(self.wrapping.kinds) > 1:
                variances["total"] = variances["aleatoric"] + variances["epistemic"]
            for kind, risk in risks.items():
                risk[path] = root(variances[kind])
        return prediction, risks

    def gradients(self, branches: list[Branch], objective: Tensor) -> dict[str, Tensor | None]:
        """The gradient of an objective on the branches' outputs, by key of the wrapped state_dict."""
        objective.backward()
        pairs = [
            (b.values[name], p.grad)
            for b in branches
            for name, p in parameters(b.model).items()
            if p.grad is not None and p.requires_grad
        ]
        torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
        return {name: tensor.grad for name, tensor in self.state.items()}

    def moved(self, branches: list[Branch]) -> dict[str, Tensor]:
        """The buffers after the run, by key: own rows each, shared ones the mean over the branches that share them."""
        found: dict[tuple[str, int | None], list[Tensor]] = {}
        for branch in branches:
            for name, value in buffers(branch.model).items():
                found.setdefault(self.home(name, branch.place), []).append(value)
        expected = {name: self.state[name].detach().clone() for name, _ in found}
        for (name, row), values in found.items():
            mean = torch.stack(values).sum(0) / len(values) if values[0].is_floating_point() else values[0]
            if row is None:
                expected[name] = mean.detach()
            else:
                expected[name][row] = mean.detach()
        return expected


def root(variance: Tensor) -> Tensor:
    """Standard deviation whose gradient is zero where all branches agree."""
    spread = variance > 1e-28
    return torch.where(spread, torch.where(spread, variance, 1.0).sqrt(), 0.0)


def majority(value: Tensor, answers: list[Tensor]) -> None:
    """Assert that each whole number is one of those that most branches gave."""
    stack = torch.stack(answers)
    counts = (stack[:, None] == stack[None]).sum(1)
    said = (stack == value).sum(0)
    assert torch.equal(said, counts.max(0).values), f"{value.tolist()} is not what most say: {stack.tolist()}"


def assert_tree(output: Any, like: Any, expected: Tree, what: str, tolerance: float = 1e-9) -> None:
    """Assert structure and values of a prediction or of a risk; `like` is an output of the plain model."""
    assert type(output) is type(like), f"{what}: {type(output).__name__} instead of {type(like).__name__}"
    found = dict(leaves(output))
    assert list(found) == [path for path, _ in leaves(like)], f"{what}: other leaves"
    for path, leaf in found.items():
        where = f"{what} {path}".strip()
        if path not in expected:
            assert leaf is None, f"{where}: a risk of what is no number"
        elif is_float(leaf):
            assert leaf.shape == expected[path].shape, f"{where}: {tuple(leaf.shape)} for {tuple(expected[path].shape)}"
            close(leaf, expected[path], where, tolerance)
        elif isinstance(leaf, Tensor):
            majority(leaf, expected[path])
        else:
            assert all(leaf == answer for answer in expected[path]), where


def exactly(output: Any) -> Tree:
    """What `assert_tree` is to find: this output."""
    return {path: leaf if is_float(leaf) else [leaf] for path, leaf in leaves(output)}


def close(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}", check_dtype=False
    )


def assert_answers(
    reference: Reference, branches: list[Branch], y: Any, risks: dict[str, Any], tolerance: float = 1e-9
) -> None:
    """Assert that prediction and risks are those of the branches."""
    prediction, expected = reference.reduced(branches)
    like = branches[0].output
    assert_tree(y, like, prediction, "prediction", tolerance)
    named = {name: risk for name, risk in risks.items() if name != "vacuitic"}
    assert not named or set(named) == set(expected)
    for name, risk in named.items():
        assert_tree(risk, like, expected[name], name, tolerance)
