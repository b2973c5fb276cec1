"""Selective prediction: curves and thresholds against brute force, bounds against scipy, and the guarantee by simulation."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from helpers.calibration_models import inputs, known, labelled, rng, scores
from scipy import optimize, stats
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

from workbench import compose, metrics, neo, sculpt, vote
from workbench.calibration import Selective, SelectivePredictor, calibrate, selective, top_uncertain
from workbench.calibration.abstention import upper_bound


def held_out(n: int = 40, outputs: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and the risk of each row."""
    mu = torch.randn(n, outputs, generator=rng(1), dtype=torch.float64)
    sigma = 0.1 + torch.rand(n, outputs, generator=rng(2), dtype=torch.float64)
    y = mu + sigma * torch.randn(n, outputs, generator=rng(3), dtype=torch.float64)
    return inputs(mu, sigma), y, sigma


def simulated(n: int, seed: int = 0, wrong: Any = lambda risk: risk**2, values: int | None = None) -> Selective:
    """Risks uniform on (0, 1) (or on that many values), wrong with a probability that depends on them."""
    risk = torch.rand(n, generator=rng(2 * seed), dtype=torch.float64)
    if values is not None:
        risk = (risk * values).floor() / values
    error = (torch.rand(n, generator=rng(2 * seed + 1), dtype=torch.float64) < wrong(risk)).double()
    return Selective(known(), "total", risk, error)


# ---- the curve
def test_the_curve_of_a_regression_is_that_of_its_absolute_error() -> None:
    x, y, sigma = held_out()
    chosen = selective(known(), (x, y))
    order = sigma[:, 0].argsort()
    error = (y - x[:, :1]).abs()[order, 0]
    np.testing.assert_allclose(chosen.curve.error, [error[: k + 1].mean() for k in range(40)], rtol=1e-9)
    np.testing.assert_allclose(chosen.curve.coverage, np.arange(1, 41) / 40)
    assert metrics.aurc(chosen.risk, chosen.error) == chosen.curve.error.mean()


def test_several_outputs_are_one_risk_and_one_error_a_row() -> None:
    x, y, sigma = held_out(outputs=3)
    chosen = selective(known(outputs=3), (x, y))
    risk = sigma.square().mean(1).sqrt()
    torch.testing.assert_close(chosen.risk, risk.sort().values)
    torch.testing.assert_close(chosen.error, (y - x[:, :3]).abs().mean(1)[risk.argsort()])


@pytest.mark.parametrize("by", ["total", "confidence"])
def test_the_curve_of_a_classifier_is_that_of_its_mistakes(by: str) -> None:
    logits, labels = labelled(60, 2.0)
    wrapped = scores(output="logits")
    chosen = selective(wrapped, (logits, labels), by)
    y, risk = wrapped(logits, return_risk=True)
    uncertainty = risk.total if by == "total" else 1 - y.softmax(-1).amax(-1)
    order = uncertainty.argsort(stable=True)
    torch.testing.assert_close(chosen.risk, uncertainty[order])
    torch.testing.assert_close(chosen.error, (y.argmax(-1) != labels)[order].double())


def test_an_error_of_ones_own() -> None:
    x, y, sigma = held_out()
    chosen = selective(known(), (x, y), error=lambda prediction, target: ((prediction - target) ** 2)[:, 0])
    torch.testing.assert_close(chosen.error, ((y - x[:, :1]) ** 2)[sigma[:, 0].argsort(), 0])
    with pytest.raises(ValueError, match=r"one number for each of 40 rows, \[40\]; it gave \[40, 1\]"):
        selective(known(), (x, y), error=lambda prediction, target: (prediction - target).abs())


