"""Output distributions: compared with torch.distributions, scipy.stats and numerical integration."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
import torch.distributions as td
from torch import Tensor

from workbench.distributions import Cauchy, Distribution, Laplace, LogitNormal, LogNormal, Normal, StudentT

DTYPES = (torch.float32, torch.float64)


def lognormal(mean: Tensor, risk: Tensor) -> tuple[Tensor, Tensor]:
    s2 = torch.log(1 + (risk / mean) ** 2)
    return mean.log() - s2 / 2, s2.sqrt()


# ours, torch's, scipy's; all from the same mean and standard deviation
FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "Normal": (Normal, td.Normal, lambda m, r: scipy.stats.norm(m, r)),
    "Laplace": (Laplace, lambda m, r: td.Laplace(m, r / 2**0.5), lambda m, r: scipy.stats.laplace(m, r / 2**0.5)),
    "StudentT": (
        StudentT(df=4.0),
        lambda m, r: td.StudentT(4.0, m, r / 2**0.5),
        lambda m, r: scipy.stats.t(4.0, m, r / 2**0.5),
    ),
    "Cauchy": (Cauchy, td.Cauchy, lambda m, r: scipy.stats.cauchy(m, r)),
    "LogNormal": (
        LogNormal,
        lambda m, r: td.LogNormal(*lognormal(m, r)),
        lambda m, r: scipy.stats.lognorm(lognormal(m, r)[1].numpy(), scale=lognormal(m, r)[0].exp().numpy()),
    ),
}
families = pytest.mark.parametrize("name", FAMILIES)
WITH_CRPS = [name for name in FAMILIES if name != "Cauchy"]


def triple(n: int = 200, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Positive targets and means, so that every family can take them, and risks."""
    generator = torch.Generator().manual_seed(seed)
    y, loc, risk = torch.rand(3, n, 1, generator=generator, dtype=torch.float64) * 4 + 0.1
    return y.to(dtype), loc.to(dtype), risk.to(dtype)


@families
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_prob_and_loss_agree_with_torch(name: str, dtype: torch.dtype) -> None:
    ours, theirs, _ = FAMILIES[name]
    y, loc, risk = triple(dtype=dtype)
    expected = theirs(loc.double(), risk.double()).log_prob(y.double())
    log_prob = ours.log_prob(y, loc, risk)
    assert log_prob.dtype == dtype
    torch.testing.assert_close(log_prob.double(), expected, rtol=1e-4 if dtype == torch.float32 else 1e-12, atol=1e-5)
    torch.testing.assert_close(ours.loss_function(y, loc, risk), -log_prob.mean())
    torch.testing.assert_close(ours.loss_function(y, loc, risk, reduction="sum"), -log_prob.sum())
    torch.testing.assert_close(ours.loss_function(y, loc, risk, reduction="none"), -log_prob)


@families
def test_cdf_icdf_mean_and_stddev_agree_with_scipy(name: str) -> None:
    ours, _, scipy_family = FAMILIES[name]
    y, loc, risk = triple()
    reference = scipy_family(loc, risk)
    np.testing.assert_allclose(ours.cdf(y, loc, risk), reference.cdf(y.numpy()), rtol=1e-9)
    for q in (1e-12, 1e-3, 0.3, 0.5, 0.9, 1 - 1e-9):
        # the closed form: scipy 1.11 loses digits of Cauchy's far quantiles
        wanted = loc - risk / math.tan(math.pi * q) if name == "Cauchy" else reference.ppf(q)
        np.testing.assert_allclose(ours.icdf(q, loc, risk), wanted, rtol=1e-6, atol=1e-12)
    levels = torch.linspace(0.01, 0.99, 200, dtype=torch.float64).unsqueeze(-1)
    torch.testing.assert_close(ours.cdf(ours.icdf(levels, loc, risk), loc, risk), levels)
    if name != "Cauchy":
        np.testing.assert_allclose(ours.mean(loc, risk), reference.mean())
        np.testing.assert_allclose(ours.stddev(loc, risk), reference.std())


@pytest.mark.parametrize("name", WITH_CRPS)
def test_crps_agrees_with_its_integral(name: str) -> None:
    ours, _, scipy_family = FAMILIES[name]
    y, loc, risk = triple(n=8)
    crps = ours.crps(y, loc, risk).squeeze(-1)
    for i in range(8):
        cdf, at = scipy_family(loc[i], risk[i]).cdf, y[i].item()
        lower, _ = scipy.integrate.quad(lambda t, cdf=cdf: cdf(t).item() ** 2, -np.inf, at, epsabs=1e-9)
        upper, _ = scipy.integrate.quad(lambda t, cdf=cdf: (1 - cdf(t).item()) ** 2, at, np.inf, epsabs=1e-9)
        assert crps[i].item() == pytest.approx(lower + upper, rel=1e-6)


