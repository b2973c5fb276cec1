"""Right-censored targets: compared with scipy's survival functions, on times of which half are censored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import scipy.stats
import torch
import torch.distributions as families
from torch import nn

import workbench
from workbench import sculpt
from workbench.calibration import calibrate, selective
from workbench.distributions import Censored

SCIPY = {
    "Exponential": lambda a, b: scipy.stats.expon(scale=1 / a),
    "Weibull": lambda a, b: scipy.stats.weibull_min(b, scale=a),
    "LogNormal": lambda a, b: scipy.stats.lognorm(b, scale=a),
}


@pytest.mark.parametrize("name", SCIPY)
def test_likelihood_against_scipy(name: str) -> None:
    family = Censored(name)
    raw = torch.tensor([[0.4], [-0.3]])
    heads = torch.full((family.n_heads, 2, 1), 0.5)
    a, b = raw.double().exp().numpy(), torch.tensor(0.5).double().exp().item()
    for time in (0.1, 3.0, 30.0):
        targets = torch.tensor([[time, 1.0], [time, 0.0]])
        event, survival = SCIPY[name](a[0], b).logpdf(time), SCIPY[name](a[1], b).logsf(time)
        expected = -torch.tensor([[float(event[0])], [float(survival[0])]])
        nll = family.loss_function(targets, raw, heads, reduction="none")
        torch.testing.assert_close(nll, expected, rtol=1e-4, atol=1e-5)
    times = torch.tensor([[2.0], [0.5]])
    density = SCIPY[name](a, b).logpdf(times.double().numpy())
    torch.testing.assert_close(
        family.log_prob(times, raw, heads), torch.as_tensor(density).float(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_the_mean_is_that_of_all_times_and_not_of_those_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1, 1, 800)[:, None]
    times = -(1 - torch.rand(800, 1, generator=generator)).log() * 10
    cut = -(1 - torch.rand(800, 1, generator=generator)).log() * 10
    targets = torch.cat([torch.minimum(times, cut), (times <= cut).float()], 1)
    torch.manual_seed(0)
    wrapped = sculpt.Wrapper(Censored(families.Exponential), n_layers=1)(
        nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    )
    workbench.fit(wrapped, (x, targets), epochs=15, lr=0.03, progress=False)
    assert wrapped.scaling is not None
    assert wrapped.scaling.y_mean is None
    wrapped.eval()
    events = targets[:, 1].sum()
    estimate = targets[:, 0].sum() / events  # the maximum of the likelihood of one rate
    torch.testing.assert_close(wrapped(x).mean(), estimate, rtol=0.15, atol=0)
    assert estimate > 1.5 * targets[:, 0].mean()
    torch.testing.assert_close(wrapped.predictive(x).mean, wrapped(x))
    assert wrapped.predictive(x).log_prob(times).shape == (800, 1)


def test_targets_without_an_indicator_are_refused() -> None:
    x, model = torch.zeros(8, 1), nn.Linear(1, 1)
    for y, message in (
        (torch.ones(8, 1), "events"),
        (torch.full((8, 2), 2.0), "1 for an event"),
        (torch.zeros(8, 2), "above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            workbench.fit(sculpt.Wrapper(Censored())(model), (x, y), epochs=1)
    with pytest.raises(ValueError, match="then 1 or 0"):
        sculpt.Wrapper(Censored())(model).loss(None, x, torch.ones(8, 1))
    with pytest.raises(ValueError, match="Exponential, Weibull, LogNormal"):
        Censored("Gamma")


@pytest.mark.parametrize("use", [calibrate, selective, lambda wrapped, data: calibrate(wrapped, data, "conformal")])
def test_censored_times_are_not_calibrated_as_if_they_were_reached(use: Callable[..., Any]) -> None:
    wrapped = sculpt.Wrapper(Censored())(nn.Linear(1, 1))
    x, times = torch.randn(40, 1), 1 + torch.rand(40, 1)
    events = (torch.arange(40) % 4 > 0).float()[:, None]
    with pytest.raises(ValueError, match="10 of 40 held-out times are censored"):
        use(wrapped, (x, torch.cat([times, events], 1)))
    with pytest.raises(ValueError, match=r"every event was observed, so give the times alone, y\[..., :1\]"):
        use(wrapped, (x, torch.cat([times, torch.ones(40, 1)], 1)))
    use(wrapped, (x, times))
