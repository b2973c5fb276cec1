"""Temperature and variance scaling: compared with closed forms, scipy and independent searches."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.calibration_models import classified, known, labelled, regression, rng, scores
from scipy import optimize, stats
from torch import Tensor, nn

from workbench import compose, neo, sculpt, vote
from workbench.calibration import TemperatureScaling, VarianceScaling, calibrate
from workbench.calibration.scaling import fit_temperature, fit_variance_scale
from workbench.distributions import Cauchy, Laplace, LogNormal, Normal, StudentT
from workbench.metrics import categorical_nll


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


@pytest.mark.parametrize(("calibration", "name"), [(TemperatureScaling, "temperature"), (VarianceScaling, "scale")])
def test_what_was_fitted_is_shown(calibration: Any, name: str) -> None:
    classes = calibration is TemperatureScaling
    wrapped = vote.Wrapper(2, output="logits" if classes else "values")(nn.Linear(2, 3 if classes else 1))
    x = torch.randn(60, 2, generator=rng(0))
    fitted = calibration(wrapped).fit((x, torch.arange(60) % 3 if classes else x[:, :1]))
    assert f"\n  {name}={getattr(fitted, name).item():.4g}\n" in repr(fitted)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("output", ["logits", "probs"])
def test_entropies_of_a_model_in_half_precision_are_computed_in_float32(output: str, dtype: torch.dtype) -> None:
    x, labels = classified()
    model = nn.Linear(4, 3) if output == "logits" else nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1))
    wrapped = vote.Wrapper(4, output=output)(model).to(dtype).eval()
    calibrated = calibrate(wrapped, (x, labels), "temperature")
    y, risk = calibrated(x.to(dtype), return_risk=True)
    assert y.dtype == dtype
    assert {risk[name].dtype for name in risk.names()} == {torch.float32}
    scores = wrapped(x.to(dtype)).double()
    logits = (scores if output == "logits" else scores.log()) / calibrated.temperature.double()
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(risk.total.double(), entropies, rtol=1e-5, atol=1e-6)


def test_without_voters_all_of_the_entropy_is_aleatoric() -> None:
    logits, labels = labelled(300, 3.0)
    calibrated = calibrate(scores(output="logits"), (logits, labels))
    _, risk = calibrated(logits, return_risk=True)
    assert risk.names() == ("aleatoric", "total")
    torch.testing.assert_close(risk.aleatoric, risk.total)


def test_logits_of_a_model_wrapped_for_values_are_scaled_and_their_risks_too() -> None:
    x, labels = classified()
    wrapped = vote.Wrapper(3, output="values")(nn.Linear(4, 3)).eval()
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
    scale = fit_variance_scale(mu, sigma, y, LogNormal).item()
    losses = {s: LogNormal.loss_function(y, mu, s * sigma).item() for s in (1.0, 0.98 * scale, scale, 1.02 * scale)}
    assert min(losses, key=lambda s: losses[s]) == scale
    assert scale == pytest.approx(2, rel=0.2)


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
    assert all(p.grad is not None and p.grad.any() for p in wrapped.risk_parameters())
