"""CV+ intervals of cross-fitted models: compared with their definition, and their promised coverage."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from workbench import calibrate, compose, fit, sculpt, vote
from workbench.calibration import CrossConformal
from workbench.calibration.cross import cv_plus
from workbench.core.crossfit import committee_of
from workbench.errors import NotFittedError
from workbench.training import History


def data(n: int = 90, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    return x, 4 + x.sum(1, keepdim=True) + x[:, :1].abs() * torch.randn(n, 1, generator=generator)


def crossfitted(head: bool = True, lr: tuple[float, ...] = (0.02,)) -> tuple[nn.Module, History]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = [vote.Wrapper(3 * len(lr)), *([sculpt.Wrapper(n_layers=1)] if head else [])]
        model = compose(*parts)(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)))
    return model, fit(model, data(), folds=3, epochs=20, lr=lr, progress=False)


def test_ends_are_order_statistics_over_rows_and_folds() -> None:
    """By the definition of Barber et al. (2021), in a plain loop."""
    generator = torch.Generator().manual_seed(0)
    loc, scale = torch.randn(4, 5, 1, generator=generator), torch.rand(4, 5, 1, generator=generator) + 0.1
    scores, fold = torch.rand(23, 1, generator=generator), torch.arange(23) % 4
    lower, upper = cv_plus(loc, scale, scores, fold, 0.8)
    k = math.ceil(0.8 * 24)
    for m in range(5):
        below = sorted(float(loc[fold[i], m, 0] - scores[i, 0] * scale[fold[i], m, 0]) for i in range(23))
        above = sorted(float(loc[fold[i], m, 0] + scores[i, 0] * scale[fold[i], m, 0]) for i in range(23))
        assert float(lower[m, 0]) == pytest.approx(below[24 - k - 1])  # the floor((1 - coverage)(n + 1))-th smallest
        assert float(upper[m, 0]) == pytest.approx(above[k - 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_to_half_precision_makes_no_interval_smaller(dtype: torch.dtype) -> None:
    loc, scale, scores = (
        values.to(dtype) for values in (torch.randn(4, 50, 1), torch.rand(4, 50, 1), torch.rand(23, 1))
    )
    fold = torch.arange(23) % 4
    exact = cv_plus(loc.double(), scale.double(), scores.double(), fold, 0.8)
    lower, upper = cv_plus(loc, scale, scores, fold, 0.8)
    assert lower.dtype == upper.dtype == dtype
    assert (lower.double() <= exact[0] + 1e-6).all()
    assert (upper.double() >= exact[1] - 1e-6).all()
    for end, like in zip((lower, upper), exact, strict=True):
        torch.testing.assert_close(end.double(), like, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_parts_of_the_rows_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.calibration import cross

    loc, scale, scores = torch.randn(3, 50, 1), torch.rand(3, 50, 1), torch.rand(40, 1)
    fold = torch.arange(40) % 3
    whole = cv_plus(loc, scale, scores, fold, 0.9)
    monkeypatch.setattr(cross, "MAX_NUMBERS", 200)
    assert all(torch.equal(a, b) for a, b in zip(whole, cv_plus(loc, scale, scores, fold, 0.9), strict=True))


def test_coverage_by_simulation() -> None:
    """Ridge regression on 40 rows in 5 folds, 300 times: at least 2 coverage - 1, about the coverage that was asked for."""
    generator = torch.Generator().manual_seed(0)
    inside = []
    for _ in range(300):
        x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
        y = x.sum(1, keepdim=True) + torch.randn(60, 1, generator=generator, dtype=torch.float64)
        train, new, fold = slice(0, 40), slice(40, 60), torch.arange(40) % 5
        loc, scores = [], torch.empty(40, 1, dtype=torch.float64)
        for k in range(5):
            inputs, target = x[train][fold != k], y[train][fold != k]
            weight = torch.linalg.solve(inputs.T @ inputs + 0.1 * torch.eye(3), inputs.T @ target)
            loc.append(x[new] @ weight)
            scores[fold == k] = (y[train][fold == k] - x[train][fold == k] @ weight).abs()
        lower, upper = cv_plus(torch.stack(loc), torch.ones(5, 20, 1), scores, fold, 0.8)
        inside.append(((y[new] >= lower) & (y[new] <= upper)).double().mean())
    coverage = torch.stack(inside).mean()
    assert 0.78 < coverage < 0.86


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("lr", [(0.02,), (0.02, 0.005)])
@pytest.mark.parametrize("score", ["normalized", "absolute"])
def test_intervals_of_a_cross_fitted_model(head: bool, lr: tuple[float, ...], score: str) -> None:
    """The prediction of those who have not seen a fold, rebuilt from plain voters, has the interval's order statistics."""
    model, history = crossfitted(head, lr)
    x = data(12, seed=1)[0]
    lower, upper = calibrate(model, history, score=score).interval(x, coverage=0.8)
    said = history.out_of_fold
    committee = committee_of(model)
    assert committee is not None
    fold, weights = committee.fold, said.decisions.weights
    if score == "absolute":
        middle = torch.zeros(3, 12, 1)
        for v, voter in enumerate(model.voters()):
            middle[fold[v]] += weights[v // 3] * voter(x).detach()
        scores = (said.target - said.prediction).abs()
        expected = cv_plus(middle, torch.ones_like(middle), scores, said.fold, 0.8)
        for ours, theirs in zip((lower, upper), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    assert (lower < upper).all()
    train_x, y = data()
    lower, upper = calibrate(model, history, score=score).interval(train_x, coverage=0.8)
    assert ((y >= lower) & (y <= upper)).float().mean() > 0.7


@pytest.mark.parametrize("unit", [1e-30, 1e25])
def test_intervals_scale_with_the_unit_of_the_targets(unit: float) -> None:
    x, y = data()
    ends = []
    for scale in (1.0, unit):
        torch.manual_seed(0)
        model = compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1))(nn.Linear(2, 1))
        history = fit(model, (x, y * scale), folds=3, epochs=2, progress=False)
        ends.append(torch.stack(CrossConformal(model).fit(history).interval(x[:9])) / scale)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-4)


