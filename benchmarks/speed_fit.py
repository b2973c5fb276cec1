"""Whole trainings: `workbench.fit` with and without graphs of its steps, beside loops, and of MLPs torch.func and stacked weights by hand; and
how long these take until their test NLL is that of `fit`."""

from __future__ import annotations

import copy
import importlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from speed_cases import noisy
from speed_clock import middle
from speed_models import batch_of, build
from speed_peers import lacking
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from workbench import compose, fit, laplace, neo, sample, sculpt, snapshot, swag, vote
from workbench.training import traced_step
from workbench.training.checks import LR
from workbench.training.defaults import one_cycle

ROWS, BATCH, EPOCHS, ROUNDS = 2048, 64, 32, 3  # 1024 steps
NEAR = 0.01  # nats within which two test NLLs are the same
Predict = Callable[[Tensor], Tensor]


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Training:
    """What is trained.

    Args:
        model: sizes of the layers of an MLP, or the name of one of `speed_models.MODELS`.
        n: voters.
        heads: the wrapper of the risk heads.
        method: another wrapper around one network, instead of voters.
        batch, epochs, rows, rounds: of these trainings.
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

    def network(self) -> nn.Module:
        """One of them, with two outputs where there are risk heads: mean, and standard deviation before softplus."""
        if isinstance(self.model, str):
            return build(self.model).train()
        return _mlp(*self.model[:-1], self.model[-1] if self.heads is None else 2)

    def wrapped(self) -> Any:
        model = build(self.model).train() if isinstance(self.model, str) else _mlp(*self.model)
        if self.method is not None:
            return self.method(model)
        return (vote.Wrapper(self.n) if self.heads is None else compose(vote.Wrapper(self.n), self.heads))(model)


SMALL = (8, 50, 50, 1)
LARGE: dict[str, Any] = {"batch": 16, "epochs": 10, "rows": 512, "rounds": 2}  # of models whose steps take long
TRAININGS: dict[str, Training] = {
    "vote, 5 x 1-16-1": Training((1, 16, 1), 5),
    "vote, 16 x 1-16-1": Training((1, 16, 1), 16),
    "vote, 5 x 8-50-50-1": Training(SMALL, 5),
    "vote, 16 x 8-50-50-1": Training(SMALL, 16),
    "vote of sculpt, last layer, 5 x 8-50-50-1": Training(SMALL, 5, sculpt.Wrapper(n_layers=1)),
    "vote of sculpt, three layers, 5 x 8-50-50-1": Training(SMALL, 5, sculpt.Wrapper()),
    "sample, 8-50-50-1": Training(SMALL, method=sample.Wrapper()),
    "neo, 8-50-50-1": Training(SMALL, method=neo.Wrapper()),
    "laplace, 8-50-50-1": Training(SMALL, method=laplace.Wrapper()),
    "swag, 8-50-50-1": Training(SMALL, method=swag.Wrapper()),
    "snapshot, 8-50-50-1": Training(SMALL, method=snapshot.Wrapper(3)),
    "cnn, vote 5": Training("cnn", 5, **LARGE),
    "transformer, vote 5": Training("transformer", 5, **LARGE),
    "lstm, vote 5": Training("lstm", 5, **LARGE),
}


def _data(training: Training) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs and targets for training, inputs and targets of new rows, and the truth there; NaN for larger models."""
    if isinstance(training.model, str):
        x, y = batch_of(training.model, training.rows)
        return x, y, x[:16], y[:16], torch.full_like(y[:16], math.nan)
    features, rows = training.model[0], training.rows
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2 * rows, features, generator=draw)
    truth = torch.sin(x.sum(1, keepdim=True))
    y = truth + 0.1 * torch.randn(truth.shape, generator=draw)
    return x[:rows], y[:rows], x[rows:], y[rows:], truth[rows:]


def _ours(training: Training, x: Tensor, y: Tensor, strategy: str | None = None) -> Any:
    """The wrapped model, trained by `fit`."""
    wrapped = training.wrapped()
    options: dict[str, Any] = {"epochs": training.epochs, "batch_size": training.batch, "validation": 0}
    fit(wrapped, (x, y), strategy=strategy, standardize=False, progress=False, **options)
    return wrapped.eval()


def _by_hand(training: Training) -> dict[str, Callable[..., Predict]]:
    """By name, what trains networks by hand, given rows, and perhaps `Reach`, and gives the answers of all [n, rows, outputs]."""

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
    if training.heads is not None:
        ways["tabm"] = lambda *rows: _tabm(training, *rows)
    if type(training.method) is laplace.Wrapper and not lacking("laplace-torch"):
        ways["laplace_torch"] = lambda *rows: _laplace_torch(training, fresh(), *rows)
    return ways


