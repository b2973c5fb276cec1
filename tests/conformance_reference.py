"""What a wrapped model must answer, from plain models alone.

A reference never runs the wrapped object: it builds the plain model anew for each branch, copies the branch's tensors into
it by their names in the `state_dict` (`fc.weight@vote` has one row for each voter, `fc.weight@sculpt` belongs to the risk
head, ...), calls it, and does the arithmetic of risks itself.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from conformance_table import Wrapping
from torch import Tensor
from zoo import Case, leaves

from workbench.engine.tree import is_float, tree_map
from workbench.testing import reference
from workbench.testing.models import Tree, assert_tree, buffers, build, inputs, parameters, seeded
from workbench.testing.reference import Branch


class Place(NamedTuple):
    """A branch: the voter, the sample and the head (0 predicts, 1 is the risk head)."""

    voter: int
    sample: int
    head: int


class Reference(reference.Reference):
    """Plain models with the tensors of a wrapped one, which are found by their names.

    Args:
        case: How to build them.
        wrapping: How the wrapped model was made.
        wrapped: Its tensors are copied now, so that it can be called and changed afterwards.
        dtype: Precision of models and inputs.
    """

    def __init__(self, case: Case, wrapping: Wrapping, wrapped: Any, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(case, wrapped, dtype)
        self.wrapping = wrapping

    def home(self, name: str, place: Any) -> tuple[str, int | None]:
        """Key and row in the state_dict where a branch keeps a tensor of the plain model."""
        heads = {key.removesuffix("@vote") for key in self.state}
        base = f"{name}@sculpt" if place.head and f"{name}@sculpt" in heads else name
        return (f"{base}@vote", place.voter) if f"{base}@vote" in self.state else (base, None)

    def value(self, name: str, place: Any) -> Tensor:
        """The tensor that a branch uses, as a differentiable function of `state`."""
        key, row = self.home(name, place)
        tensor = self.state[key] if row is None else self.state[key][row]
        if (left := self.state.get(f"{key}@vote_out")) is not None:
            shape = (-1, *[1] * (tensor.dim() - 1))
            tensor = tensor * left[place.voter].reshape(shape)
            if (right := self.state.get(f"{key}@vote_in")) is not None:
                tensor = tensor * right[place.voter].reshape(1, -1, *shape[2:])
        return tensor

    def answers(self, training: bool = False, noise: float = 0.0, seed: int = 0) -> list[Branch]:
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
            variances = {"epistemic": (stack - mean).abs().square().sum(0) / len(answers)}
            raw = [output[path] for place, output in outputs if place.head == 1]
            if raw:
                variances["aleatoric"] = torch.stack(
                    [(F.softplus(r.real if r.is_complex() else r) + 1e-9) ** 2 for r in raw]
                ).sum(0) / len(raw)
            if len(self.wrapping.kinds) > 1:
                variances["total"] = variances["aleatoric"] + variances["epistemic"]
            for kind, risk in risks.items():
                risk[path] = root(variances[kind])
        return prediction, risks


def root(variance: Tensor) -> Tensor:
    """Standard deviation whose gradient is zero where all branches agree."""
    spread = variance > 1e-28
    return torch.where(spread, torch.where(spread, variance, 1.0).sqrt(), 0.0)


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
