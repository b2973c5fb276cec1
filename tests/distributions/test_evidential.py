"""Evidential regression: compared with scipy's t, the formulas of its paper and Monte Carlo over the hierarchy."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch import Tensor, nn

from workbench import Risk, compose, fit, load, neo, sample, save, sculpt, vote
from workbench.calibration import calibrate
from workbench.distributions import Distribution, NormalInverseGamma


def parameters(n: int = 30, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Targets [n, 1], predictions [n, 1] and evidence [3, n, 1]."""
    generator = torch.Generator().manual_seed(0)
    y, gamma = torch.randn(2, n, 1, generator=generator, dtype=torch.float64)
    evidence = torch.rand(3, n, 1, generator=generator, dtype=torch.float64) * 3 + 0.1
    evidence[1] += 1
    return y.to(dtype), gamma.to(dtype), evidence.to(dtype)


def student(gamma: Tensor, evidence: Tensor) -> Any:
    nu, alpha, beta = evidence.double().numpy()
    return scipy.stats.t(2 * alpha, gamma.double().numpy(), np.sqrt(beta * (1 + nu) / (nu * alpha)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))


X = torch.linspace(-2, 2, 60)[:, None] * torch.tensor([[1.0, 0.5]])
Y = 100 + 20 * X[:, :1] + 5 * torch.randn(60, 1, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_predictive_distribution_is_scipys_t(dtype: torch.dtype) -> None:
    y, gamma, evidence = parameters(dtype=dtype)
    theirs, tolerance = student(gamma, evidence), 1e-4 if dtype == torch.float32 else 1e-9
    log_prob = NormalInverseGamma.log_prob(y, gamma, evidence)
    assert log_prob.dtype == dtype
    np.testing.assert_allclose(log_prob, theirs.logpdf(y.double()), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(NormalInverseGamma.cdf(y, gamma, evidence), theirs.cdf(y.double()), rtol=tolerance)
    np.testing.assert_allclose(
        NormalInverseGamma.icdf(0.9, gamma, evidence), theirs.ppf(0.9), rtol=tolerance, atol=tolerance
    )
    np.testing.assert_allclose(NormalInverseGamma.stddev(gamma, evidence), theirs.std(), rtol=10 * tolerance)
    assert torch.equal(NormalInverseGamma.mean(gamma, evidence), gamma)


def test_the_loss_is_that_of_the_paper() -> None:
    y, gamma, evidence = parameters()
    nu, alpha, beta = evidence.numpy()
    omega = 2 * beta * (1 + nu)
    error = (y - gamma).numpy()
    nll = (  # Amini et al. 2020, equation 8
        0.5 * np.log(math.pi / nu)
        - alpha * np.log(omega)
        + (alpha + 0.5) * np.log(error**2 * nu + omega)
        + scipy.special.gammaln(alpha)
        - scipy.special.gammaln(alpha + 0.5)
    )
    expected = nll + 0.3 * np.abs(error) * (2 * nu + alpha)
    ours = NormalInverseGamma(regularization=0.3)
    np.testing.assert_allclose(ours.loss_function(y, gamma, evidence, reduction="none"), expected, rtol=1e-10)
    assert ours.loss_function(y, gamma, evidence).item() == pytest.approx(expected.mean())


def test_risks_are_the_moments_of_the_hierarchy() -> None:
    nu, alpha, beta = 1.5, 4.0, 2.0
    rng = np.random.default_rng(0)
    variance = scipy.stats.invgamma(alpha, scale=beta).rvs(400_000, random_state=rng)
    mean = rng.normal(0.3, np.sqrt(variance / nu))
    variances = NormalInverseGamma.variances(torch.tensor([nu, alpha, beta]).reshape(3, 1, 1))
    assert variances["aleatoric"].item() == pytest.approx(variance.mean(), rel=0.01)
    assert variances["epistemic"].item() == pytest.approx(mean.var(), rel=0.02)
    whole = rng.normal(mean, np.sqrt(variance)).var()
    assert (variances["aleatoric"] + variances["epistemic"]).item() == pytest.approx(whole, rel=0.02)


def test_crps_and_draws_are_those_of_the_t() -> None:
    y, gamma, evidence = parameters(n=4)
    levels = (np.arange(20_000) + 0.5) / 20_000
    drawn = student(gamma, evidence).ppf(levels[:, None, None])
    expected = np.abs(drawn - y.numpy()).mean(0) - 2 * ((2 * levels - 1)[:, None, None] * drawn).mean(0) / 2
    np.testing.assert_allclose(NormalInverseGamma.crps(y, gamma, evidence), expected, rtol=2e-3)
    gamma, evidence = gamma[:1].expand(20_000, 1), evidence[:, :1].expand(3, 20_000, 1)
    draws = NormalInverseGamma.sample((gamma, evidence), generator=torch.Generator().manual_seed(0))
    assert scipy.stats.kstest(draws[:, 0].numpy(), student(gamma[0], evidence[:, 0]).cdf).pvalue > 0.01


def test_gradients_by_finite_differences() -> None:
    y, gamma, evidence = (t.requires_grad_() for t in parameters(n=4))
    ours = NormalInverseGamma(0.2)
    assert torch.autograd.gradcheck(lambda *tensors: ours.loss_function(*tensors), (y, gamma, evidence))
    raw = torch.randn(3, 4, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda r: ours.loss_function(y, gamma, ours.to_risk(r)), (raw,))
    assert torch.autograd.gradcheck(lambda r: ours.variances(ours.to_risk(r))["epistemic"], (raw,))


@pytest.mark.parametrize("raw", [-100.0, -20.0, 0.0, 20.0, 1e4])
@pytest.mark.parametrize("error", [0.0, 1.0, 1e6])
def test_float32_stays_finite_at_extreme_scales(raw: float, error: float) -> None:
    heads = torch.full((3, 2, 1), raw, requires_grad=True)
    gamma = torch.zeros(2, 1, requires_grad=True)
    evidence = NormalInverseGamma.to_risk(heads)
    loss = NormalInverseGamma.loss_function(torch.full((2, 1), error), gamma, evidence)
    gradients = torch.autograd.grad(loss, (gamma, heads))
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(v.isfinite().all() and (v > 0).all() for v in NormalInverseGamma.variances(evidence).values())


def test_images_trees_and_transforms() -> None:
    y, gamma, evidence = parameters(n=24)
    image = (y.reshape(2, 3, 4), gamma.reshape(2, 3, 4), evidence.reshape(3, 2, 3, 4))
    flat = NormalInverseGamma.log_prob(y, gamma, evidence)
    torch.testing.assert_close(NormalInverseGamma.log_prob(*image).flatten(), flat.flatten())
    tree = NormalInverseGamma.loss_function({"a": y, "b": y}, {"a": gamma, "b": gamma}, {"a": evidence, "b": evidence})
    torch.testing.assert_close(tree, NormalInverseGamma.loss_function(y, gamma, evidence))
    mapped = torch.func.vmap(NormalInverseGamma.loss_function, in_dims=(0, 0, 1))(y, gamma, evidence)
    torch.testing.assert_close(mapped.mean(), NormalInverseGamma.loss_function(y, gamma, evidence))


def heads_of(wrapped: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Prediction and evidence by plain models with the tensors of the heads."""
    state = wrapped.state_dict()
    outputs = []
    for mark in ("", "@sculpt", "@sculpt1", "@sculpt2"):
        plain = model()
        plain.load_state_dict({name: state[f"{name}{mark}"] for name in plain.state_dict()})
        outputs.append(plain(x))
    nu, alpha, beta = (nn.functional.softplus(raw) for raw in outputs[1:])
    return outputs[0], torch.stack([nu + 1e-6, alpha + 1.005, beta + 1e-9])


def test_a_wrapped_model_has_three_heads_and_keeps_its_prediction() -> None:
    plain = model()
    wrapped = sculpt.Wrapper(NormalInverseGamma)(plain)
    y, risk = wrapped(X, return_risk=True)
    gamma, (nu, alpha, beta) = heads_of(wrapped, X)
    assert isinstance(risk, Risk)
    assert risk.names() == ("aleatoric", "epistemic", "total")
    torch.testing.assert_close(y, plain(X))
    torch.testing.assert_close(risk.aleatoric, (beta / (alpha - 1)).sqrt())
    torch.testing.assert_close(risk.epistemic, (beta / (nu * (alpha - 1))).sqrt())
    np.testing.assert_allclose(
        risk.total.detach(), student(gamma.detach(), torch.stack([nu, alpha, beta]).detach()).std(), rtol=1e-3
    )
    criterion = nn.functional.mse_loss
    expected = criterion(gamma, Y) + NormalInverseGamma.loss_function(Y, gamma, torch.stack([nu, alpha, beta]))
    torch.testing.assert_close(wrapped.loss(criterion, X, Y), expected)
    heads = [wrapped.state_dict()[f"2.weight{mark}"] for mark in ("@sculpt", "@sculpt1", "@sculpt2")]
    assert not torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[1], heads[2])


@pytest.mark.slow
def test_it_trains_and_says_the_noise_in_units_of_the_targets() -> None:
    x = torch.linspace(-2, 2, 300)[:, None] * torch.tensor([[1.0, 0.5]])
    y = 100 + 20 * x[:, :1] + 5 * torch.randn(300, 1, generator=torch.Generator().manual_seed(0))
    wrapped = sculpt.Wrapper(NormalInverseGamma)(model())
    fit(wrapped, (x, y), epochs=60, progress=False)
    prediction, risk = wrapped(x, return_risk=True)
    residual = (y - prediction).square().mean().sqrt().item()
    assert 4 < residual < 6
    assert risk.total.median().item() == pytest.approx(residual, rel=0.4)


def test_voters_add_their_disagreement_to_the_evidential_doubt() -> None:
    torch.manual_seed(1)
    both = compose(vote.Wrapper(3), sculpt.Wrapper(NormalInverseGamma))(model()).eval()
    y, risk = both(X, return_risk=True)
    state, each = both.state_dict(), []
    for voter in range(3):
        single = sculpt.Wrapper(NormalInverseGamma)(model())
        names = [name for name in single.state_dict() if "@workbench" not in name]
        single.load_state_dict({name: state[f"{name}@vote"][voter] for name in names}, strict=False)
        each.append(single(X, return_risk=True))
    predictions = torch.stack([p for p, _ in each])
    between = predictions.var(0, correction=0)
    torch.testing.assert_close(y, predictions.mean(0))
    torch.testing.assert_close(
        risk.epistemic.square(), torch.stack([r.epistemic for _, r in each]).square().mean(0) + between
    )
    torch.testing.assert_close(risk.aleatoric.square(), torch.stack([r.aleatoric for _, r in each]).square().mean(0))
    torch.testing.assert_close(risk.total**2, risk.aleatoric**2 + risk.epistemic**2)


@pytest.mark.parametrize("other", [lambda: sample.Wrapper(3), lambda: neo.Wrapper()])
def test_it_composes_with_the_other_methods(other: Callable[[], Any]) -> None:
    wrapped = compose(other(), sculpt.Wrapper(NormalInverseGamma))(model())
    fit(wrapped, (X, Y), epochs=2, progress=False)
    _, risk = wrapped(X, return_risk=True)
    assert {"aleatoric", "epistemic", "total"} <= set(risk.names())
    torch.testing.assert_close(risk.total**2, risk.aleatoric**2 + risk.epistemic**2)


def test_it_is_saved_copied_and_calibrated(tmp_path: Any) -> None:
    wrapped = sculpt.Wrapper(NormalInverseGamma(0.2))(model()).eval()
    save(wrapped, tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors", model()).eval()
    assert again._workbench.methods[0].distribution == NormalInverseGamma(0.2)
    expected = wrapped(X, return_risk=True)[1].epistemic
    for other in (again, copy.deepcopy(wrapped)):
        assert torch.equal(other(X, return_risk=True)[1].epistemic, expected)
    calibrated = calibrate(wrapped, (X, Y))
    z = (Y - wrapped(X)) / wrapped(X, return_risk=True)[1].total
    torch.testing.assert_close(calibrated.scale, z.square().mean().sqrt().detach())


def test_bad_input_is_refused_with_what_was_found() -> None:
    y, gamma, evidence = parameters(n=5)
    risk = Risk(aleatoric=gamma.abs() + 1, epistemic=gamma.abs() + 1)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: NormalInverseGamma.loss_function(y, gamma, risk), r"shape \(5, 1\).*needs \(3, 5, 1\).*wrapped.loss"),
        (lambda: NormalInverseGamma.sample((gamma, risk)), r"shape \(5, 1\).*needs \(3, 5, 1\)"),
        (lambda: NormalInverseGamma.loss_function(y, gamma, -evidence), "nu > 0, alpha > 1 and beta > 0, found minima"),
        (lambda: NormalInverseGamma.loss_function(y[:, 0], gamma, evidence), r"y has shape \(5,\)"),
        (lambda: NormalInverseGamma(regularization=-1), "regularization must be 0 or more"),
        (lambda: sculpt.Wrapper(NormalInverseGamma, output="binary")(model())(X, return_risk=True), "LogitNormal"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="y_risk must be a tensor, found list"):
        NormalInverseGamma.log_prob(y, gamma, [1.0, 2.0, 3.0])  # type: ignore[arg-type]
    assert isinstance(NormalInverseGamma(), Distribution)