@pytest.mark.parametrize("name", WITH_CRPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_crps_far_out_and_without_risk_is_the_absolute_error(name: str, dtype: torch.dtype) -> None:
    ours = FAMILIES[name][0]
    y = torch.tensor([[1e6], [1e6], [2.0], [3.0]], dtype=dtype)
    loc = torch.tensor([[1.0], [1.0], [2.0], [5.0]], dtype=dtype)
    risk = torch.tensor([[1e-9], [0.0], [0.0], [0.0]], dtype=dtype)
    torch.testing.assert_close(ours.crps(y, loc, risk), (y - loc).abs(), rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.cdf(y, loc, risk)[:2], torch.ones(2, 1, dtype=dtype))
    assert ours.cdf(y, loc, risk)[2].item() == pytest.approx(0.5)


def test_lognormal_with_little_noise_is_normal() -> None:
    y, loc, risk = torch.tensor([[1000.5]]), torch.tensor([[1000.0]]), torch.tensor([[1.0]])
    torch.testing.assert_close(LogNormal.crps(y, loc, risk), Normal.crps(y, loc, risk), rtol=2e-2, atol=0)
    torch.testing.assert_close(
        LogNormal.crps(y.double(), loc.double(), risk.double()),
        Normal.crps(y.double(), loc.double(), risk.double()),
        rtol=2e-3,
        atol=0,
    )


@families
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_float32_stays_finite_and_true_at_extreme_scales(name: str, scale: float) -> None:
    ours, theirs, _ = FAMILIES[name]
    y = scale * torch.tensor([[1.0], [0.5], [1e-3]])
    loc = (scale * torch.tensor([[2.0], [0.5], [1.0]])).requires_grad_()
    for raw_value in (-40.0, -20.0, 0.0, 20.0, 1e6):
        raw = torch.full((3, 1), raw_value, requires_grad=True)
        risk = ours.to_risk(raw)
        risk.retain_grad()
        loss = ours.loss_function(y, loc, risk)
        assert loss.isfinite()
        grads = torch.autograd.grad(loss, (loc, risk, raw))
        assert all(grad.isfinite().all() for grad in grads)
        if name != "LogNormal":  # there the reference itself loses the small variance
            expected = -theirs(loc.double(), risk.double()).log_prob(y.double()).mean()
            torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)


@families
def test_gradients_saturate_where_float32_would_overflow(name: str) -> None:
    ours = FAMILIES[name][0]
    y, loc = torch.tensor([[1e6]]), torch.tensor([[1e-3]], requires_grad=True)
    raw = torch.tensor([[-50.0]], requires_grad=True)
    ours.loss_function(y, loc, ours.to_risk(raw)).backward()
    assert loc.grad is not None
    assert raw.grad is not None
    assert loc.grad.isfinite().all()
    assert raw.grad.isfinite().all()
    assert raw.grad.item() < 0  # a descent step raises the risk
    if name != "LogNormal":  # there the location also moves the spread of the logarithm
        assert loc.grad.item() < 0


@families
def test_gradients_by_finite_differences(name: str) -> None:
    ours = FAMILIES[name][0]
    inputs = tuple(t.requires_grad_() for t in triple(n=4))
    assert torch.autograd.gradcheck(lambda y, loc, risk: ours.loss_function(y, loc, risk), inputs)
    assert torch.autograd.gradgradcheck(lambda y, loc, risk: ours.loss_function(y, loc, risk), inputs)
    assert torch.autograd.gradcheck(lambda loc, risk: ours.icdf(0.2, loc, risk), inputs[1:])
    assert torch.autograd.gradcheck(ours.cdf, inputs)
    if name != "Cauchy":
        assert torch.autograd.gradcheck(ours.crps, inputs)
    assert torch.autograd.gradcheck(ours.to_risk, (inputs[1],))


