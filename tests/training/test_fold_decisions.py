"""Decisions of cross-fitting on unseen rows: epochs, factors, tails and weights, on checkable numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from workbench.distributions import Laplace, Normal, StudentT
from workbench.training.fold_decisions import decide, decide_classes, pool


def test_decisions_on_numbers_that_can_be_checked() -> None:
    generator = torch.Generator().manual_seed(0)
    n = 4000
    y = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    truth = 0.5 * y  # what is left over has a standard deviation of a half of |y|
    loc = torch.stack([torch.zeros_like(truth), y - 0.3 * torch.randn(n, 1, generator=generator, dtype=torch.float64)])
    loc = loc[:, None, None]
    risk = torch.stack([torch.full((1, 1, n, 1), 0.1), torch.rand(1, 1, n, 1, generator=generator) + 0.01])
    decision = decide(loc, risk, y, Normal(), members=1)
    assert (decision.mean_at, decision.scale_at) == ((1,), (0,))  # each from its own time
    assert decision.factor[0] == pytest.approx(3, rel=0.1)
    assert decision.df in (math.inf, 20.0)


def test_a_noise_far_below_what_is_said_is_found() -> None:
    """That of the first snapshot is about the spread of all targets, of which the noise may be a hundredth."""
    y = torch.randn(4000, 1, generator=torch.Generator().manual_seed(0)).double() * 0.02
    loc = torch.zeros(1, 1, 1, 4000, 1).double()
    decision = decide(loc, torch.ones_like(loc), y, Normal(), members=5)
    assert decision.factor[0] == pytest.approx(float(y.square().mean().sqrt()), rel=0.08)


@pytest.mark.slow
def test_a_small_factor_is_taken_if_it_gains_more_than_chance() -> None:
    """The second snapshot says the noise of each row; the first says 1 for all, which a small factor makes as likely where rows are few."""
    sides = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        deviation = 0.03 + 0.03 * torch.rand(30, generator=generator).double()
        y = deviation * torch.randn(30, generator=generator).double()
        zeros = torch.zeros(2, 1, 1, 30, 1).double()
        decision = decide(
            zeros, torch.stack([torch.ones(30), deviation]).reshape(2, 1, 1, 30, 1), y[:, None], Laplace(), members=1
        )
        usual, small = (
            max(
                (
                    torch.distributions.Laplace(0.0, factor * said).log_prob(y)
                    for factor in np.geomspace(low, high, 400)
                    for said in saids
                ),
                key=lambda terms: float(terms.mean()),
            )
            for low, high, saids in ((0.3, 4, [deviation]), (0.01, 0.3, [deviation, torch.ones(30).double()]))
        )
        gain = (small - usual).numpy()
        sides.append(bool(gain.mean() > gain.std(ddof=1) / math.sqrt(30)))
        assert (decision.factor[0] < 0.3) is sides[-1]
    assert len(set(sides)) == 2


def test_heavy_tails_are_found() -> None:
    generator = torch.Generator().manual_seed(0)
    zeros = torch.zeros(4000, 1, dtype=torch.float64)
    y = StudentT(4.0).sample((zeros, zeros + 1), generator)
    decision = decide(zeros[None, None, None], zeros[None, None, None] + 1, y, Normal(), members=1)
    assert decision.df in (3.0, 4.0, 6.0)
    assert decision.factor[0] == pytest.approx(1, abs=0.2)
    kept = decide(zeros[None, None, None], zeros[None, None, None] + 1, y, Laplace(), members=1)
    assert kept.df == math.inf
    torch.testing.assert_close(kept.log_prob, Laplace.log_prob(y, zeros, zeros + kept.factor[0]), atol=1e-6, rtol=1e-6)


def test_a_snapshot_of_scattered_voters_counts_as_their_whole_ensemble() -> None:
    """Two voters with errors +2 and -1 average to 0.5; ten of their kind are expected to do better than two that both err by 0.6."""
    y = torch.zeros(100, 1)
    noise = torch.randn(2, 100, 1, generator=torch.Generator().manual_seed(0))
    scattered, alike = noise, torch.full((2, 100, 1), 0.6)
    decision = decide(torch.stack([scattered, alike])[:, None], None, y, Normal(), members=10)
    assert decision.mean_at == (0,)
    few = decide(torch.stack([scattered, alike])[:, None], None, y, Normal(), members=2)
    assert few.mean_at == (1,)


def test_outputs_of_other_units_count_alike() -> None:
    """The first snapshot is bad at the first output, the second a little worse at the second, whose unit is a thousand times as large."""
    y = torch.randn(100, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 1000.0])
    first, second = y + torch.tensor([1.0, 0.0]), y + torch.tensor([0.0, 100.0])
    assert decide(torch.stack([first, second])[:, None, None], None, y, Normal(), members=1).mean_at == (1,)


def test_weights_are_those_of_the_best_pool() -> None:
    terms = torch.randn(2, 500, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights, pooled = pool(terms)
    grid = torch.linspace(0, 1, 2001, dtype=torch.float64)[1:-1, None]
    scores = torch.logaddexp(grid.log() + terms[0, :, 0], (1 - grid).log() + terms[1, :, 0]).mean(1)
    assert weights[0] == pytest.approx(float(grid[scores.argmax()]), abs=2e-3)
    assert float(pooled.mean()) == pytest.approx(float(scores.max()), abs=1e-6)


def test_classes_are_decided_by_their_likelihood() -> None:
    y = torch.tensor([0, 1, 1])
    good = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]])
    scores = torch.stack([good, 1 - good]).log()[:, None, None]
    decision = decide_classes(scores, y)
    assert decision.mean_at == (0,)
    torch.testing.assert_close(
        decision.log_prob[:, 0], torch.tensor([0.9, 0.8, 0.7]).double().log(), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("unit", [1.0, 1e-15, 1e12])
def test_constant_noise_has_the_unit_of_the_targets(unit: float) -> None:
    y = torch.randn(200, 1, generator=torch.Generator().manual_seed(0)).double()
    decision = decide(torch.zeros(1, 1, 1, 200, 1), None, y * unit, Normal(), members=5)
    rms = float(y.square().mean().sqrt())
    assert decision.factor[0] / unit == pytest.approx(rms, rel=1e-9)
    expected = torch.distributions.Normal(0.0, rms).log_prob(y) - math.log(unit)
    torch.testing.assert_close(decision.log_prob, expected)


def test_an_exact_prediction_has_a_density() -> None:
    for y in (torch.zeros(20, 1), torch.full((20, 1), 3e-14)):
        decision = decide(y[None, None, None], None, y, Normal(), members=5)
        assert decision.factor[0] == pytest.approx(1e-12 * (float(y[0]) or 1))
        assert decision.log_prob.isfinite().all()


def test_targets_that_are_all_equal_do_not_choose_the_snapshot() -> None:
    y = torch.stack([torch.randn(50, generator=torch.Generator().manual_seed(0)), torch.full((50,), 0.1)], 1)
    good, poor = y + torch.tensor([0.01, 1e-4]), y + torch.tensor([1.0, 0.0])
    for members in (1, 6):
        repeated = torch.stack([poor, good])[:, None, None].expand(2, 1, 2, 50, 2)
        assert decide(repeated, None, y, Normal(), members=members).mean_at == (1,)
    constant = y[:, 1:]
    alone = torch.stack([constant + 0.5, constant + 0.1])[:, None, None]
    assert decide(alone, None, constant, Normal(), members=1).mean_at == (1,)


def test_rows_without_a_class_weigh_nothing() -> None:
    scores = torch.randn(2, 3, 2, 40, 4, generator=torch.Generator().manual_seed(0)).log_softmax(4)
    y = torch.arange(40) % 4
    few = torch.where(torch.arange(40) < 8, y, -100)
    decision, alone = decide_classes(scores, few), decide_classes(scores[:, :, :, :8], y[:8])
    assert decision.mean_at == alone.mean_at
    assert decision.weights == pytest.approx(alone.weights)
    torch.testing.assert_close(decision.log_prob[:8], alone.log_prob)
    assert not decision.log_prob[8:].any()