# ---- thresholds
@pytest.mark.parametrize("coverage", [0.01, 0.25, 0.7, 0.8, 1.0])
def test_the_threshold_of_a_coverage_keeps_that_share(coverage: float) -> None:
    x, y, _ = held_out()
    chosen = selective(known(), (x, y))
    _, kept, risk = chosen.predictor(coverage=coverage)(x)
    assert int(kept.sum()) == math.ceil(round(40 * coverage, 9))
    assert risk[kept].max() == chosen.threshold(coverage=coverage)
    assert kept.all() or risk[~kept].min() > chosen.threshold(coverage=coverage)


@pytest.mark.parametrize("wanted", [0.02, 0.1, 0.2, 0.5])
@pytest.mark.parametrize("values", [None, 8])
def test_the_threshold_of_an_error_is_the_highest_that_keeps_to_it(wanted: float, values: int | None) -> None:
    chosen = simulated(200, seed=4, values=values)
    good = [t for t in chosen.risk.unique().tolist() if chosen.error[chosen.risk <= t].mean() <= wanted]
    assert chosen.threshold(risk=wanted) == max(good)


def test_the_bounded_threshold_is_that_of_scipy() -> None:
    chosen = simulated(300, seed=2)
    best = None
    for k in range(1, 26):
        rows = math.ceil(300 * k / 25)
        wrong = int(chosen.error[:rows].sum())
        # the rate at which as few mistakes as these are as improbable as delta / 25
        bound = 1.0
        if wrong < rows - 1:
            tail = lambda p, wrong=wrong, rows=rows: stats.binom.cdf(wrong, rows - 1, p) - 0.1 / 25  # noqa: E731
            bound = optimize.brentq(tail, 0, 1)
        if bound <= 0.2:
            best = chosen.risk[rows - 1].item()
    assert best is not None
    assert chosen.threshold(risk=0.2, confidence=0.9) == best
    assert best < chosen.threshold(risk=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("binary", [True, False])
def test_the_bound_holds_as_often_as_it_says(binary: bool) -> None:
    # risks r uniform, expected error r^2: below a threshold t it is t^2 / 3
    broken, n_thresholds = 0, 0
    for seed in range(200):
        chosen = simulated(150, seed=seed)
        if not binary:  # errors of any size up to 1, with the same expectation; Hoeffding's bound wants more rows
            risk, size = torch.rand(2, 600, generator=rng(seed), dtype=torch.float64)
            chosen = Selective(chosen.wrapped, "total", risk, risk**2 * (0.5 + size))
        try:
            threshold = chosen.threshold(risk=0.25, confidence=0.8, max_error=1.0 if binary else 1.5)
        except ValueError:
            continue
        n_thresholds += 1
        broken += threshold**2 / 3 > 0.25
    assert n_thresholds > 150
    assert broken <= 200 * 0.2 + 3 * math.sqrt(200 * 0.2 * 0.8)
    plain = [simulated(150, seed=seed).threshold(risk=0.25) ** 2 / 3 > 0.25 for seed in range(200)]
    assert sum(plain) > 2 * broken  # what the bound is for


@pytest.mark.parametrize(("wrong", "n"), [(0, 1), (0, 59), (3, 50), (49, 50), (50, 50)])
@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_the_upper_bound_of_mistakes_is_clopper_and_pearson(wrong: int, n: int, confidence: float) -> None:
    errors = torch.tensor([1.0] * wrong + [0.0] * (n - wrong))
    wanted = stats.binomtest(wrong, n, alternative="less").proportion_ci(confidence, method="exact").high
    assert upper_bound(errors, confidence) == pytest.approx(wanted, rel=1e-9)


def test_the_upper_bound_of_other_errors_is_hoeffdings() -> None:
    errors = torch.linspace(0, 4, 200)
    assert upper_bound(errors, 0.95, max_error=5) == pytest.approx(2 + 5 * math.sqrt(math.log(20) / 400))
    assert upper_bound(errors[-3:], 0.95, max_error=5) == 5


# ---- the predictor
def test_the_predictor_abstains_where_the_risk_is_high() -> None:
    x, y, sigma = held_out()
    wrapped = known()
    predictor = selective(wrapped, (x, y)).predictor(threshold=0.6)
    prediction, kept, risk = predictor(x)
    torch.testing.assert_close(prediction, wrapped(x))
    torch.testing.assert_close(risk, sigma[:, 0])
    assert kept.dtype == torch.bool
    assert torch.equal(kept, sigma[:, 0] <= 0.6)
    assert 0 < int(kept.sum()) < 40


def test_the_threshold_of_a_model_in_float64_is_not_rounded() -> None:
    wrapped = vote.Wrapper(3)(nn.Linear(1, 1)).double()
    for seed in range(10):
        x = torch.randn(40, 1, generator=rng(seed), dtype=torch.float64)
        chosen = selective(wrapped, (x, x), by="epistemic")
        predictor = SelectivePredictor(wrapped, "epistemic", chosen.threshold(coverage=0.5))
        assert predictor(x).kept.sum() == 20


def test_vacuitic_risk_and_confidence_decide_too() -> None:
    x, y = torch.randn(60, 4, generator=rng(1)), torch.randint(3, (60,), generator=rng(2))
    wrapped = compose(vote.Wrapper(3, output="logits"), neo.Wrapper())(nn.Linear(4, 3)).eval()
    wrapped.fit(x)
    logits, risk = wrapped(x, return_risk=True)
    for by, wanted in (
        ("vacuitic", risk.vacuitic),
        ("confidence", 1 - logits.softmax(-1).amax(-1)),
        ("epistemic", risk.epistemic),
    ):
        prediction = selective(wrapped, (x, y), by).predictor(coverage=0.5)(x)
        torch.testing.assert_close(prediction.risk, wanted)
        assert int(prediction.kept.sum()) == 30
    assert (
        selective(neo.Wrapper()(nn.Linear(4, 3)).eval().fit(x), (x, y), "vacuitic")
        .predictor(coverage=0.5)(x)
        .kept.sum()
        == 30
    )


def test_a_calibrated_model_is_selective_too() -> None:
    x, y, sigma = held_out()
    calibrated = calibrate(known(), (x, y))
    prediction = selective(calibrated, (x, y)).predictor(coverage=0.5)(x)
    torch.testing.assert_close(prediction.risk, calibrated.scale * sigma[:, 0])


@pytest.mark.parametrize("how", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["deepcopy", "pickle"])
def test_predictors_are_copied_and_saved(how: Any) -> None:
    x, y, _ = held_out()
    predictor = selective(known(), (x, y)).predictor(coverage=0.5)
    again = how(predictor)
    assert torch.equal(again(x).kept, predictor(x).kept)
    other = selective(known(), (x, y)).predictor(coverage=0.9)
    other.load_state_dict(predictor.state_dict())
    assert torch.equal(other(x).kept, predictor(x).kept)
    assert f"threshold={predictor.threshold.item():.6g}" in repr(predictor)


def test_answers_are_those_of_evaluation_mode() -> None:
    x, y, _ = held_out()
    predictor = selective(known(), (x, y)).predictor(coverage=0.5)
    wanted = predictor.eval()(x)
    prediction = predictor.train()(x)
    assert torch.equal(prediction.risk, wanted.risk)
    assert predictor.wrapped.training


# ---- the most uncertain rows
class Bare(Dataset):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Tensor:
        return self.x[i]


@pytest.mark.parametrize(
    "give",
    [
        lambda x, y: x,
        lambda x, y: (x, y),
        TensorDataset,
        lambda x, y: TensorDataset(x),
        lambda x, y: Bare(x),
        lambda x, y: DataLoader(Bare(x), batch_size=7),
        lambda x, y: DataLoader(TensorDataset(x), batch_size=7),
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=7),
    ],
    ids=["tensor", "pair", "TensorDataset", "inputs", "Dataset", "loader", "loader of inputs", "loader of pairs"],
)
def test_the_most_uncertain_rows_are_found(give: Any) -> None:
    x, y, sigma = held_out()
    top = top_uncertain(known(), give(x, y), 5, by="aleatoric", batch_size=9)
    order = np.argsort(-sigma[:, 0].numpy(), kind="stable")[:5]
    assert top.indices.tolist() == order.tolist()
    torch.testing.assert_close(top.values, sigma[order, 0])