@families
def test_samples_follow_the_distribution_and_carry_gradients(name: str) -> None:
    ours, _, scipy_family = FAMILIES[name]
    loc = torch.full((20_000, 1), 2.0, dtype=torch.float64, requires_grad=True)
    risk = torch.full((20_000, 1), 1.5, dtype=torch.float64, requires_grad=True)
    draw = ours.sample((loc, risk), generator=torch.Generator().manual_seed(1))
    reference = scipy_family(torch.tensor([2.0], dtype=torch.float64), torch.tensor([1.5], dtype=torch.float64))
    assert scipy.stats.kstest(draw.detach().squeeze(-1).numpy(), reference.cdf).pvalue > 0.01
    again = ours.sample((loc, risk), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(draw, again, rtol=0, atol=0)
    u = ours.cdf(draw.detach(), loc.detach(), risk.detach())  # for a given noise the draw is the quantile at u
    at_quantile = torch.autograd.grad(ours.icdf(u, loc, risk).sum(), (loc, risk))
    through_draw = torch.autograd.grad(draw.sum(), (loc, risk))
    torch.testing.assert_close(through_draw, at_quantile, rtol=1e-5, atol=1e-6)


def test_sampling_does_not_touch_the_global_generator_when_given_one() -> None:
    before = torch.random.get_rng_state()
    for ours, _, _ in FAMILIES.values():
        ours.sample((torch.ones(3, 1), torch.ones(3, 1)), generator=torch.Generator())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_class_and_instance_are_the_same_thing() -> None:
    y, loc, risk = triple()
    for family in (Normal, Laplace, StudentT, Cauchy, LogNormal):
        assert torch.equal(family.loss_function(y, loc, risk), family().loss_function(y, loc, risk))
        assert torch.equal(family.to_risk(loc), family().to_risk(loc))
        assert isinstance(family(), Distribution)
    assert Normal(beta=0.5) == Normal(beta=0.5) != Normal()
    assert "StudentT(df=3.0)" in repr(StudentT(3.0))
    assert [f.location_scale for f in (Normal, Laplace, StudentT, Cauchy, LogNormal, LogitNormal)] == [True] * 4 + [
        False
    ] * 2


@pytest.mark.parametrize("family", [Normal(), Laplace(), StudentT(), Cauchy(), LogNormal()], ids=repr)
def test_levels_near_one_are_not_rounded_to_float32(family: Distribution) -> None:
    one = torch.ones(1, 1)
    for level in (1 - 1e-6, 1 - 1e-9):
        expected = family.icdf(level, one.double(), one.double()).float()
        torch.testing.assert_close(family.icdf(level, one, one), expected)
        torch.testing.assert_close(family.icdf(torch.tensor([[level]], dtype=torch.float64), one, one), expected)


def test_beta_nll_weighs_by_the_held_variance() -> None:
    y, loc, risk = triple()
    risk.requires_grad_()
    expected = (risk.detach() ** 1.0 * -Normal.log_prob(y, loc, risk)).mean()
    loss = Normal(beta=0.5).loss_function(y, loc, risk)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, risk), torch.autograd.grad(expected, risk))
    with pytest.raises(ValueError, match="beta"):
        Normal(beta=1.5)


def test_trees_and_risk_objects() -> None:
    y, loc, risk = triple()
    counts = torch.arange(200)
    tree = {"a": loc, "b": (loc, counts), "c": [2 * loc]}
    risks = {"c": [risk], "a": risk, "b": (3 * risk, None)}
    target = {"a": y, "b": [y, counts], "c": (y,)}
    expected = sum(Normal.loss_function(y, m, r) for m, r in ((loc, risk), (loc, 3 * risk), (2 * loc, risk))) / 3
    torch.testing.assert_close(Normal.loss_function(target, tree, risks), expected)
    torch.testing.assert_close(Normal.loss_function(target, tree, SimpleNamespace(aleatoric=risks)), expected)
    each = Normal.loss_function(target, tree, risks, reduction="none")
    torch.testing.assert_close(each["b"][0], -Normal.log_prob(y, loc, 3 * risk))
    assert each["b"][1] is None
    drawn = Normal.sample((tree, SimpleNamespace(aleatoric=risks)), generator=torch.Generator().manual_seed(0))
    assert drawn["b"][1] is counts
    assert isinstance(drawn["b"], tuple)
    assert [drawn["a"].shape, drawn["c"][0].shape] == [loc.shape, loc.shape]
    assert not torch.equal(drawn["a"], loc)


def test_half_precision_is_scored_in_float32() -> None:
    y, loc, risk = (t.half() for t in triple())
    loss = Normal.loss_function(1000 * y, loc, risk / 100)
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert Normal.to_risk(torch.tensor([-60.0], dtype=torch.float16)).item() == pytest.approx(1e-9)
    assert Normal.sample((loc, risk)).dtype == torch.float16
    assert Normal.loss_function(y.double(), loc, risk).dtype == torch.float64


