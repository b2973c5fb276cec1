"""Models that return a torch Distribution: mean and spread compared with a plain loop over the voters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributions as families
from torch import Tensor, nn

import workbench
from workbench import compose, sample, sculpt, vote
from workbench.core.outputs.returned_distributions import nll

X = torch.linspace(-1, 1, 10)[:, None]

MADE = {
    "Normal": lambda a, b: families.Normal(a, b.exp()),
    "one_scale": lambda a, b: families.Normal(a, torch.tensor(2.0)),
    "Gamma": lambda a, b: families.Gamma(a.exp(), b.exp()),
    "NegativeBinomial": lambda a, b: families.NegativeBinomial(a.exp(), logits=b),
    "probs": lambda a, b: families.NegativeBinomial(a.exp(), probs=b.sigmoid()),
    "LogNormal": lambda a, b: families.LogNormal(a, b.exp()),
    "Independent": lambda a, b: families.Independent(families.Normal(a, b.exp()), 1),
    "joint": lambda a, b: families.MultivariateNormal(a, torch.diag_embed(b.exp()) + 0.1),
    "mixture": lambda a, b: families.MixtureSameFamily(
        families.Categorical(logits=torch.tensor([0.0, 1.0, 2.0])), families.Normal(a, b.exp())
    ),
}


class Said(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.a, self.b = kind, nn.Linear(1, 3), nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Any:
        return MADE[self.kind](self.a(x), self.b(x))


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("strategy", ["auto", "loop", "vmap"])
def test_mean_and_spread_over_voters(kind: str, strategy: str) -> None:
    if (kind, strategy) == ("joint", "vmap"):
        pytest.skip("torch looks at the numbers of a matrix as it makes the distribution; vmap is refused by name")
    wrapped = vote.Wrapper(3, strategy=strategy)(Said(kind)).eval()
    members = [voter.eval()(X) for voter in wrapped.voters()]
    means, variances = (torch.stack([getattr(m, what) for m in members]) for what in ("mean", "variance"))
    y, risk = wrapped(X, return_risk=True)
    torch.testing.assert_close(y, means.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(wrapped(X), means.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(risk.aleatoric, variances.mean(0).sqrt(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(risk.epistemic, means.std(0, correction=0), rtol=1e-4, atol=1e-5)
    total = (variances.mean(0) + means.var(0, correction=0)).sqrt()
    torch.testing.assert_close(risk.total, total, rtol=1e-4, atol=1e-5)
    target = members[0].mean.round() + 1
    density = torch.stack([m.log_prob(target) for m in members]).logsumexp(0) - torch.tensor(3.0).log()
    torch.testing.assert_close(wrapped.predictive(X).log_prob(target), density)
    torch.testing.assert_close(wrapped.predictive(X).stddev, risk.total, rtol=1e-4, atol=1e-5)


def test_a_training_loop_gets_the_distribution() -> None:
    wrapped = vote.Wrapper(2)(Said("Normal")).train()
    said = wrapped(X)
    assert isinstance(said, families.Normal)
    (-said.log_prob(torch.zeros(10, 3)).mean()).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in wrapped.parameters())


@pytest.mark.parametrize("kind", ["Normal", "Gamma"])
def test_fit_trains_by_the_likelihood_in_the_targets_own_units(kind: str) -> None:
    x = torch.linspace(-1, 1, 128)[:, None]
    y = MADE[kind](x.repeat(1, 3), 0 * x.repeat(1, 3)).sample()
    wrapped = vote.Wrapper(2)(Said(kind))
    with torch.no_grad():
        before = wrapped.eval().predictive(x).log_prob(y).mean()
    workbench.fit(wrapped, (x, y), epochs=10, progress=False)
    assert wrapped.scaling is not None
    assert wrapped.scaling.y_mean is None
    assert wrapped.eval().predictive(x).log_prob(y).mean() > before
    if kind == "Gamma":
        with pytest.raises(ValueError, match="support"):
            workbench.fit(wrapped, (x, -y), epochs=1)


def test_without_voters_and_with_samples() -> None:
    y, risk = compose()(Said("Gamma")).eval()(X, return_risk=True)
    plain = Said("Gamma")(X)
    torch.testing.assert_close(y, plain.mean)
    torch.testing.assert_close(risk.aleatoric, plain.stddev)
    y, risk = sample.Wrapper(4, where="weights")(Said("Gamma")).eval()(X, return_risk=True)
    assert risk.names() == ("aleatoric", "epistemic", "total")


class Other(nn.Module):
    def __init__(self, said: Any) -> None:
        super().__init__()
        self.layer, self.said = nn.Linear(1, 3), said

    def forward(self, x: Tensor) -> Any:
        return self.said(self.layer(x))


def test_what_has_no_moments_is_refused_by_name() -> None:
    for said, message in (
        (lambda a: families.Categorical(logits=a), 'Categorical: return its logits, and wrap with output="logits"'),
        (lambda a: families.Cauchy(a, torch.ones(())), "Cauchy, whose mean"),
        (lambda a: families.TransformedDistribution(families.Normal(a, 1.0), families.TanhTransform()), "Transformed"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            vote.Wrapper(2)(Other(said)).eval()(X, return_risk=True)
    with pytest.raises(ValueError, match="risk head would predict"):
        sculpt.Wrapper()(Said("Normal")).eval()(X, return_risk=True)


def test_a_distribution_beside_other_outputs() -> None:
    wrapped = vote.Wrapper(2)(Other(lambda a: {"y": families.Normal(a, 1.0), "raw": a})).eval()
    y, risk = wrapped(X, return_risk=True)
    torch.testing.assert_close(y["y"], y["raw"])
    torch.testing.assert_close(risk.aleatoric["y"], torch.ones(10, 3))
    assert risk.aleatoric["raw"] is None


class Fixed(nn.Linear):
    """Returns a Normal of mean 1 and the given standard deviation, in the dtype of its weights."""

    def __init__(self, sd: float) -> None:
        super().__init__(1, 1)
        self.sd = sd

    def forward(self, x: Tensor) -> families.Normal:
        mean = 0 * super().forward(x) + 1
        return families.Normal(mean, torch.full_like(mean, self.sd))


@pytest.mark.parametrize("sd", [300.0, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_of_half_precision_are_those_of_float32(sd: float, dtype: torch.dtype) -> None:
    wrapped, x = vote.Wrapper(3)(Fixed(sd)).to(dtype).eval(), torch.zeros(2, 1, dtype=dtype)
    exact = families.Normal(1.0, float(torch.tensor(sd, dtype=dtype)))
    predictive, target = wrapped.predictive(x), torch.full((2, 1), 1 + 0.5 * sd)
    for risk in (wrapped(x, return_risk=True)[1].total, predictive.stddev):
        torch.testing.assert_close(risk, torch.full((2, 1), exact.scale))
    torch.testing.assert_close(predictive.log_prob(target), exact.log_prob(target))
    torch.testing.assert_close(nll(Fixed(sd).to(dtype)(x), target), -exact.log_prob(target).mean())
