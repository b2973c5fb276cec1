"""Expected answers of a wrapped model, computed by plain models alone.

The reference is independent of the code under test. For each branch it builds a new plain model, gives it the branch's tensors, which it
finds in the `state_dict` by their keys (`workbench.testing.reference.NamedTensors`), and calls it. The number of branches comes from the table
of wrappers; noise on weights and inputs is drawn here, and predictions and risks are computed here from the answers. It uses no rule, plan or
intervention of the wrapped object, only its initial values, which it reads from the state.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.conformance_table import DATA_NOISE, PRIOR_PRECISION, ROWS, Wrapping
from helpers.zoo import Case, leaves
from workbench.engine.plan import Intervention
from workbench.engine.tree import flatten, is_float, tree_map
from workbench.testing import reference
from workbench.testing.models import Tree, assert_tree, buffers, build, call, inputs, parameters, seeded
from workbench.testing.reference import Branch, Place


class NoisyWeights(Intervention):
    """Gaussian noise on weights, proportional to their values."""

    def __init__(self, amount: float, weights: set[str]) -> None:
        self.amount, self.weights = amount, weights

    def tensors(self, installed: dict[str, Tensor], index: Place) -> dict[str, Tensor]:
        return {
            name: value * (1 + self.amount * torch.randn_like(value)) if name in self.weights else value
            for name, value in installed.items()
        }


class NoisyInputs(Intervention):
    """Gaussian noise on inputs."""

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def inputs(self, args: Any, kwargs: Any, place: Any) -> Any:
        return tree_map(lambda x: x + self.amount * torch.randn_like(x) if is_float(x) else x, (args, kwargs))


class ScaledInputs(Intervention):
    """The first floating-point input times 1, 1 + amount, 1 + 2 * amount, ..., the transforms of augment in `conformance_table`."""

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def inputs(self, args: Any, kwargs: Any, place: Any) -> Any:
        leaves, rebuild = flatten((args, kwargs))
        first = next(i for i, leaf in enumerate(leaves) if is_float(leaf))
        leaves[first] = leaves[first] * (1 + self.amount * place["sample"])
        return rebuild(leaves)


class Reference(reference.Reference):
    """Plain models with the tensors of a wrapped one, found by name.

    Args:
        case: How to build the models.
        wrapping: How the wrapped model was made.
        wrapped: The wrapped model. Its tensors are copied at once, so that it may be called and changed afterwards.
        dtype: Precision of models and inputs.
        without_prior: Paths of outputs to which no prior is added, since they are averaged only; in `LIMITED` are those of limited range.
    """

    def __init__(
        self,
        case: Case,
        wrapping: Wrapping,
        wrapped: Any,
        dtype: torch.dtype = torch.float64,
        without_prior: Container[str] = (),
    ) -> None:
        super().__init__(case, wrapped, dtype)
        self.without_prior = {*without_prior, *(path for name, path in LIMITED if name == case.name.partition("-")[0])}
        self.by_rule = {}
        self.wrapping = wrapping
        self.heads = wrapping.heads or int("aleatoric" in wrapping.kinds)
        stem = "extras@workbench.prior."
        self.priors = {
            name.removeprefix(stem).replace("/", "."): tensor.clone()
            for name, tensor in wrapped.named_buffers()
            if name.startswith(stem)
        }

    def places(self) -> list[Place]:
        """Return the indices of all branches: voter, sample and head (0 predicts, the others are risk heads)."""
        axes = {self.wrapping.members: self.wrapping.voters, "sample": self.wrapping.samples, "sculpt": 1 + self.heads}
        return [dict(zip(axes, place, strict=True)) for place in itertools.product(*map(range, axes.values()))]

    def answers(self, training: bool = False, noise: float = 0.0, seed: int = 0) -> list[Branch]:
        """Return the answers of all branches, with the noise of sample on weights or inputs, if any."""
        self.training = training
        interventions: list[Intervention] = []
        if noise and self.wrapping.where == "weights":
            weights = {name for name, parameter in parameters(build(self.case)).items() if parameter.dim() >= 2}
            interventions = [NoisyWeights(noise, weights)]
        elif noise and self.wrapping.where == "inputs":
            interventions = [NoisyInputs(noise)]
        elif noise and self.wrapping.where == "transforms":
            interventions = [ScaledInputs(noise)]
        with seeded(seed):
            return [self.branch(place, interventions, training) for place in self.places()]

    def branch(self, place: Place, interventions: Iterable[Intervention], training: bool) -> Branch:
        """Run one pass of a plain model; with a prior, add a pass of an untrained model in evaluation mode."""
        branch = super().branch(place, interventions, training)
        if not self.priors:
            return branch
        model = build(self.case, self.dtype)
        with torch.no_grad():
            for name, tensor in {**parameters(model), **buffers(model)}.items():
                rows = self.priors.get(name)
                if rows is not None:
                    tensor.copy_(rows if rows.shape == tensor.shape else rows[place["vote"]])
        for parameter in parameters(model).values():
            parameter.requires_grad_(False)
        added = dict(leaves(call(model, inputs(self.case, self.dtype))))
        answers, rebuild = flatten(branch.output)
        paths = [path for path, _ in leaves(branch.output)]
        branch.output = rebuild(
            [
                answer + self.wrapping.prior * added[path]
                if is_float(answer) and path not in self.without_prior
                else answer
                for path, answer in zip(paths, answers, strict=True)
            ]
        )
        return branch

    def linearized(self, path: str) -> Tensor:
        """Return the variance of an output leaf under laplace, from the gradients of each number with respect to the last layer's weights.

        J (sum_n J_n^T J_n / noise^2 + prior_precision I)^-1 J^T, where J_n are the Jacobians of the rows used for fitting.
        """
        [layer] = {name.partition("@")[0] for name in self.state if name.endswith("@laplace_points")}

        def jacobian(rows: int, seed: int) -> tuple[Tensor, Tensor]:
            model, (args, kwargs) = build(self.case, self.dtype), inputs(self.case, self.dtype, rows, seed)
            model_parameters = parameters(model)
            layer_weights = [
                model_parameters[name]
                for name in (layer, f"{layer.removesuffix('weight')}bias")
                if name in model_parameters
            ]
            for name, tensor in {**model_parameters, **buffers(model)}.items():
                tensor.requires_grad_(False).copy_(self.state[name].detach())
            for tensor in layer_weights:
                tensor.requires_grad_()
            with torch.enable_grad(), seeded():
                leaf = dict(leaves(model(*args, **kwargs)))[path]
            numbers = (
                leaf.real.flatten() if leaf.requires_grad else [sum(t.sum() for t in layer_weights) * 0] * leaf.numel()
            )
            rows_of = [torch.autograd.grad(x, layer_weights, retain_graph=True, allow_unused=True) for x in numbers]
            flat = [
                [torch.zeros_like(t) if g is None else g for g, t in zip(row, layer_weights, strict=True)]
                for row in rows_of
            ]
            return torch.stack([torch.cat([g.flatten() for g in row]) for row in flat]), leaf

        fitted, _ = jacobian(40, 3)
        precision = fitted.T @ fitted / DATA_NOISE**2 + PRIOR_PRECISION * torch.eye(fitted.shape[1]).to(fitted)
        rows_jacobian, leaf = jacobian(ROWS, 0)
        return (rows_jacobian @ torch.linalg.inv(precision) * rows_jacobian).sum(1).reshape(leaf.shape)

    def reduced(self, branches: list[Branch]) -> tuple[Tree, dict[str, Tree]]:
        """Return prediction and risks by path, by the law of total variance; a non-floating leaf is the list of all answers."""
        prediction: Tree = {}
        risks: dict[str, Tree] = {kind: {} for kind in self.wrapping.variances}
        outputs = [(b.place, dict(leaves(b.output))) for b in branches]
        numbers = [leaf for leaf in outputs[0][1].values() if is_float(leaf)]
        sized = any(leaf.dim() for leaf in numbers)
        for path, first in outputs[0][1].items():
            answers = [output[path] for place, output in outputs if not place["sculpt"]]
            if not is_float(first):
                prediction[path] = answers
                continue
            stack = torch.stack(answers)
            mean = stack.sum(0) / len(answers)
            prediction[path] = mean if len(answers) > 1 else stack[0]
            if sized and not first.dim():
                continue  # a number beside outputs with rows, such as a loss, is averaged and has no risk
            variances = {"epistemic": (stack - mean).abs().square().sum(0) / len(answers)}
            # one tensor per risk head, stacked over all voters and samples
            raw = [torch.stack([o[path] for p, o in outputs if p["sculpt"] == head + 1]) for head in range(self.heads)]
            undone = UNDONE.get((self.case.name, path))
            raw = [undone(r) if undone else r.real if r.is_complex() else r for r in raw]
            for kind, variance in spoken(raw).items():
                variances[kind] = variances.get(kind, 0) + variance.sum(0) / len(answers)
            if self.wrapping.name == "laplace":
                variances["epistemic"] = torch.zeros_like(mean.real) if self.training else self.linearized(path)
            if len(self.wrapping.kinds) > 1:
                variances["total"] = variances["aleatoric"] + variances["epistemic"]
            for kind, risk in risks.items():
                risk[path] = root(variances[kind])
        return prediction, risks


def _of_tanh(output: Tensor) -> Tensor:
    doubled = 2 * torch.atanh(output)
    return torch.where(doubled > 0, doubled.sinh(), doubled)


# (model, output) -> inverse of the function of limited range that the output, and so a risk head, ends in
UNDONE = {
    ("namedtuple_out", "scale"): lambda output: output.expm1().log(),
    ("dict_out", "hidden"): _of_tanh,
    ("tuple_out", "1"): _of_tanh,
    ("dataclass_out", "hidden"): _of_tanh,
    ("hf_dataclass", "hidden"): _of_tanh,
    ("nested_out", "heads.1.0"): _of_tanh,
}

# (model, output) of limited range, beside other outputs: tanh, softplus and the weights of attention
LIMITED = {*UNDONE, ("mha_module", "1"), ("nn.MultiheadAttention", "1")}


def spoken(raw: list[Tensor]) -> dict[str, Tensor]:
    """Return the variances that raw head outputs stand for: one is a Normal, two are quantiles at 10 and 90 %, three are evidential."""
    risks = [F.softplus(output) for output in raw]
    if len(risks) == 1:
        return {"aleatoric": (risks[0] + 1e-9) ** 2}
    if len(risks) == 2:
        return {"aleatoric": ((risks[0] + 1e-9) / (2 * 1.2815515655446004)) ** 2}
    if len(risks) == 3:
        nu, alpha, beta = risks[0] + 1e-6, risks[1] + 1.005, risks[2] + 1e-9
        return {"aleatoric": beta / (alpha - 1), "epistemic": beta / (nu * (alpha - 1))}
    return {}


def root(variance: Tensor) -> Tensor:
    """Return the standard deviation, with zero gradient where all branches agree."""
    spread = variance > 1e-28
    return torch.where(spread, torch.where(spread, variance, 1.0).sqrt(), 0.0)


def assert_answers(
    reference: Reference, branches: list[Branch], y: Any, risks: dict[str, Any], tolerance: float = 1e-9
) -> None:
    """Assert that prediction and risks equal those of the branches; the tolerance of risks scales with the prediction."""
    prediction, expected = reference.reduced(branches)
    like = branches[0].output
    assert_tree(y, like, prediction, "prediction", tolerance)
    deviations = {name: risk for name, risk in risks.items() if name != "vacuitic"}
    assert not deviations or set(deviations) == set(expected)
    unit = 1 + max((size(leaf) for leaf in prediction.values() if isinstance(leaf, Tensor)), default=0.0)
    for name, risk in deviations.items():
        assert_tree(risk, like, expected[name], name, tolerance * unit)
    assert all(leaf.isfinite().all() for name, leaf in risks.items() if name == "vacuitic")


def size(tensor: Tensor) -> float:
    """Return the largest absolute value, 0 for an empty tensor."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0
