"""Split conformal prediction: simulated coverage, and intervals and sets compared with independent numpy computations."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from helpers.calibration_models import inputs, known, labelled, regression, rng, scores
from scipy import stats
from torch import Tensor, nn

from workbench import NotFittedError, compose, neo, sculpt, vote
from workbench.calibration import DensityRatio, SplitConformal, calibrate
from workbench.calibration.conformal import conformal_quantile
from workbench.distributions import Laplace
from workbench.errors import WorkbenchWarning

N, NEW, DRAWS = 29, 40, 250


def quantile(values: np.ndarray, coverage: str) -> Any:
    """The finite-sample quantile, by the definition: the least value that at least (n + 1) * coverage of n values stay up to."""
    ordered = np.sort(values, 0)
    k = next(k for k in range(1, len(values) + 1) if k >= (len(values) + 1) * Fraction(coverage))
    return ordered[k - 1]


def mean_coverage(draw: Callable[[int], tuple[Tensor, Tensor]], holds: Callable[[Tensor, Tensor], Tensor]) -> tuple:
    """Mean and standard error over many draws of held-out and new rows."""
    shares = [holds(*draw(seed)).double().mean().item() for seed in range(DRAWS)]
    return np.mean(shares), np.std(shares) / math.sqrt(DRAWS)


def within(mean: float, se: float, coverage: float, n: int = N) -> bool:
    return coverage - 3 * se <= mean <= coverage + 1 / (n + 1) + 3 * se


# ---- the quantile
@pytest.mark.parametrize("n", [9, 10, 19, 99, 100, 250])
@pytest.mark.parametrize("coverage", ["0.1", "0.5", "0.7", "0.9"])
def test_the_quantile_is_the_order_statistic(n: int, coverage: str) -> None:
    values = torch.randn(n, generator=rng(n))
    assert conformal_quantile(values, float(coverage)).item() == quantile(values.numpy(), coverage)


def test_too_few_rows_for_a_coverage_are_refused() -> None:
    assert conformal_quantile(torch.arange(9.0), 0.9) == 8
    with pytest.raises(ValueError, match=r"coverage 0.9 needs at least 9 held-out rows, there are 8.*at most 0.8888"):
        conformal_quantile(torch.arange(8.0), 0.9)
    assert conformal_quantile(torch.arange(8.0), 0.8888) == 7
    with pytest.raises(ValueError, match=r"coverage 0\.99 needs at least 99 held-out rows, there are 98"):
        conformal_quantile(torch.arange(98.0), 0.99)
    for coverage in (0.0, 1.0, 90):
        with pytest.raises(ValueError, match="strictly between 0 and 1"):
            conformal_quantile(torch.arange(8.0), coverage)


# ---- values
@pytest.mark.slow
@pytest.mark.parametrize("score", ["absolute", "normalized", "cqr"])
def test_intervals_cover_as_often_as_asked(score: str) -> None:
    calibrated = SplitConformal(known(), score)

    def draw(seed: int) -> tuple[Tensor, Tensor]:  # noise of another size and shape than the model thinks
        mu, sigma, noise = torch.rand(3, N + NEW, 1, generator=rng(seed), dtype=torch.float64)
        x, y = inputs(mu, 0.5 + sigma), mu + 0.3 - torch.log(noise) * sigma
        calibrated.fit((x[:N], y[:N]))
        return x[N:], y[N:]

    def holds(x: Tensor, y: Tensor) -> Tensor:
        lower, upper = calibrated.interval(x, 0.8)
        return (lower <= y) & (y <= upper)

    assert within(*mean_coverage(draw, holds), 0.8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", ["absolute", "normalized", "cqr"])
def test_targets_that_tie_with_the_quantile_lie_inside_in_spite_of_rounding(score: str, dtype: torch.dtype) -> None:
    y = torch.tensor([-3.0, 1.0, 7.0]).repeat(10)[:, None].to(dtype)
    for seed in range(40):
        mu, sigma = torch.rand(2, 1, generator=rng(seed))
        x = inputs(mu[:, None], 0.1 + sigma[:, None]).to(dtype).expand(30, 2)  # ten rows of each score
        lower, upper = SplitConformal(known().to(dtype), score).fit((x, y)).interval(x, 0.6)
        assert ((lower <= y) & (y <= upper)).sum() == 20


def test_absolute_and_normalized_intervals_are_those_of_numpy() -> None:
    x, y, mu, sigma = regression(60, outputs=2)
    new, _, new_mu, new_sigma = regression(7, outputs=2, seed=40)
    wrapped = known(outputs=2)
    q = quantile((y - mu).abs().numpy(), "0.9")
    lower, upper = calibrate(wrapped, (x, y), "conformal", score="absolute").interval(new)
    np.testing.assert_allclose(lower.detach().numpy(), new_mu.numpy() - q, rtol=1e-9)
    np.testing.assert_allclose(upper.detach().numpy(), new_mu.numpy() + q, rtol=1e-9)
    q = quantile(((y - mu).abs() / sigma).numpy(), "0.7")
    lower, upper = calibrate(wrapped, (x, y), "conformal").interval(new, 0.7)
    np.testing.assert_allclose((upper - lower).detach().numpy() / 2, (new_sigma.numpy() * q), rtol=1e-6)
    np.testing.assert_allclose((upper + lower).detach().numpy() / 2, new_mu.numpy(), atol=1e-9)


def test_joint_intervals_hold_all_outputs_at_once() -> None:
    x, y, mu, sigma = regression(60, outputs=3)
    joint = calibrate(known(outputs=3), (x, y), "conformal", joint=True)
    lower, upper = joint.interval(x, 0.9)
    q = quantile(((y - mu).abs() / sigma).numpy().max(1), "0.9")
    torch.testing.assert_close(upper - lower, 2 * q * sigma)
    inside = ((lower <= y) & (y <= upper)).all(1)
    assert int(inside.sum()) == 55  # ceil(61 * 0.9) of 60
    each = calibrate(known(outputs=3), (x, y), "conformal").interval(x, 0.9)
    assert int(((each[0] <= y) & (y <= each[1])).all(1).sum()) < 55


@pytest.mark.parametrize("options", [{}, {"score": "absolute"}, {"score": "cqr"}, {"joint": True}], ids=repr)
def test_one_number_per_row_has_the_intervals_of_a_column(options: dict[str, Any]) -> None:
    class Column(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[..., 0] if squeezed else super().forward(x)

    squeezed = False
    x, y = torch.randn(40, 2, generator=rng(0)), torch.randn(40, 1, generator=rng(1))
    wrapped = vote.Wrapper(3)(Column(2, 1)).eval()
    expected = calibrate(wrapped, (x, y), "conformal", **options).interval(x, 0.8)
    squeezed = True
    interval = calibrate(wrapped, (x, y[:, 0]), "conformal", **options).interval(x, 0.8)
    for end, column in zip(interval, expected, strict=True):
        torch.testing.assert_close(end, column[:, 0])


@pytest.mark.slow
def test_joint_coverage_by_simulation() -> None:
    calibrated = SplitConformal(known(outputs=3), "normalized", joint=True)

    def draw(seed: int) -> tuple[Tensor, Tensor]:
        x, y, _, _ = regression(N + NEW, outputs=3, seed=3 * seed)
        calibrated.fit((x[:N], y[:N]))
        return x[N:], y[N:]

    def holds(x: Tensor, y: Tensor) -> Tensor:
        lower, upper = calibrated.interval(x, 0.8)
        return ((lower <= y) & (y <= upper)).all(1)

    assert within(*mean_coverage(draw, holds), 0.8)


@pytest.mark.parametrize("by", ["aleatoric", "epistemic", "vacuitic"])
def test_any_named_risk_normalizes(by: str) -> None:
    x, y, _, _ = regression(60)
    wrapped = compose(vote.Wrapper(3), compose(neo.Wrapper()))(
        nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    )
    if by == "aleatoric":
        wrapped = known()
    else:
        wrapped.double().eval().fit(x)
    prediction, risk = wrapped(x, return_risk=True)
    width = getattr(risk, by, risk)
    width = nn.functional.softplus(width)[:, None] if by == "vacuitic" else width
    q = quantile(((y - prediction).abs() / width).detach().numpy(), "0.9")[0]
    lower, upper = calibrate(wrapped, (x, y), "conformal", by=by).interval(x)
    torch.testing.assert_close((lower, upper), (prediction - q * width, prediction + q * width))


@pytest.mark.parametrize(("distribution", "family"), [(None, stats.norm), (Laplace, stats.laplace(scale=0.5**0.5))])
@pytest.mark.parametrize("coverage", ["0.5", "0.9"])
def test_cqr_of_predicted_quantiles_is_that_of_numpy(distribution: Any, family: Any, coverage: str) -> None:
    x, y, mu, sigma = regression(40, outputs=2, factor=2.0)
    wrapped = known(outputs=2) if distribution is None else known(distribution, outputs=2)
    z = family.ppf((1 + float(coverage)) / 2)
    low, high = (mu - z * sigma).numpy(), (mu + z * sigma).numpy()
    q = quantile(np.maximum(low - y.numpy(), y.numpy() - high), coverage)
    lower, upper = calibrate(wrapped, (x, y), "conformal", score="cqr").interval(x, float(coverage))
    np.testing.assert_allclose(lower.detach().numpy(), low - q, rtol=0, atol=1e-6)
    np.testing.assert_allclose(upper.detach().numpy(), high + q, rtol=0, atol=1e-6)


def test_cqr_of_a_model_that_gives_quantiles() -> None:
    wrapped = compose()(nn.Linear(1, 2))
    calibrated = SplitConformal(wrapped, "cqr")

    def draw(seed: int) -> tuple[Tensor, Tensor]:
        x, y = torch.randn(2, N + NEW, 1, generator=rng(seed))
        calibrated.fit((x[:N], y[:N]))
        return x[N:], y[N:]

    def holds(x: Tensor, y: Tensor) -> Tensor:
        lower, upper = calibrated.interval(x, 0.8)
        assert lower.shape == y.shape
        return (lower <= y) & (y <= upper)

    assert within(*mean_coverage(draw, holds), 0.8)
    x, y = torch.randn(2, 50, 1, generator=rng(1))
    ends = wrapped(x).detach().sort(1).values.numpy()
    q = quantile(np.maximum(ends[:, :1] - y.numpy(), y.numpy() - ends[:, 1:]), "0.9")
    lower, upper = calibrated.fit((x, y)).interval(x)
    np.testing.assert_allclose(torch.cat([lower, upper], 1).detach().numpy(), ends + np.r_[-q, q], atol=1e-5)


def test_intervals_of_a_plain_baseline_and_of_a_calibrated_model() -> None:
    x, y, _, _ = regression(60, factor=3.0)
    baseline = calibrate(compose()(nn.Linear(2, 1).double()), (x, y), "conformal")
    assert baseline.score == "absolute"
    scaled = calibrate(known(), (x, y))
    raw, after = (calibrate(model, (x, y), "conformal").interval(x) for model in (known(), scaled))
    torch.testing.assert_close(raw, after)  # a factor on all risks cancels
    assert scaled(x, return_risk=True)[1].mean() > 2 * known()(x, return_risk=True)[1].mean()


# ---- classes
def probabilities(n: int, classes: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Log-probabilities of an overconfident model, and labels."""
    logits, labels = labelled(n, 1.5, classes, seed)
    return logits, labels


