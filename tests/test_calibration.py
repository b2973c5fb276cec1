"""Temperature, variance scale and recalibrated quantiles, against closed forms, scipy and independent searches."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import workbench
from workbench import compose, neo, sample, sculpt, vote
from workbench.calibration import (
    QuantileRecalibration,
    SplitConformal,
    TemperatureScaling,
    VarianceScaling,
    calibrate,
    fit_temperature,
    fit_variance_scale,
)
from workbench.data import Split
from workbench.distributions import Cauchy, Laplace, LogNormal, Normal, StudentT
from workbench.metrics import categorical_nll, quantile_calibration_error


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def known(distribution: Any = Normal, outputs: int = 1, **settings: Any) -> Any:
    """A wrapped model of x = [mu, raw]: the prediction is mu, its aleatoric risk softplus(raw) + 1e-9, all [n, outputs]."""
    model = nn.Linear(2 * outputs, outputs, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.eye(outputs, 2 * outputs))
    wrapped = sculpt.Wrapper(distribution, n_layers=1, **settings)(model)
    (name,) = wrapped.risk_parameters()
    wrapped.set_risk_parameters({name: torch.eye(2 * outputs).double()[outputs:]})
    return wrapped.eval()


def inputs(mu: Tensor, sigma: Tensor) -> Tensor:
    return torch.cat([mu, torch.log(torch.expm1(sigma))], 1)


def regression(n: int, outputs: int = 1, factor: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, y, mu, sigma with y ~ N(mu, factor * sigma)."""
    mu = torch.randn(n, outputs, generator=rng(seed), dtype=torch.float64)
    sigma = 0.5 + torch.rand(n, outputs, generator=rng(seed + 1), dtype=torch.float64)
    noise = torch.randn(n, outputs, generator=rng(seed + 2), dtype=torch.float64)
    return inputs(mu, sigma), mu + factor * sigma * noise, mu, sigma


def scores(**settings: Any) -> Any:
    """A wrapped model whose prediction is its input, in float64."""
    model = nn.Linear(3, 3, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
    return compose(sculpt.Wrapper(workbench.distributions.LogitNormal, n_layers=1, **settings))(model).eval()


def labelled(n: int, temperature: float, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits, and labels drawn from softmax(logits / temperature)."""
    logits = 2 * torch.randn(n, classes, generator=rng(seed), dtype=torch.float64)
    return logits, torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng(seed + 1))[:, 0]


def cross_entropy(logits: Tensor, labels: Tensor) -> float:
    return nn.functional.cross_entropy(logits.double(), labels).item()


class Votes(nn.Module):
    """Logits from x by one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc(x))


@pytest.fixture
def voters() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return vote.Wrapper(4, output="logits")(Votes())


def classified(n: int = 60) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4, generator=rng(3)), torch.randint(3, (n,), generator=rng(4))


# ---- temperature
@pytest.mark.parametrize("true", [0.3, 1.0, 4.0])
def test_the_temperature_of_the_labels_is_found(true: float) -> None:
    assert fit_temperature(*labelled(20_000, true)) == pytest.approx(true, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_the_temperature_is_that_of_an_independent_search(seed: int) -> None:
    logits, labels = labelled(200, 2.5, classes=7, seed=10 * seed)

    def loss(beta: np.ndarray) -> float:  # convex in beta = 1 / T
        z = beta[0] * logits.numpy()
        return float((np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), labels.numpy()]).mean())

    beta = optimize.minimize(loss, [1.0], method="BFGS", options={"gtol": 1e-9}).x[0]
    assert fit_temperature(logits, labels) == pytest.approx(1 / beta, rel=1e-4)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n", [1, 2, 7, 50])
def test_the_loss_on_the_fitted_rows_never_rises(n: int, seed: int) -> None:
    logits = 10 ** (seed - 4) * torch.randn(n, 5, generator=rng(seed))
    labels = torch.randint(5, (n,), generator=rng(seed + 9))
    assert cross_entropy(logits / fit_temperature(logits, labels), labels) <= cross_entropy(logits, labels)


def test_equal_scores_keep_temperature_one() -> None:
    assert fit_temperature(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])) == 1.0


