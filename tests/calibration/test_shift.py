"""Conformal prediction by group, by class and under covariate shift: compared with plain loops, and its coverage."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import PolynomialFeatures
from torch import Tensor, nn

from workbench import calibrate, compose, neo, sample, sculpt, vote
from workbench.calibration import DensityRatio, SplitConformal
from workbench.calibration.conformal import conformal_quantile
from workbench.calibration.shift import _beta_binomial_tail, warn_unlike, weighted_quantile
from workbench.errors import WorkbenchWarning


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def side(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long()


def tilt(x: Tensor) -> Tensor:
    return (2 * x[:, :1]).exp()


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * self.w


def noisy_rows(n: int, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Noise that grows with x."""
    g = generator(seed)
    x = torch.randn(n, 1, generator=g) + shift
    return x, x + torch.randn(n, 1, generator=g) * (x / 2).exp()


def plain_weighted(scores: list[float], weights: list[float], new: float, coverage: float) -> float:
    """Lemma 3 of Tibshirani et al. 2019, one point after the other."""
    whole, total = sum(weights) + new, 0.0
    for score, weight in sorted(zip(scores, weights, strict=True)):
        total += weight / whole
        if total >= coverage - 1e-12:
            return score
    return math.inf


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9])
def test_weighted_quantiles_are_those_of_a_plain_loop(coverage: float) -> None:
    g = generator()
    scores, weights, new = (
        torch.randn(40, 3, generator=g),
        torch.rand(40, generator=g) ** 3,
        torch.rand(6, generator=g) * 4,
    )
    quantiles = weighted_quantile(scores, weights, new, coverage)
    expected = [
        [plain_weighted(scores[:, k].tolist(), weights.tolist(), w, coverage) for k in range(3)] for w in new.tolist()
    ]
    torch.testing.assert_close(quantiles, torch.tensor(expected))


@pytest.mark.parametrize("n", [9, 19, 39, 99, 189])
def test_equal_weights_are_split_conformal(n: int) -> None:
    scores = torch.randn(n, generator=generator())
    for coverage in (0.5, 0.7, 0.9):
        quantile = weighted_quantile(scores, torch.full((n,), 0.3), torch.tensor([0.3]), coverage)
        assert quantile[0] == conformal_quantile(scores, coverage)


def test_each_group_has_a_quantile_of_its_own() -> None:
    x, y = noisy_rows(400, 0)
    calibrated = calibrate(compose()(Line()), (x, y), "conformal", groups=side)
    new = torch.linspace(-2, 2, 12)[:, None]
    lower, upper = calibrated.interval(new, coverage=0.8)
    scores = (y - x).abs()[:, 0]
    for row in range(12):
        quantile = conformal_quantile(scores[side(x) == side(new)[row]], 0.8)
        torch.testing.assert_close(upper[row, 0] - new[row, 0], quantile)
        torch.testing.assert_close(new[row, 0] - lower[row, 0], quantile)
    test_x, test_y = noisy_rows(20_000, 1)
    lower, upper = calibrated.interval(test_x, coverage=0.8)
    inside = ((lower <= test_y) & (test_y <= upper))[:, 0]
    for group in (0, 1):
        assert inside[side(test_x) == group].double().mean() == pytest.approx(0.8, abs=0.06)
    whole = SplitConformal(compose()(Line())).fit((x, y)).interval(test_x, coverage=0.8)
    covered = ((whole[0] <= test_y) & (test_y <= whole[1]))[:, 0]
    assert covered[side(test_x) == 0].double().mean() > 0.9  # what groups are for


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


