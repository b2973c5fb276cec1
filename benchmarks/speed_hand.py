"""Trainings to measure, and the same trainings without workbench: loops, torch.func, stacked weights, and other packages' networks."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from speed_cases import noisy
from speed_models import build
from speed_peers import dropped, lacking
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from workbench import compose, laplace, sample, vote
from workbench.training.checks import LR
from workbench.training.defaults import one_cycle

ROWS, BATCH, EPOCHS, ROUNDS = 2048, 64, 32, 3  # 1024 steps
NEAR = 0.01  # nats within which two test NLLs count as the same
Predict = Callable[[Tensor], Tensor]


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Training:
    """A training to measure.

    Args:
        model: sizes of the layers of an MLP, or a name in `speed_models.MODELS`.
        n: number of voters.
        heads: wrapper of the risk heads.
        method: another wrapper, of one network, instead of voters.
        batch, epochs, rows, rounds: batch size, epochs, training rows, and rounds of measurement.
    """

    model: tuple[int, ...] | str
    n: int = 1
    heads: Any = None
    method: Any = None
    batch: int = BATCH
    epochs: int = EPOCHS
    rows: int = ROWS
    rounds: int = ROUNDS

    @property
    def steps(self) -> int:
        return self.epochs * self.rows // self.batch

    @property
    def draws(self) -> int:
        """Number of noisy passes that the NLL of one network by hand is the mixture of."""
        return self.method.n_samples if type(self.method) is sample.Wrapper else 1

    def network(self) -> nn.Module:
        """Return one plain network, with two outputs in place of risk heads: mean, and standard deviation before softplus."""
        if isinstance(self.model, str):
            return build(self.model).train()
        return _mlp(*self.model[:-1], self.model[-1] if self.heads is None else 2)

    def wrapped(self) -> Any:
        model = build(self.model).train() if isinstance(self.model, str) else _mlp(*self.model)
        method = self.method or vote.Wrapper(self.n)
        return (method if self.heads is None else compose(method, self.heads))(model)


def by_hand(training: Training) -> dict[str, Callable[..., Predict]]:
    """Return trainings by hand, by name: functions of rows and an optional `Reach` to a function for the outputs [n, rows, outputs]."""

    def fresh() -> list[nn.Module]:
        networks = [training.network() for _ in range(training.n)]
        return [noisy(each, last=False) for each in networks] if type(training.method) is sample.Wrapper else networks

    ways: dict[str, Callable[..., Predict]] = {
        "loop": lambda *rows: _loop(training, fresh(), False, *rows),
        "loop_fused": lambda *rows: _loop(training, fresh(), True, *rows),
    }
    if training.method is None and not isinstance(training.model, str):
        ways["func"] = lambda *rows: _func(training, fresh(), *rows)
        ways["stacked"] = lambda *rows: _stacked(training, fresh(), *rows)
    if training.heads is not None and training.method is None:
        ways["tabm"] = lambda *rows: _tabm(training, *rows)
    if type(training.method) is laplace.Wrapper and not lacking("laplace-torch"):
        ways["laplace_torch"] = lambda *rows: _laplace_torch(training, fresh(), *rows)
    return ways


def by_torch_uncertainty(training: Training) -> dict[str, Callable[..., Predict]]:
    """Return trainings of networks of torch-uncertainty, by name, like `by_hand`; none if it is not installed."""
    kinds = ("ensemble", "packed") if training.method is None else ("dropout",)
    ways = {f"uncertainty_{kind}": functools.partial(_torch_uncertainty, training, kind) for kind in kinds}
    return {} if lacking("torch-uncertainty") else ways


class Reach:
    """Clock of a training that ends as soon as its test NLL is near a goal; the time of evaluating it is not counted.

    Args:
        nll: NLL to reach.
        x, y: test rows.
    """

    def __init__(self, nll: float, x: Tensor, y: Tensor) -> None:
        self._goal, self._x, self._y = nll + NEAR, x, y
        self._start, self.nll, self.seconds = time.process_time_ns(), math.inf, 0.0

    @property
    def reached(self) -> bool:
        return self.nll <= self._goal

    def after_epoch(self, members: Predict) -> bool:
        """Evaluate the NLL and return whether training may end."""
        start = time.process_time_ns()
        self.seconds = (start - self._start) / 1e9
        with torch.no_grad():
            self.nll = nll_of(members(self._x), self._y)
        self._start += time.process_time_ns() - start
        return self.reached


def nll_of(answers: Tensor, y: Tensor) -> float:
    """Return the NLL of the uniform mixture of networks with outputs [n, rows, 2]: mean, and standard deviation before softplus."""
    members = torch.distributions.Normal(answers[..., :1], F.softplus(answers[..., 1:]))
    return float(math.log(len(answers)) - members.log_prob(y).logsumexp(0).mean())


def _loss(answer: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of one voter; outputs with a second column are mean and standard deviation, with the same loss as in `fit`."""
    if answer.shape[-1] == targets.shape[-1]:
        return F.mse_loss(answer, targets)
    mean, std = answer[..., :1], F.softplus(answer[..., 1:])
    return F.mse_loss(mean, targets) + (std.log() + ((targets - mean) / std).square() / 2).mean()