def test_a_shift_of_each_row_changes_nothing() -> None:
    logits, labels = labelled(100, 2.0)
    shifted = logits + 1000 * torch.randn(100, 1, generator=rng(1), dtype=torch.float64)
    assert fit_temperature(shifted, labels) == pytest.approx(fit_temperature(logits, labels), rel=1e-6)


def test_a_class_that_is_ruled_out_is_no_trouble_unless_it_is_the_label() -> None:
    logits, labels = labelled(100, 2.0)
    logits = torch.cat([logits, torch.full((100, 1), -torch.inf)], 1)
    assert fit_temperature(logits, labels) == pytest.approx(fit_temperature(logits[:, :3], labels), rel=1e-6)
    labels[7] = 3
    with pytest.raises(ValueError, match="probability 0 in 1 of 100 rows, first in row 7"):
        fit_temperature(logits, labels)


def test_averaged_probabilities_of_voters_are_scaled(voters: Any) -> None:
    x, labels = classified()
    calibrated = calibrate(voters, (x, labels))
    assert isinstance(calibrated, TemperatureScaling)
    voters.eval()
    mean = torch.stack([voter.eval()(x).softmax(-1) for voter in voters.voters()]).mean(0)
    temperature = fit_temperature(mean.log(), labels)
    assert temperature != 1.0
    torch.testing.assert_close(calibrated(x).softmax(-1), (mean.log() / temperature).softmax(-1))
    torch.testing.assert_close(calibrated(x).argmax(-1), mean.argmax(-1))
    assert categorical_nll(calibrated(x).softmax(-1), labels) < categorical_nll(mean, labels)


@pytest.mark.parametrize("output", ["logits", "probs"])
def test_risks_of_classes_follow_the_new_probabilities(output: str) -> None:
    x, labels = classified()
    model = nn.Linear(4, 3) if output == "logits" else nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1))
    wrapped = compose(vote.Wrapper(4, output=output), neo.Wrapper())(model).eval()
    wrapped.fit(x)
    calibrated = calibrate(wrapped, (x, labels), "temperature")
    before = wrapped(x, return_risk=True)[1]
    y, risk = calibrated(x, return_risk=True)
    probs = y.softmax(-1) if output == "logits" else y
    torch.testing.assert_close(probs.sum(-1), torch.ones(60))
    torch.testing.assert_close(risk.total, torch.distributions.Categorical(probs).entropy())
    torch.testing.assert_close(risk.total, risk.aleatoric + risk.epistemic)
    torch.testing.assert_close(risk.epistemic / risk.total, before.epistemic / before.total)
    torch.testing.assert_close(risk.vacuitic, before.vacuitic)
    torch.testing.assert_close(y, calibrated(x))
    assert (risk.total - before.total).abs().max() > 0.01


def test_without_voters_all_of_the_entropy_is_aleatoric() -> None:
    logits, labels = labelled(300, 3.0)
    calibrated = calibrate(scores(output="logits"), (logits, labels))
    _, risk = calibrated(logits, return_risk=True)
    assert risk.names() == ("aleatoric", "total")
    torch.testing.assert_close(risk.aleatoric, risk.total)


def test_logits_of_a_model_wrapped_for_values_are_scaled_and_their_risks_too() -> None:
    x, labels = classified()
    wrapped = vote.Wrapper(3)(nn.Linear(4, 3)).eval()
    calibrated = calibrate(wrapped, (x, labels))
    y, risk = wrapped(x, return_risk=True)
    new, new_risk = calibrated(x, return_risk=True)
    temperature = fit_temperature(y, labels)
    torch.testing.assert_close(new, y / temperature)
    torch.testing.assert_close(new_risk, risk / temperature)


def test_fitting_leaves_model_modes_gradients_and_randomness_alone(voters: Any) -> None:
    voters.train()
    voters.fc.eval()
    modes = {name: module.training for name, module in voters.named_modules()}
    state, random = copy.deepcopy(voters.state_dict()), torch.get_rng_state()
    first = calibrate(voters, classified())
    assert {name: module.training for name, module in voters.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in voters.state_dict().items())
    assert all(p.grad is None for p in voters.parameters())
    with torch.no_grad():
        assert torch.equal(calibrate(voters, classified()).temperature, first.temperature)
    assert torch.equal(calibrate(voters.eval(), classified()).temperature, first.temperature)


