"""Whole trainings by `workbench.fit`, with and without graphs of its steps, compared with loops and, for MLPs, torch.func and stacked weights;
and the time until these reach the test NLL of `fit`."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from speed_clock import middle
from speed_hand import ROUNDS, Predict, Reach, Training, by_hand, by_torch_uncertainty
from speed_models import batch_of
from torch import Tensor

from workbench import fit, laplace, neo, sample, sculpt, snapshot, swag
from workbench.training import traced_step

SMALL = (8, 50, 50, 1)
LARGE: dict[str, Any] = {"batch": 16, "epochs": 10, "rows": 512, "rounds": 2}  # for models with slow steps
TRAININGS: dict[str, Training] = {
    "vote, 5 x 1-16-1": Training((1, 16, 1), 5),
    "vote, 16 x 1-16-1": Training((1, 16, 1), 16),
    "vote, 5 x 8-50-50-1": Training(SMALL, 5),
    "vote, 16 x 8-50-50-1": Training(SMALL, 16),
    "vote of sculpt, last layer, 5 x 8-50-50-1": Training(SMALL, 5, sculpt.Wrapper(n_layers=1)),
    "vote of sculpt, three layers, 5 x 8-50-50-1": Training(SMALL, 5, sculpt.Wrapper()),
    "sample, 8-50-50-1": Training(SMALL, method=sample.Wrapper()),
    "sample of sculpt, last layer, 8-50-50-1": Training(
        SMALL, heads=sculpt.Wrapper(n_layers=1), method=sample.Wrapper()
    ),
    "neo, 8-50-50-1": Training(SMALL, method=neo.Wrapper()),
    "laplace, 8-50-50-1": Training(SMALL, method=laplace.Wrapper()),
    "swag, 8-50-50-1": Training(SMALL, method=swag.Wrapper()),
    "snapshot, 8-50-50-1": Training(SMALL, method=snapshot.Wrapper(3)),
    "cnn, vote 5": Training("cnn", 5, **LARGE),
    "transformer, vote 5": Training("transformer", 5, **LARGE),
    "lstm, vote 5": Training("lstm", 5, **LARGE),
}


def _data(training: Training) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return inputs and targets for training, inputs and targets of new rows, and their noise-free truth (NaN for larger models)."""
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
    """Return the wrapped model, trained by `fit`."""
    wrapped = training.wrapped()
    options: dict[str, Any] = {"epochs": training.epochs, "batch_size": training.batch, "validation": 0}
    fit(wrapped, (x, y), strategy=strategy, standardize=False, progress=False, **options)
    return wrapped.eval()


class Making:
    """Measures the time of recording graphs of training steps, without that of their first runs."""

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
    """Return the seconds of each way to train, measured in turn, the ratios of `fit` to the others, and the final errors on new rows.

    "making_s" is the time in `fit` for recording graphs; "vote" is `fit` of the same voters without risk heads.
    """
    case = TRAININGS[training]
    x, y, new, _, truth = _data(case)
    ways: dict[str, Callable[..., Predict]] = {
        "fit": lambda *rows: _ours(case, *rows),
        "eager": lambda *rows: _ours(case, *rows, "eager"),
        **by_hand(case),
    }
    if case.heads is not None and case.method is None:
        alone = replace(case, heads=None)
        ways["vote"] = lambda *rows: _ours(alone, *rows)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    errors: dict[str, list[float]] = {name: [] for name in ways}
    making: list[float] = []
    importlib.import_module("torch._dynamo")  # otherwise the first optimizer of the process imports it, in a second
    # the first round is a warm-up, which long steps do not need
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


def raced(race: str, on: str) -> dict[str, Any]:
    """Return the seconds of each training by hand until its test NLL is near the final one of `fit`, measured in turn.

    Networks have risk heads. A training that never gets there counts with its whole time; "reached" counts the rounds that do.
    """
    case = TRAININGS[race]
    x, y, new, targets, _ = _data(case)
    ways = by_hand(case) | by_torch_uncertainty(case)
    seconds: dict[str, list[float]] = {name: [] for name in ("fit", *ways)}
    nlls: dict[str, list[float]] = {name: [] for name in seconds}
    reached = dict.fromkeys(ways, 0)
    for round_ in range(-1, ROUNDS):  # the first round is a warm-up
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


__all__ = ["TRAININGS", "raced", "trained"]
