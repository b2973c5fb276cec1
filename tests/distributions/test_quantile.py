"""Quantile heads: compared with scikit-learn's quantile regression, empirical quantiles, scipy and plain models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.linear_model import QuantileRegressor
from sklearn.metrics import mean_pinball_loss
from torch import Tensor, nn

from workbench import compose, fit, load, sample, save, sculpt, vote
from workbench.calibration import SplitConformal, calibrate
from workbench.distributions import Normal, Quantiles

LEVELS = (0.05, 0.16, 0.5, 0.84, 0.95)
Z = torch.tensor(scipy.stats.norm.ppf(LEVELS))


def parameters(n: int = 20, levels: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Targets [n, 1], predictions [n, 1] and rising offsets [levels, n, 1], float64."""
    generator = torch.Generator().manual_seed(seed)
    y, loc = torch.randn(2, n, 1, generator=generator, dtype=torch.float64)
    return y, loc, torch.randn(levels, n, 1, generator=generator, dtype=torch.float64).sort(0).values


def model(inputs: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 1))


def descend(parameters: Any, loss: Callable[[], Tensor], steps: int, lr: float) -> None:
    """Adam with a rate that falls to a hundredth."""
    optimizer = torch.optim.Adam(parameters, lr=lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.01 ** (1 / steps))
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        schedule.step()


X = torch.linspace(-2, 2, 60)[:, None] * torch.tensor([[1.0, 0.5]])
Y = 100 + 20 * X[:, :1] + 5 * torch.randn(60, 1, generator=torch.Generator().manual_seed(0))


def test_the_loss_is_sklearns_pinball_loss() -> None:
    y, loc, offsets = parameters()
    expected = [
        mean_pinball_loss(y[:, 0], (loc + offset)[:, 0], alpha=level)
        for level, offset in zip(LEVELS, offsets, strict=True)
    ]
    assert Quantiles.loss_function(y, loc, offsets).item() == pytest.approx(np.mean(expected))
    assert Quantiles.loss_function(y, loc, offsets, reduction="none").shape == y.shape


@pytest.mark.slow
def test_a_constant_learns_the_empirical_quantiles() -> None:
    y = torch.as_tensor(scipy.stats.gamma(2).rvs(1001, random_state=0))[:, None]
    raw = torch.zeros(5, 1, 1, dtype=torch.float64, requires_grad=True)

    def loss(offsets: Tensor) -> Tensor:
        return Quantiles.loss_function(y, torch.zeros_like(y), offsets.expand(5, *y.shape))

    descend([raw], lambda: loss(Quantiles.to_risk(raw)), steps=400, lr=0.1)
    quantiles, best = Quantiles.to_risk(raw.detach()), torch.as_tensor(np.quantile(y, LEVELS))
    np.testing.assert_allclose(quantiles[:, 0, 0], best, atol=0.05)
    assert loss(quantiles).item() == pytest.approx(loss(best[:, None, None]).item(), rel=1e-3)


@pytest.mark.slow
def test_a_linear_model_learns_the_quantile_regression() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(300, 1, generator=generator)
    y = x + (0.2 + x) * torch.randn(300, 1, generator=generator)
    torch.manual_seed(0)
    wrapped: Any = sculpt.Wrapper(Quantiles((0.2, 0.8)))(nn.Linear(1, 1))
    criterion = lambda prediction, target: 0 * prediction.sum()  # noqa: E731
    descend(wrapped.parameters(), lambda: wrapped.loss(criterion, x, y), steps=500, lr=0.2)
    lower, upper = wrapped.quantiles(x)
    # the second head is the middle one, a line; the distance to the other is a softplus of a line
    for level, quantile, tolerance in ((0.8, upper, 0.002), (0.2, lower, 0.06)):
        expected = QuantileRegressor(quantile=level, alpha=0).fit(x, y[:, 0]).predict(x)
        assert np.abs(quantile[:, 0].detach().numpy() - expected).mean() < tolerance


def test_quantiles_of_a_normal_give_the_normal_back() -> None:
    y, loc, _ = parameters()
    sigma = torch.full_like(loc, 1.7)
    offsets = Z[:, None, None] * sigma
    for ours, normal in (
        (Quantiles.log_prob(y, loc, offsets), Normal.log_prob(y, loc, sigma)),
        (Quantiles.cdf(y, loc, offsets), Normal.cdf(y, loc, sigma)),
        (Quantiles.icdf(0.99, loc, offsets), Normal.icdf(0.99, loc, sigma)),
        (Quantiles.icdf(0.3, loc, offsets), Normal.icdf(0.3, loc, sigma)),
        (Quantiles.stddev(loc, offsets), sigma),
        (Quantiles.mean(loc, offsets), loc),
    ):
        torch.testing.assert_close(ours, normal)


