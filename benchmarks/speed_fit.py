"""Whole trainings: `workbench.fit` with and without graphs of its steps, beside loops, torch.func and stacked weights by hand."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from speed_clock import middle
from torch import Tensor, nn

from workbench import compose, fit, sculpt, vote
from workbench.training.checks import LR
from workbench.training.defaults import one_cycle

ROWS, BATCH, EPOCHS, ROUNDS = 2048, 64, 32, 3  # 1024 steps
Predict = Callable[[Tensor], Tensor]


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# what is trained -> the sizes of the layers, voters, and the wrapper of the risk heads
TRAININGS: dict[str, tuple[tuple[int, ...], int, Any]] = {
    "vote, 5 x 1-16-1": ((1, 16, 1), 5, None),
    "vote, 16 x 1-16-1": ((1, 16, 1), 16, None),
    "vote, 5 x 8-50-50-1": ((8, 50, 50, 1), 5, None),
    "vote, 16 x 8-50-50-1": ((8, 50, 50, 1), 16, None),
    "vote of sculpt, last layer, 5 x 8-50-50-1": ((8, 50, 50, 1), 5, sculpt.Wrapper(n_layers=1)),
    "vote of sculpt, three layers, 5 x 8-50-50-1": ((8, 50, 50, 1), 5, sculpt.Wrapper()),
}


def trained(training: str, on: str) -> dict[str, Any]:
    """Seconds of each way to train, taken in turn, their ratios to the ways by hand, and the error on new rows that each ends with."""
    sizes, n, heads = TRAININGS[training]
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2 * ROWS, sizes[0], generator=draw)
    truth = torch.sin(x.sum(1, keepdim=True))
    y = truth + 0.1 * torch.randn(truth.shape, generator=draw)
    x, new, y = x[:ROWS], x[ROWS:], y[:ROWS]
    wrapper = vote.Wrapper(n) if heads is None else compose(vote.Wrapper(n), heads)
    outputs = 1 if heads is None else 2  # by hand: mean, and standard deviation

    def ours(strategy: str | None) -> Predict:
        wrapped = wrapper(_mlp(*sizes))
        options: dict[str, Any] = {"epochs": EPOCHS, "batch_size": BATCH, "validation": 0, "standardize": False}
        fit(wrapped, (x, y), strategy=strategy, progress=False, **options)
        return wrapped.eval()

    def by_hand(train: Callable[..., Predict], **how: Any) -> Callable[[], Predict]:
        return lambda: train([_mlp(*sizes[:-1], outputs) for _ in range(n)], x, y, **how)

    ways: dict[str, Callable[[], Predict]] = {
        "fit": lambda: ours(None),
        "eager": lambda: ours("eager"),
        "loop": by_hand(_loop, fused=False),
        "loop_fused": by_hand(_loop, fused=True),
        "func": by_hand(_func),
        "stacked": by_hand(_stacked),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    errors: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(-1, ROUNDS):  # the first one is to get warm
        for name, run in ways.items():
            start = time.process_time_ns()
            predict = run()
            if round_ >= 0:
                seconds[name].append((time.process_time_ns() - start) / 1e9)
                with torch.no_grad():
                    errors[name].append(F.mse_loss(predict(new), truth[ROWS:]).sqrt().item())
    row: dict[str, Any] = {f"{name}_s": middle(values)[0] for name, values in seconds.items()}
    row |= {f"{name}_rmse": middle(values)[0] for name, values in errors.items()}
    for name in list(ways)[1:]:
        ratios = [ours / other for ours, other in zip(seconds["fit"], seconds[name], strict=True)]
        row |= dict(zip((f"fit_{name}", f"fit_{name}_low", f"fit_{name}_high"), middle(ratios), strict=True))
    return {"steps": EPOCHS * ROWS // BATCH, **row}


def _loss(answer: Tensor, targets: Tensor) -> Tensor:
    """The loss of one voter; with two columns, a mean and a standard deviation are trained as `fit` trains them."""
    if answer.shape[-1] == 1:
        return F.mse_loss(answer, targets)
    mean, std = answer[..., :1], F.softplus(answer[..., 1:])
    return F.mse_loss(mean, targets) + (std.log() + ((targets - mean) / std).square() / 2).mean()


def _batches(x: Tensor, y: Tensor, *optimizers: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches in a random order, with the learning rates that `fit` has: linear warm-up, then a cosine to zero."""
    orders = (torch.randperm(len(x)).split(BATCH) for _ in range(EPOCHS))
    for step, rows in enumerate(itertools.chain.from_iterable(orders)):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = LR * one_cycle(step, steps=EPOCHS * len(x) // BATCH)
        yield x[rows], y[rows]


def _loop(models: list[nn.Module], x: Tensor, y: Tensor, fused: bool) -> Predict:
    """Each model with an optimizer of its own."""
    optimizers = [torch.optim.Adam(each.parameters(), fused=fused or None) for each in models]
    for inputs, targets in _batches(x, y, *optimizers):
        for each, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            _loss(each(inputs), targets).backward()
            optimizer.step()
    return lambda x: torch.stack([each(x)[:, :1] for each in models]).mean(0)


def _func(models: list[nn.Module], x: Tensor, y: Tensor) -> Predict:
    """One vmap over the models' gradients, and one optimizer of all, as the tutorial of torch.func has it."""
    parameters, _ = torch.func.stack_module_state(models)
    model = copy.deepcopy(models[0]).to("meta")

    def loss(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return _loss(torch.func.functional_call(model, weights, inputs), targets)

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None, None))
    optimizer = torch.optim.Adam(parameters.values(), fused=True)
    for inputs, targets in _batches(x, y, optimizer):
        for name, gradient in gradients(parameters, inputs, targets).items():
            parameters[name].grad = gradient
        optimizer.step()
    call = torch.func.vmap(lambda weights, x: torch.func.functional_call(model, weights, x), in_dims=(0, None))
    return lambda x: call(parameters, x)[..., :1].mean(0)


def _stacked(models: list[nn.Module], x: Tensor, y: Tensor) -> Predict:
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

    def call(x: Tensor) -> Tensor:
        x = x.expand(len(models), *x.shape)
        for weight, bias in layers[:-1]:
            x = torch.baddbmm(bias, x, weight).relu()
        return torch.baddbmm(layers[-1][1], x, layers[-1][0])

    optimizer = torch.optim.Adam(parameters, fused=True)
    for inputs, targets in _batches(x, y, optimizer):
        optimizer.zero_grad()
        (len(models) * _loss(call(inputs), targets.expand(len(models), *targets.shape))).backward()
        optimizer.step()
    return lambda x: call(x)[..., :1].mean(0)


__all__ = ["TRAININGS", "trained"]