def test_answers_are_those_of_evaluation_mode(voters: Any) -> None:
    x, labels = classified()
    calibrated = calibrate(voters.eval(), (x, labels))
    wanted = calibrated(x)
    calibrated.train()
    assert torch.equal(calibrated(x), wanted)
    assert voters.training
    assert voters.drop.training


def test_the_set_of_a_scaled_classifier_holds_the_fewest_classes() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.06, 0.04]], dtype=torch.float64)
    calibrated = TemperatureScaling(scores(output="logits"))
    assert calibrated.predict_set(probs.log(), 0.6).tolist() == [[True, True, False], [True, False, False]]
    assert calibrated.predict_set(probs.log(), 0.95).tolist() == [[True, True, True], [True, True, False]]


# ---- variance
def test_the_variance_scale_of_a_normal_is_the_root_mean_square() -> None:
    x, y, mu, sigma = regression(50, factor=3.0)
    calibrated = calibrate(known(), (x, y))
    assert isinstance(calibrated, VarianceScaling)
    wanted = np.sqrt(np.mean(((y - mu) / sigma).numpy() ** 2))
    assert calibrated.scale.item() == pytest.approx(wanted, rel=1e-7)
    prediction, risk = calibrated(x, return_risk=True)
    torch.testing.assert_close(prediction, mu)
    torch.testing.assert_close(risk, wanted * sigma)


def test_each_output_can_have_a_scale_of_its_own() -> None:
    x, y, mu, sigma = regression(40, outputs=3)
    calibrated = calibrate(known(outputs=3), (x, y), "variance", per_output=True)
    torch.testing.assert_close(calibrated.scale, ((y - mu) / sigma).square().mean(0).sqrt())
    torch.testing.assert_close(calibrated(x, return_risk=True)[1], calibrated.scale * sigma)


def test_the_scale_of_a_laplace_is_the_mean_absolute_residual() -> None:
    _, y, mu, sigma = regression(101)
    wanted = math.sqrt(2) * ((y - mu) / sigma).abs().mean().item()
    assert fit_variance_scale(mu, sigma, y, Laplace).item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("distribution", "reference"),
    [
        (StudentT(df=4.0), lambda s, r: stats.t(4, scale=s * r / math.sqrt(2))),
        (Cauchy(), lambda s, r: stats.cauchy(scale=s * r)),
        (Normal(beta=0.5), lambda s, r: stats.norm(scale=s * r)),
    ],
)
def test_the_scale_of_other_families_is_that_of_scipy(distribution: Any, reference: Any) -> None:
    _, y, mu, sigma = regression(80, factor=0.4)
    y[0] += 1e4 if isinstance(distribution, Cauchy) else 0  # an outlier must not lead the search astray

    def loss(log_s: float) -> float:
        return -reference(math.exp(log_s), sigma.numpy()).logpdf((y - mu).numpy()).mean()

    wanted = math.exp(optimize.minimize_scalar(loss, bracket=(-2, 1), tol=1e-10).x)
    assert fit_variance_scale(mu, sigma, y, distribution).item() == pytest.approx(wanted, rel=1e-4)


def test_the_scale_of_positive_values_lowers_their_loss() -> None:
    mu, sigma = torch.full((200, 1), 3.0), torch.full((200, 1), 1.0)
    y = LogNormal.sample((mu, 2 * sigma), generator=rng())
    found = fit_variance_scale(mu, sigma, y, LogNormal).item()
    losses = {s: LogNormal.loss_function(y, mu, s * sigma).item() for s in (1.0, 0.98 * found, found, 1.02 * found)}
    assert min(losses, key=lambda s: losses[s]) == found
    assert found == pytest.approx(2, rel=0.2)


@pytest.mark.parametrize("distribution", [Normal, Laplace, StudentT, Cauchy])
@pytest.mark.parametrize("n", [1, 3, 30])
def test_the_likelihood_on_the_fitted_rows_never_falls(distribution: Any, n: int) -> None:
    _, y, mu, sigma = regression(n, factor=0.01, seed=n)
    s = fit_variance_scale(mu, sigma, y, distribution)
    assert distribution.loss_function(y, mu, s * sigma) <= distribution.loss_function(y, mu, sigma)


