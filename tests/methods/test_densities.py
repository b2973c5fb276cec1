"""Densities over features: compared with scipy, scikit-learn and closed forms."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.density_rows import Build, correlated, draw, fitted, layers, train
from scipy.stats import multivariate_normal
from sklearn.covariance import ledoit_wolf as sklearn_ledoit_wolf
from sklearn.metrics import roc_auc_score
from torch import Tensor

from workbench.errors import NotFittedError, WorkbenchWarning
from workbench.methods.densities import Flow, Gaussian, Signature
from workbench.methods.densities.moments import ledoit_wolf, robust_moments

BOTH = pytest.mark.parametrize("build", [Gaussian, Flow, Signature])


def reference(x: Tensor, shrinkage: float | None = None) -> multivariate_normal:
    """Gaussian of the rows, shrunk in units of the standard deviations."""
    data = x.double().numpy()
    sd = data.std(0)
    covariance, _ = sklearn_ledoit_wolf((data - data.mean(0)) / sd)
    if shrinkage is not None:
        sample = np.corrcoef(data.T)
        covariance = (1 - shrinkage) * sample + shrinkage * np.eye(len(sample))
    return multivariate_normal(data.mean(0), covariance * np.outer(sd, sd))


@pytest.mark.parametrize("shrinkage", [None, 0.0, 0.3])
def test_gaussian_nll_is_that_of_scipy(shrinkage: float | None) -> None:
    x, fresh = correlated(300), correlated(50, seed=1)
    nll = fitted(Gaussian, x, shrinkage=shrinkage).nll(fresh).detach()
    np.testing.assert_allclose(nll, -reference(x, shrinkage).logpdf(fresh.double()), rtol=1e-4)


def test_double_precision_is_that_of_scipy() -> None:
    x = correlated(300).double()
    density = Gaussian(shrinkage=0.0).double()
    density.fit(x)
    np.testing.assert_allclose(density.nll(x).detach(), -reference(x, 0.0).logpdf(x), rtol=1e-10)


@pytest.mark.parametrize(("n", "d"), [(30, 4), (30, 100), (500, 20)])
def test_shrinkage_is_that_of_sklearn(n: int, d: int) -> None:
    z = correlated(n, d).double()
    z -= z.mean(0)
    assert ledoit_wolf(z) == pytest.approx(sklearn_ledoit_wolf(z.numpy(), assume_centered=True)[1], rel=1e-9)


@BOTH
@pytest.mark.parametrize("n", [60, 40, 12, 2])
def test_more_features_than_rows(build: Build, n: int) -> None:
    density = Gaussian() if n < 50 else build()
    density.fit(draw(n, 200))
    density.eval()
    fresh, far = density(draw(200, 200, seed=1)).detach(), density(3 * draw(200, 200, seed=2)).detach()
    assert fresh.isfinite().all()
    if n > 2:  # two rows say too little to rank others
        assert far.min() > fresh.max()
        assert abs(fresh.mean()) < 1  # held-out rows tell the level: training rows would put it many units too low


def test_dead_and_duplicate_features() -> None:
    x = correlated(500)
    dead = torch.cat([x, torch.full((500, 2), 0.7), x[:, :2]], 1)
    density = fitted(Gaussian, dead)
    usual, alive = dead[:100], dead[:100].clone()
    alive[:, 5] += 2
    assert density(usual).isfinite().all()
    assert (density(alive) > density(usual) + 10).all()  # never seen in training
    plain = fitted(Gaussian, torch.cat([x, x[:, :2]], 1))
    # up to the log of their units, which is the same for all rows, dead features change nothing while they are dead
    difference = density.nll(usual) - plain.nll(torch.cat([usual[:, :5], usual[:, 7:]], 1))
    torch.testing.assert_close(difference, difference.mean().expand(100), rtol=0, atol=2e-2)


def test_all_features_constant_is_no_error() -> None:
    density = fitted(Gaussian, torch.ones(60, 3))
    assert density(torch.ones(1, 3)).item() == pytest.approx(0, abs=0.5)
    assert density(torch.zeros(1, 3)).item() > 10


def test_singular_covariance_without_shrinkage_is_refused_before_any_change() -> None:
    density = fitted(Gaussian, correlated(100), shrinkage=0.0)
    before = copy.deepcopy(density.state_dict())
    with pytest.raises(ValueError, match=r"covariance of 5 features on .* rows is singular, and.*use shrinkage=None"):
        density.fit(correlated(100)[:, :1].sign().expand(100, 5))
    once = correlated(20)
    once[:, 1] = once[:, 0]
    once[0, 1] += 1
    for seed in range(3):  # only the fold without the first row is singular
        with pytest.raises(ValueError, match="on 16 rows"):
            density.fit(once, seed=seed)
    assert all(torch.equal(value, before[name]) for name, value in density.state_dict().items())


@BOTH
@pytest.mark.parametrize("n", [30, 1000])
@pytest.mark.filterwarnings("ignore:30 rows are too few")
def test_fresh_risk_has_mean_0_and_sd_1(build: Build, n: int) -> None:
    risk = fitted(build, correlated(n))(correlated(4000, seed=1)).detach()
    assert risk.mean().item() == pytest.approx(0, abs=0.2)
    assert risk.std().item() == pytest.approx(1, abs=0.2)


def test_wild_rows_do_not_inflate_the_scale() -> None:
    x = correlated(2000)
    wild = x.clone()
    wild[:5] *= 1e3
    few = fitted(Gaussian, wild, shrinkage=0.0).scale.item()
    clean = robust_moments(torch.cat([draw(998).square(), torch.tensor([1e6, 1e9])]))[1].item()
    assert few < 10 * fitted(Gaussian, x).scale.item()
    assert clean == pytest.approx(math.sqrt(2), rel=0.3)  # standard deviation of chi squared with one degree
    normal = draw(5000)
    mean, sd = robust_moments(normal)
    assert (mean.item(), sd.item()) == pytest.approx((normal.mean().item(), normal.std(correction=0).item()))


@BOTH
@pytest.mark.parametrize("many", [False, True])
def test_shifted_rows_are_found(build: Build, many: bool) -> None:
    if many:
        train_rows, usual, strange = layers(600), layers(300, seed=1), layers(300, seed=2, shift=3.0)
        density = fitted(build, train_rows)
        risks = density(usual), density(strange)
    else:
        density = fitted(build, correlated(600))
        risks = density(correlated(300, seed=1)), density(correlated(300, seed=2) + 10)
    truth = [0] * 300 + [1] * 300
    assert roc_auc_score(truth, torch.cat(risks).detach()) > 0.98


def test_correlation_counts_not_only_size() -> None:
    x = draw(500, 1) * torch.ones(1, 2) + 0.1 * draw(500, 2, seed=1)
    along, across = fitted(Gaussian, x)(torch.tensor([[1.5, 1.5], [1.5, -1.5]])).detach()
    assert along < 2
    assert across > 50


@BOTH
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("state", ["fit", "trained", "unfitted"])
def test_a_loaded_density_scores_as_the_saved_one(build: Build, many: bool, state: str) -> None:
    make: Callable[..., Tensor | list[Tensor]] = layers if many else correlated
    density = build()
    if state == "fit":
        density.fit(make(80))
    elif state == "trained":
        train(density, [make(32, seed=s) for s in range(4)], lr=1e-2)
    file = io.BytesIO()
    torch.save(density.state_dict(), file)
    file.seek(0)
    loaded = build()
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (loaded, copy.deepcopy(density), pickle.loads(pickle.dumps(density))):
        assert other.fitted == (state != "unfitted")
        if other.fitted:
            fresh = make(20, seed=9)
            torch.testing.assert_close(other.eval()(fresh), density.eval()(fresh), rtol=0, atol=0)
    assert optimizer.param_groups[0]["params"][0] is next(iter(loaded.parameters()))
    if state != "unfitted":
        loaded.load_state_dict(density.state_dict())  # a second time, into full sizes


def test_state_of_another_size_is_refused() -> None:
    state = fitted(Gaussian, correlated(100, 4)).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        fitted(Gaussian, correlated(100)).load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch"):
        Gaussian(d=5).load_state_dict(state)


@BOTH
def test_sizes_known_at_the_start(build: Build) -> None:
    density = build(d=5)
    assert not density.fitted
    assert sum(p.numel() for p in density.parameters()) > 25
    density.fit(correlated(100))
    torch.testing.assert_close(density.nll(correlated(9)), fitted(build, correlated(100)).nll(correlated(9)))
    with pytest.raises(ValueError, match=r"4 features, but .* made for another number"):
        build(d=5).fit(correlated(100, 4))


@BOTH
def test_unfitted_is_refused_in_eval_mode(build: Build) -> None:
    with pytest.raises(NotFittedError, match=r"call wrapped.fit\(loader\), or train"):
        build().eval()(correlated(10))
    with pytest.raises(NotFittedError, match="no training data"):
        build().nll(correlated(10))


@BOTH
def test_rows_that_are_not_finite(build: Build) -> None:
    x = correlated(100)
    bad = x.clone()
    bad[3, 1] = torch.nan
    bad[5, 0] = -torch.inf
    density = build()
    with pytest.warns(WorkbenchWarning, match="2 of 100 rows"):
        density.fit(bad)
    clean = fitted(build, torch.cat([x[:3], x[4:5], x[6:]]))
    risk = density.eval()(bad)
    assert risk.isnan().nonzero()[:, 0].tolist() == [3, 5]
    torch.testing.assert_close(risk[~risk.isnan()], clean(x)[~risk.isnan()])
    density.train()(bad).nanmean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in density.parameters())


@BOTH
def test_bad_input_is_refused_before_any_change(build: Build) -> None:
    density = fitted(build, correlated(100))
    many = fitted(build, layers(100))
    before = copy.deepcopy(density.state_dict())
    with pytest.raises(ValueError, match=r"size 4, but .* fitted on size 5"):
        density(correlated(10, 4))
    with pytest.raises(ValueError, match=r"size 4, but .* fitted on size 5"):
        density.fit(correlated(100, 4))
    with pytest.raises(ValueError, match=r"\[120, 100\], but .* \[120, 100, 10\]"):
        many(layers(10)[:2])
    with pytest.raises(ValueError, match=r"size \[5\], but .* size 5"):
        density([correlated(10)])
    with pytest.raises(ValueError, match="at least 2 rows of finite features to start from, got 1 of 1"):
        build().fit(correlated(1))
    with pytest.raises(ValueError, match="got 1 of 3"):
        build()(torch.tensor([[1.0], [torch.nan], [torch.inf]]))
    with pytest.raises(ValueError, match=r"shapes \[\[3, 2\], \[4, 2\]\]"):
        build().fit([torch.zeros(3, 2), torch.zeros(4, 2)])
    with pytest.raises(ValueError, match=r"shapes \[\[3, 2, 2\]\]"):
        build().fit(torch.zeros(3, 2, 2))
    with pytest.raises(TypeError, match="int64"):
        build().fit(torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="got"):
        build().fit([])
    with pytest.raises(ValueError, match="got 2"):
        build(shrinkage=2)
    assert all(torch.equal(value, before[name]) for name, value in density.state_dict().items())


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="n_layers=0"):
        Flow(n_layers=0)
    with pytest.raises(ValueError, match="d=0"):
        Gaussian(d=0)
    with pytest.raises(ValueError, match="batch_size=0"):
        Flow().fit(correlated(100), batch_size=0)


@BOTH
def test_random_state_is_left_alone_and_seeds_decide(build: Build) -> None:
    before = torch.get_rng_state()
    first, again, other, from_generator = build(), build(), build(), build()
    first.fit(correlated(60))
    again.fit(correlated(60))
    other.fit(correlated(60), seed=1)
    from_generator.fit(correlated(60), generator=torch.Generator().manual_seed(1))
    build()(layers(60))
    assert torch.equal(before, torch.get_rng_state())
    assert first.centre == again.centre
    assert first.centre != other.centre
    assert other.centre == from_generator.centre


@BOTH
def test_gradient_reaches_the_features(build: Build) -> None:
    density = fitted(build, correlated(100)).double()
    x = correlated(4, seed=1).double().requires_grad_()
    assert torch.autograd.gradcheck(density, x)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_features_and_modules(build: Build, dtype: torch.dtype) -> None:
    density = fitted(build, correlated(200).to(dtype))
    fresh = correlated(50, seed=1).to(dtype)
    exact = density(fresh)
    assert exact.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(density(fresh), exact)
    assert density.to(dtype)(fresh).dtype == torch.float32
    unfitted = build().to(dtype)
    assert unfitted(fresh).isfinite().all()


@BOTH
def test_autocast_changes_nothing(build: Build) -> None:
    x, fresh = layers(100), layers(20, seed=1)
    fits, batches = (build(), build()), (build(), build())
    fits[0].fit(x)
    exact, first = fits[0](fresh), batches[0](fresh)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fits[1].fit(x)
        torch.testing.assert_close(fits[1](fresh), exact, rtol=0, atol=0)
        torch.testing.assert_close(batches[1](fresh), first, rtol=0, atol=0)


@BOTH
def test_built_on_another_default_device(build: Build) -> None:
    with torch.device("meta"):
        density = build(d=5)
    assert {p.device.type for p in density.parameters()} == {"meta"}
    density.to_empty(device="cpu").load_state_dict(fitted(build, correlated(100)).state_dict())
    torch.testing.assert_close(density.eval()(correlated(9)), fitted(build, correlated(100))(correlated(9)))


def test_an_empty_batch_has_no_scores() -> None:
    density = fitted(Gaussian, correlated(100))
    assert density(correlated(100)[:0]).shape == (0,)
    assert density.train()(correlated(100)[:0]).shape == (0,)
