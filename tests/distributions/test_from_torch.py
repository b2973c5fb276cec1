"""Classes of torch.distributions in sculpt: compared with torch's own distributions of plain copies, scipy and closed forms."""

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
from workbench.distributions import FromTorch, Mixture, Normal

X = torch.linspace(-1, 1, 24)[:, None]


def network(outputs: int = 1) -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, outputs))


def raw_outputs(wrapped: Any, heads: int) -> tuple[Tensor, list[Tensor]]:
    """What the model and each head give, by plain copies whose last layer is loaded from the wrapped object's state."""
    state, out = wrapped.state_dict(), []
    for mark in ("", "@sculpt", *(f"@sculpt{i}" for i in range(1, heads)))[: 1 + heads]:
        plain = copy.deepcopy(wrapped.unwrap())
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(state.get(f"{name}{mark}", state[name]))
            out.append(plain(X))
    return out[0], out[1:]


MADE = {  # the distribution of raw outputs, written out
    "Poisson": lambda raw: families.Poisson(raw.double().exp()),
    "Exponential": lambda raw: families.Exponential(raw.double().exp()),
    "Gamma": lambda raw, rate: families.Gamma(raw.double().exp(), rate.double().exp()),
    "Beta": lambda raw, b: families.Beta(raw.double().exp(), b.double().exp()),
    "NegativeBinomial": lambda raw, n: families.NegativeBinomial(n.double().exp(), logits=raw.double()),
    "Normal": lambda raw, s: families.Normal(raw.double(), s.double().exp()),
    "Gumbel": lambda raw, s: families.Gumbel(raw.double(), s.double().exp()),
    "LogNormal": lambda raw, s: families.LogNormal(raw.double(), s.double().exp()),
    "Dirichlet": lambda raw: families.Dirichlet(raw.double().exp()),
}


@pytest.mark.parametrize("name", MADE)
def test_prediction_risk_and_density_are_those_of_plain_copies(name: str) -> None:
    wrapped = sculpt.Wrapper(getattr(families, name))(network(3)).eval()
    raw, heads = raw_outputs(wrapped, FromTorch(name).n_heads)
    expected = MADE[name](raw, *heads)
    y, risk = wrapped(X, return_risk=True)
    torch.testing.assert_close(y, expected.mean.float())
    torch.testing.assert_close(risk, expected.stddev.float())
    assert torch.equal(wrapped(X), y)
    target = expected.sample()
    predictive = wrapped.predictive(X)
    torch.testing.assert_close(predictive.log_prob(target), expected.log_prob(target).float(), rtol=1e-4, atol=1e-5)
    target = target.float()
    torch.testing.assert_close(wrapped.loss(None, X, target), -expected.log_prob(target.double()).mean().float())
    torch.testing.assert_close(
        wrapped.loss(nn.MSELoss(), X, target),
        nn.functional.mse_loss(expected.mean, target).float() - expected.log_prob(target).mean().float(),
    )


def test_targets_next_to_the_end_of_the_support_are_not_rounded() -> None:
    wrapped = compose(vote.Wrapper(2), sculpt.Wrapper(families.Beta))(network()).eval()
    predictive = wrapped.predictive(X[:1])
    members = [
        families.Beta(*(raw.double().exp() for raw in pair))
        for pair in zip(predictive.loc, predictive.risk[0], strict=True)
    ]
    target = torch.tensor([[1 - 3e-7]], dtype=torch.float64)  # 2.4e-7 or 3.6e-7 below 1 in float32
    density = torch.stack([member.log_prob(target) for member in members]).logsumexp(0) - torch.tensor(2.0).log()
    torch.testing.assert_close(predictive.log_prob(target), density.float())
    halves = Mixture(
        Normal(), torch.zeros(1, 1, dtype=torch.bfloat16), torch.full((1, 1), 1e-2, dtype=torch.bfloat16), torch.ones(1)
    )
    expected = families.Normal(0.0, halves.risk[0].float()).log_prob(torch.tensor([0.0303]))
    torch.testing.assert_close(halves.log_prob(torch.tensor([0.0303])), expected)


def test_voters_by_the_law_of_total_variance() -> None:
    wrapped = compose(vote.Wrapper(3), sculpt.Wrapper(families.Gamma))(network()).eval()
    state, members = wrapped.state_dict(), []
    for k in range(3):
        plain, head = (copy.deepcopy(network()) for _ in range(2))
        with torch.no_grad():
            for model, mark in ((plain, ""), (head, "@sculpt")):
                for name, parameter in model.named_parameters():
                    parameter.copy_(state.get(f"{name}{mark}@vote", state[f"{name}@vote"])[k])
            members.append(MADE["Gamma"](plain(X), head(X)))
    means, variances = (torch.stack([getattr(m, what) for m in members]) for what in ("mean", "variance"))
    y, risk = wrapped(X, return_risk=True)
    torch.testing.assert_close(y, means.mean(0).float())
    torch.testing.assert_close(risk.aleatoric, variances.mean(0).sqrt().float())
    torch.testing.assert_close(risk.epistemic, means.std(0, correction=0).float())
    torch.testing.assert_close(risk.total, wrapped.predictive(X).stddev)
    target = members[0].sample()
    density = torch.stack([m.log_prob(target) for m in members]).logsumexp(0) - torch.tensor(3.0).log()
    torch.testing.assert_close(wrapped.predictive(X).log_prob(target), density.float(), rtol=1e-4, atol=1e-5)
    below = torch.stack([m.cdf(target) for m in members]).mean(0)
    torch.testing.assert_close(wrapped.predictive(X).cdf(target), below.float())
    torch.testing.assert_close(wrapped.predictive(X).icdf(0.5), wrapped.predictive(X).icdf(torch.tensor(0.5)))


