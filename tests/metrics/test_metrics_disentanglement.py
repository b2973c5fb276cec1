"""The Disentanglement Error: compared term by term with scipy's correlations, and where it is undefined."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr

from workbench import metrics
from workbench.metrics import LeverCurves


def _curves(levels: int, seed: int) -> LeverCurves:
    generator = np.random.default_rng(seed)
    return LeverCurves(*(generator.uniform(size=(3, levels)) for _ in range(3)))


def test_every_term_is_that_of_the_paper_and_of_the_package() -> None:
    size, noise = _curves(7, 0), _curves(11, 1)
    ua_ue, ue_ue = ([pearsonr(risk[run], -size.accuracy[run])[0] for run in range(3)] for risk in size[1:])
    ua_ua, ue_ua = ([pearsonr(risk[run], -noise.accuracy[run])[0] for run in range(3)] for risk in noise[1:])
    terms = [np.abs(np.array(ua_ua) - 1).mean(), np.abs(np.array(ue_ue) - 1).mean()]
    cross = [np.abs(ua_ue).mean(), np.abs(ue_ua).mean()]
    result = metrics.disentanglement_error(size, noise)
    assert result.error.item() == pytest.approx((sum(terms) + sum(cross)) / 4)
    # the package's own sum: its second term is the first one again
    assert result.package.item() == pytest.approx(1 / (1 + 3) * (terms[0] + 1.0 * terms[0] + sum(cross)))
    assert result.aleatoric_noise.item() == pytest.approx(np.mean(ua_ua))
    assert result.epistemic_size.item() == pytest.approx(np.mean(ue_ue))
    assert [result.aleatoric_size.item(), result.epistemic_noise.item()] == pytest.approx(cross)
    ranges = [np.ptp(curve.mean(0)) for curve in (*size[1:], *noise[1:])]
    assert result.aleatoric_ratio.item() == pytest.approx(ranges[0] / ranges[2])
    assert result.epistemic_ratio.item() == pytest.approx(ranges[3] / ranges[1])


def test_the_floor_is_the_mean_correlation_of_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 200_000, 6, generator=generator, dtype=torch.float64)
    x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
    by_chance = ((x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1))).abs().mean()
    floor = metrics.disentanglement_error(_curves(6, 0), _curves(6, 1)).floor
    assert floor.item() == pytest.approx(2 * by_chance.item() / 4, abs=2e-3)


def test_risks_that_always_move_together_have_one_half() -> None:
    falling = torch.linspace(0.9, 0.2, 5).expand(3, 5)
    both = LeverCurves(falling, 1 - falling, 2 - falling)
    assert metrics.disentanglement_error(both, both).error.item() == pytest.approx(0.5)


def test_a_flat_risk_follows_nothing() -> None:
    falling = torch.linspace(0.9, 0.2, 5, dtype=torch.float64).expand(3, 5)
    rounded = 0.7 + 1e-8 * torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = metrics.disentanglement_error(
        LeverCurves(falling, rounded, 1 - falling), LeverCurves(falling, 1 - falling, rounded)
    )
    assert result.error.item() == pytest.approx(0, abs=1e-12)
    assert (result.aleatoric_ratio, result.epistemic_ratio) == (0, 0)
    swapped = metrics.disentanglement_error(
        LeverCurves(falling, rounded, rounded), LeverCurves(falling, rounded, rounded)
    )
    assert swapped.error == 0.5
    assert math.isnan(swapped.epistemic_ratio)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (LeverCurves(*torch.rand(3, 2, 5)), "2 runs of 5 levels"),
        (LeverCurves(*torch.rand(3, 5, 2)), "5 runs of 2 levels"),
        (LeverCurves(torch.ones(3, 4), *torch.rand(2, 3, 4)), "accuracy is the same at all levels of run 0"),
        (LeverCurves(*torch.rand(2, 3, 4), torch.rand(3, 5)), r"size.epistemic has the shape \(3, 5\)"),
        (LeverCurves(*torch.rand(3, 7)), r"size.accuracy has the shape \(7,\)"),
        (LeverCurves(torch.full((3, 4), math.nan), *torch.rand(2, 3, 4)), "size.accuracy has 12 NaN"),
    ],
    ids=["runs", "levels", "constant", "shapes", "one run", "nan"],
)
def test_what_tells_nothing_is_refused(size: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        metrics.disentanglement_error(size, _curves(5, 0))