@pytest.mark.parametrize("unit", [1e-30, 1e25])
def test_rows_are_ranked_in_any_unit(unit: float) -> None:
    wrapped = vote.Wrapper(3)(nn.Linear(1, 1, bias=False))
    wrapped.scale(y_mean=torch.zeros(1), y_scale=torch.full((1,), unit))
    assert top_uncertain(wrapped, torch.tensor([[0.0], [3.0], [-5.0]]), k=2).indices.tolist() == [2, 1]


def test_equal_risks_keep_their_order() -> None:
    x, _, _ = held_out(4)
    assert top_uncertain(known(), x[:1].expand(4, 2), 3, by="total").indices.tolist() == [0, 1, 2]


def test_a_loader_that_shuffles_is_refused() -> None:
    x, _, _ = held_out()
    for loader in (
        DataLoader(Bare(x), batch_size=7, shuffle=True),
        DataLoader(Bare(x), batch_sampler=BatchSampler(RandomSampler(Bare(x)), 7, False)),
    ):
        with pytest.raises(ValueError, match="the DataLoader shuffles its rows"):
            top_uncertain(known(), loader, 3, by="total")


def test_numbers_of_numpy_are_those_of_python() -> None:
    x, y, _ = held_out()
    for size in (9, np.int64(9)):
        np.testing.assert_array_equal(
            top_uncertain(known(), x, type(size)(5), by="aleatoric", batch_size=size).indices,
            top_uncertain(known(), x, 5, by="aleatoric").indices,
        )
        assert float(calibrate(known(), (x, y), batch_size=size).scale) == pytest.approx(
            float(calibrate(known(), (x, y)).scale), rel=1e-6
        )