def wide(classes: int = 6) -> Any:
    """A wrapped model whose logits are its input."""
    model = nn.Linear(classes, classes, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.eye(classes))
    return compose(neo.Wrapper(output="logits"))(model).eval()


def slow_score(p: np.ndarray, label: int, u: float, penalty: float = 0.0, k_reg: int = 0) -> float:
    above = [k for k in range(len(p)) if p[k] > p[label]]
    return sum(p[above]) + u * p[label] + penalty * max(0, len(above) + 1 - k_reg)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"score": "lac"},
        {"score": "aps"},
        {"score": "aps", "randomized": False},
        {"score": "raps", "penalty": 0.1, "k_reg": 1},
        {"score": "raps", "penalty": 0.1, "k_reg": 1, "randomized": False},
    ],
    ids=str,
)
def test_sets_cover_as_often_as_asked(options: dict[str, Any]) -> None:
    calibrated = SplitConformal(wide(), **options)
    generator = rng(5)

    def draw(seed: int) -> tuple[Tensor, Tensor]:
        x, labels = probabilities(N + NEW, seed=2 * seed)
        calibrated.fit((x[:N], labels[:N]), seed=seed)
        return x[N:], labels[N:]

    def holds(x: Tensor, labels: Tensor) -> Tensor:
        return calibrated.predict_set(x, 0.8, generator=generator).gather(1, labels[:, None])

    assert within(*mean_coverage(draw, holds), 0.8)


