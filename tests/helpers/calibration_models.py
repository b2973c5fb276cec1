"""Wrapped models with known predictions, risks and best calibration, and rows to calibrate them on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench import compose, sculpt
from workbench.distributions import LogitNormal, Normal


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def known(distribution: Any = Normal, outputs: int = 1, **settings: Any) -> Any:
    """Return a wrapped model of x = [mu, raw] that predicts mu with aleatoric risk softplus(raw) + 1e-9, all [n, outputs]."""
    model = nn.Linear(2 * outputs, outputs, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.eye(outputs, 2 * outputs))
    wrapped = sculpt.Wrapper(distribution, n_layers=1, **settings)(model)
    ((name, _),) = wrapped.named_risk_parameters()
    wrapped.set_risk_parameters({name: torch.eye(2 * outputs).double()[outputs:]})
    return wrapped.eval()


def inputs(mu: Tensor, sigma: Tensor) -> Tensor:
    return torch.cat([mu, torch.log(torch.expm1(sigma))], 1)


def regression(n: int, outputs: int = 1, factor: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, y, mu and sigma with y ~ N(mu, factor * sigma)."""
    mu = torch.randn(n, outputs, generator=rng(seed), dtype=torch.float64)
    sigma = 0.5 + torch.rand(n, outputs, generator=rng(seed + 1), dtype=torch.float64)
    noise = torch.randn(n, outputs, generator=rng(seed + 2), dtype=torch.float64)
    return inputs(mu, sigma), mu + factor * sigma * noise, mu, sigma


def scores(**settings: Any) -> Any:
    """Return a wrapped model that predicts its input, in float64."""
    model = nn.Linear(3, 3, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
    return compose(sculpt.Wrapper(LogitNormal, n_layers=1, **settings))(model).eval()


def labelled(n: int, temperature: float, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits, and labels drawn from softmax(logits / temperature)."""
    logits = 2 * torch.randn(n, classes, generator=rng(seed), dtype=torch.float64)
    return logits, torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng(seed + 1))[:, 0]


def classified(n: int = 60) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4, generator=rng(3)), torch.randint(3, (n,), generator=rng(4))


def answers_of(calibrated: Any, x: Tensor) -> list[Tensor]:
    y, risk = calibrated(x, return_risk=True)
    results = [y, getattr(risk, "total", risk)]
    try:
        results += calibrated.interval(x, 0.8)
    except (TypeError, ValueError):
        results += [calibrated.predict_set(x, 0.8)]
    return results