# ---- bad input
@pytest.mark.parametrize("columns", [1, 2])
def test_values_have_no_class_of_which_to_be_confident(columns: int) -> None:
    x, y, _ = held_out(outputs=columns)
    with pytest.raises(ValueError, match=r"by='confidence'.* class"):
        selective(known(outputs=columns), (x, y), "confidence")
    with pytest.raises(ValueError, match=r"by='confidence'.* class"):
        top_uncertain(known(outputs=columns), x, 3, by="confidence")


@pytest.mark.parametrize("settings", [{}, {"output": "values"}])
def test_probabilities_of_which_nobody_said_so_are_not_taken_for_logits(settings: dict[str, str]) -> None:
    x = torch.randn(30, 2, generator=rng(0))
    wrapped: Any = vote.Wrapper(2, **settings)(nn.Sequential(nn.Linear(2, 3), nn.Softmax(-1)))
    for ask in (
        lambda: top_uncertain(wrapped, x, 3, by="confidence"),
        lambda: selective(wrapped, (x, x.argmax(-1)), "confidence"),
    ):
        with pytest.raises(ValueError, match=r"by='confidence'.* wrap with output='logits' or output='probs'"):
            ask()


def test_bad_input_is_refused() -> None:
    x, y, _ = held_out()
    wrapped = known()
    for k in (0, 41, 2.0, True):
        with pytest.raises(ValueError, match=r"k must be a whole number (of at least 1|from 1 to 40)"):
            top_uncertain(wrapped, x, k, by="total")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="by must be one of aleatoric, epistemic, vacuitic, total, or 'confidence'"):
        selective(wrapped, (x, y), "entropy")
    with pytest.raises(ValueError, match="by='epistemic': the model measures no such risk; it gives aleatoric, total"):
        top_uncertain(wrapped, x, 3)
    with pytest.raises(ValueError, match="it gives vacuitic"):
        selective(neo.Wrapper()(nn.Linear(2, 1)).double().fit(x), (x, y))
    with pytest.raises(TypeError, match="Linear is not wrapped"):
        selective(nn.Linear(2, 1), (x, y))
    with pytest.raises(TypeError, match="instead of pairs"):
        selective(wrapped, DataLoader(Bare(x)))