def test_vmap_and_grad_transforms() -> None:
    y, loc, risk = (torch.stack([t, t + 1]) for t in triple(n=5))
    for ours in (Normal, Laplace, StudentT, Cauchy, LogNormal):
        gradient = torch.func.vmap(torch.func.grad(ours.loss_function, argnums=2))(y, loc, risk)
        risk_leaf = risk.clone().requires_grad_()
        each = torch.stack([ours.loss_function(y[i], loc[i], risk_leaf[i]) for i in range(2)])
        torch.testing.assert_close(gradient, torch.autograd.grad(each.sum(), risk_leaf)[0])
        assert (
            torch.func.vmap(lambda m, r, f=ours: f.sample((m, r)), randomness="different")(loc, risk).shape == loc.shape
        )


@pytest.mark.parametrize("ours", [Normal, Normal(beta=0.5), LogNormal])
def test_a_compiled_training_step_gives_the_same_loss(ours: Any) -> None:
    inputs = triple(n=5)
    compiled = torch.compile(lambda y, loc, risk: ours.loss_function(y, loc, risk), backend="eager")
    torch.testing.assert_close(compiled(*inputs), ours.loss_function(*inputs))


def test_images_are_scored_elementwise() -> None:
    y, loc, risk = (t.reshape(5, 2, 4, 5) for t in triple())
    for ours, _, _ in FAMILIES.values():
        flat = ours.log_prob(*(t.flatten() for t in (y, loc, risk)))
        torch.testing.assert_close(ours.log_prob(y, loc, risk).flatten(), flat)
        assert ours.sample((loc, risk)).shape == loc.shape