class Making:
    """While graphs of steps are made, how long that takes; what comes after it, their first runs, is not in it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        make = traced_step.Graph

        def made(*args: Any) -> Any:
            start = time.process_time_ns()
            try:
                return make(*args)
            finally:
                self.seconds += (time.process_time_ns() - start) / 1e9

        self.watching = mock.patch.object(traced_step, "Graph", made)


def trained(training: str, on: str) -> dict[str, Any]:
    """Seconds of each way to train, taken in turn, their ratios to the ways by hand, and the error on new rows that each ends with.

    "making_s" are those of `fit` that its graphs take to be made; "vote" is `fit` of the same voters without risk heads.
    """
    case = TRAININGS[training]
    x, y, new, _, truth = _data(case)
    ways: dict[str, Callable[..., Predict]] = {
        "fit": lambda *rows: _ours(case, *rows),
        "eager": lambda *rows: _ours(case, *rows, "eager"),
        **_by_hand(case),
    }
    if case.heads is not None:
        alone = replace(case, heads=None)
        ways["vote"] = lambda *rows: _ours(alone, *rows)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    errors: dict[str, list[float]] = {name: [] for name in ways}
    making: list[float] = []
    importlib.import_module("torch._dynamo")  # as the first optimizer of a process does, which takes a second
    # the first one is to get warm, which does not count beside long steps
    for round_ in range(-1 if case.rounds == ROUNDS else 0, case.rounds):
        for name, run in ways.items():
            graphs = Making()
            start = time.process_time_ns()
            with graphs.watching:
                predict = run(x, y)
            if round_ < 0:
                continue
            seconds[name].append((time.process_time_ns() - start) / 1e9)
            if name == "fit":
                making.append(graphs.seconds)
            with torch.no_grad():
                ours = name in ("fit", "eager", "vote")
                answer = predict(new) if ours else predict(new)[..., : truth.shape[-1]].mean(0)
                errors[name].append(F.mse_loss(answer, truth).sqrt().item())
    row: dict[str, Any] = {f"{name}_s": middle(values)[0] for name, values in seconds.items()}
    row |= {f"{name}_rmse": middle(values)[0] for name, values in errors.items() if not math.isnan(values[0])}
    for name in list(ways)[1:]:
        ratios = [ours / other for ours, other in zip(seconds["fit"], seconds[name], strict=True)]
        row |= dict(zip((f"fit_{name}", f"fit_{name}_low", f"fit_{name}_high"), middle(ratios), strict=True))
    return {"steps": case.steps, "making_s": middle(making)[0], **row}


class Reach:
    """The clock of a training that ends as soon as its test NLL is near that of another; what it takes to look does not count.

    Args:
        nll: of the other.
        x, y: test rows.
    """

    def __init__(self, nll: float, x: Tensor, y: Tensor) -> None:
        self._goal, self._x, self._y = nll + NEAR, x, y
        self._start, self.nll, self.seconds = time.process_time_ns(), math.inf, 0.0

    @property
    def reached(self) -> bool:
        return self.nll <= self._goal

    def after_epoch(self, members: Predict) -> bool:
        """Whether training may end."""
        start = time.process_time_ns()
        self.seconds = (start - self._start) / 1e9
        with torch.no_grad():
            self.nll = nll_of(members(self._x), self._y)
        self._start += time.process_time_ns() - start
        return self.reached


def nll_of(answers: Tensor, y: Tensor) -> float:
    """Negative log likelihood of the even mixture of networks [n, rows, 2] that say mean and (before softplus) standard deviation."""
    said = torch.distributions.Normal(answers[..., :1], F.softplus(answers[..., 1:]))
    return float(math.log(len(answers)) - said.log_prob(y).logsumexp(0).mean())


def raced(race: str, on: str) -> dict[str, Any]:
    """Seconds that each way by hand takes until its test NLL is near that which `fit` ends with, taken in turn.

    Networks have risk heads. A way that does not get there counts with all of its time, and `reached` says how often it did.
    """
    case = TRAININGS[race]
    x, y, new, targets, _ = _data(case)
    ways = _by_hand(case)
    seconds: dict[str, list[float]] = {name: [] for name in ("fit", *ways)}
    nlls: dict[str, list[float]] = {name: [] for name in seconds}
    reached = dict.fromkeys(ways, 0)
    for round_ in range(-1, ROUNDS):  # the first one is to get warm
        start = time.process_time_ns()
        wrapped = _ours(case, x, y)
        took = (time.process_time_ns() - start) / 1e9
        with torch.no_grad():
            nll = float(-wrapped.predictive(new).log_prob(targets).mean())
        clocks = {}
        for name, run in ways.items():
            clocks[name] = Reach(nll, new, targets)
            run(x, y, clocks[name])
        if round_ < 0:
            continue
        seconds["fit"].append(took)
        nlls["fit"].append(nll)
        for name, clock in clocks.items():
            seconds[name].append(clock.seconds)
            nlls[name].append(clock.nll)
            reached[name] += clock.reached
    row: dict[str, Any] = {f"{name}_s": middle(values)[0] for name, values in seconds.items()}
    row |= {f"{name}_nll": middle(values)[0] for name, values in nlls.items()}
    row |= {f"{name}_reached": count for name, count in reached.items()}
    for name in ways:
        ratios = [ours / other for ours, other in zip(seconds["fit"], seconds[name], strict=True)]
        row |= dict(zip((f"fit_{name}", f"fit_{name}_low", f"fit_{name}_high"), middle(ratios), strict=True))
    return {"rounds": ROUNDS, **row}


def _loss(answer: Tensor, targets: Tensor) -> Tensor:
    """The loss of one voter; with a column more than targets, a mean and a standard deviation are trained as `fit` trains them."""
    if answer.shape[-1] == targets.shape[-1]:
        return F.mse_loss(answer, targets)
    mean, std = answer[..., :1], F.softplus(answer[..., 1:])
    return F.mse_loss(mean, targets) + (std.log() + ((targets - mean) / std).square() / 2).mean()


def _batches(
    training: Training, x: Tensor, y: Tensor, members: Predict, reach: Reach | None, *optimizers: torch.optim.Optimizer
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches in a random order, with the learning rates that `fit` has: linear warm-up, then a cosine to zero."""
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
    """Each model with an optimizer of its own."""
    optimizers = [torch.optim.Adam(each.parameters(), fused=fused or None) for each in models]

    def members(x: Tensor) -> Tensor:
        return torch.stack([each(x) for each in models])

    for inputs, targets in _batches(training, x, y, members, reach, *optimizers):
        for each, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            _loss(each(inputs), targets).backward()
            optimizer.step()
    return members


