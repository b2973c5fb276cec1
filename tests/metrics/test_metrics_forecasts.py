"""Metrics of horizons and joint targets: compared with plain loops and draws of known coverage."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from workbench import metrics
from workbench.metrics import _pieces

RNG = np.random.default_rng(0)
SAMPLES, TARGET = RNG.normal(size=(7, 6, 3)), RNG.normal(size=(6, 3))
KEEP = RNG.uniform(size=(6, 3)) < 0.6
KEEP[2] = False  # a path without any step


def energy(samples: np.ndarray, target: np.ndarray, fair: bool) -> float:
    m = len(samples)
    pairs = sum(np.linalg.norm(a - b) for a in samples for b in samples)
    return float(np.mean([np.linalg.norm(a - target) for a in samples]) - pairs / (2 * m * (m - 1 if fair else m)))


@pytest.mark.parametrize("numbers", [2**18, 30])
@pytest.mark.parametrize("fair", [False, True])
def test_energy_score_by_plain_loops(fair: bool, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pieces, "PIECE_SIZE", numbers)
    expected = [energy(SAMPLES[:, i], TARGET[i], fair) for i in range(6)]
    np.testing.assert_allclose(metrics.energy_score(SAMPLES, TARGET, fair, "none"), expected)
    assert metrics.energy_score(SAMPLES, TARGET, fair).item() == pytest.approx(np.mean(expected))
    observed = [energy(SAMPLES[:, i, KEEP[i]], TARGET[i, KEEP[i]], fair) for i in range(6) if KEEP[i].any()]
    for options in ({"mask": KEEP}, {"void": float("nan")}):
        target = np.where(KEEP, TARGET, np.nan)
        np.testing.assert_allclose(metrics.energy_score(SAMPLES, target, fair, "none", **options), observed)


def test_the_energy_score_of_one_target_is_the_crps() -> None:
    samples, target = SAMPLES[..., :1], TARGET[:, :1]
    for fair in (False, True):
        crps = metrics.crps_samples(samples, target, fair)
        torch.testing.assert_close(metrics.energy_score(samples, target, fair), crps)
        torch.testing.assert_close(metrics.energy_score(samples[..., 0], target[:, 0], fair), crps)


def covered(samples: np.ndarray, target: np.ndarray, level: float) -> bool:
    """Whether one path lies in the joint band, by plain loops."""
    m, deviations = len(samples), []
    for i in range(m):
        others = np.delete(samples, i, 0)
        deviations.append(max(np.abs(samples[i] - others.mean(0)) / others.std(0, ddof=1)))
    width = sorted(deviations)[int(np.ceil(level * (m + 1) - 1e-9)) - 1]
    return bool(max(np.abs(target - samples.mean(0)) / samples.std(0, ddof=1)) <= width)


def test_path_coverage_by_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pieces, "PIECE_SIZE", 50)
    for level in (0.25, 0.5, 0.8):
        expected = [covered(SAMPLES[:, i], TARGET[i], level) for i in range(6)]
        assert metrics.path_coverage(SAMPLES, TARGET, level, "none").tolist() == expected
        observed = [covered(SAMPLES[:, i, KEEP[i]], TARGET[i, KEEP[i]], level) for i in range(6) if KEEP[i].any()]
        assert metrics.path_coverage(SAMPLES, TARGET, level, "none", mask=KEEP).tolist() == observed


def test_joint_bands_hold_whole_paths_and_intervals_of_steps_do_not() -> None:
    mix = RNG.normal(size=(8, 8))
    draws = RNG.normal(size=(61, 3000, 8)) @ mix
    samples, target = draws[1:], draws[0]
    for level in (0.5, 0.9):
        assert metrics.path_coverage(samples, target, level).item() == pytest.approx(level, abs=0.03)
    u = metrics.pit_samples(samples, target)
    assert ((u > 0.05) & (u < 0.95)).double().mean().item() == pytest.approx(0.9, abs=0.02)
    assert ((u > 0.05) & (u < 0.95)).all(-1).double().mean() < 0.75
    assert metrics.path_coverage(samples, 2 * target).item() < 0.6


def test_steps_without_spread() -> None:
    samples = np.concatenate([SAMPLES, np.ones((7, 6, 1))], -1)
    same, other = (np.concatenate([TARGET, np.full((6, 1), end)], -1) for end in (1.0, 2.0))
    for level in (0.5, 0.8):
        torch.testing.assert_close(
            metrics.path_coverage(samples, same, level), metrics.path_coverage(SAMPLES, TARGET, level)
        )
        assert metrics.path_coverage(samples, other, level) == 0


def test_steps_are_calibrated_by_themselves() -> None:
    scale = np.array([1.0, 2.0, 4.0])
    target, risk = scale * RNG.normal(size=(4000, 3)), np.full((4000, 3), 2.0)  # the right risk of the second step only
    table = metrics.coverage_by_step(np.zeros((4000, 3)), risk, target, levels=[0.5, 0.9])
    normal = scipy.stats.norm
    expected = [[2 * normal.cdf(normal.ppf((1 + p) / 2) * 2 / s) - 1 for p in (0.5, 0.9)] for s in scale]
    np.testing.assert_allclose(table.observed, expected, atol=0.025)
    for t in range(3):
        columns = (np.zeros(4000), risk[:, t], target[:, t])
        torch.testing.assert_close(table.error[t], metrics.calibration_error(*columns, levels=[0.5, 0.9]))
    turned = metrics.coverage_by_step(np.zeros((3, 4000)), risk.T, target.T, dim=0, levels=[0.5, 0.9])
    assert torch.equal(turned.observed, table.observed)


def test_steps_of_series_that_end_early() -> None:
    lengths = np.array([3, 1, 2, 0])
    keep = np.arange(4) < lengths[:, None]
    prediction, risk, target = RNG.normal(size=(4, 4)), np.ones((4, 4)), RNG.normal(size=(4, 4))
    table = metrics.coverage_by_step(prediction, risk, np.where(keep, target, np.nan), void=float("nan"))
    assert table.rows.tolist() == [3, 2, 1, 0]
    assert table.observed[3].isnan().all()
    for t in range(3):
        rows = keep[:, t]
        curve = metrics.coverage_curve(prediction[rows, t], risk[rows, t], target[rows, t])
        torch.testing.assert_close(table.observed[t], curve.observed)


def test_pits_are_the_cdf_and_the_share_of_lower_samples() -> None:
    u = metrics.pit(TARGET, np.exp(TARGET), SAMPLES[0])
    np.testing.assert_allclose(u, scipy.stats.norm.cdf(SAMPLES[0], TARGET, np.exp(TARGET)))
    ranks = [[np.sum(SAMPLES[:, i, j] < TARGET[i, j]) for j in range(3)] for i in range(6)]
    np.testing.assert_allclose(metrics.pit_samples(SAMPLES, TARGET), (np.array(ranks) + 0.5) / 8)
    np.testing.assert_allclose(metrics.pit_samples([[0.0], [1.0], [1.0], [2.0]], [1.0]), [(1 + 1 + 0.5) / 5])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.energy_score(SAMPLES, TARGET[:, 0]), r"found \(7, 6, 3\) for target \(6,\)"),
        (lambda: metrics.energy_score(SAMPLES[:1], TARGET, fair=True), r"m >= 2.*found \(1, 6, 3\)"),
        (lambda: metrics.energy_score(SAMPLES[:, 0, 0], TARGET[0, 0]), r"target \(\)"),
        (lambda: metrics.path_coverage(SAMPLES, TARGET, 0.9), "a band of level 0.9 needs at least 9 samples, found 7"),
        (lambda: metrics.path_coverage(SAMPLES, TARGET, 90), "level must lie strictly between 0 and 1, found 90"),
        (lambda: metrics.path_coverage(SAMPLES, TARGET, 0.5, mask=KEEP & False), "no target is left"),
        (
            lambda: metrics.coverage_by_step(TARGET, abs(TARGET), TARGET, dim=2),
            r"no dimension 2 of steps, found \(6, 3\)",
        ),
        (lambda: metrics.coverage_by_step(TARGET, TARGET, TARGET), r"must be >= 0.*shape \(6, 3\)"),
    ],
)
def test_bad_input_says_what_was_found(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("season", [1, 4])
def test_mase_by_a_plain_loop(season: int) -> None:
    generator = torch.Generator().manual_seed(3)
    past, target, prediction = (torch.randn(shape, generator=generator) for shape in ((20, 2), (5, 3, 2), (5, 3, 2)))
    terms = []
    for k in range(2):
        naive = [abs(float(past[t, k] - past[t - season, k])) for t in range(season, 20)]
        scale = sum(naive) / (20 - season)
        terms.append((target[..., k] - prediction[..., k]).abs() / scale)
    expected = torch.stack(terms, -1)
    assert torch.allclose(metrics.mase(prediction, target, past, season, "none"), expected.double(), rtol=1e-5)
    keep = torch.rand(5, 3, 2, generator=generator) > 0.5
    assert float(metrics.mase(prediction, target, past, season, mask=keep)) == pytest.approx(
        float(expected[keep].mean()), rel=1e-5
    )
    alone = metrics.mase(prediction[..., 0], target[..., 0], past[:, 0], season)
    assert float(alone) == pytest.approx(float(terms[0].mean()), rel=1e-5)
    gaps = target.where(keep, float("nan"))
    assert metrics.mase(prediction, gaps, past, season, void=float("nan")) == metrics.mase(
        prediction, target, past, season, mask=keep
    )


def test_mase_of_the_naive_forecast_on_its_own_past_is_one() -> None:
    past = torch.tensor([3.0, 5.0, 4.0, 9.0, 1.0])
    assert metrics.mase(past[None, :-2], past[None, 2:], past, season=2) == 1


def test_pinball_by_a_plain_loop_and_beside_crps() -> None:
    levels, target = [0.1, 0.5, 0.8], torch.tensor([[0.0, 2.0], [-1.0, 1.0]], dtype=torch.float64)
    quantiles = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)[:, None, None].expand(3, 2, 2)
    expected = torch.zeros(2, 2, dtype=torch.float64)
    for q, level in zip((-1.0, 0.0, 1.0), levels, strict=True):
        for i in range(2):
            for j in range(2):
                gap = float(target[i, j]) - q
                expected[i, j] += (level * gap if gap >= 0 else (level - 1) * gap) / 3
    assert torch.allclose(metrics.pinball(quantiles, target, levels, "none"), expected)
    many = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    normal = torch.distributions.Normal(0.0, 1.0).icdf(many)[:, None].double()
    crps = metrics.crps(torch.zeros(1), torch.ones(1), torch.tensor([0.7]))
    assert 2 * float(metrics.pinball(normal, torch.tensor([0.7]), many)) == pytest.approx(float(crps), abs=1e-3)
    assert metrics.pinball(torch.tensor([[1.0]]), torch.tensor([3.0]), 0.25) == 0.5


def test_coverage_over_time_of_long_windows_adds_each_time_once() -> None:
    y = torch.linspace(-1, 1, 100_000).sin()
    started = time.perf_counter()
    shares = metrics.coverage_over_time(torch.zeros(len(y)), torch.ones(len(y)), y, 50_000)
    assert time.perf_counter() - started < 1  # sums of each window anew take several seconds
    hits = np.cumsum(np.r_[0, y.numpy() >= 0])
    np.testing.assert_array_equal(shares.numpy(), (hits[50_000:] - hits[:-50_000]) / 50_000)


def test_coverage_over_time_by_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(12, 3, generator=generator)
    lower, upper = torch.full((12, 3), -0.5), torch.full((12, 3), 0.8)
    upper[4], lower[5, 1] = -9.0, -float("inf")  # an empty interval, and one without a lower end
    keep = torch.rand(12, 3, generator=generator) > 0.3
    keep[6:9] = False
    for mask in (None, keep):
        shares = []
        for start in range(10):
            inside = [
                float(lower[t, h] <= target[t, h] <= upper[t, h])
                for t in range(start, start + 3)
                for h in range(3)
                if mask is None or mask[t, h]
            ]
            shares.append(sum(inside) / len(inside) if inside else float("nan"))
        said = metrics.coverage_over_time(lower, upper, target, 3, mask=mask)
        assert torch.allclose(said, torch.tensor(shares, dtype=torch.float64), equal_nan=True)
    assert metrics.coverage_over_time(lower[:, 0], upper[:, 0], target[:, 0], 12).shape == (1,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.mase([[1.0]], [[2.0]], [1.0, 1.0]), "the same in all seasons of 1"),
        (lambda: metrics.mase([[1.0]], [[2.0]], [1.0, 2.0], 2), "past has 2 times, and season=2 needs more than 2"),
        (lambda: metrics.mase([[1.0]], [[2.0]], torch.rand(4, 3)), r"past must have shape \[time\], or \[time, k\]"),
        (lambda: metrics.pinball([[1.0]], [2.0], [0.1, 0.9]), "one for each of 2 levels"),
        (lambda: metrics.pinball([[1.0]], [2.0], 1.5), "every level must lie strictly between 0 and 1"),
        (
            lambda: metrics.mase([[float("nan")]], [[2.0]], [1.0, 2.0]),
            r"prediction has 1 NaN or infinite values of 1 \(shape \(1, 1\)\)",
        ),
        (lambda: metrics.pinball([[1.0]], [[2.0]], [0.1]), r"found \(1, 1\) for target \(1, 1\)"),
        (lambda: metrics.coverage_over_time([0.0], [1.0], [0.5], 2), "window must be at most 1, found 2"),
    ],
)
def test_what_no_forecast_is_scored_by(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