def test_each_class_has_a_quantile_of_its_own() -> None:
    g = generator()
    y = torch.randint(3, (600,), generator=g)
    x = torch.randn(600, 3, generator=g) + 2 * nn.functional.one_hot(y, 3) * torch.tensor([2.0, 1.0, 0.3])
    model = compose(output="logits")(Scores())
    calibrated = calibrate(model, (x[:300], y[:300]), "conformal", score="lac", groups="class")
    chosen = calibrated.predict_set(x[300:], coverage=0.9)
    p, new = x[:300].softmax(1), x[300:].softmax(1)
    for label in range(3):
        quantile = conformal_quantile(1 - p[y[:300] == label, label], 0.9)
        assert torch.equal(chosen[:, label], 1 - new[:, label] <= quantile + 1e-6)
        rows = y[300:] == label
        assert chosen[rows, label].double().mean() > 0.8
    usual = calibrate(model, (x[:300], y[:300]), "conformal", score="lac").predict_set(x[300:], coverage=0.9)
    assert usual[y[300:] == 2, 2].double().mean() < 0.85


def test_a_shift_of_the_inputs_is_made_up_for() -> None:
    """The density of the new place by that of the old one is exp(x - 1 / 2) for means of 0 and 1."""
    test_x, test_y = noisy_rows(4_000, 7, shift=1.0)
    covered, usual = [], []
    for seed in range(8):
        held_out = noisy_rows(2_000, 100 + seed)
        model = compose()(Line())
        for weight, into in ((lambda x: x.exp(), covered), (None, usual)):
            lower, upper = calibrate(model, held_out, "conformal", weight=weight).interval(test_x, coverage=0.8)
            into.append(((lower <= test_y) & (test_y <= upper)).double().mean())
    assert torch.stack(covered).mean() > 0.78
    assert torch.stack(usual).mean() < 0.7


def test_weights_are_those_of_the_rows() -> None:
    x, y = noisy_rows(50, 0)
    calibrated: Any = calibrate(compose()(Line()), (x, y), "conformal", weight=tilt)
    weights = tilt(x)[:, 0].double()
    assert calibrated.effective_rows == pytest.approx(float(weights.sum() ** 2 / weights.square().sum()))
    new = torch.tensor([[-1.0], [0.5], [1.0]])
    _, upper = calibrated.interval(new, coverage=0.6)
    expected = [
        plain_weighted((y - x).abs()[:, 0].tolist(), weights.tolist(), float(tilt(row[None])), 0.6) for row in new
    ]
    torch.testing.assert_close(upper[:, 0] - new[:, 0], torch.tensor(expected))


def test_by_class_and_by_weight_at_once() -> None:
    g = generator()
    y = torch.randint(2, (80,), generator=g)
    x = torch.randn(80, 2, generator=g) + nn.functional.one_hot(y, 2)
    calibrated = calibrate(
        compose(output="logits")(Scores()), (x, y), "conformal", score="lac", groups="class", weight=tilt
    )
    new = x[:7] + 0.1
    chosen = calibrated.predict_set(new, coverage=0.7)
    p, weights = -x.softmax(1), tilt(x)[:, 0]
    for row, label in ((row, label) for row in range(7) for label in range(2)):
        of_class = y == label
        quantile = plain_weighted(
            p[of_class, label].tolist(), weights[of_class].tolist(), float(tilt(new[row : row + 1])), 0.7
        )
        assert bool(chosen[row, label]) == (float(-new.softmax(1)[row, label]) <= quantile)


def test_rows_that_nothing_is_known_of_have_no_ends_and_that_is_said() -> None:
    x, y = noisy_rows(30, 0)
    wrapped = sculpt.Wrapper()(Line())
    calibrated = calibrate(wrapped, (x, y), "conformal", groups=lambda x: x[:, 0].round().clamp(-1, 9))
    with pytest.warns(WorkbenchWarning, match=r"1 of 2 rows get intervals without ends.*too few of their group"):
        lower, upper = calibrated.interval(torch.tensor([[0.0], [8.0]]), coverage=0.6)
    assert lower[1] == -torch.inf
    assert upper[1] == torch.inf
    assert bool(torch.isfinite(lower[0]) & torch.isfinite(upper[0]))
    labels = torch.tensor([0] * 20 + [1] * 2)
    classes = calibrate(
        compose(output="logits")(Scores()),
        (torch.randn(22, 3, generator=generator()), labels),
        "conformal",
        groups="class",
    )
    with pytest.warns(WorkbenchWarning, match="all classes"):
        chosen = classes.predict_set(torch.randn(5, 3, generator=generator()), coverage=0.8)
    assert bool(chosen[:, 1:].all())  # of two rows and of none