def _batches(
    training: Training, x: Tensor, y: Tensor, members: Predict, reach: Reach | None, *optimizers: torch.optim.Optimizer
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches in random order, and set the learning rate as `fit` does: linear warm-up, then a cosine to zero."""
    step = 0
    for _ in range(training.epochs):
        for rows in torch.randperm(len(x)).split(training.batch):
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = LR * one_cycle(step, steps=training.steps)
            yield x[rows], y[rows]
            step += 1
        if reach is not None and reach.after_epoch(members):
            return


def _loop(
    training: Training, models: list[nn.Module], fused: bool, x: Tensor, y: Tensor, reach: Reach | None = None
) -> Predict:
    """Train each model with its own optimizer."""
    optimizers = [torch.optim.Adam(each.parameters(), fused=fused or None) for each in models]

    def members(x: Tensor) -> Tensor:
        return torch.stack([each(x) for each in models for _ in range(training.draws)])

    for inputs, targets in _batches(training, x, y, members, reach, *optimizers):
        for each, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            _loss(each(inputs), targets).backward()
            optimizer.step()
    return members


def _func(training: Training, models: list[nn.Module], x: Tensor, y: Tensor, reach: Reach | None = None) -> Predict:
    """Train with one vmap over the models' gradients and one optimizer, as in the tutorial of torch.func."""
    parameters, _ = torch.func.stack_module_state(models)
    model = copy.deepcopy(models[0]).to("meta")

    def loss(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return _loss(torch.func.functional_call(model, weights, inputs), targets)

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None, None))
    optimizer = torch.optim.Adam(parameters.values(), fused=True)
    call = torch.func.vmap(lambda weights, x: torch.func.functional_call(model, weights, x), in_dims=(0, None))

    def members(x: Tensor) -> Tensor:
        return call(parameters, x)

    for inputs, targets in _batches(training, x, y, members, reach, optimizer):
        for name, gradient in gradients(parameters, inputs, targets).items():
            parameters[name].grad = gradient
        optimizer.step()
    return members


def _stacked(training: Training, models: list[nn.Module], x: Tensor, y: Tensor, reach: Reach | None = None) -> Predict:
    """Train with batched matrix products of stacked weights."""
    linears = [[layer for layer in model.modules() if isinstance(layer, nn.Linear)] for model in models]
    layers = [
        (
            torch.stack([layer.weight.detach().T for layer in row]),
            torch.stack([layer.bias.detach()[None] for layer in row]),
        )
        for row in zip(*linears, strict=True)
    ]
    parameters = [tensor.requires_grad_() for layer in layers for tensor in layer]

    def members(x: Tensor) -> Tensor:
        x = x.expand(len(models), *x.shape)
        for weight, bias in layers[:-1]:
            x = torch.baddbmm(bias, x, weight).relu()
        return torch.baddbmm(layers[-1][1], x, layers[-1][0])

    _train_together(training, members, parameters, x, y, reach)
    return members