def test_soft_labels_of_classes_are_no_values() -> None:
    """The errors were distances of logits from probabilities."""
    classifier = vote.Wrapper(3, output="logits")(nn.Linear(2, 4))
    soft = torch.rand(20, 4, generator=rng()).softmax(-1)
    with pytest.raises(ValueError, match="scores of classes, and the targets are floats"):
        selective(classifier, (torch.zeros(20, 2), soft))
    crossed = selective(classifier, (torch.zeros(20, 2), soft), error=lambda y, t: -(t * y.log_softmax(-1)).sum(-1))
    assert len(crossed.risk) == 20  # an error of one's own may read them


def test_a_predictor_that_is_asked_for_risk_says_where_it_is() -> None:
    x, y, _ = held_out()
    predictor = selective(known(), (x, y)).predictor(coverage=0.5)
    with pytest.raises(TypeError, match=r"return_risk: .*prediction, kept, risk = predictor\(x\)"):
        predictor(x, return_risk=True)


def test_thresholds_that_do_not_exist_are_refused() -> None:
    chosen = simulated(50, wrong=lambda risk: 0.5 + 0 * risk)
    lowest = min(chosen.error[: k + 1].mean().item() for k in range(50))
    for wanted in ({}, {"coverage": 0.5, "risk": 0.1}):
        with pytest.raises(ValueError, match=r"give either coverage .* or risk"):
            chosen.threshold(**wanted)
    for coverage in (0, "0.9", [0.5, 0.9], math.nan):
        with pytest.raises(ValueError, match="coverage must lie above 0"):
            chosen.threshold(coverage=coverage)
    for risk in ("0.1", [0.1, 0.2], math.nan):
        with pytest.raises((TypeError, ValueError), match=r"risk (must|has 1 NaN)"):
            chosen.threshold(risk=risk)
    with pytest.raises(ValueError, match="a coverage alone makes no promise"):
        chosen.threshold(coverage=0.5, confidence=0.9)
    with pytest.raises(ValueError, match=f"no threshold has an error of -1; the lowest is {lowest:.4g}"):
        chosen.threshold(risk=-1)
    with pytest.raises(ValueError, match=r"no threshold guarantees .* on 50 held-out rows; the lowest bound is 0\.\d+"):
        chosen.threshold(risk=0.1, confidence=0.9)
    with pytest.raises(ValueError, match="give a threshold or coverage, not both"):
        chosen.predictor(0.5, coverage=0.5)
    values = Selective(known(), "total", chosen.risk, 3 * chosen.risk)
    with pytest.raises(ValueError, match="give max_error="):
        values.threshold(risk=1, confidence=0.9)
    with pytest.raises(ValueError, match=r"max_error=2, but errors go up to 2\.9"):
        values.threshold(risk=1, confidence=0.9, max_error=2)
    with pytest.raises(ValueError, match="numbers between 0 and max_error=1, at least one; found 0 to 2"):
        upper_bound(torch.tensor([0.0, 2.0]))


def test_sculpt_and_vote_together_rank_rows_by_their_total() -> None:
    x, y, _ = held_out()
    wrapped = compose(vote.Wrapper(3), sculpt.Wrapper())(nn.Linear(2, 1).double()).eval()
    total = wrapped(x, return_risk=True)[1].total[:, 0]
    torch.testing.assert_close(selective(wrapped, (x, y)).risk, total.sort().values)
