"""Conformal prediction by group, by class and under covariate shift: compared with plain loops, and its coverage."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from helpers.calibration_models import rng
from torch import Tensor, nn

from workbench import calibrate, compose, sculpt, vote
from workbench.calibration import SplitConformal
from workbench.calibration.conformal import conformal_quantile
from workbench.calibration.shift import weighted_quantile
from workbench.errors import WorkbenchWarning


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
    g = rng(seed)
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
    g = rng()
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
    scores = torch.randn(n, generator=rng())
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
    g = rng()
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
    g = rng()
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
        (torch.randn(22, 3, generator=rng()), labels),
        "conformal",
        groups="class",
    )
    with pytest.warns(WorkbenchWarning, match="all classes"):
        chosen = classes.predict_set(torch.randn(5, 3, generator=rng()), coverage=0.8)
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
