"""Scientific networks: torchdiffeq solvers, models that differentiate inside, and gradients through a training step."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torchdiffeq import odeint, odeint_adjoint

from workbench import laplace, neo, sample, vote


def net(inputs: int = 1, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net(3, 3)

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(y)


class NeuralODE(nn.Module):
    def __init__(self, solve: Any, method: str) -> None:
        super().__init__()
        self.start, self.field, self.head = nn.Linear(1, 3), Field(), nn.Linear(3, 1)
        self.solve, self.method = solve, method

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.solve(self.field, self.start(x), torch.tensor([0.0, 1.0]), method=self.method)[-1])


class Residual(nn.Module):
    """A physics-informed network: the function and its derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            u = self.net(x)
            return torch.cat([u, torch.autograd.grad(u.sum(), x, create_graph=True)[0]], 1)


class Force(nn.Module):
    """Minus the gradient of an energy, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -torch.func.vmap(torch.func.grad(lambda row: self.net(row[None]).squeeze()))(x)


class Jacobian(Force):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.jacrev(lambda row: self.net(row[None])[0]))(x)[..., 0]


MODELS = {
    "adaptive": lambda: NeuralODE(odeint, "dopri5"),
    "fixed": lambda: NeuralODE(odeint, "rk4"),
    "adjoint": lambda: NeuralODE(odeint_adjoint, "rk4"),
    "residual": Residual,
    "force": Force,
    "jacobian": Jacobian,
}


@pytest.mark.parametrize("share", [None, 1])
@pytest.mark.parametrize("name", MODELS)
def test_predictions_risks_and_gradients_are_those_of_plain_voters(name: str, share: int | None) -> None:
    x = torch.randn(6, 1)
    wrapped = vote.Wrapper(3, share=share)(MODELS[name]()).eval()
    copies = [copy.deepcopy(voter) for voter in wrapped.voters()]
    prediction, risk = wrapped(x, return_risk=True)
    outputs = torch.stack([voter(x) for voter in copies])
    torch.testing.assert_close(prediction, outputs.mean(0))
    torch.testing.assert_close(risk, outputs.std(0, unbiased=False))
    y = torch.randn_like(prediction)
    wrapped.train().loss(F.mse_loss, x, y).backward()
    (sum(F.mse_loss(voter.train()(x), y) for voter in copies) / 3).backward()
    for slot, parameter in wrapped.named_parameters():
        of_copies = [voter.get_parameter(slot.partition("@")[0]) for voter in copies]
        # a force has no bias
        grads = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in of_copies])
        present = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(present, grads if "@" in slot else grads.sum(0))


@pytest.mark.parametrize(
    "method", [sample.Wrapper(), neo.Wrapper(), laplace.Wrapper()], ids=["sample", "neo", "laplace"]
)
@pytest.mark.parametrize("name", ["force", "jacobian"])
def test_what_cannot_look_inside_a_transform_is_refused(name: str, method: Any) -> None:
    wrapped, x = method(MODELS[name]()), torch.randn(6, 1)
    with pytest.raises((ValueError, RuntimeError), match=r"torch\.func transform|no layer whose input"):
        wrapped.fit([(x, x)]) if wrapped.needs_fit else wrapped(x, return_risk=True)


def test_gradients_go_through_a_step_of_training() -> None:
    """MAML (Finn et al. 2017): the loss after a step, by parameters that are no leaves."""
    wrapped, (x, y, x_new, y_new) = vote.Wrapper(3)(net()).train(), torch.randn(4, 6, 1)
    copies = [copy.deepcopy(voter) for voter in wrapped.voters()]

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = wrapped

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.model.loss(F.mse_loss, x, y)

    task, values = Loss(), dict(wrapped.named_parameters(prefix="model"))
    grads = torch.autograd.grad(functional_call(task, values, (x, y)), list(values.values()), create_graph=True)
    after = {name: value - 0.3 * grad for (name, value), grad in zip(values.items(), grads, strict=True)}
    functional_call(task, after, (x_new, y_new)).backward()

    total: Any = 0.0
    for voter in copies:
        plain = dict(voter.named_parameters())
        grads = torch.autograd.grad(F.mse_loss(voter(x), y), list(plain.values()), create_graph=True)
        stepped = {name: value - 0.1 * grad for (name, value), grad in zip(plain.items(), grads, strict=True)}
        total = total + F.mse_loss(functional_call(voter, stepped, (x_new,)), y_new) / 3
    total.backward()
    for name, parameter in wrapped.named_parameters():
        expected = torch.stack([voter.get_parameter(name.partition("@")[0]).grad for voter in copies])
        torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.parametrize("prior", [None, 2.0])
def test_voters_learn_targets_of_their_own_in_their_order(prior: float | None) -> None:
    wrapped = vote.Wrapper(3, prior=prior, output="values")(net(2, 4))
    x, action, targets = torch.randn(5, 2), torch.randint(4, (5,)), torch.randn(3, 5)
    copies = wrapped.voters()
    each = iter(targets)
    loss = wrapped.loss(lambda q, a: F.mse_loss(q[torch.arange(5), a], next(each)), x, action)
    expected = [
        F.mse_loss(copy(x)[torch.arange(5), action], target) for copy, target in zip(copies, targets, strict=True)
    ]
    torch.testing.assert_close(loss, torch.stack(expected).mean())
    loss.backward()
    gradients = [
        torch.autograd.grad(value / 3, list(copy[2].parameters())) for copy, value in zip(copies, expected, strict=True)
    ]
    last = dict(wrapped[2].named_parameters())
    for i, name in enumerate(("weight@vote", "bias@vote")):
        torch.testing.assert_close(last[name].grad, torch.stack([gradient[i] for gradient in gradients]))
