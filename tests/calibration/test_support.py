"""Intervals are clipped to the support of the model's distribution, which loses no target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

from workbench import compose, fit, sculpt, vote
from workbench.calibration import SplitConformal, calibrate
from workbench.calibration.base import Calibrated
from workbench.distributions import LogNormal


class Counts(nn.Module):
    """A model that itself returns a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Any:
        return distributions.Poisson(self.fc(x).exp())


def rows(family: str, n: int = 400) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=draw)
    rate = (x[:, :1] - 1).exp()
    y = torch.poisson(rate, generator=draw)
    if family in ("Beta", "Gamma", "LogNormal"):
        y = rate * torch.rand(n, 1, generator=draw) + 1e-3
    return x, y / (y + 1) if family == "Beta" else y


def trained(family: str) -> tuple[Any, Tensor, Tensor]:
    x, y = rows(family)
    torch.manual_seed(0)
    if family == "returned":
        wrapped = vote.Wrapper(2)(Counts())
    elif family == "LogNormal":
        wrapped = sculpt.Wrapper(LogNormal)(nn.Sequential(nn.Linear(2, 1), nn.Softplus()))
    elif family == "voters":
        wrapped = compose(vote.Wrapper(2), sculpt.Wrapper(distributions.Poisson))(nn.Linear(2, 1))
    else:
        wrapped = sculpt.Wrapper(getattr(distributions, family))(nn.Linear(2, 1))
    fit(wrapped, (x[:100], y[:100]), epochs=3, progress=False)
    return wrapped, x[100:], y[100:]


def unclipped(calibrated: Calibrated, x: Tensor) -> tuple[Tensor, Tensor]:
    calibrated.support = torch.empty(0)
    return calibrated.interval(x, 0.9)


METHODS: list[Any] = [
    ("conformal", {"score": "absolute"}),
    ("conformal", {"score": "normalized"}),
    ("conformal", {"score": "cqr"}),
    ("variance", {}),
    ("isotonic", {}),
]


@pytest.mark.parametrize("family", ["Poisson", "NegativeBinomial", "Gamma", "Beta", "LogNormal", "voters", "returned"])
@pytest.mark.parametrize(("method", "options"), METHODS, ids=lambda value: str(value))
def test_intervals_lie_in_the_support_and_cover_the_same_targets(family: str, method: str, options: Any) -> None:
    wrapped, x, y = trained(family)
    held = x[:150], y[:150]
    start = calibrate(wrapped, held, "variance") if method == "isotonic" else wrapped
    calibrated = calibrate(start, held, method, **options)
    lower, upper = calibrated.interval(x, 0.9)
    highest = 1.0 if family == "Beta" else torch.inf
    assert bool((lower >= 0).all())
    assert bool((upper <= highest).all())
    before = unclipped(calibrated, x)
    torch.testing.assert_close((lower, upper), tuple(end.clamp(0, highest) for end in before))
    assert torch.equal((lower <= y) & (y <= upper), (before[0] <= y) & (y <= before[1]))
    if options.get("score") == "absolute":
        assert bool((before[0] < 0).any())  # so that there was something to clip


def test_intervals_of_cross_fitted_positive_values_are_clipped() -> None:
    x, y = rows("LogNormal", 60)
    torch.manual_seed(0)
    wrapped = compose(vote.Wrapper(2), sculpt.Wrapper(LogNormal))(nn.Sequential(nn.Linear(2, 1), nn.Softplus()))
    calibrated = calibrate(wrapped, fit(wrapped, (x, y), folds=2, epochs=2, progress=False), score="absolute")
    lower, upper = calibrated.interval(x, 0.9)
    before = unclipped(calibrated, x)
    assert bool((before[0] < 0).any())
    torch.testing.assert_close((lower, upper), (before[0].clamp_min(0), before[1]))


def test_values_of_any_sign_are_not_clipped() -> None:
    x, y = rows("Poisson")
    wrapped = sculpt.Wrapper()(nn.Linear(2, 1))
    calibrated = calibrate(wrapped, (x, y - y.mean()), "conformal")
    assert not calibrated.support.numel()
    assert bool((calibrated.interval(x, 0.9)[0] < 0).any())


def test_targets_outside_of_the_support_are_covered_all_the_same() -> None:
    wrapped, x, y = trained("Poisson")
    y = y - 3  # counts from which something was subtracted
    lower, upper = calibrate(wrapped, (x[:150], y[:150]), "conformal", score="absolute").interval(x[150:], 0.9)
    assert ((lower <= y[150:]) & (y[150:] <= upper)).float().mean() > 0.8


def test_states_keep_the_support_and_those_of_earlier_versions_load() -> None:
    wrapped, x, y = trained("Poisson")
    calibrated = calibrate(wrapped, (x, y), "conformal", score="absolute")
    again = SplitConformal(wrapped, score="absolute")
    again.load_state_dict(calibrated.state_dict())
    torch.testing.assert_close(again.interval(x), calibrated.interval(x))
    earlier = calibrated.state_dict()
    del earlier["support"]
    again.load_state_dict(earlier)
    torch.testing.assert_close(again.interval(x), unclipped(calibrated, x))