def test_lac_is_that_of_numpy() -> None:
    x, labels = probabilities(50)
    p = x.softmax(-1).numpy()
    q = quantile(1 - p[np.arange(50), labels.numpy()], "0.8")
    sets = calibrate(wide(), (x, labels), "conformal").predict_set(x, 0.8)
    np.testing.assert_array_equal(sets.numpy(), 1 - p <= q + 1e-12)


@pytest.mark.parametrize(("score", "penalty", "k_reg"), [("aps", 0.0, 0), ("raps", 0.07, 2)])
@pytest.mark.parametrize("randomized", [True, False])
def test_adaptive_sets_are_those_of_the_definition(score: str, penalty: float, k_reg: int, randomized: bool) -> None:
    x, labels = probabilities(50)
    p = x.softmax(-1).numpy()
    options = {"penalty": penalty, "k_reg": k_reg} if score == "raps" else {}
    calibrated = calibrate(wide(), (x, labels), "conformal", score=score, randomized=randomized, seed=3, **options)

    def draws(seed: int) -> np.ndarray:
        u = torch.rand(50, 1, generator=rng(seed), dtype=torch.float64)[:, 0].numpy()
        return u if randomized else np.ones(50)

    held = [slow_score(p[i], int(labels[i]), draws(3)[i], penalty, k_reg) for i in range(50)]
    q = quantile(np.array(held), "0.8")
    wanted = [[slow_score(p[i], k, draws(8)[i], penalty, k_reg) <= q + 1e-12 for k in range(6)] for i in range(50)]
    sets = calibrated.predict_set(x, 0.8, generator=rng(8))
    np.testing.assert_array_equal(sets.numpy(), wanted)
    full = calibrated.predict_set(x, 0.8, generator=rng(8), allow_empty=False)
    top = np.eye(6, dtype=bool)[p.argmax(1)]
    np.testing.assert_array_equal(full.numpy(), wanted | top)