def test_a_group_without_any_weight_has_no_ends() -> None:
    """The only held-out rows of its kind do not exist in the other place, and new rows of weight 0 do not either."""
    x = torch.linspace(-1, 1, 100)[:, None]
    calibrated = calibrate(
        vote.Wrapper(2)(nn.Linear(1, 1)).eval(),
        (x, x.sin()),
        "conformal",
        score="absolute",
        groups=lambda x: (x[:, 0] > 0).long(),
        weight=lambda x: (x[:, 0] <= 0).double(),
    )
    with pytest.warns(WorkbenchWarning, match="1 of 2 rows get intervals without ends"):
        lower, upper = calibrated.interval(torch.tensor([[0.5], [-0.5]]), coverage=0.8)
    assert (upper - lower).isinf()[:, 0].tolist() == [True, False]


def test_without_a_width_an_infinite_quantile_still_has_no_ends() -> None:
    class Still(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).where(x < 5, 0 * self.fc(x))

    from workbench import vote

    torch.manual_seed(0)
    x, y = noisy_rows(30, 0)
    calibrated = calibrate(vote.Wrapper(3)(Still()), (x, y), "conformal", groups=lambda x: (x[:, 0] > 4).long())
    with pytest.warns(WorkbenchWarning, match="too few of their group"):
        lower, upper = calibrated.interval(torch.tensor([[6.0]]), coverage=0.6)
    assert (lower.item(), upper.item()) == (-math.inf, math.inf)