def _func(training: Training, models: list[nn.Module], x: Tensor, y: Tensor, reach: Reach | None = None) -> Predict:
    """One vmap over the models' gradients, and one optimizer of all, as the tutorial of torch.func has it."""
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
    """Batched matrix products of weights that are stacked by hand."""
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
    """As many members as there are voters, which share their weights but for factors of a row and a column, and biases and the last layer.

    As TabM has them (Gorishniy et al., ICLR 2025): those in front of the first layer start as random signs, all others as ones.
    """
    n, layers = training.n, [layer for layer in training.network().modules() if isinstance(layer, nn.Linear)]
    parameters: list[Tensor] = []

    def own(tensor: Tensor) -> Tensor:
        parameters.append(tensor.detach().clone().requires_grad_())
        return parameters[-1]

    shared: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # before, weight, behind, bias
    for i, layer in enumerate(layers[:-1]):
        before = torch.ones(n, 1, layer.in_features)
        before = before if i else before.bernoulli_(0.5) * 2 - 1
        bias = layer.bias.expand(n, 1, -1)
        shared.append((own(before), own(layer.weight), own(torch.ones(n, 1, layer.out_features)), own(bias)))
    heads = [nn.Linear(layers[-1].in_features, layers[-1].out_features) for _ in range(n)]
    weights, biases = (
        own(torch.stack([head.weight.T for head in heads])),
        own(torch.stack([head.bias[None] for head in heads])),
    )

    def members(x: Tensor) -> Tensor:
        h = x.expand(n, *x.shape)
        for before, weight, behind, bias in shared:
            h = (F.linear(h * before, weight) * behind + bias).relu()
        return torch.baddbmm(biases, h, weights)

    _train_together(training, members, parameters, x, y, reach)
    return members


def _train_together(
    training: Training, members: Predict, parameters: list[Tensor], x: Tensor, y: Tensor, reach: Reach | None
) -> None:
    """One optimizer for all members [n, rows, outputs], each with a loss of its own."""
    optimizer = torch.optim.Adam(parameters, fused=True)
    for inputs, targets in _batches(training, x, y, members, reach, optimizer):
        optimizer.zero_grad()
        (training.n * _loss(members(inputs), targets.expand(training.n, *targets.shape))).backward()
        optimizer.step()


def _laplace_torch(training: Training, models: list[nn.Module], x: Tensor, y: Tensor) -> Predict:
    """The loop, and then the posterior of the last layer by laplace-torch, with the prior of the largest marginal likelihood."""
    from laplace import Laplace

    _loop(training, models, True, x, y)
    posterior = Laplace(models[0].eval(), "regression", subset_of_weights="last_layer")
    posterior.fit(DataLoader(TensorDataset(x, y), batch_size=256))
    posterior.optimize_prior_precision(method="marglik")
    return lambda x: posterior(x)[0][None]


__all__ = ["TRAININGS", "nll_of", "raced", "trained"]