@pytest.mark.parametrize("name", ["Poisson", "NegativeBinomial", "Geometric", "Beta", "Gamma"])
def test_cdf_and_quantiles_against_scipy(name: str) -> None:
    family, loc = FromTorch(name), torch.tensor([[0.3], [1.7]])
    heads = torch.full((family.n_heads, 2, 1), 0.8)
    a, b = loc.double().exp().numpy(), torch.tensor(0.8).double().exp().item()
    reference = {
        "Poisson": scipy.stats.poisson(a),
        "NegativeBinomial": scipy.stats.nbinom(b, 1 / (1 + a)),
        "Geometric": scipy.stats.geom(a / (1 + a), loc=-1),
        "Beta": scipy.stats.beta(a, b),
        "Gamma": scipy.stats.gamma(a, scale=1 / b),
    }[name]
    for q in (0.05, 0.5, 0.9):
        torch.testing.assert_close(family.icdf(q, loc, heads), torch.as_tensor(reference.ppf(q)).float())
    for y in (-1.0, 0.4, 2.0):
        at = torch.full((2, 1), y)
        torch.testing.assert_close(family.cdf(at, loc, heads), torch.as_tensor(reference.cdf(at)).float())


@pytest.mark.parametrize("name", ["Poisson", "Gamma", "Exponential"])
def test_crps_is_its_integral(name: str) -> None:
    family, loc = FromTorch(name), torch.tensor([[0.3], [1.2]], dtype=torch.float64)
    heads = torch.full((family.n_heads, 2, 1), 0.2, dtype=torch.float64)
    y = torch.tensor([[0.0], [3.0]], dtype=torch.float64) + (name != "Poisson")
    grid = torch.linspace(0, 60, 600_001, dtype=torch.float64)
    below = family.cdf(grid.expand(2, -1), loc.expand(2, len(grid)), heads.expand(-1, 2, len(grid)))
    integral = torch.trapezoid((below - (grid >= y).double()) ** 2, grid)
    torch.testing.assert_close(family.crps(y, loc, heads)[:, 0], integral, rtol=1e-3, atol=1e-3)


def test_far_counts_and_rates_keep_their_digits() -> None:
    y, log_rate = torch.tensor([[1e6], [0.0]]), torch.tensor([[13.8], [-18.4]])
    log_prob = FromTorch("Poisson").log_prob(y, log_rate, torch.zeros(0, 2, 1))
    exact = scipy.stats.poisson(log_rate.double().exp().numpy()).logpmf(y.double().numpy())
    torch.testing.assert_close(log_prob, torch.as_tensor(exact).float())
    shapes = torch.tensor([[[5.0], [30.0]]])  # so wide a binomial is a Poisson
    log_prob = FromTorch("NegativeBinomial").log_prob(
        torch.tensor([[1e6], [3.0]]), torch.tensor([[10.0], [-19.0]]), shapes
    )
    exact = scipy.stats.nbinom(
        torch.tensor(5.0).double().exp().item(), 1 / (1 + torch.tensor(10.0).double().exp().item())
    ).logpmf(1e6)
    torch.testing.assert_close(log_prob[0, 0], torch.tensor(exact).float())
    assert log_prob.isfinite().all()
    raw = torch.tensor([[400.0], [-400.0]], requires_grad=True)
    loss = FromTorch("Poisson").loss_function(torch.ones(2, 1), raw, torch.zeros(0, 2, 1))
    loss.backward()
    assert loss.isfinite()
    assert raw.grad.isfinite().all()


