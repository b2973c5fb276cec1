"""Metrics of real-valued predictions and ensembles: compared with scipy, scikit-learn, torchmetrics and brute force."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import sklearn.metrics
import torch
import torchmetrics.functional
from torch import Tensor

from workbench import metrics
from workbench.distributions import Cauchy, Laplace, LogNormal, Normal, StudentT

RNG = np.random.default_rng(0)
PREDICTION = RNG.normal(size=(300, 2)).astype(np.float32)
RISK = RNG.uniform(0.5, 2.0, size=(300, 2)).astype(np.float32)
TARGET = (PREDICTION + RISK * RNG.standard_t(4, size=(300, 2))).astype(np.float32)
P, R, T = (torch.from_numpy(a) for a in (PREDICTION, RISK, TARGET))
NORM = scipy.stats.norm(PREDICTION.astype(float), RISK.astype(float))
Y = TARGET.astype(float)


def check(actual: Tensor, expected: Any, rel: float = 1e-9) -> None:
    assert (actual.dtype, actual.ndim) == (torch.float64, 0)
    assert actual.item() == pytest.approx(float(expected), rel=rel)


def test_errors_against_sklearn() -> None:
    check(metrics.rmse(P, T), sklearn.metrics.mean_squared_error(Y, PREDICTION) ** 0.5)
    check(metrics.mae(P, T), sklearn.metrics.mean_absolute_error(Y, PREDICTION))
    torch.testing.assert_close(metrics.mae(P, T, reduction="none"), (P.double() - T.double()).abs())


@pytest.mark.parametrize(
    ("distribution", "reference"),
    [
        (Normal, NORM),
        (Laplace, scipy.stats.laplace(PREDICTION.astype(float), RISK.astype(float) / 2**0.5)),
        (StudentT(df=4.0), scipy.stats.t(4, PREDICTION.astype(float), RISK.astype(float) / 2**0.5)),
        (Cauchy, scipy.stats.cauchy(PREDICTION.astype(float), RISK.astype(float))),
    ],
)
def test_likelihood_and_intervals_against_scipy(distribution: Any, reference: Any) -> None:
    check(metrics.nll(P, R, T, distribution), -reference.logpdf(Y).mean())
    for level in (0.5, 0.9, 0.99):
        lower, upper = reference.interval(level)
        inside = (lower <= Y) & (upper >= Y)
        check(metrics.picp(P, R, T, level, distribution), inside.mean())
        check(metrics.mpiw(P, R, level, distribution), (upper - lower).mean())
        pinball = lambda q, at: np.maximum(q * (Y - at), (q - 1) * (Y - at))  # noqa: E731
        alpha = 1 - level  # an interval score is a sum of two pinball losses
        expected = 2 / alpha * (pinball(alpha / 2, lower) + pinball(1 - alpha / 2, upper)).mean()
        check(metrics.interval_score(P, R, T, level, distribution), expected)
    levels = [0.1, 0.5, 0.8]
    curve = metrics.coverage_curve(P, R, T, levels, distribution)
    bounds = [reference.interval(level) for level in levels]
    shares = np.array([((lower <= Y) & (upper >= Y)).mean() for lower, upper in bounds])
    np.testing.assert_allclose(curve.observed, shares)
    np.testing.assert_allclose(curve.expected, levels)
    check(metrics.calibration_error(P, R, T, distribution, levels), np.abs(shares - levels).mean())
    below = np.array([(reference.ppf(q) >= Y).mean() for q in levels])
    check(metrics.quantile_calibration_error(P, R, T, distribution, levels), np.abs(below - levels).mean())


def test_default_levels_are_even() -> None:
    expected = [(np.abs(2 * NORM.cdf(Y) - 1) <= level).mean() - level for level in np.arange(1, 20) / 20]
    check(metrics.calibration_error(P, R, T), np.abs(expected).mean())


def test_calibrated_risks_have_little_calibration_error() -> None:
    sample = Normal.sample((P.repeat(50, 1), R.repeat(50, 1)), generator=torch.Generator().manual_seed(0))
    args = (P.repeat(50, 1), R.repeat(50, 1), sample)
    assert metrics.calibration_error(*args) < 0.01
    assert metrics.calibration_error(args[0], 2 * args[1], args[2]) > 0.15
    assert metrics.quantile_calibration_error(args[0] + 1, args[1], args[2]) > 0.1


def test_crps_against_its_integral() -> None:
    for distribution, family in ((Normal, scipy.stats.norm), (StudentT(df=4.0), scipy.stats.t(4))):
        p, r, t = P[:3, :1], R[:3, :1], T[:3, :1]
        total = 0.0
        for m, s, y in zip(p.flatten().tolist(), r.flatten().tolist(), t.flatten().tolist(), strict=True):
            z = (y - m) / (s if distribution is Normal else s / 2**0.5)
            below, _ = scipy.integrate.quad(lambda x, f=family: f.cdf(x) ** 2, -np.inf, z)
            above, _ = scipy.integrate.quad(lambda x, f=family: f.sf(x) ** 2, z, np.inf)
            total += (below + above) * (s if distribution is Normal else s / 2**0.5)
        check(metrics.crps(p, r, t, distribution), total / 3, rel=1e-6)
    check(metrics.crps(P, 0 * R, T), metrics.mae(P, T))
    with pytest.raises(ValueError, match="Cauchy has no crps"):
        metrics.crps(P, R, T, Cauchy)


def test_zero_risk_covers_exact_predictions_only() -> None:
    p, t = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [3.0]])
    check(metrics.picp(p, 0 * p, t), 0.5)
    check(metrics.mpiw(p, 0 * p), 0.0)
    check(metrics.interval_score(p, 0 * p, t), 1 / 0.1 / 2 * 2)


def test_sharpness_and_risk_objects() -> None:
    check(metrics.sharpness(R), np.sqrt((RISK.astype(float) ** 2).mean()))
    check(metrics.nll(P, SimpleNamespace(total=R, aleatoric=R / 2), T), metrics.nll(P, R, T))


def test_one_element_other_inputs_and_extremes() -> None:
    one = torch.ones(1, 1)
    check(metrics.rmse(one, one + 2), 2.0)
    check(metrics.nll(one, one, one), 0.9189385332046727)
    check(metrics.rmse(PREDICTION, TARGET), metrics.rmse(P, T))  # numpy
    check(metrics.rmse(P.half(), T.half()), metrics.rmse(P, T), rel=1e-2)
    check(metrics.rmse([1, 2], [1, 4]), 2**0.5)
    big = torch.full((4, 1), 1e30)
    check(metrics.rmse(big, -big), 2e30, rel=1e-6)  # would overflow when squared in float32
    tiny = 1e-9 * one
    check(metrics.nll(1e6 * one, tiny, one), -Normal.log_prob(one.double(), 1e6 * one.double(), tiny.double()))
    check(metrics.crps(one, one, one, LogNormal), LogNormal.crps(one.double(), one.double(), one.double()))
    assert metrics.nll(P.requires_grad_(), R, T).requires_grad
    P.requires_grad_(False)


def test_sample_crps_against_brute_force_and_torchmetrics() -> None:
    samples = torch.from_numpy(RNG.normal(size=(7, 40, 2)))
    target = torch.from_numpy(RNG.normal(size=(40, 2)))
    pairs = (samples.unsqueeze(0) - samples.unsqueeze(1)).abs()
    error = (samples - target).abs().mean(0)
    check(metrics.crps_samples(samples, target), (error - pairs.mean((0, 1)) / 2).mean())
    fair = error - pairs.sum((0, 1)) / (7 * 6) / 2
    torch.testing.assert_close(metrics.crps_samples(samples, target, fair=True, reduction="none"), fair)
    theirs = getattr(torchmetrics.functional.regression, "continuous_ranked_probability_score", None)
    if theirs is not None:  # torchmetrics 1.4 has none
        check(
            metrics.crps_samples(samples[..., 0], target[:, 0]),
            theirs(samples[..., 0].T, target[:, 0]).item(),
            rel=1e-5,
        )
    check(metrics.crps_samples(samples[:1], target), metrics.mae(samples[0], target))
    many = Normal.sample((P[:5].expand(20_000, 5, 2), R[:5].expand(20_000, 5, 2)), torch.Generator().manual_seed(0))
    check(metrics.crps_samples(many, T[:5], fair=True), metrics.crps(P[:5], R[:5], T[:5]), rel=0.02)


class TestMixture:
    predictions = torch.from_numpy(RNG.normal(size=(3, 6, 1)))
    risk = torch.from_numpy(RNG.uniform(0.3, 2.0, size=(3, 6, 1)))
    target = torch.from_numpy(RNG.normal(size=(6, 1)))
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)

    @pytest.mark.parametrize("weighted", [True, False])
    def test_nll_and_crps_against_the_mixture_density(self, weighted: bool) -> None:
        weights = self.weights if weighted else None
        w = self.weights.numpy() if weighted else np.full(3, 1 / 3)
        density = (w[:, None, None] * scipy.stats.norm(self.predictions, self.risk).pdf(self.target)).sum(0)
        check(metrics.mixture_nll(self.predictions, self.risk, self.target, weights=weights), -np.log(density).mean())
        crps = metrics.mixture_crps(self.predictions, self.risk, self.target, weights=weights, reduction="none")
        for i in range(6):
            family, y = scipy.stats.norm(self.predictions[:, i, 0], self.risk[:, i, 0]), self.target[i, 0].item()
            below, _ = scipy.integrate.quad(lambda x, f=family: (w @ f.cdf(x)) ** 2, -np.inf, y)
            above, _ = scipy.integrate.quad(lambda x, f=family: (1 - w @ f.cdf(x)) ** 2, y, np.inf)
            assert crps[i].item() == pytest.approx(below + above, rel=1e-6)

    @pytest.mark.parametrize(
        ("distribution", "reference"),
        [
            (Laplace, lambda m, r: scipy.stats.laplace(m, r / 2**0.5)),
            (StudentT(df=4.0), lambda m, r: scipy.stats.t(4, m, r / 2**0.5)),
        ],
    )
    def test_nll_of_other_families_against_the_mixture_density(self, distribution: Any, reference: Any) -> None:
        density = (self.weights.numpy()[:, None, None] * reference(self.predictions, self.risk).pdf(self.target)).sum(0)
        nll = metrics.mixture_nll(self.predictions, self.risk, self.target, distribution, self.weights, "none")
        np.testing.assert_allclose(nll, -np.log(density))

    def test_one_voter_is_itself_and_no_risk_is_the_sample_score(self) -> None:
        first = (self.predictions[:1], self.risk[:1], self.target)
        plain = (self.predictions[0], self.risk[0], self.target)
        check(metrics.mixture_nll(*first, StudentT(df=3.0)), metrics.nll(*plain, StudentT(df=3.0)))
        check(metrics.mixture_crps(*first), metrics.crps(*plain))
        check(
            metrics.mixture_crps(self.predictions, 0 * self.risk, self.target),
            metrics.crps_samples(self.predictions, self.target),
        )
        zero = torch.tensor([1.0, 0.0, 0.0])
        check(metrics.mixture_nll(self.predictions, self.risk, self.target, weights=zero), metrics.nll(*plain))

    def test_bad_input(self) -> None:
        with pytest.raises(ValueError, match=r"\[voters, \*target\], found \(3, 6, 1\) for target \(6,\)"):
            metrics.mixture_nll(self.predictions, self.risk, self.target[:, 0])
        with pytest.raises(ValueError, match="weights must be 3 numbers"):
            metrics.mixture_crps(self.predictions, self.risk, self.target, weights=[0.5, 0.5])
        with pytest.raises(ValueError, match=r"only a mixture of Normals.*Laplace"):
            metrics.mixture_crps(self.predictions, self.risk, self.target, Laplace)
        with pytest.raises(ValueError, match=r"m >= 2.*found \(1, 6, 1\)"):
            metrics.crps_samples(self.predictions[:1], self.target, fair=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.rmse(P, T[:, :1]), r"prediction \(300, 2\), target \(300, 1\)"),
        (lambda: metrics.nll(P, R[:, 0], T), r"risk \(300,\)"),
        (lambda: metrics.mpiw(P, R[:1]), r"risk \(1, 2\)"),
        (
            lambda: metrics.mae(P * float("nan"), T),
            r"prediction has 600 NaN or infinite values of 600 \(shape \(300, 2\)\)",
        ),
        (lambda: metrics.mae(P, T / 0), "target has 600"),
        (lambda: metrics.crps(P, -R, T), ">= 0, found -"),
        (lambda: metrics.sharpness(-R), ">= 0, found -"),
        (lambda: metrics.nll(P, 0 * R, T), "> 0.*found 0.0"),
        (lambda: metrics.rmse(P[:0], T[:0]), r"prediction is empty \(shape \(0, 2\)\)"),
        (lambda: metrics.picp(P, R, T, level=1.0), "level must lie strictly between 0 and 1, found 1.0"),
        (lambda: metrics.calibration_error(P, R, T, levels=[0.5, 2.0]), "found 2.0"),
        (lambda: metrics.nll(P, R, T, reduction="sum"), "reduction must be"),
        (lambda: metrics.rmse(P.to(torch.complex64), T), "real"),
    ],
)
def test_bad_input_says_what_was_found(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