def test_named_risks_are_scaled_alike() -> None:
    x, y, _, _ = regression(60, factor=2.0)
    wrapped = compose(vote.Wrapper(3), sculpt.Wrapper(), neo.Wrapper())(nn.Linear(2, 1).double()).eval()
    wrapped.fit(x)
    calibrated = calibrate(wrapped, (x, y))
    before, after = wrapped(x, return_risk=True)[1], calibrated(x, return_risk=True)[1]
    for name in ("aleatoric", "epistemic", "total"):
        torch.testing.assert_close(after[name], calibrated.scale * before[name])
    torch.testing.assert_close(after.vacuitic, before.vacuitic)
    torch.testing.assert_close(after.total**2, after.aleatoric**2 + after.epistemic**2)


@pytest.mark.parametrize("distribution", [Normal, Laplace, StudentT(df=6.0)])
def test_intervals_and_quantiles_are_those_of_the_family(distribution: Any) -> None:
    x, y, mu, sigma = regression(60, factor=2.0)
    calibrated = calibrate(known(distribution), (x, y))
    lower, upper = calibrated.interval(x, 0.8)
    family = distribution() if isinstance(distribution, type) else distribution
    torch.testing.assert_close(upper, family.icdf(0.9, mu, calibrated.scale * sigma))
    torch.testing.assert_close(lower, calibrated.quantile(x, 0.1))
    torch.testing.assert_close(lower + upper, 2 * mu)


def test_gradients_reach_the_model_through_a_calibrated_risk() -> None:
    x, y, _, _ = regression(20)
    wrapped = known()
    calibrated = calibrate(wrapped, (x, y))
    calibrated(x, return_risk=True)[1].sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in wrapped.risk_parameters().values())


# ---- quantiles
def test_recalibrated_probabilities_are_the_observed_shares() -> None:
    x, y, mu, sigma = regression(99, factor=2.0)
    y = y + 0.5
    calibrated = calibrate(known(), (x, y), "isotonic")
    u = stats.norm.cdf(((y - mu) / sigma).numpy())[:, 0]
    knots = np.r_[0, np.sort(u), 1]
    at = np.linspace(0, 1, 201)
    targets = mu[:1] + sigma[:1] * torch.as_tensor(stats.norm.ppf(at[1:-1, None]))
    found = calibrated.cdf(x[:1].expand(199, 2), targets)
    np.testing.assert_allclose(
        found.detach().numpy()[:, 0], np.interp(at, knots, np.arange(101) / 100)[1:-1], atol=1e-9
    )
    for q in (0.005, 0.1, 0.5, 0.93):
        torch.testing.assert_close(calibrated.cdf(x, calibrated.quantile(x, q)), torch.full((99, 1), q).double())
        stated = np.interp(q, np.arange(101) / 100, knots)
        torch.testing.assert_close(calibrated.quantile(x, q), mu + sigma * stats.norm.ppf(stated))
    lower, upper = calibrated.interval(x, 0.8)
    torch.testing.assert_close((lower, upper), (calibrated.quantile(x, 0.1), calibrated.quantile(x, 0.9)))


def test_recalibration_holds_on_new_rows() -> None:
    def skewed(n: int, seed: int) -> tuple[Tensor, Tensor]:
        x, _, mu, sigma = regression(n, seed=seed)
        noise = torch.empty(n, 1, dtype=torch.float64).exponential_(generator=rng(seed + 7))
        return x, mu + 0.7 * sigma * noise

    calibrated = calibrate(known(), skewed(2000, 0), "isotonic")
    x, y = skewed(4000, 50)
    share = {q: (y <= calibrated.quantile(x, q)).double().mean().item() for q in (0.05, 0.25, 0.5, 0.9, 0.99)}
    assert all(abs(share[q] - q) < 4 * math.sqrt(q * (1 - q) * (1 / 2000 + 1 / 4000)) for q in share)
    prediction, risk = calibrated(x, return_risk=True)
    before = quantile_calibration_error(*known()(x, return_risk=True), y)
    assert quantile_calibration_error(prediction, risk, y) < before / 2


