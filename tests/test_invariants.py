"""What a useful risk must do on data with known true risk."""

from __future__ import annotations

import torch
from torch import nn

from workbench import data, fit, sculpt, vote


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))


def test_voters_know_less_in_the_gap() -> None:
    sine = data.toy.sine_gap(n_train=2000, n_test=300)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrapped = vote.Wrapper(5)(network())
    fit(wrapped, sine, epochs=60, validation=0, progress=False)
    with torch.no_grad():
        y, risk = wrapped(sine.test.x, return_risk=True)
    known, gap = sine.test.regions["data"], sine.test.regions["gap"]
    assert risk[gap].mean() > 3 * risk[known].mean()
    # and not because the voters failed where there was something to learn
    assert (y - sine.test.y)[known].abs().mean() < 0.05


def test_sculpt_finds_the_true_noise() -> None:
    cubic = data.toy.cubic(n_train=3000, n_test=300)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrapped = sculpt.Wrapper()(network())
    fit(wrapped, cubic, epochs=50, progress=False)
    with torch.no_grad():
        _, risk = wrapped(cubic.test.x, return_risk=True)
    assert cubic.test.sigma is not None
    inside = cubic.test.regions["data"]
    error = ((risk - cubic.test.sigma).abs() / cubic.test.sigma)[inside]
    assert error.median() < 0.15
    # where the noise peaks: within half a unit of x = -1
    peak = cubic.test.x[inside][risk[inside].argmax()]
    assert abs(float(peak) + 1) < 0.5