def test_a_penalty_makes_sets_smaller() -> None:
    x, labels = probabilities(300)
    sizes = [
        calibrate(wide(), (x, labels), "conformal", **options).predict_set(x, generator=rng(1)).sum(1)
        for options in ({"score": "aps"}, {"score": "raps", "penalty": 0.2, "k_reg": 1})
    ]
    assert sizes[1].max() < sizes[0].max()


def test_held_out_draws_are_reproducible_and_private() -> None:
    x, labels = probabilities(50)
    wrapped = wide()
    random = torch.get_rng_state()
    first, second, other = (calibrate(wrapped, (x, labels), "conformal", score="aps", seed=s).scores for s in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), random)


def test_tiny_probabilities_are_told_apart() -> None:
    x = torch.tensor([[0.0, -40.0, -50.0]] * 30)
    labels = torch.tensor([0] * 15 + [1] * 15)
    sets = calibrate(scores(output="logits").float(), (x, labels), "conformal", score="lac").predict_set(x[:1], 0.9)
    assert sets.tolist() == [[True, True, False]]


def test_sets_of_averaged_probabilities() -> None:
    x, labels = torch.randn(40, 4, generator=rng(1)), torch.randint(3, (40,), generator=rng(2))
    wrapped = vote.Wrapper(3, output="probs")(nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1))).eval()
    p = wrapped(x).detach().numpy()
    q = quantile(1 - p[np.arange(40), labels.numpy()], "0.9")
    sets = calibrate(wrapped, (x, labels), "conformal").predict_set(x)
    np.testing.assert_array_equal(sets.numpy(), 1 - p <= q + 1e-6)


# ---- bad input
def by_sign(x: Tensor) -> Tensor:
    return x[:, 0] > 0


@pytest.mark.parametrize("name", ["plain", "groups", "weight"])
def test_no_rows_have_no_intervals_and_no_sets(name: str) -> None:
    def calibrated(model: Any, x: Tensor, y: Tensor) -> SplitConformal:
        options: Any = {"plain": {}, "groups": {"groups": by_sign}, "weight": {"weight": DensityRatio(x, x + 0.1)}}
        return SplitConformal(model, **options[name]).fit((x, y))

    x, y, *_ = regression(60)
    intervals = calibrated(vote.Wrapper(2)(nn.Linear(2, 1).double()), x, y)
    assert [end.shape for end in intervals.interval(x[:0], 0.5)] == [(0, 1), (0, 1)]
    x, y = labelled(60, 1.0)
    assert calibrated(scores(output="logits"), x, y).predict_set(x[:0], 0.5).shape == (0, 3)