@pytest.mark.parametrize(("distribution", "family"), [(Normal, stats.norm), (Laplace, stats.laplace(scale=0.5**0.5))])
def test_mean_and_standard_deviation_are_integrals_of_the_quantiles(distribution: Any, family: Any) -> None:
    x, y, mu, sigma = regression(9, factor=2.0)
    calibrated = calibrate(known(distribution), (x, y + 1), "isotonic")
    knots = np.sort(np.r_[0, family.cdf(((y + 1 - mu) / sigma).numpy())[:, 0], 1])

    def moment(power: int) -> float:
        return sum(
            0.1 / (b - a) * integrate.quad(lambda u: family.ppf(u) ** power, a, b)[0]
            for a, b in itertools.pairwise(knots)
        )

    mean, stddev = moment(1), math.sqrt(moment(2) - moment(1) ** 2)
    prediction, risk = calibrated(x, return_risk=True)
    torch.testing.assert_close(prediction, mu + sigma * mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(risk, sigma * stddev, rtol=1e-3, atol=0)
    torch.testing.assert_close(prediction, calibrated(x))


def test_nothing_moves_where_nothing_was_fitted() -> None:
    x, _, mu, sigma = regression(20)
    prediction, risk = QuantileRecalibration(known())(x, return_risk=True)
    torch.testing.assert_close(prediction, mu, rtol=0, atol=1e-9)
    torch.testing.assert_close(risk, sigma, rtol=1e-4, atol=0)
    positive = inputs(mu.abs() + 1, sigma)
    prediction, risk = QuantileRecalibration(known(LogNormal))(positive, return_risk=True)
    torch.testing.assert_close(prediction, mu.abs() + 1, rtol=1e-3, atol=0)
    torch.testing.assert_close(risk, sigma, rtol=1e-2, atol=0)


def test_named_risks_follow_the_recalibrated_one() -> None:
    x, y, _, _ = regression(60, factor=0.5)
    wrapped = compose(vote.Wrapper(3), sculpt.Wrapper())(nn.Linear(2, 1).double()).eval()
    calibrated = calibrate(calibrate(wrapped, (x, y)), (x, y), "isotonic")
    before, after = wrapped(x, return_risk=True)[1], calibrated(x, return_risk=True)[1]
    torch.testing.assert_close(after.total**2, after.aleatoric**2 + after.epistemic**2)
    torch.testing.assert_close(after.epistemic / after.total, before.epistemic / before.total)


def test_each_output_can_have_a_map_of_its_own() -> None:
    x, y, _, _ = regression(30, outputs=2)
    y[:, 1] = 3 * y[:, 1] - 1
    both = calibrate(known(outputs=2), (x, y), "isotonic", per_output=True)
    for k in range(2):
        one = calibrate(known(), (x[:, k::2], y[:, k : k + 1]), "isotonic")
        torch.testing.assert_close(both.quantile(x, 0.3)[:, k : k + 1], one.quantile(x[:, k::2], 0.3))
        torch.testing.assert_close(both.cdf(x, y)[:, k : k + 1], one.cdf(x[:, k::2], y[:, k : k + 1]))
        for mine, theirs in zip(both(x, return_risk=True), one(x[:, k::2], return_risk=True), strict=True):
            torch.testing.assert_close(mine[:, k : k + 1], theirs)


def test_quantiles_that_say_nothing_are_refused() -> None:
    x, y, _, _ = regression(30)
    with pytest.raises(ValueError, match=r"1 of 30 targets lie where the predicted cdf is 0 or 1.*variance"):
        calibrate(known(), (x, y.index_fill(0, torch.tensor([4]), 1e3)), "isotonic")
    with pytest.raises(ValueError, match="Cauchy has no standard deviation"):
        calibrate(known(Cauchy), (x, y), "isotonic")(x)
    assert calibrate(known(Cauchy), (x, y), "isotonic").quantile(x, 0.5).isfinite().all()
    with pytest.raises(ValueError, match="after QuantileRecalibration predictions follow no family"):
        calibrate(calibrate(known(), (x, y), "isotonic"), (x, y), "variance")


# ---- rows, states, bad input
class Pairs(Dataset):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


@pytest.mark.parametrize(
    "give",
    [
        lambda x, y: (x.numpy(), y.numpy()),
        TensorDataset,
        Pairs,
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True),
        lambda x, y: Split(x.float(), y.float()),
        lambda x, y: (x.float(), y),
    ],
    ids=["arrays", "TensorDataset", "Dataset", "DataLoader", "Split", "float32"],
)
def test_rows_come_in_many_forms(give: Any) -> None:
    x, y, _, _ = regression(40, factor=2.0)
    wrapped = known()
    random = torch.get_rng_state()
    found = calibrate(wrapped, give(x, y), "variance").scale
    assert found.item() == pytest.approx(calibrate(wrapped, (x, y), batch_size=3).scale.item(), rel=1e-5)
    assert torch.equal(torch.get_rng_state(), random)