@pytest.mark.parametrize("levels", [(0.1, 0.9), (0.05, 0.5, 0.95), LEVELS, (0.01, 0.2, 0.3, 0.6)])
def test_cdf_density_and_draws_belong_together(levels: tuple[float, ...]) -> None:
    _, loc, offsets = parameters(n=3, levels=len(levels))
    ours = Quantiles(levels)
    for level, offset in zip(levels, offsets, strict=True):
        torch.testing.assert_close(ours.icdf(level, loc, offsets), loc + offset)
        torch.testing.assert_close(ours.cdf(loc + offset, loc, offsets), torch.full_like(loc, level))
    q = torch.linspace(0.001, 0.999, 50, dtype=torch.float64)
    for row in range(3):
        at, spread = loc[row : row + 1].expand(50, 1), offsets[:, row : row + 1].expand(-1, 50, 1)
        torch.testing.assert_close(ours.cdf(ours.icdf(q[:, None], at, spread), at, spread), q[:, None])
        low, high = ours.icdf(0.02, at, spread)[0].item(), ours.icdf(0.7, at, spread)[0].item()
        grid = low + (high - low) * (torch.arange(100_000, dtype=torch.float64)[:, None] + 0.5) / 100_000
        wide = (grid, loc[row].expand_as(grid), offsets[:, row : row + 1].expand(-1, 100_000, 1))
        mass = ours.log_prob(*wide).exp().mean().item() * (high - low)
        assert mass == pytest.approx(0.68, abs=1e-4)
    at, spread = loc[:1].expand(20_000, 1), offsets[:, :1].expand(-1, 20_000, 1)
    drawn = ours.sample((at, spread), generator=torch.Generator().manual_seed(0))
    assert scipy.stats.kstest(ours.cdf(drawn, at, spread)[:, 0].numpy(), "uniform").pvalue > 0.01


def test_the_risk_is_half_the_width_between_one_standard_deviation_to_each_side() -> None:
    """Whatever the levels are: the quantiles in between are linear in z."""
    _, _, offsets = parameters(n=6)
    at = [np.interp([-1, 1], Z.numpy(), offsets[:, row, 0].numpy()) for row in range(6)]
    expected = np.array([(high - low) / 2 for low, high in at])
    risk = Quantiles.variances(offsets)["aleatoric"].sqrt()
    np.testing.assert_allclose(risk[:, 0], expected)
    wide = Quantiles((0.01, 0.5, 0.99)).variances(torch.tensor([-2.0, 0.0, 4.0]).reshape(3, 1, 1))["aleatoric"].sqrt()
    assert wide.item() == pytest.approx(3 / scipy.stats.norm.ppf(0.99))
    middle = Quantiles((0.4, 0.6)).variances(torch.tensor([-1.0, 1.0]).reshape(2, 1, 1))["aleatoric"].sqrt()
    assert middle.item() == pytest.approx(1 / scipy.stats.norm.ppf(0.6))  # the line goes on beyond the levels