def _tabm(training: Training, x: Tensor, y: Tensor, reach: Reach | None = None) -> Predict:
    """Train TabM's members (Gorishniy et al., ICLR 2025), as many as voters, with separate rank-one factors, biases and last layers.

    The factors on the inputs of the first layer start as random signs, all others as ones.
    """
    n, layers = training.n, [layer for layer in training.network().modules() if isinstance(layer, nn.Linear)]
    parameters: list[Tensor] = []

    def trainable(tensor: Tensor) -> Tensor:
        parameters.append(tensor.detach().clone().requires_grad_())
        return parameters[-1]

    shared: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # input factors, weight, output factors, bias
    for i, layer in enumerate(layers[:-1]):
        before = torch.ones(n, 1, layer.in_features)
        before = before if i else before.bernoulli_(0.5) * 2 - 1
        bias = layer.bias.expand(n, 1, -1)
        shared.append(
            (
                trainable(before),
                trainable(layer.weight),
                trainable(torch.ones(n, 1, layer.out_features)),
                trainable(bias),
            )
        )
    heads = [nn.Linear(layers[-1].in_features, layers[-1].out_features) for _ in range(n)]
    weights, biases = (
        trainable(torch.stack([head.weight.T for head in heads])),
        trainable(torch.stack([head.bias[None] for head in heads])),
    )

    def members(x: Tensor) -> Tensor:
        h = x.expand(n, *x.shape)
        for before, weight, after, bias in shared:
            h = (F.linear(h * before, weight) * after + bias).relu()
        return torch.baddbmm(biases, h, weights)

    _train_together(training, members, parameters, x, y, reach)
    return members


def _train_together(
    training: Training, members: Predict, parameters: list[Tensor], x: Tensor, y: Tensor, reach: Reach | None
) -> None:
    """Train members with outputs [n, rows, outputs] with one optimizer, each with its own loss."""
    optimizer = torch.optim.Adam(parameters, fused=True)
    for inputs, targets in _batches(training, x, y, members, reach, optimizer):
        optimizer.zero_grad()
        (training.n * _loss(members(inputs), targets.expand(training.n, *targets.shape))).backward()
        optimizer.step()


def _laplace_torch(training: Training, models: list[nn.Module], x: Tensor, y: Tensor) -> Predict:
    """Train by the loop, then fit the posterior of the last layer by laplace-torch, with the prior of the largest marginal likelihood."""
    from laplace import Laplace

    _loop(training, models, True, x, y)
    posterior = Laplace(models[0].eval(), "regression", subset_of_weights="last_layer")
    posterior.fit(DataLoader(TensorDataset(x, y), batch_size=256))
    posterior.optimize_prior_precision(method="marglik")
    return lambda x: posterior(x)[0][None]


def _torch_uncertainty(training: Training, kind: str, x: Tensor, y: Tensor, reach: Reach | None = None) -> Predict:
    """Train networks of torch-uncertainty with one optimizer: an ensemble, a packed ensemble or MC dropout."""
    from torch_uncertainty.methods import deep_ensembles, mc_dropout
    from torch_uncertainty.models.mlp import packed_mlp

    regression = {"task": "regression", "probabilistic": False}
    if kind == "packed":
        first, *hidden = training.model[:-1]
        model = packed_mlp(first, 2, hidden, num_estimators=training.n, alpha=2)
    elif kind == "ensemble":
        model = deep_ensembles([training.network() for _ in range(training.n)], **regression)
    else:
        model = mc_dropout(dropped(training.network()), training.draws, on_batch=True, **regression)

    def members(x: Tensor) -> Tensor:
        model.train(torch.is_grad_enabled())  # without gradients, MC dropout has several passes
        return model(x).view(-1, len(x), 2)

    _train_together(training, members, [*model.parameters()], x, y, reach)
    return members


__all__ = ["ROUNDS", "Predict", "Reach", "Training", "by_hand", "by_torch_uncertainty", "nll_of"]
