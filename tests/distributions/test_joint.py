"""The joint Normal and the mixture density in sculpt: compared with torch and scipy distributions of plain copies."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
import torch.distributions as families
from torch import Tensor, nn

import workbench
from workbench import compose, sculpt, vote
from workbench.distributions import JointNormal, MixtureDensity, Normal

X = torch.linspace(-1, 1, 12)[:, None]


def network(outputs: int) -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, outputs))


def answers(wrapped: Any, outputs: int, heads: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """What each of two voters gives, and each of its heads, by plain copies loaded from the state."""
    state, predictions, head_outputs = wrapped.state_dict(), [], []
    for k in range(2):
        raw = []
        for mark in ("", "@sculpt", *(f"@sculpt{i}" for i in range(1, heads))):
            plain = copy.deepcopy(network(outputs))
            with torch.no_grad():
                for name, parameter in plain.named_parameters():
                    parameter.copy_(state.get(f"{name}{mark}@vote", state[f"{name}@vote"])[k])
                raw.append(plain(X).double())
        predictions.append(raw[0])
        head_outputs.append(raw[1:])
    return predictions, head_outputs


@pytest.mark.parametrize("scaled", [False, True])
def test_joint_normal_against_plain_copies(scaled: bool) -> None:
    wrapped = compose(vote.Wrapper(2), sculpt.Wrapper(Normal(joint=True)))(network(3)).eval()
    mean, unit = torch.tensor([10.0, 0.0, -5.0]), torch.tensor([100.0, 1.0, 0.1])
    predictions, head_outputs = answers(wrapped, 3, 3)
    if scaled:
        wrapped.scale(y_mean=mean, y_scale=unit)
    members = []
    for mu, rows in zip(predictions, head_outputs, strict=True):
        raw = torch.stack(rows, -2)
        factor = raw.tril(-1) + torch.diag_embed(raw.diagonal(dim1=-2, dim2=-1).exp())
        covariance = factor @ factor.mT
        if scaled:
            mu, covariance = mu * unit + mean, covariance * unit[:, None] * unit
        members.append(families.MultivariateNormal(mu, covariance))
    y, risk = wrapped(X, return_risk=True)
    means = torch.stack([m.mean for m in members])
    torch.testing.assert_close(y, means.mean(0).float())
    torch.testing.assert_close(risk.aleatoric, torch.stack([m.variance for m in members]).mean(0).sqrt().float())
    torch.testing.assert_close(risk.epistemic, means.std(0, correction=0).float(), rtol=1e-4, atol=1e-5)
    predictive = wrapped.predictive(X)
    assert (predictive.batch_shape, predictive.event_shape) == ((12,), (3,))
    target = members[0].sample().float()
    density = torch.stack([m.log_prob(target.double()) for m in members]).logsumexp(0) - torch.tensor(2.0).log()
    torch.testing.assert_close(predictive.log_prob(target), density.float(), rtol=1e-4, atol=1e-4)
    deviations = means - means.mean(0)
    among = (deviations[..., :, None] * deviations[..., None, :]).mean(0)
    covariance = torch.stack([m.covariance_matrix for m in members]).mean(0) + among
    torch.testing.assert_close(predictive.covariance_matrix, covariance.float(), rtol=1e-4, atol=1e-4)
    nll = -torch.stack([m.log_prob(target.double()).mean() for m in members]).mean()
    if not scaled:
        torch.testing.assert_close(wrapped.loss(None, X, target), nll.float())


def test_draws_of_a_joint_mixture_have_its_covariance() -> None:
    wrapped = compose(vote.Wrapper(2), sculpt.Wrapper(Normal(joint=True)))(network(2)).eval()
    predictive = wrapped.predictive(X[:1])
    before = torch.get_rng_state()
    draws = predictive.sample((40_000,), torch.Generator().manual_seed(0))[:, 0]
    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(draws.T.cov(), predictive.covariance_matrix[0].detach(), rtol=0.05, atol=0.05)
    torch.testing.assert_close(draws.mean(0), predictive.mean[0].detach(), rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_joint_normal_learns_a_correlation(tmp_path: Path) -> None:
    noise = torch.randn(600, 2, generator=torch.Generator().manual_seed(0))
    noise = noise @ torch.tensor([[2.0, 1.8], [0.0, 0.6]])
    x = torch.linspace(-1, 1, 600)[:, None]
    wrapped = sculpt.Wrapper(Normal(joint=True), n_layers=1)(network(2))
    workbench.fit(wrapped, (x, 100 + 10 * noise), epochs=30, progress=False)
    wrapped.eval()
    covariance = wrapped.predictive(x).covariance_matrix.mean(0)
    torch.testing.assert_close(covariance, 100 * noise.T.cov(), rtol=0.2, atol=0)
    workbench.save(wrapped, tmp_path / "model.safetensors")
    again = workbench.load(tmp_path / "model.safetensors", network(2)).eval()
    assert torch.equal(again(x, return_risk=True)[1], wrapped(x, return_risk=True)[1])


def test_joint_targets_that_cannot_be_told_are_refused() -> None:
    reshaped = nn.Sequential(nn.Linear(1, 6), nn.Unflatten(1, (3, 2)))
    with pytest.raises(ValueError, match=r"n_targets=2"):
        sculpt.Wrapper(Normal(joint=True))(reshaped).eval()(X, return_risk=True)
    with pytest.raises(ValueError, match=r"n_targets=k"):
        sculpt.Wrapper(Normal(joint=True))(nn.Sequential(nn.Conv1d(1, 2, 1), nn.Flatten()))
    wrapped = sculpt.Wrapper(Normal(joint=True, n_targets=2))(reshaped).eval()
    assert wrapped.predictive(X).event_shape == (2,)
    with pytest.raises(ValueError, match="beta"):
        Normal(beta=0.5, joint=True)
    with pytest.raises(ValueError, match="no cdf"):
        JointNormal(2).cdf(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(2, 1, 2))
    assert copy.deepcopy(Normal(beta=0.5)) == Normal(beta=0.5)


@pytest.mark.parametrize("scaled", [False, True])
def test_mixture_density_against_plain_copies(scaled: bool) -> None:
    wrapped = compose(vote.Wrapper(2), sculpt.Wrapper(MixtureDensity(2)))(network(1)).eval()
    predictions, head_outputs = answers(wrapped, 1, 6)
    if scaled:
        wrapped.scale(y_mean=torch.tensor(1000.0), y_scale=torch.tensor(50.0))
    members = []
    for mean, (a, b, c, d, e, f) in zip(predictions, head_outputs, strict=True):
        weights = torch.cat([a, b], -1).softmax(-1)
        offsets = torch.cat([c, d], -1)
        offsets = offsets - (weights * offsets).sum(-1, keepdim=True)
        scale, unit, zero = torch.cat([e, f], -1).exp(), 50.0 if scaled else 1.0, 1000.0 if scaled else 0.0
        parts = families.Normal((mean + offsets) * unit + zero, scale * unit)
        members.append(families.MixtureSameFamily(families.Categorical(weights), parts))
    y, risk = wrapped(X, return_risk=True)
    means, variances = (torch.stack([getattr(m, what) for m in members])[..., None] for what in ("mean", "variance"))
    torch.testing.assert_close(y, means.mean(0).float())
    torch.testing.assert_close(risk.aleatoric, variances.mean(0).sqrt().float())
    torch.testing.assert_close(risk.epistemic, means.std(0, correction=0).float(), rtol=1e-3, atol=1e-4)
    target = y + risk.total
    predictive = wrapped.predictive(X)
    density = torch.stack([m.log_prob(target[:, 0].double()) for m in members]).logsumexp(0) - torch.tensor(2.0).log()
    torch.testing.assert_close(predictive.log_prob(target)[:, 0], density.float(), rtol=1e-4, atol=1e-4)
    below = torch.stack([m.cdf(target[:, 0].double()) for m in members]).mean(0)
    torch.testing.assert_close(predictive.cdf(target)[:, 0], below.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(predictive.cdf(predictive.icdf(0.3)), torch.full((12, 1), 0.3), rtol=1e-3, atol=1e-3)


def test_mixture_density_crps_is_its_integral() -> None:
    family, y = MixtureDensity(2), torch.tensor([[0.5]], dtype=torch.float64)
    heads = torch.tensor([0.2, -0.3, 2.0, -1.0, 0.1, -0.5], dtype=torch.float64).reshape(6, 1, 1)
    loc, grid = torch.zeros(1, 1, dtype=torch.float64), torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    below = family.cdf(grid[None], loc.expand(1, len(grid)), heads.expand(6, 1, len(grid)))
    integral = torch.trapezoid((below - (grid >= y).double()) ** 2, grid)
    torch.testing.assert_close(family.crps(y, loc, heads)[0], integral, rtol=1e-4, atol=1e-4)
    one = family.log_prob(y, loc, heads)
    w = torch.tensor([0.2, -0.3], dtype=torch.float64).softmax(0).numpy()
    d = torch.tensor([2.0, -1.0]).numpy() - (w * [2.0, -1.0]).sum()
    density = (w * scipy.stats.norm(d, torch.tensor([0.1, -0.5]).double().exp().numpy()).pdf(0.5)).sum()
    torch.testing.assert_close(one.exp().item(), density)


@pytest.mark.slow
def test_mixture_density_finds_two_peaks() -> None:
    sign = torch.where(torch.arange(600) % 3 == 0, -1.0, 1.0)[:, None]
    x = torch.linspace(-1, 1, 600)[:, None]
    y = 500 + 30 * sign + torch.randn(600, 1, generator=torch.Generator().manual_seed(0))
    wrapped = sculpt.Wrapper(MixtureDensity(2), n_layers=1)(network(1))
    workbench.fit(wrapped, (x, y), epochs=40, lr=0.03, progress=False)
    predictive = wrapped.eval().predictive(x)
    valley = predictive.log_prob(torch.full_like(x, 500.0)).exp()
    peaks = [predictive.log_prob(torch.full_like(x, 500.0 + side)).exp() for side in (-30, 30)]
    assert bool((valley < 0.2 * torch.minimum(*peaks)).all())


def test_the_covariance_of_half_precision_is_in_float32() -> None:
    loc, heads = torch.zeros(1, 1, dtype=torch.float16), torch.full((1, 1, 1), 6.0, dtype=torch.float16)
    covariance = torch.tensor([[[12.0]]]).exp()  # above the largest number of float16
    torch.testing.assert_close(JointNormal(1).covariance(loc, heads), covariance)
