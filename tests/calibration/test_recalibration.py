"""Recalibrated quantiles: compared with numpy and scipy integrals, and on new rows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.calibration_models import inputs, known, regression, rng
from scipy import integrate, stats
from torch import Tensor, nn

from workbench import compose, sculpt, vote
from workbench.calibration import QuantileRecalibration, calibrate
from workbench.distributions import Cauchy, Laplace, LogNormal, Normal, StudentT
from workbench.metrics import quantile_calibration_error


def test_recalibrated_probabilities_are_the_observed_shares() -> None:
    x, y, mu, sigma = regression(99, factor=2.0)
    y = y + 0.5
    calibrated = calibrate(known(), (x, y), "isotonic")
    u = stats.norm.cdf(((y - mu) / sigma).numpy())[:, 0]
    knots = np.r_[0, np.sort(u), 1]
    at = np.linspace(0, 1, 201)
    targets = mu[:1] + sigma[:1] * torch.as_tensor(stats.norm.ppf(at[1:-1, None]))
    cdf = calibrated.cdf(x[:1].expand(199, 2), targets)
    np.testing.assert_allclose(cdf.detach().numpy()[:, 0], np.interp(at, knots, np.arange(101) / 100)[1:-1], atol=1e-9)
    for q in (0.005, 0.1, 0.5, 0.93):
        torch.testing.assert_close(calibrated.cdf(x, calibrated.quantile(x, q)), torch.full((99, 1), q).double())
        stated = np.interp(q, np.arange(101) / 100, knots)
        torch.testing.assert_close(calibrated.quantile(x, q), mu + sigma * stats.norm.ppf(stated))
    lower, upper = calibrated.interval(x, 0.8)
    torch.testing.assert_close((lower, upper), (calibrated.quantile(x, 0.1), calibrated.quantile(x, 0.9)))


def test_recalibration_holds_on_new_rows() -> None:
    def skewed(n: int, seed: int) -> tuple[Tensor, Tensor]:
        x, _, mu, sigma = regression(n, seed=seed)
        noise = torch.empty(n, 1, dtype=torch.float64).exponential_(generator=rng(seed + 7))
        return x, mu + 0.7 * sigma * noise

    calibrated = calibrate(known(), skewed(2000, 0), "isotonic")
    x, y = skewed(4000, 50)
    share = {q: (y <= calibrated.quantile(x, q)).double().mean().item() for q in (0.05, 0.25, 0.5, 0.9, 0.99)}
    assert all(abs(share[q] - q) < 4 * math.sqrt(q * (1 - q) * (1 / 2000 + 1 / 4000)) for q in share)
    prediction, risk = calibrated(x, return_risk=True)
    before = quantile_calibration_error(*known()(x, return_risk=True), y)
    assert quantile_calibration_error(prediction, risk, y) < before / 2


@pytest.mark.parametrize(("distribution", "family"), [(Normal, stats.norm), (Laplace, stats.laplace(scale=0.5**0.5))])
def test_mean_and_standard_deviation_are_integrals_of_the_quantiles(distribution: Any, family: Any) -> None:
    x, y, mu, sigma = regression(19, factor=2.0)
    calibrated = calibrate(known(distribution), (x, y + 1), "isotonic")
    knots = np.sort(np.r_[0, family.cdf(((y + 1 - mu) / sigma).numpy())[:, 0], 1])

    def moment(power: int) -> float:
        return sum(
            0.05 / (b - a) * integrate.quad(lambda u: family.ppf(u) ** power, a, b)[0]
            for a, b in itertools.pairwise(knots)
        )

    mean, stddev = moment(1), math.sqrt(moment(2) - moment(1) ** 2)
    prediction, risk = calibrated(x, return_risk=True)
    torch.testing.assert_close(prediction, mu + sigma * mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(risk, sigma * stddev, rtol=1e-3, atol=0)
    torch.testing.assert_close(prediction, calibrated(x))


def test_nothing_moves_where_nothing_was_fitted() -> None:
    x, _, mu, sigma = regression(20)
    prediction, risk = QuantileRecalibration(known())(x, return_risk=True)
    torch.testing.assert_close(prediction, mu, rtol=0, atol=1e-9)
    torch.testing.assert_close(risk, sigma, rtol=1e-4, atol=0)
    positive = inputs(mu.abs() + 1, sigma)
    prediction, risk = QuantileRecalibration(known(LogNormal))(positive, return_risk=True)
    torch.testing.assert_close(prediction, mu.abs() + 1, rtol=1e-3, atol=0)
    torch.testing.assert_close(risk, sigma, rtol=1e-2, atol=0)


def test_levels_near_one_are_not_rounded_to_float32() -> None:
    wrapped, x = sculpt.Wrapper()(nn.Linear(2, 1)), torch.zeros(1, 2)
    identity = QuantileRecalibration(wrapped)
    y, risk = wrapped(x, return_risk=True)
    for level in (1 - 1e-6, 1 - 1e-9):
        torch.testing.assert_close(identity.quantile(x, level), y + risk * stats.norm.ppf(level), check_dtype=False)


def test_the_cdf_of_values_in_float64_is_not_that_of_rounded_ones() -> None:
    wrapped, x = sculpt.Wrapper()(nn.Linear(2, 1)), torch.zeros(1, 2)
    wrapped.scale(y_mean=torch.tensor(1e6), y_scale=torch.tensor(0.01))
    y, risk = (part.detach().double() for part in wrapped(x, return_risk=True))
    values = y + risk * 0.7  # a step of float32 is 0.06 there
    expected = stats.norm.cdf(values, y, risk)
    np.testing.assert_allclose(QuantileRecalibration(wrapped).cdf(x, values).detach(), expected, rtol=1e-6)


def test_named_risks_follow_the_recalibrated_one() -> None:
    x, y, _, _ = regression(60, factor=0.5)
    wrapped = compose(vote.Wrapper(3), sculpt.Wrapper())(nn.Linear(2, 1).double()).eval()
    calibrated = calibrate(calibrate(wrapped, (x, y)), (x, y), "isotonic")
    before, after = wrapped(x, return_risk=True)[1], calibrated(x, return_risk=True)[1]
    torch.testing.assert_close(after.total**2, after.aleatoric**2 + after.epistemic**2)
    torch.testing.assert_close(after.epistemic / after.total, before.epistemic / before.total)


def test_each_output_can_have_a_map_of_its_own() -> None:
    x, y, _, _ = regression(30, outputs=2)
    y[:, 1] = 3 * y[:, 1] - 1
    both = calibrate(known(outputs=2), (x, y), "isotonic", per_output=True)
    for k in range(2):
        one = calibrate(known(), (x[:, k::2], y[:, k : k + 1]), "isotonic")
        torch.testing.assert_close(both.quantile(x, 0.3)[:, k : k + 1], one.quantile(x[:, k::2], 0.3))
        torch.testing.assert_close(both.cdf(x, y)[:, k : k + 1], one.cdf(x[:, k::2], y[:, k : k + 1]))
        for mine, theirs in zip(both(x, return_risk=True), one(x[:, k::2], return_risk=True), strict=True):
            torch.testing.assert_close(mine[:, k : k + 1], theirs)


def test_quantiles_that_say_nothing_are_refused() -> None:
    x, y, _, _ = regression(30)
    with pytest.raises(ValueError, match=r"predicted cdf is exactly 0 or 1 at 1 of 30 targets.*variance"):
        calibrate(known(), (x, y.index_fill(0, torch.tensor([4]), 1e3)), "isotonic")
    x, y, _, _ = regression(200)
    rows = x, y.index_fill(0, torch.tensor([4]), 100.0)
    with pytest.raises(
        ValueError, match=r"exactly 0 or 1 at 1 of 200 .*; train with heavier tails.*StudentT.*conformal"
    ):
        calibrate(calibrate(known(), rows, "variance"), rows, "isotonic")
    assert calibrate(known(StudentT), rows, "isotonic").quantile(x, 0.5).isfinite().all()
    x, y, _, _ = regression(30)
    with pytest.raises(ValueError, match="Cauchy has no standard deviation"):
        calibrate(known(Cauchy), (x, y), "isotonic")(x)
    assert calibrate(known(Cauchy), (x, y), "isotonic").quantile(x, 0.5).isfinite().all()
    with pytest.raises(ValueError, match="after QuantileRecalibration, predictions no longer follow a family"):
        calibrate(calibrate(known(), (x, y), "isotonic"), (x, y), "variance")


def test_the_factor_of_the_risks_of_a_model_in_half_precision_is_not_rounded() -> None:
    x, y, *_ = regression(99, factor=2.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrapped = compose(vote.Wrapper(2), sculpt.Wrapper())(nn.Linear(2, 1)).to(torch.bfloat16).eval()
    calibrated = calibrate(wrapped, (x, y / y.std()), "isotonic")
    prediction, risk = calibrated(x.bfloat16(), return_risk=True)
    assert prediction.dtype == torch.bfloat16
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    z = torch.special.ndtri(torch.as_tensor(np.interp(u, *(line[0].numpy() for line in reversed(calibrated._lines())))))
    before = wrapped(x.bfloat16(), return_risk=True)[1]
    expected = z.std(correction=0).float().expand(99, 1)  # of the recalibrated standard normal
    torch.testing.assert_close(risk.total / before.total, expected, rtol=2e-4, atol=0)