def test_what_cannot_be_answered_is_refused() -> None:
    x, y, _, _ = regression(30)
    logits, labels = probabilities(30)
    values, classes = calibrate(known(), (x, y), "conformal"), calibrate(wide(), (logits, labels), "conformal")
    with pytest.raises(ValueError, match=r"score='normalized' does not support this; call interval\(x\)"):
        values.predict_set(x)
    with pytest.raises(ValueError, match=r"score='lac' does not support this; call predict_set\(x\)"):
        classes.interval(logits)
    with pytest.raises(ValueError, match="needs at least 99 held-out rows, there are 30"):
        values.interval(x, 0.99)
    with pytest.raises(NotFittedError, match="not fitted yet"):
        SplitConformal(known()).interval(x)


@pytest.mark.parametrize("method", ["conformal", "variance", "isotonic", "temperature", None])
def test_soft_labels_do_not_make_values_of_class_scores(method: Any) -> None:
    x, labels = labelled(60, 1.0)
    softmax = nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1)).double()
    for model in (scores(output="logits"), vote.Wrapper(2, output="probs")(softmax)):
        with pytest.raises(
            ValueError, match=r"y: the model gives scores of classes, and the targets are floats \[60, 3\]"
        ):
            calibrate(model, (x, nn.functional.one_hot(labels, 3).double()), method)


@pytest.mark.parametrize("score", ["lac", "aps", "temperature"])
@pytest.mark.parametrize("options", [{}, {"allow_empty": False}])
def test_rows_whose_scores_are_nan_get_all_classes(score: str, options: dict[str, Any]) -> None:
    x, labels = labelled(60, 1.0)
    model, strange = scores(output="logits"), x[:4].clone()
    strange[2] = math.nan
    if score == "temperature":
        calibrated, options = calibrate(model, (x, labels)), {}
    else:
        calibrated = SplitConformal(model, score, randomized=False).fit((x, labels))
    with pytest.warns(WorkbenchWarning, match="1 of 4 rows get all classes: the scores of the model are NaN there"):
        sets = calibrated.predict_set(strange, 0.5, **options)
    assert sets[2].all()
    assert torch.equal(sets[[0, 1, 3]], calibrated.predict_set(x[[0, 1, 3]], 0.5, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "platt"}, "score must be one of absolute, normalized, cqr, lac, aps, raps; found 'platt'"),
        ({"by": "risk"}, "by must be one of aleatoric, epistemic, vacuitic, total; found 'risk'"),
        ({"penalty": -1.0}, "penalty must be a number of at least 0; found -1.0"),
        ({"score": "aps"}, "score='aps' is for classes, but the targets are values"),
        (
            {"score": "normalized", "by": "epistemic"},
            "by='epistemic': the model measures no such risk; it gives aleatoric, total",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    x, y, _, _ = regression(30)
    with pytest.raises(ValueError, match=message):
        calibrate(known(), (x, y), "conformal", **options)


def test_risks_of_zero_and_parts_of_rows_are_refused() -> None:
    x, y, _, _ = regression(30)
    with pytest.raises(ValueError, match=r"the total risk is 0 in 30 of 30 held-out values.*score='absolute'"):
        calibrate(vote.Wrapper(1)(nn.Linear(2, 1).double()), (x, y), "conformal")
    tokens, labels = torch.randn(5, 4, 3, generator=rng()), torch.zeros(5, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="rows are exchangeable, but not the pixels, tokens or labels of a row"):
        calibrate(vote.Wrapper(2, output="values")(nn.Linear(3, 3)), (tokens, labels), "conformal")


@pytest.mark.parametrize("score", ["absolute", "normalized", "cqr"])
@pytest.mark.parametrize(("offset", "noise"), [(1e6, 0.01), (1.7e9, 30.0)])
def test_steps_of_float32_wider_than_the_noise_lose_no_coverage(score: str, offset: float, noise: float) -> None:
    wrapped = compose(vote.Wrapper(2), sculpt.Wrapper())(nn.Linear(1, 1)).eval()
    wrapped.scale(y_mean=torch.tensor(offset), y_scale=torch.tensor(noise))
    x = torch.zeros(400, 1)
    target = offset + noise * torch.randn(400, 1, dtype=torch.float64)
    calibrated = SplitConformal(wrapped, score=score).fit((x[:200], target[:200]))
    lower, upper = calibrated.interval(x[200:])
    assert lower.dtype == torch.float32
    assert ((lower <= target[200:]) & (target[200:] <= upper)).double().mean() > 0.85