def test_bad_input_is_refused_with_what_was_found() -> None:
    y, loc, risk = triple(n=3)
    cases = [
        (lambda: Normal.loss_function(y.squeeze(-1), loc, risk), r"y has shape \(3,\) but y_pred has shape \(3, 1\)"),
        (lambda: Normal.loss_function(y, loc, risk[:, 0]), r"y_risk has shape \(3,\)"),
        (lambda: Normal.loss_function((y, y[:1]), (loc, loc), (risk, risk)), r"y\[1\] has shape \(1, 1\)"),
        (lambda: Normal.loss_function({"b": y}, {"a": loc}, {"a": risk}), r"y does not match.*\['a'\].*\['b'\]"),
        (lambda: Normal.loss_function((y,), (loc, loc), (risk, risk)), "y does not match"),
        (lambda: Normal.loss_function(y, loc, -risk), "y_risk must be > 0, found -"),
        (lambda: Normal.log_prob(y, loc, 0 * risk), "y_risk must be > 0"),
        (lambda: Normal.loss_function(y, loc, risk, reduction="avg"), "avg"),
        (lambda: Normal.loss_function(y[:0], loc[:0], risk[:0]), "nothing to score"),
        (lambda: Normal.loss_function((y,), (loc,), (None,)), "nothing to score"),
        (lambda: Normal.icdf(1.5, loc, risk), "q must lie in"),
        (lambda: LogNormal.loss_function(-y, loc, risk), "targets > 0, found -"),
        (lambda: LogNormal.loss_function(y, -loc, risk), "predictions > 0"),
        (lambda: Cauchy.crps(y, loc, risk), "Cauchy has no crps"),
        (lambda: Cauchy.mean(loc, risk), "no mean"),
        (lambda: Cauchy.stddev(loc, risk), "no standard deviation"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="y_risk must be a tensor, found float"):
        Normal.loss_function(y, loc, 1.0)
    with pytest.raises(TypeError, match="one pair"):
        Normal.sample(loc)  # type: ignore[arg-type]
    assert Normal.loss_function(y, loc, risk * math.nan).isnan()  # a NaN that came in stays visible


class TestLogitNormal:
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]], dtype=torch.float64)
    risk = torch.tensor([[0.5, 2.0, 1.0], [1.0, 1.0, 0.1]], dtype=torch.float64)
    labels = torch.tensor([0, 2])

    def test_without_noise_it_is_cross_entropy(self) -> None:
        expected = torch.nn.functional.cross_entropy(self.logits, self.labels)
        for distribution in (LogitNormal, LogitNormal(n_samples=3), LogitNormal(pairwise=True)):
            torch.testing.assert_close(distribution.loss_function(self.labels, self.logits, 0 * self.risk), expected)

    def test_mean_field_matches_the_integral_for_two_classes(self) -> None:
        # the expected probability depends on the difference of the two logits alone, a one-dimensional integral
        for mean, sd in ((0.0, 1.0), (1.5, 2.0), (-3.0, 0.7)):
            exact, _ = scipy.integrate.quad(
                lambda t, m=mean, s=sd: scipy.stats.norm(m, s).pdf(t) / (1 + math.exp(-t)),
                mean - 12 * sd,
                mean + 12 * sd,
            )
            logits = torch.tensor([[mean, 0.0]], dtype=torch.float64)
            risk = torch.full((1, 2), sd, dtype=torch.float64)
            assert LogitNormal.probs(logits, risk)[0, 0].item() == pytest.approx(exact, abs=0.01)
            probs = LogitNormal(pairwise=True).probs(logits, risk / 2**0.5)  # the difference has the variance of both
            assert probs[0, 0].item() == pytest.approx(exact, abs=0.01)

    def test_monte_carlo_converges_to_expected_probabilities(self) -> None:
        generator = np.random.default_rng(0)
        draws = generator.normal(size=(200_000, 2, 3)) * self.risk.numpy() + self.logits.numpy()
        expected = (np.exp(draws) / np.exp(draws).sum(-1, keepdims=True)).mean(0)
        many = LogitNormal(n_samples=50_000, generator=torch.Generator().manual_seed(0))
        np.testing.assert_allclose(many.probs(self.logits, self.risk), expected, atol=5e-3)
        picked = -np.log(expected[[0, 1], [0, 2]]).mean()
        assert many.loss_function(self.labels, self.logits, self.risk).item() == pytest.approx(picked, abs=1e-2)
        np.testing.assert_allclose(LogitNormal(pairwise=True).probs(self.logits, self.risk), expected, atol=0.03)
        plain = torch.softmax(self.logits / torch.sqrt(1 + math.pi / 8 * self.risk**2), -1)
        torch.testing.assert_close(LogitNormal.probs(self.logits, self.risk), plain)

    def test_images_gradients_and_samples(self) -> None:
        logits, risk, labels = self.logits.expand(4, 5, 2, 3), self.risk.expand(4, 5, 2, 3), self.labels.expand(4, 5, 2)
        torch.testing.assert_close(
            LogitNormal.loss_function(labels, logits, risk),
            LogitNormal.loss_function(self.labels, self.logits, self.risk),
        )
        inputs = (self.logits.clone().requires_grad_(), self.risk.clone().requires_grad_())
        assert torch.autograd.gradcheck(lambda loc, risk: LogitNormal.loss_function(self.labels, loc, risk), inputs)
        many = [t.expand(20_000, 2, 3) for t in inputs]
        draw = LogitNormal.sample((many[0], many[1]), generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(draw.std(0), self.risk, rtol=0.03, atol=0.0)
        assert all(g.abs().sum() > 0 for g in torch.autograd.grad(draw.square().sum(), inputs))
        extreme = torch.tensor([[1e4, -1e4]], requires_grad=True)
        loss = LogitNormal.loss_function(torch.tensor([1]), extreme, torch.full((1, 2), 1e-9))
        assert torch.autograd.grad(loss, extreme)[0].isfinite().all()
        assert loss.item() == pytest.approx(2e4)

    def test_bad_labels_and_shapes(self) -> None:
        with pytest.raises(ValueError, match=r"y has shape \(2, 1\) but y_pred has shape \(2, 3\)"):
            LogitNormal.loss_function(self.labels.unsqueeze(-1), self.logits, self.risk)
        with pytest.raises(ValueError, match=r"labels must lie in \[0, 3\), found y from 1 to 3"):
            LogitNormal.loss_function(self.labels + 1, self.logits, self.risk)
        with pytest.raises(TypeError, match="integer class labels"):
            LogitNormal.loss_function(self.labels.double(), self.logits, self.risk)
        with pytest.raises(ValueError, match="classes >= 2"):
            LogitNormal.loss_function(self.labels, self.logits[:, :1], self.risk[:, :1])
        with pytest.raises(ValueError, match="n_samples"):
            LogitNormal(n_samples=0)
        with pytest.raises(ValueError, match="one form"):
            LogitNormal(n_samples=2, pairwise=True)
        for call in (LogitNormal.cdf, LogitNormal.crps):
            with pytest.raises(ValueError, match="no order"):
                call(self.labels, self.logits, self.risk)
        with pytest.raises(ValueError, match="no order"):
            LogitNormal.icdf(0.5, self.logits, self.risk)
