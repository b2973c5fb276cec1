"""Detection and selective prediction: compared with scikit-learn, scipy, torchmetrics and brute force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import sklearn.metrics
import torch
from torch import Tensor

from workbench import metrics

RNG = np.random.default_rng(0)
INSIDE, OUTSIDE = RNG.normal(size=400), RNG.normal(1, 1.5, size=160)
LABELS = np.r_[np.zeros(400), np.ones(160)]


def check(actual: Tensor, expected: Any, abs: float = 1e-9) -> None:
    assert (actual.dtype, actual.ndim) == (torch.float64, 0)
    assert actual.item() == pytest.approx(float(expected), abs=abs)


@pytest.mark.parametrize("decimals", [None, 1, 0])  # rounding makes ties
def test_detection_against_sklearn(decimals: int | None) -> None:
    inside, outside = (a if decimals is None else a.round(decimals) for a in (INSIDE, OUTSIDE))
    scores = np.r_[inside, outside]
    args = (torch.from_numpy(inside), torch.from_numpy(outside))
    check(metrics.auroc(*args), sklearn.metrics.roc_auc_score(LABELS, scores))
    check(metrics.aupr(*args), sklearn.metrics.average_precision_score(LABELS, scores))
    fpr, tpr, _ = sklearn.metrics.roc_curve(LABELS, scores, drop_intermediate=False)
    check(metrics.fpr95(*args), fpr[np.argmax(tpr >= 0.95)])
    fpr, tpr, _ = sklearn.metrics.roc_curve(1 - LABELS, -scores, drop_intermediate=False)
    check(metrics.fpr95(-args[1], -args[0]), fpr[np.argmax(tpr >= 0.95)])


@pytest.mark.parametrize("n_out", [1, 2, 19, 20, 21, 40, 60, 100, 180])
def test_fpr95_needs_exactly_95_percent(n_out: int) -> None:
    inside, outside = RNG.normal(size=50), RNG.normal(size=n_out)
    thresholds = [t for t in outside if (outside >= t).sum() * 100 >= 95 * n_out]
    check(metrics.fpr95(torch.from_numpy(inside), torch.from_numpy(outside)), (inside >= max(thresholds)).mean())


def test_detection_at_the_edges() -> None:
    low, high = torch.tensor([0.1, 0.2]), torch.tensor([0.3, float("inf")])
    for function, best, worst in ((metrics.auroc, 1.0, 0.0), (metrics.fpr95, 0.0, 1.0)):
        check(function(low, high), best)
        check(function(high, low), worst)
    check(metrics.aupr(low, high), 1.0)
    check(metrics.auroc(torch.ones(5, 1), torch.ones(3, 1)), 0.5)
    check(metrics.auroc(torch.tensor([1.0]), torch.tensor([1.0])), 0.5)
    same = torch.linspace(0, 1, 1000)
    check(metrics.auroc(same, same), 0.5)


@pytest.mark.parametrize("decimals", [None, 0])
def test_correlation_against_scipy(decimals: int | None) -> None:
    error, risk = RNG.normal(size=(200, 1)), RNG.uniform(size=(200, 1)) * 5
    if decimals is not None:
        error, risk = error.round(decimals), risk.round(decimals)
    target = torch.zeros(200, 1)
    expected = scipy.stats.spearmanr(risk.ravel(), np.abs(error).ravel()).statistic
    check(metrics.risk_error_correlation(torch.from_numpy(error), torch.from_numpy(risk), target), expected)


def expected_over_orders(risk: np.ndarray, error: np.ndarray, score: Callable[[np.ndarray], float]) -> float:
    """Mean of a score of risk-ordered errors over many random orders of equal risks."""
    generator = np.random.default_rng(1)
    return float(np.mean([score(error[np.lexsort((generator.random(len(risk)), risk))]) for _ in range(4000)]))


RISKS, ERRORS = RNG.uniform(size=60), RNG.uniform(size=60) ** 2


def test_aurc_augrc_and_ause_by_plain_loops() -> None:
    risk, error = torch.from_numpy(RISKS), torch.from_numpy(ERRORS)
    ordered, oracle = ERRORS[np.argsort(RISKS)], np.sort(ERRORS)
    selective = [ordered[:k].mean() for k in range(1, 61)]
    check(metrics.aurc(risk, error), np.mean(selective))
    np.testing.assert_allclose(metrics.risk_coverage_curve(risk, error).error, selective)
    np.testing.assert_allclose(metrics.risk_coverage_curve(risk, error).coverage, np.arange(1, 61) / 60)
    generalized = [0, *(ordered[:k].sum() / 60 for k in range(1, 61))]
    check(metrics.augrc(risk, error), scipy.integrate.trapezoid(generalized, dx=1 / 60))
    kept = [ordered[: 60 - k].mean() / ERRORS.mean() for k in range(60)]
    best = [oracle[: 60 - k].mean() / ERRORS.mean() for k in range(60)]
    curve = metrics.sparsification_curve(risk, error)
    np.testing.assert_allclose(curve.error, kept)
    np.testing.assert_allclose(curve.oracle, best)
    np.testing.assert_allclose(curve.removed, np.arange(60) / 60, atol=1e-12)
    check(metrics.ause(risk, error), np.mean(np.subtract(kept, best)))


def test_equal_risks_count_as_a_random_order() -> None:
    risk, error = np.round(RISKS[:12] * 3), ERRORS[:12]
    args = (torch.from_numpy(risk), torch.from_numpy(error))
    aurc = expected_over_orders(risk, error, lambda e: float((e.cumsum() / np.arange(1, 13)).mean()))
    check(metrics.aurc(*args), aurc, abs=2e-3)
    augrc = expected_over_orders(
        risk, error, lambda e: float(scipy.integrate.trapezoid(np.r_[0, e.cumsum() / 12], dx=1 / 12))
    )
    check(metrics.augrc(*args), augrc, abs=2e-3)


def test_augrc_of_failures_is_its_closed_form() -> None:
    wrong = RNG.uniform(size=500) < 0.3
    risk = RNG.normal(size=500).round(1) + wrong
    accuracy, auroc = 1 - wrong.mean(), sklearn.metrics.roc_auc_score(wrong, risk)
    expected = (1 - auroc) * accuracy * (1 - accuracy) + (1 - accuracy) ** 2 / 2
    check(metrics.augrc(torch.from_numpy(risk), torch.from_numpy(wrong)), expected)


def test_a_random_risk_gives_a_flat_sparsification_curve() -> None:
    error = torch.from_numpy(RNG.uniform(size=20_000))
    curve = metrics.sparsification_curve(torch.from_numpy(RNG.uniform(size=20_000)), error)
    assert (curve.error[:19_000] - 1).abs().max() < 0.06
    check(metrics.ause(error, error), 0.0)
    oracle = curve.oracle.mean().item()
    check(metrics.ause(torch.ones(20_000), error), 1 - oracle)  # a constant risk says as little
    assert metrics.ause(-error, error) > metrics.ause(torch.ones(20_000), error)
    check(metrics.ause(torch.rand(3, generator=torch.Generator()), torch.zeros(3)), 0.0)
    check(metrics.ause(torch.ones(1), torch.ones(1)), 0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.auroc(torch.ones(3), torch.ones(0)), "found 3 in-distribution and 0 out-of-distribution"),
        (lambda: metrics.aupr([], [1.0]), "both splits need rows"),
        (lambda: metrics.fpr95([1.0, float("nan")], [1.0]), r"risk_in has 1 NaN values of 2"),
        (
            lambda: metrics.risk_error_correlation(torch.rand(4), torch.ones(4), torch.rand(4)),
            "every risk of 4 elements",
        ),
        (lambda: metrics.risk_error_correlation(torch.ones(4), torch.rand(4), torch.ones(4)), "every absolute error"),
        (lambda: metrics.risk_error_correlation([1.0], [1.0], [1.0]), "values that differ"),
        (lambda: metrics.risk_error_correlation(torch.ones(4, 1), torch.ones(4), torch.ones(4, 1)), r"risk \(4,\)"),
        (lambda: metrics.aurc(torch.ones(3), torch.ones(3, 1)), r"risk \(3,\), error \(3, 1\)"),
        (lambda: metrics.ause(torch.ones(3), -torch.ones(3)), "errors must be >= 0.*found -1"),
        (lambda: metrics.augrc(torch.ones(0), torch.ones(0)), "risk is empty"),
        (lambda: metrics.aurc([1.0, float("nan")], [1.0, 0.0]), "risk has 1 NaN"),
    ],
)
def test_bad_input_says_what_was_found(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
