"""Bounds of expected losses: compared with plain loops, and by the losses that result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.stats import binom

from workbench.calibration import control_risk, learn_then_test
from workbench.calibration.conformal import conformal_quantile


def missed(n: int, seed: int, thresholds: torch.Tensor) -> torch.Tensor:
    """The share of ten true labels that {p >= 1 - threshold} leaves out, of rows that are more or less hard."""
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(n, 10, generator=g) ** torch.rand(n, 1, generator=g)
    return (p[:, None] < 1 - thresholds[:, None]).double().mean(2)


def test_the_expected_loss_is_at_most_the_level() -> None:
    thresholds = torch.linspace(0, 1, 201)
    new = missed(20_000, 999, thresholds)
    ends = []
    for seed in range(60):
        held_out = missed(50, seed, thresholds)
        chosen = control_risk(held_out, thresholds, level=0.2)
        n, means = 50, held_out.mean(0).tolist()
        expected = next(
            t
            for t, mean in zip(thresholds.tolist(), means, strict=True)
            if n / (n + 1) * mean + 1 / (n + 1) <= 0.2 + 1e-12
        )
        assert float(chosen) == expected
        ends.append(new[:, int((thresholds == chosen).nonzero())].mean())
    assert 0.17 < torch.stack(ends).mean() < 0.203  # E[loss] <= level, and at least level - 2 / (n + 1)


@pytest.mark.parametrize(("n", "coverage"), [(9, 0.9), (99, 0.9), (57, 0.8)])
def test_the_loss_of_missing_the_truth_is_split_conformal(n: int, coverage: float) -> None:
    scores = torch.rand(n, generator=torch.Generator().manual_seed(n)).double()
    thresholds = scores.sort().values
    losses = (scores[:, None] > thresholds).double()
    assert control_risk(losses, thresholds, level=1 - coverage) == conformal_quantile(scores, coverage)


def plain_p_value(losses: list[float], level: float) -> float:
    """Hoeffding-Bentkus, by the formulas of Bates et al. 2021."""
    n = len(losses)
    mean = sum(losses) / n
    a = min(mean, level)
    first = a * math.log(a / level) if a else 0.0
    h = first + ((1 - a) * math.log((1 - a) / (1 - level)) if a < 1 else 0.0)
    return min(math.exp(-n * h), math.e * float(binom.cdf(math.ceil(n * mean - 1e-9), n, level)))


@pytest.mark.parametrize("whole", [True, False])
def test_thresholds_are_tested_one_after_the_other(whole: bool) -> None:
    thresholds = torch.linspace(0, 0.5, 26)
    g = torch.Generator().manual_seed(0)
    losses = (
        (torch.rand(300, 26, generator=g) < thresholds).double()
        if whole
        else thresholds * torch.rand(300, 26, generator=g).double() * 2
    )
    good = learn_then_test(losses, thresholds, level=0.3, confidence=0.9)
    expected = []
    for k, threshold in enumerate(thresholds.tolist()):
        if plain_p_value(losses[:, k].tolist(), 0.3) > 0.1:
            break
        expected.append(threshold)
    assert good.tolist() == expected
    assert 0 < len(good) < 20
    both = learn_then_test(torch.stack([losses, losses.flip(0)]), thresholds, level=(0.3, 0.2))
    assert both.tolist() == learn_then_test(losses, thresholds, level=0.2).tolist()


def test_all_that_are_called_good_are_so_with_the_confidence() -> None:
    thresholds = torch.linspace(0.1, 0.3, 9)  # the probability of a loss of one: above 0.2 they are bad
    wrong = 0
    for seed in range(300):
        losses = torch.rand(100, 9, generator=torch.Generator().manual_seed(seed)) < thresholds
        wrong += bool((learn_then_test(losses.double(), thresholds, level=0.2, confidence=0.8) > 0.2).any())
    assert wrong <= 0.2 * 300


RISING = torch.tensor([[0.1, 0.2], [0.3, 0.1]])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: control_risk(RISING, [0.0, 1.0]), "rise along the thresholds in 1 of 2 rows, first in row 0"),
        (
            lambda: control_risk(torch.ones(5, 2), [0.0, 1.0]),
            "no threshold has an expected loss of at most 0.1: the last reaches 1",
        ),
        (lambda: control_risk(torch.zeros(5, 2), [0.0, 1.0]), "reaches 0.1667 with 5 held-out rows"),
        (
            lambda: control_risk(torch.zeros(5, 2), [0.0, 1.0, 2.0]),
            r"\[rows, thresholds\] for thresholds of shape \[3\]",
        ),
        (lambda: control_risk(2 * torch.ones(5, 2), [0.0, 1.0]), "between 0 and 1; found 2 to 2: scale them"),
        (lambda: control_risk(torch.full((5, 2), torch.nan), [0.0, 1.0]), "NaN"),
        (lambda: control_risk(torch.zeros(5, 2), [0.0, 1.0], level=1.0), "level must lie between 0 and the bound 1"),
        (lambda: learn_then_test(torch.zeros(5, 2), [0.0, 1.0], level=(0.1, 0.2)), "level has 2 numbers for 1 losses"),
        (lambda: learn_then_test(torch.zeros(5, 2), [0.0, 1.0], confidence=1.0), "confidence"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("value", ["0.5", None, [0.1], True])
def test_levels_and_bounds_that_are_no_number_are_refused(value: Any) -> None:
    losses, thresholds = torch.zeros(50, 2), [0.0, 1.0]
    for name in ("level", "bound"):
        with pytest.raises(TypeError, match=f"{name} must be (one number|a tensor or an array of numbers), found"):
            control_risk(losses, thresholds, **{name: value})
    if value in ("0.5", None):
        with pytest.raises((TypeError, ValueError), match="level must "):
            learn_then_test(losses, thresholds, value)
    with pytest.raises(TypeError, match="thresholds must be a tensor or an array of numbers"):
        learn_then_test(losses, ["a", "b"])
    assert control_risk(losses, thresholds, level=torch.tensor(0.1)) == control_risk(losses, thresholds, level=0.1)


def test_several_losses_and_levels_come_as_lists_or_tensors() -> None:
    losses, thresholds = torch.zeros(2, 50, 3), torch.arange(3.0)
    losses[1, :40, 2] = 1
    for converted in (losses, list(losses), losses.numpy(), losses.tolist()):
        for level in (torch.tensor([0.1, 0.2]), [0.1, 0.2], (0.1, 0.2)):
            assert learn_then_test(converted, thresholds, level).tolist() == [0.0, 1.0]


def test_thresholds_that_are_no_numbers_are_refused() -> None:
    for call in (control_risk, learn_then_test):
        with pytest.raises(ValueError, match="thresholds has 1 NaN of 2"):
            call(torch.zeros(50, 2), torch.tensor([0.0, float("nan")]))