def test_several_inputs() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.fc(a + b)

    wrapped = vote.Wrapper(3)(Sum())
    x, y = torch.randn(2, 20, 2, generator=rng()), torch.randn(20, 1, generator=rng(1))
    calibrated = calibrate(wrapped, ((x[0], x[1]), y))
    lower, upper = calibrated.interval((x[0], x[1]))
    torch.testing.assert_close((lower + upper) / 2, calibrated(x[0], x[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_calibrated_in_float32(dtype: torch.dtype) -> None:
    x, labels = classified()
    wrapped = vote.Wrapper(3, output="logits")(nn.Linear(4, 3)).to(dtype).eval()
    calibrated = calibrate(wrapped, (x, labels))
    assert calibrated.temperature.dtype == torch.float32
    assert calibrated(x.to(dtype)).dtype == dtype
    assert calibrated.temperature.item() == pytest.approx(
        fit_temperature(wrapped(x.to(dtype)).float(), labels), rel=1e-4
    )


def makers() -> dict[str, Any]:
    x, y, _, _ = regression(30, outputs=2)
    logits, labels = labelled(30, 2.0)
    return {
        "temperature": lambda: (calibrate(scores(output="logits"), (logits, labels)), logits),
        "variance": lambda: (calibrate(known(outputs=2), (x, y), per_output=True, method="variance"), x),
        "isotonic": lambda: (calibrate(known(outputs=2), (x, y), "isotonic"), x),
        "normalized": lambda: (calibrate(known(outputs=2), (x, y), "conformal"), x),
        "cqr": lambda: (calibrate(known(outputs=2), (x, y), "conformal", score="cqr", joint=True), x),
        "aps": lambda: (
            calibrate(scores(output="logits"), (logits, labels), "conformal", score="aps", randomized=False),
            logits,
        ),
        "chain": lambda: (calibrate(calibrate(known(outputs=2), (x, y)), (x, y), "conformal"), x),
    }


def answers_of(calibrated: Any, x: Tensor) -> list[Tensor]:
    y, risk = calibrated(x, return_risk=True)
    found = [y, getattr(risk, "total", risk)]
    try:
        found += calibrated.interval(x, 0.8)
    except (AttributeError, ValueError):
        found += [calibrated.predict_set(x, 0.8)]
    return found


@pytest.mark.parametrize("name", makers())
@pytest.mark.parametrize("how", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "pickle"])
def test_copies_answer_alike(name: str, how: Any) -> None:
    calibrated, x = makers()[name]()
    again = how(calibrated)
    assert again is not calibrated
    for mine, theirs in zip(answers_of(calibrated, x), answers_of(again, x), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("name", "fresh"),
    [
        ("temperature", lambda: TemperatureScaling(scores(output="logits"))),
        ("variance", lambda: VarianceScaling(known(outputs=2), per_output=True)),
        ("isotonic", lambda: QuantileRecalibration(known(outputs=2))),
        ("normalized", lambda: SplitConformal(known(outputs=2))),
        ("cqr", lambda: SplitConformal(known(outputs=2), "cqr", joint=True)),
        ("aps", lambda: SplitConformal(scores(output="logits"), "aps", randomized=False)),
        ("chain", lambda: SplitConformal(VarianceScaling(known(outputs=2)))),
    ],
)
def test_a_state_is_loaded_by_a_fresh_object(name: str, fresh: Any, tmp_path: Any) -> None:
    calibrated, x = makers()[name]()
    torch.save(calibrated.state_dict(), tmp_path / "state.pt")
    again = fresh().double().eval()
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for mine, theirs in zip(answers_of(calibrated, x), answers_of(again, x), strict=True):
        assert torch.equal(mine, theirs)


def test_a_state_of_other_options_is_refused() -> None:
    calibrated, _ = makers()["normalized"]()
    other = SplitConformal(known(outputs=2), joint=True)
    with pytest.raises(ValueError, match=r"the state is of SplitConformal.*'joint': False.*this object.*'joint': True"):
        other.load_state_dict(calibrated.state_dict())
    assert not other.scores.numel()
    with pytest.raises(ValueError, match=r"the state is of SplitConformal.*this object is VarianceScaling"):
        VarianceScaling(known(outputs=2)).load_state_dict(calibrated.state_dict(), strict=False)


def test_it_moves_with_the_model() -> None:
    calibrated, x = makers()["variance"]()
    calibrated.float()
    assert calibrated.scale.dtype == torch.float32
    assert calibrated(x.float(), return_risk=True)[1].dtype == torch.float32


def test_models_that_are_not_wrapped_are_refused() -> None:
    with pytest.raises(TypeError, match="Linear is not wrapped; compose"):
        calibrate(nn.Linear(2, 1), (torch.zeros(3, 2), torch.zeros(3, 1)))
    with pytest.raises(TypeError, match="found function; give what a wrapper made"):
        calibrate(lambda x: x, (torch.zeros(3, 2), torch.zeros(3, 1)))  # type: ignore[arg-type]


def test_training_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="a Data holds training rows"):
        calibrate(known(), workbench.data.load("cubic", n_train=20))


@pytest.mark.parametrize(
    ("wrapped", "y", "method", "message"),
    [
        (known, torch.zeros(5, 1), "platt", "method must be one of temperature, variance"),
        (known, torch.zeros(5), "variance", r"targets have shape \[5\], predictions \[5, 1\].*y\[:, None\]"),
        (known, torch.zeros(5, 1), "temperature", "for classes, but the targets are values"),
        (known, torch.zeros(5, dtype=torch.int64), "variance", "for values, but the targets are class numbers"),
        (
            known,
            torch.zeros(5, dtype=torch.int64),
            "temperature",
            r"class numbers have shape \[5\], predictions \[5, 1\]",
        ),
        (known, torch.zeros(4, 1), None, "x has 5 rows and y has 4"),
        (known, torch.full((5, 1), torch.nan), None, "y holds NaN"),
        (known, torch.zeros(5, 1), "variance", "the prediction is exact in all 5 held-out numbers"),
        (lambda: compose()(nn.Linear(2, 1)), torch.ones(5, 1), "variance", r"gives none at all \(the plain baseline\)"),
        (
            lambda: neo.Wrapper()(nn.Linear(2, 1)).fit(torch.randn(9, 2, generator=rng())),
            torch.ones(5, 1),
            "isotonic",
            "by='total': the model measures no such risk; it gives vacuitic",
        ),
        (lambda: sample.Wrapper(1)(nn.Linear(2, 1)), torch.ones(5, 1), "variance", "must be > 0"),
    ],
)
def test_bad_input_is_refused(wrapped: Any, y: Tensor, method: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(wrapped(), (torch.zeros(5, 2), y), method)


def test_labels_beyond_the_classes_and_empty_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="class numbers go from 0 to 3, but the model gives 3 scores"):
        calibrate(scores(output="logits"), (torch.zeros(2, 3), torch.tensor([0, 3])))
    with pytest.raises(ValueError, match="there is no row"):
        calibrate(known(), (torch.zeros(0, 2), torch.zeros(0, 1)))
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1; found 0"):
        calibrate(known(), (torch.zeros(2, 2), torch.zeros(2, 1)), batch_size=0)
    with pytest.raises(TypeError, match="'score'"):
        calibrate(known(), (torch.zeros(2, 2), torch.ones(2, 1)), "variance", score="aps")


def test_a_prediction_that_is_not_finite_is_told() -> None:
    x, y, _, _ = regression(5)
    x[3] = 1e308
    with pytest.raises(ValueError, match="is NaN or infinite in 1 of 5 rows, first in row 3"):
        calibrate(vote.Wrapper(3)(nn.Linear(2, 1, bias=False)), (x.clamp_max(3e38).float(), y.float()))


def test_several_outputs_are_refused_with_a_hint() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.fc(x), self.fc(-x)

    with pytest.raises(TypeError, match="gives a tuple; calibration needs one tensor"):
        calibrate(vote.Wrapper(2)(Two()), (torch.zeros(3, 2), torch.zeros(3, 1)))
