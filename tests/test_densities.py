"""Densities over features, against scipy, scikit-learn and closed forms."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.covariance import ledoit_wolf as sklearn_ledoit_wolf
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score
from torch import Tensor

from workbench.errors import NotFittedError, WorkbenchWarning
from workbench.wrappers.densities import Density, Flow, Gaussian, Reduce, pool
from workbench.wrappers.densities.moments import ledoit_wolf, robust_moments

BOTH = pytest.mark.parametrize("build", [Gaussian, Flow])
Build = Callable[..., Density]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(n: int, d: int = 5, seed: int = 0) -> Tensor:
    return draw(n, d, seed=seed) @ draw(d, d, seed=99) + 3


def banana(n: int, seed: int = 0) -> Tensor:
    a = draw(n, 2, seed=seed)
    return torch.stack([a[:, 0], 0.3 * a[:, 1] + a[:, 0].square()], 1)


def layers(n: int, seed: int = 0, shift: float = 0.0) -> list[Tensor]:
    """Features of a small ReLU network: 120 and 100 units (some dead), and its 10 inputs."""
    x = draw(n, 10, seed=seed) + shift
    first = torch.relu(x @ draw(10, 120, seed=97))
    second = torch.relu(first @ draw(120, 100, seed=98) / 11 - 1)
    second[:, :7] = 0
    return [first, second, x]


def fitted(build: Build, features: Tensor | list[Tensor], **settings: object) -> Density:
    density = build(**settings)
    density.fit(features)
    return density.eval()


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
    found = fitted(Gaussian, x, shrinkage=shrinkage).nll(fresh).detach()
    np.testing.assert_allclose(found, -reference(x, shrinkage).logpdf(fresh.double()), rtol=1e-4)


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
    with pytest.raises(ValueError, match=r"covariance of 5 features is singular.*use shrinkage=None"):
        density.fit(correlated(100)[:, :1].sign().expand(100, 5))
    once = correlated(20)
    once[:, 1] = once[:, 0]
    once[0, 1] += 1
    for seed in range(3):  # only the fold without the first row is singular
        with pytest.raises(ValueError, match="on 16 rows"):
            density.fit(once, seed=seed)
    assert all(torch.equal(value, before[name]) for name, value in density.state_dict().items())


def train(density: Density, batches: Sequence[Tensor | list[Tensor]], lr: float) -> None:
    optimizer = torch.optim.Adam(density.parameters(), lr=lr)  # made before the first batch is seen
    for batch in batches:
        optimizer.zero_grad()
        density(batch).mean().backward()
        optimizer.step()


def test_training_reaches_the_maximum_likelihood_gaussian() -> None:
    x = correlated(400, 3)
    density = Gaussian()
    train(density, [x[:8]] + [x] * 800, lr=2e-2)
    exact = fitted(Gaussian, x, shrinkage=0.0)
    start = Gaussian()
    start(x[:8])
    gap = (density.nll(x) - exact.nll(x)).mean().item()
    assert start.nll(x).mean() - exact.nll(x).mean() > 0.3  # it was a long way
    assert gap == pytest.approx(0, abs=0.01)
    density.eval()
    risk = density(x).detach()
    assert risk.mean().item() == pytest.approx(0, abs=0.05)
    assert risk.std().item() == pytest.approx(1, abs=0.1)


def test_distance_alone_collapses_and_the_likelihood_does_not() -> None:
    x = correlated(200, 3)
    sound = Gaussian()
    train(sound, [x] * 300, lr=2e-2)
    naive = Gaussian()
    naive(x)
    optimizer = torch.optim.Adam(naive.parameters(), lr=2e-2)
    for _ in range(300):
        optimizer.zero_grad()
        z = (x - naive.location) @ naive.whitening.T
        u, _ = naive._transport(z)
        u.square().sum(1).mean().backward()
        optimizer.step()

    def contrast(density: Density) -> float:
        density.eval()
        return (density.nll(x + 10).mean() - density.nll(x).mean()).item()

    exact = contrast(fitted(Gaussian, x, shrinkage=0.0))
    assert contrast(naive) < 0.05 * exact
    assert contrast(sound) == pytest.approx(exact, rel=0.1)


def test_dead_feature_does_not_drive_the_likelihood_to_minus_infinity() -> None:
    x = torch.cat([correlated(200, 2), torch.zeros(200, 1)], 1)
    density = Gaussian()
    train(density, [x] * 1500, lr=2e-2)
    # closed form: z = 0 with noise of variance 1e-3, so that diag L tends to 1e-3 ** -0.5
    assert density.get_parameter("factor")[2, 2].exp().item() == pytest.approx(1e-3**-0.5, rel=0.02)


@BOTH
def test_loss_has_a_gradient_and_two_forwards_can_precede_backward(build: Build) -> None:
    density = build()
    first = density(correlated(64))
    second = density(correlated(64, seed=1))
    assert first.mean().item() == pytest.approx(0, abs=1e-5)
    (first.mean() + second.mean()).backward()
    assert sum(p.grad.abs().sum().item() for p in density.parameters() if p.grad is not None) > 0.01


def test_running_moments_are_bias_corrected_averages() -> None:
    density = Gaussian()
    batches = [correlated(32, seed=s) for s in range(6)]
    for batch in batches:
        density(batch)
    weights = np.array([0.95**k for k in reversed(range(6))])
    weights /= weights.sum()
    moments = [robust_moments(density.nll(batch).detach()) for batch in batches]
    means, sds = (np.array([float(m[i]) for m in moments]) for i in (0, 1))
    centre = weights @ means
    assert density.centre.item() == pytest.approx(centre, rel=1e-5)
    assert density.scale.item() == pytest.approx(math.sqrt(weights @ (sds**2 + (means - centre) ** 2)), rel=1e-4)


@BOTH
def test_forward_changes_no_state_once_fitted(build: Build) -> None:
    density = build()
    density.fit(correlated(100))
    before = copy.deepcopy(density.state_dict())
    density.train()
    density(correlated(30, seed=5) * 1e14)
    after = density.state_dict()  # where nothing was trained so far, the parameters are there now and change nothing
    assert all(torch.equal(after[name], value) or (not value.numel() and not after[name].any()) for name, value in before.items())


@pytest.mark.parametrize("d", [1, 2, 5])
def test_flow_starts_as_the_gaussian(d: int) -> None:
    x, fresh = correlated(200, d), correlated(50, d, seed=1) * 50
    flow, gaussian = Flow(), Gaussian()
    flow(x)
    gaussian(x)
    torch.testing.assert_close(flow.nll(fresh), gaussian.nll(fresh))
    torch.testing.assert_close(flow.eval()(fresh), gaussian.eval()(fresh))


def test_flow_learns_a_banana_and_is_a_density() -> None:
    flow, gaussian = fitted(Flow, banana(800)), fitted(Gaussian, banana(800))
    fresh = banana(1000, seed=1)
    truth = 1 + math.log(2 * math.pi) + math.log(0.3)  # entropy, the floor of every density
    assert truth < flow.nll(fresh).mean() < gaussian.nll(fresh).mean() - 1
    # volume of exp(-nll) over a grid that holds the data
    a, b = torch.linspace(-5, 5, 400), torch.linspace(-4, 25, 800)
    grid = torch.cartesian_prod(a, b)
    volume = (-flow.nll(grid)).exp().sum() * (a[1] - a[0]) * (b[1] - b[0])
    assert volume.item() == pytest.approx(1, abs=0.02)


def test_flow_log_determinant_is_that_of_autograd() -> None:
    flow = fitted(Flow, banana(300))
    z = draw(1, 2, seed=3)
    jacobian = torch.autograd.functional.jacobian(lambda v: flow._transport(v)[0], z)[0, :, 0]
    assert flow._transport(z)[1].item() == pytest.approx(jacobian.slogdet()[1].item(), abs=1e-5)


def test_flow_trains_label_free() -> None:
    flow = Flow()
    train(flow, [banana(128, seed=s) for s in range(150)], lr=5e-3)
    flow.eval()
    fresh = banana(1000, seed=999)
    assert flow.nll(fresh).mean() < fitted(Gaussian, fresh).nll(fresh).mean() - 0.7
    assert abs(flow(fresh).mean()) < 0.5


def test_flow_far_away_still_grows() -> None:
    flow = fitted(Flow, banana(300))
    risk = flow(torch.tensor([[30.0, 0.0], [300.0, 0.0], [3000.0, 0.0]]))
    assert (risk.diff() > 100).all()


def test_flow_fit_leaves_gradients_and_flags_alone_and_works_without_grad() -> None:
    flow = Flow().requires_grad_(False)
    with torch.no_grad():
        flow.fit(banana(100), epochs=5)
    assert all(p.grad is None and not p.requires_grad for p in flow.parameters())
    assert flow.get_parameter("weight_out").abs().sum() > 0


def test_flow_with_few_rows_stays_gaussian_and_says_so() -> None:
    flow = Flow()
    with pytest.warns(WorkbenchWarning, match="40 rows are too few"):
        flow.fit(banana(40))
    torch.testing.assert_close(flow.nll(banana(9)), fitted(Gaussian, banana(40)).nll(banana(9)))


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


def test_reduce_keeps_the_principal_subspace_and_the_residual() -> None:
    x = draw(400, 20) @ draw(20, 200, seed=1) + 0.05 * draw(400, 200, seed=2)
    reduce = Reduce(n_components=20)
    reduce.fit(x)
    out = reduce(x)
    z = ((x - x.mean(0)) / x.std(0, correction=0)).numpy()
    pca = PCA(20, svd_solver="full").fit(z)
    scores = pca.transform(z)
    np.testing.assert_allclose(out[:, :20].square().sum(1), (scores**2).sum(1), rtol=1e-3)
    np.testing.assert_allclose(out[:, :20].abs(), abs(scores), atol=0.05)
    residual = ((z - pca.inverse_transform(scores)) ** 2).sum(1)
    np.testing.assert_allclose(out[:, 20], np.log1p(residual), rtol=1e-2, atol=1e-3)
    assert reduce(draw(50, 200, seed=3))[:, 20].min() > 5 * out[:, 20].max()


@pytest.mark.parametrize("n", [2, 10, 50, 500])
def test_reduced_size_does_not_depend_on_the_number_of_rows(n: int) -> None:
    reduce = Reduce(n_components=16)
    reduce.fit(draw(n, 40))
    assert reduce(draw(3, 40)).shape == (3, 17)
    assert reduce(draw(n, 40))[:, 16].min() > 0.1  # training rows keep a residual


def test_few_features_are_only_standardised() -> None:
    x = correlated(100)
    reduce = Reduce()
    reduce.fit(x)
    torch.testing.assert_close(reduce(x), (x - x.mean(0)) / x.std(0, correction=0))
    nearly_dead = torch.cat([x, 1e-6 * draw(100, 1)], 1)
    reduce.fit(nearly_dead)
    spread = reduce(nearly_dead).std(0, correction=0)
    assert spread[:5].tolist() == pytest.approx([1] * 5, rel=1e-4)
    floor = 1e-3 * x.std(0, correction=0).max()
    assert spread[5].item() == pytest.approx((nearly_dead[:, 5].std(correction=0) / floor).item(), rel=1e-3)


@BOTH
def test_first_batch_small_then_fit_on_all(build: Build) -> None:
    density = build()
    identities = [id(p) for p in density.parameters()]
    train(density, [layers(16, seed=s) for s in range(3)], lr=1e-3)
    shapes = [p.shape for p in density.parameters()]
    density.fit(layers(300))
    assert identities == [id(p) for p in density.parameters()]
    assert shapes == [p.shape for p in density.parameters()]


@BOTH
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("state", ["fit", "trained", "unfitted"])
def test_state_survives(build: Build, many: bool, state: str) -> None:
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


def test_rows_that_are_not_finite_in_training() -> None:
    x = correlated(50)
    bad = torch.cat([x, torch.full((2, 5), torch.nan)])
    density, clean = Gaussian(), Gaussian()
    for _ in range(2):
        torch.testing.assert_close(density(bad)[:50], clean(x))
    assert density.centre.isfinite()


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
        Flow().fit(banana(100), batch_size=0)


@BOTH
def test_random_state_is_left_alone_and_seeds_decide(build: Build) -> None:
    before = torch.get_rng_state()
    first, again, other, given = build(), build(), build(), build()
    first.fit(correlated(60))
    again.fit(correlated(60))
    other.fit(correlated(60), seed=1)
    given.fit(correlated(60), generator=torch.Generator().manual_seed(1))
    build()(layers(60))
    assert torch.equal(before, torch.get_rng_state())
    assert first.centre == again.centre
    assert first.centre != other.centre
    assert other.centre == given.centre


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


def test_empty_batch() -> None:
    density = fitted(Gaussian, correlated(100))
    assert density(correlated(100)[:0]).shape == (0,)
    assert density.train()(correlated(100)[:0]).shape == (0,)


def test_pool_averages_over_a_grid() -> None:
    image = draw(3, 4, 6, 8)
    quarters = [image[:, :, i : i + 3, j : j + 4].mean((2, 3)) for i in (0, 3) for j in (0, 4)]
    torch.testing.assert_close(pool(image, 3), torch.stack(quarters, 2).flatten(1))
    torch.testing.assert_close(pool(image.permute(0, 2, 3, 1), 3, channel_dim=-1), pool(image, 3))
    sequence = draw(3, 10, 4)
    halves = torch.stack([sequence[:, :5].mean(1), sequence[:, 5:].mean(1)], 2).flatten(1)
    torch.testing.assert_close(pool(sequence, 3), halves)
    torch.testing.assert_close(pool(sequence.transpose(0, 1), 3, row_dim=1), halves)
    torch.testing.assert_close(pool(sequence.transpose(1, 2), 3, channel_dim=1), halves)


@pytest.mark.parametrize(
    ("shape", "width"),
    [((3,), 1), ((3, 5), 5), ((3, 1, 5), 10), ((3, 5, 1, 1), 5), ((3, 5, 1, 9), 10), ((3, 2, 4, 4, 4), 16),
     ((3, 2, 4, 4, 4, 3), 16), ((0, 5), 5), ((0, 5, 4, 4), 20)],
)  # fmt: skip
def test_pool_widths(shape: tuple[int, ...], width: int) -> None:
    assert pool(torch.ones(shape), shape[0]).shape == (shape[0], width)
    assert pool(torch.ones(shape, dtype=torch.bfloat16), shape[0]).dtype == torch.float32


def test_pool_refuses_what_has_no_rows() -> None:
    with pytest.raises(ValueError, match=r"\[6, 5\] has not the 3 rows"):
        pool(torch.ones(6, 5), 3)
    with pytest.raises(ValueError, match="nothing to average"):
        pool(torch.ones(3, 5, 0), 3)
    with pytest.raises(TypeError, match="complex"):
        pool(torch.ones(3, 5, dtype=torch.complex64), 3)