BAD = {
    "Poisson": (0.5, "whole numbers"),
    "NegativeBinomial": (-1.0, "whole numbers"),
    "Gamma": (0.0, "above 0"),
    "Beta": (1.0, "between 0 and 1"),
    "Exponential": (-0.1, "from 0"),
    "Dirichlet": (0.4, "sum to 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_targets_are_checked_before_training(name: str) -> None:
    value, message = BAD[name]
    wrapped = sculpt.Wrapper(getattr(families, name))(network(2))
    y = torch.full((24, 2), value)
    before = copy.deepcopy(wrapped.state_dict())
    with pytest.raises(ValueError, match=message):
        workbench.fit(wrapped, (X, y), epochs=1)
    with pytest.raises(ValueError, match=message):
        wrapped.loss(None, X, y)
    assert all(torch.equal(value, before[name]) for name, value in wrapped.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_counts_are_trained_by_their_likelihood_and_never_standardized(dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 1, 200)[:, None]
    y = torch.poisson(torch.exp(2 + x), generator=torch.Generator().manual_seed(0)).to(dtype)
    wrapped = sculpt.Wrapper(families.Poisson)(network())
    history = workbench.fit(wrapped, (x, y), epochs=30, batch_size=32, lr=0.03, progress=False)
    assert wrapped.scaling is not None
    assert wrapped.scaling.y_mean is None
    wrapped.eval()
    mean, risk = wrapped(x, return_risk=True)
    torch.testing.assert_close(mean, torch.exp(2 + x), rtol=0.25, atol=0.5)
    torch.testing.assert_close(risk, mean.sqrt())
    assert history.records[-1][1] < 3  # in nats of counts; of a squared error it would be above 7


def test_counts_in_other_units_are_refused() -> None:
    wrapped = sculpt.Wrapper(families.Poisson)(network())
    with pytest.raises(ValueError, match="cannot be standardized"):
        wrapped.scale(y_mean=torch.zeros(()), y_scale=torch.ones(()))
    scaled = vote.Wrapper(2)(network())
    scaled.scale(y_mean=torch.zeros(()), y_scale=torch.ones(()))
    with pytest.raises(ValueError, match="cannot be standardized"):
        sculpt.Wrapper(families.Poisson)(scaled)


@pytest.mark.parametrize("name", ["Normal", "Gumbel"])
def test_standardized_targets_are_predicted_in_their_units(name: str) -> None:
    wrapped = sculpt.Wrapper(getattr(families, name))(network()).eval()
    raw, (head,) = raw_outputs(wrapped, 1)
    wrapped.scale(y_mean=torch.tensor(1000.0), y_scale=torch.tensor(50.0))
    expected = MADE[name](raw * 50 + 1000, head + torch.tensor(50.0).log())
    y, risk = wrapped(X, return_risk=True)
    torch.testing.assert_close(y, expected.mean.float())
    torch.testing.assert_close(risk, expected.stddev.float())
    target = expected.sample()
    torch.testing.assert_close(
        wrapped.predictive(X).log_prob(target), expected.log_prob(target).float(), rtol=1e-3, atol=1e-3
    )


REFUSED = {
    families.Categorical: "logits",
    families.StudentT: "workbench.distributions.StudentT",
    families.Cauchy: "workbench.distributions.Cauchy",
    families.MultivariateNormal: r"joint=True",
    families.Uniform: "support",
    families.InverseGamma: "no standard deviation",
    families.VonMises: "circle",
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_fitted_is_refused_by_name(family: type) -> None:
    with pytest.raises(ValueError, match=rf"torch.distributions.{family.__name__}.*{REFUSED[family]}"):
        sculpt.Wrapper(family)


def test_other_classes_and_instances_are_refused() -> None:
    class Mine(families.Gamma):
        pass

    with pytest.raises(ValueError, match=r"Mine. is not a class of torch.distributions"):
        sculpt.Wrapper(Mine)
    with pytest.raises(TypeError, match=r"give the class torch.distributions.Poisson"):
        sculpt.Wrapper(families.Poisson(torch.ones(1)))
    with pytest.raises(ValueError, match="folds"):
        workbench.fit(
            compose(vote.Wrapper(4), sculpt.Wrapper(families.Poisson))(network()), (X, X.abs().round()), folds=2
        )


def test_a_mean_and_a_risk_are_no_raw_outputs() -> None:
    y, risk = sculpt.Wrapper(families.Gamma)(network()).eval()(X, return_risk=True)
    with pytest.raises(ValueError, match=r"wrapped.loss"):
        FromTorch("Gamma").loss_function(y, y, risk)
    with pytest.raises(ValueError, match="draw samples"):
        FromTorch("Beta").crps(torch.full((1, 1), 0.5), torch.zeros(1, 1), torch.zeros(1, 1, 1))


@pytest.mark.parametrize("name", ["Poisson", "NegativeBinomial"])
def test_files_name_the_family(name: str, tmp_path: Path) -> None:
    wrapped = compose(vote.Wrapper(2), sculpt.Wrapper(getattr(families, name)))(network()).eval()
    workbench.save(wrapped, tmp_path / "model.safetensors")
    again = workbench.load(tmp_path / "model.safetensors", network()).eval()
    for ours, theirs in zip(again(X, return_risk=True), wrapped(X, return_risk=True), strict=True):
        assert torch.equal(*(getattr(t, "total", t) for t in (ours, theirs)))
    other = sculpt.Wrapper(families.Exponential)(vote.Wrapper(2)(network()))
    with pytest.raises(ValueError, match="family"):
        other.load_state_dict(wrapped.state_dict())


def test_a_loss_that_the_model_gives_stays_a_loss() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.layers(x)
            return {"y": y, "loss": y.square().mean()}

    wrapped = sculpt.Wrapper(families.Poisson)(WithLoss()).eval()
    torch.testing.assert_close(wrapped(X)["loss"], network()(X).square().mean())