def test_normalized_intervals_are_wide_where_the_risk_is() -> None:
    model, history = crossfitted()
    x = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    risk = model(x, return_risk=True)[1].total
    lower, upper = calibrate(model, history).interval(x)
    widths = (upper - lower)[:, 0]
    assert (widths[1] > widths[0]) == bool(risk[1] > risk[0])
    flat = calibrate(model, history, score="absolute").interval(x)
    ratio = (flat[1] - flat[0])[:, 0]
    assert float(ratio.max() / ratio.min()) < 1.5


def test_a_loaded_state_gives_the_same_intervals() -> None:
    model, history = crossfitted()
    x = data(5, seed=2)[0]
    ours = calibrate(model, history)
    theirs = CrossConformal(model)
    theirs.load_state_dict(ours.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.interval(x), theirs.interval(x), strict=True))


def test_bad_input() -> None:
    model, history = crossfitted()
    plain = vote.Wrapper(2)(nn.Linear(2, 1))
    with pytest.raises(
        ValueError, match=r"was not cross-fitted: train it with workbench.fit\(wrapped, data, folds=5\)"
    ):
        CrossConformal(plain)
    with pytest.raises(ValueError, match="method='conformal'; found 'variance'"):
        calibrate(model, history, "variance")
    with pytest.raises(ValueError, match="score must be"):
        calibrate(model, history, score="cqr")
    with pytest.raises(NotFittedError, match="calibrate first"):
        CrossConformal(model).interval(torch.zeros(1, 2))
    with pytest.raises(TypeError, match="without out-of-fold predictions"):
        CrossConformal(model).fit(History([], 0))
    with pytest.raises(ValueError, match="needs at least 99 rows, there are 90"):
        calibrate(model, history).interval(torch.zeros(1, 2), coverage=0.99)
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        calibrate(model, history).interval(torch.zeros(1, 2), coverage=1.0)