def test_it_is_saved_copied_and_pickled() -> None:
    rows, new = noisy_rows(60, 0), torch.linspace(-1, 1, 5)[:, None]
    make = lambda **how: SplitConformal(compose()(Line()), **how)  # noqa: E731
    calibrated = make(groups=side, weight=tilt).fit(rows)
    expected = calibrated.interval(new, coverage=0.6)
    other = make(groups=side, weight=tilt)
    other.load_state_dict(calibrated.state_dict())
    for again in (other, copy.deepcopy(calibrated), pickle.loads(pickle.dumps(calibrated))):
        assert all(map(torch.equal, again.interval(new, coverage=0.6), expected))
    with pytest.raises(ValueError, match=r"with the same options before loading"):
        make(weight=tilt, groups=None).load_state_dict(calibrated.state_dict())
    plain = make().fit(rows)
    make().load_state_dict(plain.state_dict())
    assert not {"score_groups", "score_weights"} & set(plain.state_dict())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"groups": torch.zeros(20)}, TypeError, "groups must be a function of a batch of inputs or"),
        ({"weight": 3.0}, TypeError, "weight must be a function"),
        ({"groups": lambda x: x}, ValueError, "one number for each of 20 rows; found shape"),
        ({"groups": lambda x: x[:, 0] + 0.5}, ValueError, "whole numbers"),
        ({"groups": lambda x: ["old"] * len(x)}, TypeError, "groups must be .* numbers, found list .*'old'"),
        ({"groups": "class"}, ValueError, "for classes, but the targets are values"),
        ({"groups": "class", "score": "absolute"}, ValueError, "for classes, and score='absolute' for values"),
        ({"weight": lambda x: -x[:, 0].abs() - 1}, ValueError, "not be negative"),
        ({"weight": lambda x: x[:, 0] * torch.nan}, ValueError, "NaN"),
        ({"weight": lambda x: 0 * x[:, 0]}, ValueError, "0 for every held-out row"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    x = torch.arange(40.0).reshape(20, 2)
    with pytest.raises(error, match=words):
        calibrate(compose()(nn.Linear(2, 1)), (x, x[:, :1]), "conformal", **options)


def test_the_density_ratio_is_that_of_logistic_regression() -> None:
    g = generator()
    held_out, new = torch.randn(300, 3, generator=g).double(), torch.randn(120, 3, generator=g).double() * 0.8 + 0.7
    held_out[:, 2] = new[:, 2] = 4.0  # says nothing
    ratio = DensityRatio(held_out, new, ridge=2.0)
    x = torch.cat([held_out, new])
    standard = ((x - x.mean(0)) / x.std(0, correction=0).clamp_min(1e-9)).numpy()
    reference = LogisticRegression(C=0.5, tol=1e-10, max_iter=10_000).fit(standard, np.arange(420) >= 300)
    p = reference.predict_proba(standard)[:, 1]
    torch.testing.assert_close(ratio(x), torch.tensor(p / (1 - p) * 300 / 120), rtol=1e-4, atol=1e-5)
    flat = DensityRatio(held_out, new, features=lambda x: x[:, :1])
    torch.testing.assert_close(flat(x), flat(torch.cat([x[:, :1], 7 * x[:, 1:]], 1)))
    for arguments, words in (
        ((held_out[:1], new), "held_out: a density needs at least 2 rows"),
        ((held_out, new[:, :2]), "2 features a row"),
        ((held_out, new * torch.nan), "NaN"),
        ((held_out, new, None, 0.0), "ridge must be above 0"),
    ):
        with pytest.raises(ValueError, match=words):
            DensityRatio(*arguments)


def two_normals(n: int) -> tuple[Tensor, Tensor, Any]:
    """Rows of two correlated normal distributions of the same mean, and the log of their ratio in closed form."""
    g = generator(4)
    first, second = torch.eye(2).double(), torch.tensor([[0.7, 0.2], [0.2, 0.4]]).double()
    rows = [torch.randn(n, 2, generator=g).double() @ torch.linalg.cholesky(cov).mT for cov in (first, second)]
    usual, other = (torch.distributions.MultivariateNormal(torch.zeros(2).double(), cov) for cov in (first, second))
    return rows[0], rows[1], lambda x: other.log_prob(x) - usual.log_prob(x)


def test_a_shift_of_spread_alone_has_the_ratio_of_its_closed_form() -> None:
    held_out, new, closed = two_normals(4000)
    quadratic = DensityRatio(held_out, new[:2000], model="quadratic")
    x = torch.cat([held_out[:200], new[2000:2200]])
    torch.testing.assert_close(quadratic(x).log(), closed(x), rtol=0, atol=0.6)  # far out, where few rows lie
    assert float((quadratic(x).log() - closed(x)).square().mean().sqrt()) < 0.08
    # which a model of means does not see
    assert float(DensityRatio(held_out, new)(x).log().abs().max()) < 0.2
    assert float(closed(x).abs().max()) > 2


@pytest.mark.parametrize("model", ["squares", "quadratic"])
def test_the_ratio_is_logistic_regression_on_squares_and_products(model: str) -> None:
    held_out, new, _ = two_normals(300)
    x = torch.cat([held_out, new]).numpy()
    columns = PolynomialFeatures(2, include_bias=False).fit_transform((x - x.mean(0)) / x.std(0))
    columns = columns if model == "quadratic" else columns[:, [0, 1, 2, 4]]  # without the product
    reference = LogisticRegression(C=0.5, tol=1e-10, max_iter=10_000)
    reference.fit((columns - columns.mean(0)) / columns.std(0), np.arange(600) >= 300)
    p = reference.predict_proba((columns - columns.mean(0)) / columns.std(0))[:, 1]
    found = DensityRatio(held_out, new, ridge=2.0, model=model)(torch.as_tensor(x))
    torch.testing.assert_close(found, torch.tensor(p / (1 - p)), rtol=1e-4, atol=1e-5)


def test_a_classifier_is_asked_of_rows_that_it_was_not_trained_on() -> None:
    """A nearest neighbour knows its training rows by heart: of two samples of one place it would tell them apart without an error."""
    g = generator(1)
    held_out, new = torch.randn(200, 2, generator=g), torch.randn(200, 2, generator=g)
    ratio = DensityRatio(held_out, new, model=KNeighborsClassifier(1))
    known, told = ratio(held_out), ratio(held_out + 1e-6)
    assert 60 < int((known > 1).sum()) < 140  # half of them, by chance
    assert int((told > 1).sum()) < 20  # four of five copies have seen these
    parts = torch.cat([ratio(part) for part in held_out.split(7)])
    assert torch.equal(parts, known)
    assert torch.equal(ratio(held_out.double()), known)
    # rows that are there twice are held out together
    twice = DensityRatio(held_out.repeat(2, 1), new.repeat(2, 1), model=KNeighborsClassifier(1))
    assert 60 < int((twice(held_out) > 1).sum()) < 140


def test_a_classifier_sees_a_shift_of_spread_and_stays_as_it_was() -> None:
    held_out, new, closed = two_normals(1500)
    forest = RandomForestClassifier(30, min_samples_leaf=30, random_state=0)
    found = DensityRatio(held_out, new, model=forest)(held_out).log()
    assert not hasattr(forest, "classes_")
    near = closed(held_out) > -2  # of a leaf of thirty rows nothing smaller is told
    assert float(torch.corrcoef(torch.stack([found, closed(held_out)])[:, near])[0, 1]) > 0.8


@pytest.mark.parametrize(("model", "held"), [("linear", False), ("squares", True), ("quadratic", True)])
def test_coverage_holds_under_a_shift_of_spread_where_the_ratio_sees_it(model: str, held: bool) -> None:
    g = generator(2)

    def rows(n: int, spread: float) -> tuple[Tensor, Tensor]:
        x = spread * torch.randn(n, 1, generator=g)
        return x, x + (0.1 + x.abs()) * torch.randn(n, 1, generator=g)

    held_out, (x, y) = rows(8000, 1.0), rows(8000, 1.5)
    weight = DensityRatio(held_out[0], x, model=model)
    calibrated = calibrate(compose()(Line()), held_out, "conformal", score="absolute", weight=weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkbenchWarning)  # a few rows get intervals without ends
        lower, upper = calibrated.interval(x, coverage=0.9)
    coverage = float(((y >= lower) & (y <= upper)).double().mean())
    assert (abs(coverage - 0.9) < 0.02) == held, coverage


def test_what_is_no_model_of_a_ratio_is_refused() -> None:
    x = torch.randn(50, 2, generator=generator())
    for model in ("cubic", object()):
        with pytest.raises(TypeError, match="model must be 'linear' or 'squares' or 'quadratic', or a classifier"):
            DensityRatio(x, x + 1, model=model)
    wide = torch.randn(50, 90, generator=generator())
    with pytest.raises(ValueError, match="90 features make 4185 columns"):
        DensityRatio(wide, wide, model="quadratic")
    with pytest.raises(ValueError, match="new: a classifier as model= needs 5 different rows; found 1"):
        DensityRatio(x, torch.ones(50, 2), model=KNeighborsClassifier(1))


def test_rows_stranger_than_those_held_out_are_told_of() -> None:
    g = generator()
    x, y = torch.randn(600, 2, generator=g), torch.randn(600, 1, generator=g)
    wrapped = neo.Wrapper()(nn.Linear(2, 1))
    wrapped.fit(x[:300])
    calibrated = calibrate(wrapped, (x[300:500], y[300:500]), "conformal", score="absolute")
    usual = calibrated.interval(x[500:], coverage=0.8)
    plain = calibrate(compose()(wrapped.unwrap()), (x[300:500], y[300:500]), "conformal", score="absolute")
    assert all(map(torch.equal, usual, plain.interval(x[500:], coverage=0.8)))
    with pytest.warns(
        WorkbenchWarning, match="100 of 100 rows are stranger by vacuitic risk than 99.5 % of the 200 held-out rows"
    ):
        calibrated.interval(x[500:] + 9, coverage=0.8)
    few = x[500:].clone()
    few[:16] += 9
    with pytest.warns(WorkbenchWarning, match="guaranteed only for rows like those"):
        calibrated.interval(few, coverage=0.8)
    weighted = calibrate(wrapped, (x[300:500], y[300:500]), "conformal", weight=lambda x: torch.ones(len(x)))
    weighted.interval(x[500:] + 9, coverage=0.8)
    # a file from before
    state = calibrated.state_dict()
    del state["strangeness"]
    old = SplitConformal(wrapped, score="absolute")
    old.load_state_dict(state)
    assert all(
        map(torch.equal, old.interval(x[500:] + 9, coverage=0.8), calibrated_without_words(calibrated, x[500:] + 9))
    )


def calibrated_without_words(calibrated: Any, x: Tensor) -> Any:
    with pytest.warns(WorkbenchWarning):
        return calibrated.interval(x, coverage=0.8)


def told(held_out: Tensor, new: Tensor) -> str:
    """What is said of rows, "" for nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = warn_unlike(held_out.sort().values, new, "stranger")
    assert said == bool(caught)
    return str(caught[0].message) if caught else ""


@pytest.mark.parametrize(("n", "m"), [(150, 100), (29, 40), (1000, 3)])
def test_chance_alone_is_not_told_of(n: int, m: int) -> None:
    draws = [torch.randn(n + m, generator=generator(seed)) for seed in range(300)]
    assert not any(told(rows[:n], rows[n:]) for rows in draws)


def test_what_chance_does_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for count, m, above, below in [(0, 5, 2, 30), (3, 5, 2, 30), (9, 40, 1, 29), (25, 100, 11, 990)]:
        wanted = stats.betabinom.sf(count - 1, m, above, below)
        assert _beta_binomial_tail(count, m, above, below) == pytest.approx(wanted, rel=1e-9)
    held_out, new = torch.randn(400, generator=generator()), torch.randn(300, generator=generator(1)) + 0.6
    distance = stats.ks_2samp(new, held_out, alternative="less").statistic
    chance = math.sqrt(-math.log(1e-4) * 700 / (2 * 400 * 300))
    assert f"KS distance {distance:.2f}, by chance {chance:.2f} at most" in told(
        held_out, new.clamp_max(held_out.max())
    )
    assert told(held_out, new - 1.2) == ""  # less strange than those held out


def test_sets_of_less_clear_rows_are_told_of_without_neo() -> None:
    g = generator()
    x, y = 3 * torch.randn(900, 4, generator=g), torch.randint(4, (900,), generator=g)
    model = compose(output="logits")(nn.Identity())
    calibrated = calibrate(model, (x[:400], y[:400]), "conformal", score="aps")
    calibrated.predict_set(x[400:])
    with pytest.warns(WorkbenchWarning, match="500 rows are less clear to the model than"):
        calibrated.predict_set(x[400:] / 3)
    # groups have a guarantee of their own, weights another one
    for options in ({"groups": "class"}, {"groups": lambda x: x[:, 0] > 0}, {"weight": lambda x: torch.ones(len(x))}):
        calibrate(model, (x[:400], y[:400]), "conformal", score="aps", **options).predict_set(x[400:] / 3)
    state = calibrated.state_dict()
    del state["doubt"]  # a file from before
    old = SplitConformal(model, score="aps")
    old.load_state_dict(state)
    old.predict_set(x[400:] / 3)


def test_intervals_of_rows_that_voters_know_less_are_told_of_without_neo() -> None:
    g = generator()
    x, y = torch.randn(900, 3, generator=g), torch.randn(900, 2, generator=g)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        voters = vote.Wrapper(4)(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)))
        noisy = sample.Wrapper(16)(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
    with torch.no_grad():
        for parameter in voters.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=g)
    calibrated = calibrate(voters, (x[:400], y[:400]), "conformal")
    assert calibrated.score == "normalized"
    calibrated.interval(x[400:])
    with pytest.warns(WorkbenchWarning, match="500 rows are of higher epistemic risk than"):
        calibrated.interval(4 * x[400:])
    _, risk = voters(x[:400], return_risk=True)
    risks = risk if isinstance(risk, Tensor) else risk.epistemic
    assert torch.allclose(calibrated.doubt.exp(), risks.prod(1).sqrt().sort().values, rtol=1e-4)
    # a pass that draws says nothing, since its noise may be common to the rows of a batch; nor does one without the risk
    for model, options in ((noisy, {}), (voters, {"score": "absolute"})):
        assert calibrate(model, (x[:400], y[:400]), "conformal", **options).doubt.numel() == 0
