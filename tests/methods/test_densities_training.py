"""Trained densities: label-free by their own risk, and the flow by `fit`."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.density_rows import Build, banana, correlated, draw, fitted, layers, train

from workbench.errors import WorkbenchWarning
from workbench.methods.densities import Flow, Gaussian, Signature
from workbench.methods.densities.moments import robust_moments

BOTH = pytest.mark.parametrize("build", [Gaussian, Flow, Signature])


@pytest.mark.slow
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


@pytest.mark.slow
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

    def contrast(density: Any) -> float:
        density.eval()
        return (density.nll(x + 10).mean() - density.nll(x).mean()).item()

    exact = contrast(fitted(Gaussian, x, shrinkage=0.0))
    assert contrast(naive) < 0.05 * exact
    assert contrast(sound) == pytest.approx(exact, rel=0.1)


@pytest.mark.slow
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
    assert all(
        torch.equal(after[name], value) or (not value.numel() and not after[name].any())
        for name, value in before.items()
    )


@pytest.mark.parametrize("d", [1, 2, 5])
def test_flow_starts_as_the_gaussian(d: int) -> None:
    x, fresh = correlated(200, d), correlated(50, d, seed=1) * 50
    flow, gaussian = Flow(), Gaussian()
    flow(x)
    gaussian(x)
    torch.testing.assert_close(flow.nll(fresh), gaussian.nll(fresh))
    torch.testing.assert_close(flow.eval()(fresh), gaussian.eval()(fresh))


@pytest.mark.slow
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
def test_first_batch_small_then_fit_on_all(build: Build) -> None:
    density = build()
    identities = [id(p) for p in density.parameters()]
    train(density, [layers(16, seed=s) for s in range(3)], lr=1e-3)
    shapes = [p.shape for p in density.parameters()]
    density.fit(layers(300))
    assert identities == [id(p) for p in density.parameters()]
    assert shapes == [p.shape for p in density.parameters()]


def test_rows_that_are_not_finite_in_training() -> None:
    x = correlated(50)
    bad = torch.cat([x, torch.full((2, 5), torch.nan)])
    density, clean = Gaussian(), Gaussian()
    for _ in range(2):
        torch.testing.assert_close(density(bad)[:50], clean(x))
    assert density.centre.isfinite()