@pytest.mark.parametrize("n", [2, 3, 5, 6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e3])
def test_quantiles_never_cross(n: int, dtype: torch.dtype, size: float) -> None:
    raw = (size * torch.randn(n, 500, 2, generator=torch.Generator().manual_seed(0))).to(dtype)
    levels = [(k + 1) / (n + 1) for k in range(n)]
    offsets = Quantiles(levels).to_risk(raw)
    assert offsets.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    assert (offsets.diff(dim=0) >= 0).all()
    torch.testing.assert_close(offsets[n // 2], raw[n // 2].to(offsets.dtype))
    loss = Quantiles(levels).loss_function(torch.zeros(500, 2), torch.zeros(500, 2), offsets)
    assert loss.isfinite()
    assert (Quantiles(levels).variances(offsets)["aleatoric"] >= 0).all()


def test_gradients_by_finite_differences() -> None:
    y, loc, _ = (t.requires_grad_() for t in parameters(n=4))
    raw = torch.randn(5, 4, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for call in (
        lambda y, loc, raw: Quantiles.loss_function(y, loc, Quantiles.to_risk(raw)),
        lambda y, loc, raw: Quantiles.log_prob(y, loc, Quantiles.to_risk(raw)),
        lambda y, loc, raw: Quantiles.cdf(y, loc, Quantiles.to_risk(raw)),
        lambda y, loc, raw: Quantiles.icdf(0.3, loc, Quantiles.to_risk(raw)),
        lambda y, loc, raw: Quantiles.variances(Quantiles.to_risk(raw))["aleatoric"],
    ):
        assert torch.autograd.gradcheck(call, (y, loc, raw))


def test_images_and_transforms() -> None:
    y, loc, offsets = parameters(n=24)
    image = (y.reshape(2, 3, 4), loc.reshape(2, 3, 4), offsets.reshape(5, 2, 3, 4))
    for name in ("log_prob", "cdf"):
        method = getattr(Quantiles, name)
        torch.testing.assert_close(method(*image).flatten(), method(y, loc, offsets).flatten())
        mapped = torch.func.vmap(method, in_dims=(0, 0, 1))(y, loc, offsets)
        torch.testing.assert_close(mapped, method(y, loc, offsets))


# ---- wrapped models
def test_the_heads_are_plain_models_around_the_prediction() -> None:
    plain = model()
    wrapped = sculpt.Wrapper(Quantiles)(plain)
    state = wrapped.state_dict()
    outputs: list[Tensor] = []
    for mark in ("", "", "1", "2", "3", "4"):
        head = model()
        names = head.state_dict()
        head.load_state_dict({n: state[f"{n}@sculpt{mark}" if outputs else n] for n in names})
        outputs.append(head(X))
    raw = torch.stack(outputs[1:])
    gap = nn.functional.softplus(raw)
    middle = outputs[0] + raw[2]
    expected = [
        middle - gap[1] - gap[0],
        middle - gap[1],
        middle,
        middle + gap[3],
        middle + gap[3] + gap[4],
    ]
    quantiles = wrapped.quantiles(X)
    torch.testing.assert_close(quantiles, torch.stack(expected))
    y, risk = wrapped(X, return_risk=True)
    torch.testing.assert_close(y, plain(X))
    torch.testing.assert_close(risk, Quantiles.stddev(y, quantiles - y))


def test_quantiles_come_in_the_units_and_structure_of_the_prediction() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"a": self.layer(x), "rows": torch.arange(len(x))}

    wrapped = sculpt.Wrapper(Quantiles((0.1, 0.9)))(Pair())
    before = wrapped.quantiles(X)
    assert before["a"].shape == (2, 60, 1)
    assert before["rows"] is None
    single = sculpt.Wrapper(Quantiles((0.1, 0.9)))(model())
    plain = single.quantiles(X)
    single.scale(y_mean=torch.tensor(100.0), y_scale=torch.tensor(20.0))
    torch.testing.assert_close(single.quantiles(X), 100 + 20 * plain)


def test_voters_average_their_quantiles() -> None:
    both = compose(vote.Wrapper(3), sculpt.Wrapper(Quantiles))(model()).eval()
    state, each = both.state_dict(), []
    for voter in range(3):
        single = sculpt.Wrapper(Quantiles)(model())
        names = [name for name in single.state_dict() if "@workbench" not in name]
        single.load_state_dict({name: state[f"{name}@vote"][voter] for name in names}, strict=False)
        each.append((single.quantiles(X), single(X, return_risk=True)[1]))
    torch.testing.assert_close(both.quantiles(X), torch.stack([q for q, _ in each]).mean(0))
    _, risk = both(X, return_risk=True)
    torch.testing.assert_close(risk.aleatoric**2, torch.stack([r for _, r in each]).square().mean(0))
    noisy = compose(sample.Wrapper(4), sculpt.Wrapper(Quantiles))(model())
    assert (noisy.quantiles(X).diff(dim=0) >= 0).all()


@pytest.mark.slow
def test_training_finds_the_quantiles_of_skewed_noise() -> None:
    rng = np.random.default_rng(0)
    x = torch.as_tensor(rng.uniform(-1, 1, (800, 1)), dtype=torch.float32)
    y = x + torch.as_tensor(rng.exponential(2.0, (800, 1)), dtype=torch.float32)
    wrapped = sculpt.Wrapper(Quantiles)(model(1))
    fit(wrapped, (x, y), epochs=25, progress=False)
    shares = (y <= wrapped.quantiles(x)).float().mean((1, 2))
    assert (shares - torch.tensor(LEVELS)).abs().max() < 0.05


def test_conformal_intervals_are_made_of_the_heads() -> None:
    wrapped = sculpt.Wrapper(Quantiles)(model()).eval()
    calibrated = calibrate(wrapped, (X, Y), "conformal", score="cqr")
    with torch.no_grad():
        lower, *_, upper = wrapped.quantiles(X).double().numpy()
    scores = np.sort(np.maximum(lower - Y.numpy(), Y.numpy() - upper), axis=0)
    q = scores[int(np.ceil(61 * 0.9)) - 1]
    for bound, expected in zip(calibrated.interval(X, coverage=0.9), (lower - q, upper + q), strict=True):
        np.testing.assert_allclose(bound.detach(), expected, rtol=1e-5)
    state = calibrated.state_dict()
    again = SplitConformal(wrapped)
    again.load_state_dict(state)
    for bound, expected in zip(again.interval(X, coverage=0.8), calibrated.interval(X, coverage=0.8), strict=True):
        assert torch.equal(bound, expected)
    scaled = calibrate(wrapped, (X, Y), "variance")  # one number for prediction and total risk: a Normal
    torch.testing.assert_close(
        scaled.scale.square(), ((Y - wrapped(X)) / wrapped(X, return_risk=True)[1]).square().mean().detach()
    )
    low, high = calibrate(scaled, (X, Y), "conformal", score="cqr").interval(X)
    assert (low < high).all()


def test_conformal_intervals_cover() -> None:
    rng = np.random.default_rng(0)
    wrapped = sculpt.Wrapper(Quantiles((0.05, 0.95)))(model(1)).eval()
    inside = []
    for _ in range(60):
        x = torch.as_tensor(rng.normal(size=(300, 1)), dtype=torch.float32)
        y = x + (1 + x.abs()) * torch.as_tensor(rng.exponential(size=(300, 1)), dtype=torch.float32)
        lower, upper = calibrate(wrapped, (x[:100], y[:100]), "conformal", score="cqr").interval(x[100:], 0.9)
        inside.append(((lower <= y[100:]) & (y[100:] <= upper)).float().mean().item())
    assert np.mean(inside) == pytest.approx(0.905, abs=0.012)  # ceil(101 * 0.9) / 101 = 0.901


def test_it_is_saved_and_copied(tmp_path: Any) -> None:
    wrapped = sculpt.Wrapper(Quantiles((0.2, 0.8)))(model()).eval()
    save(wrapped, tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors", model()).eval()
    assert again._workbench.methods[0].distribution == Quantiles((0.2, 0.8))
    for other in (again, copy.deepcopy(wrapped)):
        assert torch.equal(other.quantiles(X), wrapped.quantiles(X))
    with pytest.raises(ValueError, match="levels"):
        sculpt.Wrapper(Quantiles((0.1, 0.9)))(model()).load_state_dict(wrapped.state_dict())


def test_bad_input_is_refused_with_what_was_found() -> None:
    y, loc, offsets = parameters(n=5)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: Quantiles((0.5,)), "at least two probabilities between 0 and 1, increasing"),
        (lambda: Quantiles((0.9, 0.1)), "increasing, found"),
        (lambda: Quantiles((0.0, 0.5)), "between 0 and 1"),
        (lambda: Quantiles.loss_function(y, loc, offsets[:3]), r"shape \(3, 5, 1\), but Quantiles needs \(5, 5, 1\)"),
        (lambda: Quantiles.loss_function(y, loc, offsets.flip(0)), "must increase with the level, found a step of -"),
        (lambda: Quantiles.loss_function(y[:, 0], loc, offsets), r"y has shape \(5,\)"),
        (lambda: Quantiles.crps(y, loc, offsets), "no crps in closed form"),
        (lambda: sculpt.Wrapper(Normal)(model()).quantiles(X), "no quantile heads"),
        (lambda: vote.Wrapper(2)(model()).quantiles(X), "no quantile heads"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.slow
def test_cross_fitting_trains_the_prediction_as_well() -> None:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(200, 1, generator=torch.Generator().manual_seed(1))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrapped: Any = compose(vote.Wrapper(2), sculpt.Wrapper(Quantiles((0.1, 0.5, 0.9)), n_layers=1))(nn.Linear(3, 1))
    history = fit(wrapped, (x, y), folds=2, epochs=150, lr=0.05)
    assert history.out_of_fold is not None
    with torch.no_grad():
        answers = wrapped(x), history.out_of_fold.prediction, wrapped.quantiles(x)[1]
    # the pinball loss alone can be small wherever the prediction is, since the heads predict offsets from it
    for answer in answers:
        assert (answer - y).square().mean().sqrt() < 0.15
