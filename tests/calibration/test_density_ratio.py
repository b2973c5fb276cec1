"""Density ratios: compared with logistic regression of scikit-learn and closed forms, and the coverage under their weights."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers.calibration_models import rng
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import PolynomialFeatures
from torch import Tensor, nn

from workbench import calibrate, compose
from workbench.calibration import DensityRatio
from workbench.errors import WorkbenchWarning
from workbench.experiments.worker import load_file

peak = load_file(ROOT / "benchmarks" / "speed_clock.py").peak


def test_the_density_ratio_is_that_of_logistic_regression() -> None:
    g = rng()
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
    g = rng(4)
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
    ratio = DensityRatio(held_out, new, ridge=2.0, model=model)(torch.as_tensor(x))
    torch.testing.assert_close(ratio, torch.tensor(p / (1 - p)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["linear", "squares", "quadratic"])
def test_rows_in_pieces_have_the_ratio_of_all_rows_at_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g = rng(5)
    held_out, new = torch.randn(3000, 4, generator=g), 0.8 * torch.randn(1000, 4, generator=g) + 0.3
    held_out[:, 3] = new[:, 3] = 0.1  # whose mean rounds, unless it is computed with care
    whole = DensityRatio(held_out, new, model=model)
    monkeypatch.setattr("workbench.calibration.shift.PIECE_SIZE", 999)
    pieces = DensityRatio(held_out, new, model=model)
    torch.testing.assert_close(pieces(held_out), whole(held_out), rtol=1e-6, atol=0)
    changed = torch.cat([held_out[:, :3], torch.ones(3000, 1)], 1)
    assert float((pieces(changed) / pieces(held_out)).log().abs().max()) < 1e-6  # a constant column decides nothing


@pytest.mark.slow
def test_products_of_features_of_many_rows_are_not_all_in_memory() -> None:
    """40,000 rows of 20 features have 230 columns, which take up 70 MiB for all rows."""
    rows = torch.randn(20_000, 20, generator=rng(6))
    assert peak(lambda: DensityRatio(rows, rows + 0.1, model="quadratic", ridge=100.0)(rows), "cpu") < 120


def test_a_classifier_is_asked_of_rows_that_it_was_not_trained_on() -> None:
    """A nearest neighbour knows its training rows by heart: of two samples of one place it would tell them apart without an error."""
    g = rng(1)
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
    log_ratio = DensityRatio(held_out, new, model=forest)(held_out).log()
    assert not hasattr(forest, "classes_")
    near = closed(held_out) > -2  # of a leaf of thirty rows nothing smaller is told
    assert float(torch.corrcoef(torch.stack([log_ratio, closed(held_out)])[:, near])[0, 1]) > 0.8


@pytest.mark.parametrize(("model", "held"), [("linear", False), ("squares", True), ("quadratic", True)])
def test_coverage_holds_under_a_shift_of_spread_where_the_ratio_sees_it(model: str, held: bool) -> None:
    g = rng(2)

    def rows(n: int, spread: float) -> tuple[Tensor, Tensor]:
        x = spread * torch.randn(n, 1, generator=g)
        return x, x + (0.1 + x.abs()) * torch.randn(n, 1, generator=g)

    held_out, (x, y) = rows(8000, 1.0), rows(8000, 1.5)
    weight = DensityRatio(held_out[0], x, model=model)
    calibrated = calibrate(compose()(nn.Identity()), held_out, "conformal", score="absolute", weight=weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkbenchWarning)  # a few rows get intervals without ends
        lower, upper = calibrated.interval(x, coverage=0.9)
    coverage = float(((y >= lower) & (y <= upper)).double().mean())
    assert (abs(coverage - 0.9) < 0.02) == held, coverage


def test_what_is_no_model_of_a_ratio_is_refused() -> None:
    x = torch.randn(50, 2, generator=rng())
    for model in ("cubic", object()):
        with pytest.raises(TypeError, match="model must be 'linear' or 'squares' or 'quadratic', or a classifier"):
            DensityRatio(x, x + 1, model=model)
    wide = torch.randn(50, 90, generator=rng())
    with pytest.raises(ValueError, match="90 features make 4185 columns"):
        DensityRatio(wide, wide, model="quadratic")
    with pytest.raises(ValueError, match="new: a classifier as model= needs 5 different rows; found 1"):
        DensityRatio(x, torch.ones(50, 2), model=KNeighborsClassifier(1))


class Classifier:
    """As scikit-learn's, but `fit` returns nothing."""

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def fit(self, x: Any, y: Any) -> None:
        self.fitted = True

    def predict_proba(self, x: Any) -> Any:
        return np.full((len(x), self.columns), 1 / self.columns)


def test_classifiers_and_features_of_another_form() -> None:
    x = torch.randn(30, 2, generator=rng())
    assert DensityRatio(x, x + 1, model=Classifier(2))(x).tolist() == pytest.approx([1.0] * 30)
    with pytest.raises(ValueError, match=r"probabilities of both sources, \[rows, 2\]; for 2 rows it gave \[2, 1\]"):
        DensityRatio(x, x + 1, model=Classifier(1))
    with pytest.raises(ValueError, match="x has 1 features a row, and the ratio was estimated from 2"):
        DensityRatio(x, x + 1)(x[:, :1])
    text: Any = "x"
    with pytest.raises(ValueError, match="ridge must be above 0; found 'x'"):
        DensityRatio(x, x + 1, ridge=text)
    with pytest.raises(TypeError, match="features must be a function of a batch of inputs; found 'x'"):
        DensityRatio(x, x + 1, features=text)
