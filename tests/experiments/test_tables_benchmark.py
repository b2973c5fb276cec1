"""The benchmark `tables`: its cells, its scores compared with scipy, and rivals on rows with known noise."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT
from scipy import stats

from workbench.data import Data
from workbench.distributions import Normal
from workbench.distributions.mixture import Mixture
from workbench.experiments.worker import load_file


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return load_file(ROOT / "benchmarks" / "tables.py")


def test_cells_are_json_and_each_is_there_once(tables: ModuleType) -> None:
    for smoke in (True, False):
        cells = tables.cells(smoke)
        assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == len(cells)


@pytest.mark.slow
def test_every_method_of_ours_and_some_rivals_give_finite_scores_twice_the_same(tables: ModuleType) -> None:
    for cell in tables.cells(smoke=True):
        if cell["method"] in (*tables.OURS, "boosted quantiles"):
            first, second = tables.run(**cell), tables.run(**cell)
            assert first | {"cost": 0} == second | {"cost": 0}
            assert all(np.isfinite(first[score]) for score in ("nll", "rmse", "coverage", "width"))


def test_scores_are_those_of_scipy(tables: ModuleType) -> None:
    draw = np.random.default_rng(0)
    loc, scale, y = draw.normal(size=(3, 20, 1)), draw.uniform(0.5, 2, (3, 20, 1)), draw.normal(size=(20, 1))
    mixture = Mixture(Normal(), torch.tensor(loc), torch.tensor(scale), torch.full((3,), 1 / 3).double())
    scores = tables.scores(mixture, torch.tensor(y))
    assert scores["nll"] == pytest.approx(-np.log(stats.norm.pdf(y, loc, scale).mean(0)).mean())
    assert scores["rmse"] == pytest.approx(np.sqrt(((loc.mean(0) - y) ** 2).mean()))
    shares = stats.norm.cdf(y, loc, scale).mean(0)
    assert scores["coverage"] == pytest.approx(((shares >= 0.05) & (shares <= 0.95)).mean())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gaussian process", "NGBoost", "boosted quantiles", "deep ensemble"])
def test_rivals_find_a_line_and_its_noise(tables: ModuleType, name: str) -> None:
    if name == "NGBoost" and importlib.util.find_spec("ngboost") is None:
        pytest.skip("ngboost is not installed")
    draw = np.random.default_rng(0)
    x, x_test = draw.normal(size=(400, 2)), draw.uniform(-1, 1, (200, 2))
    y = 2 * x[:, 0] + 0.5 * draw.normal(size=400)
    said = tables.RIVALS[name](x, y, x_test, 0)
    error = np.sqrt(((said.mean.mean(0) - 2 * x_test[:, 0]) ** 2).mean())
    assert error < 0.35
    assert 0.4 < np.median(said.scale) < 0.9
    half = tables.RIVALS[name](x, y, x_test[:100], 0)  # what is said of a test row does not hang on others
    np.testing.assert_allclose(half.mean, said.mean[:, :100], rtol=1e-3, atol=1e-3)


def test_a_rival_speaks_in_the_units_of_the_table(tables: ModuleType) -> None:
    data = tables.rows_of("friedman1", 0, 80)
    other = Data.from_arrays(
        100 * data.train.x + 7, 1000 * data.train.y - 5, test=(100 * data.test.x + 7, 1000 * data.test.y - 5)
    )
    (first, _), (second, _) = (tables.rival("Gaussian process", one, 0) for one in (data, other))
    torch.testing.assert_close(second.mean, 1000 * first.mean - 5, rtol=1e-3, atol=5.0)
    torch.testing.assert_close(second.stddev, 1000 * first.stddev, rtol=1e-2, atol=1.0)


def test_tables_have_no_test_row_among_those_to_train_on_and_the_rows_that_were_asked_for(tables: ModuleType) -> None:
    for name in ("friedman2", "robot arm", "diabetes"):
        one, again, other = (tables.rows_of(name, split, 300) for split in (0, 0, 1))
        assert torch.equal(one.train.x, again.train.x)
        assert not torch.equal(one.test.x, other.test.x)
        assert len(one.train) == 300
        seen = {tuple(row) for row in one.train.x.tolist()}
        assert not any(tuple(row) in seen for row in one.test.x.tolist())


def test_the_page_counts_who_is_first(tables: ModuleType) -> None:
    rows = [
        {
            "data": data,
            "split": split,
            "method": method,
            "nll": nll + split,
            "rmse": nll,
            "coverage": 0.88,
            "train": 50,
            "cost": 1.0,
        }
        for data, better in (("yacht", "NGBoost"), ("diabetes", "Gaussian process"))
        for split in (0, 1)
        for method, nll in ((better, 1.0), *((m, 2.0) for m in ("NGBoost", "Gaussian process") if m != better))
    ]
    page = tables.summary(pd.DataFrame(rows), ROOT)
    line = next(line for line in page.splitlines() if line.startswith("| NGBoost"))
    assert [part.strip() for part in line.split("|")[2:4]] == ["1 of 1", "1.0"]
    assert "1.500 ± 0.500" in page


def test_a_table_that_a_method_is_missing_on_is_shown_and_counted_nowhere(tables: ModuleType) -> None:
    costs = {"split": 0, "rmse": 3.0, "coverage": 0.9, "train": 50, "cost": 1.0}
    rows = [
        {"data": data, "method": method, "nll": 1.25, **costs}
        for data, method in (("yacht", "tabular"), ("yacht", "Gaussian process"), ("adult age", "tabular"))
    ]
    page = tables.summary(pd.DataFrame(rows), ROOT)
    assert "Not all methods were run on adult age" in page
    assert "| adult age | 50 | 1 | 1.250 |  |" in page
    assert next(line for line in page.splitlines() if line.startswith("| tabular")).count("0 of 0") == 2


def test_many_rows_and_classes_have_tables_of_their_own(tables: ModuleType) -> None:
    scores = {"split": 0, "nll": 1.5, "rmse": 3.0, "coverage": 0.9, "width": 2.0, "cost": 1.0}
    rows = [
        {"data": "yacht", "method": "tabular", "train": 50, **scores},
        {"data": "protein", "method": "tabular", "train": tables.MANY_ROWS, **scores},
        {"data": tables.CLASSES, "method": "tabular", "train": 30_000, "accuracy": 0.875, "ece": 0.01, **scores},
    ]
    page = tables.summary(pd.DataFrame(rows), ROOT)
    few, many = page.split(f"### {tables.MANY_ROWS:,} rows")
    many, classes = many.split("### Classes")
    assert "protein" not in few.split("### NLL")[1]
    assert "| protein | tabular | 30,000 |" in many
    assert "| tabular | 30,000 | 1 | 1.5000 | 0.8750 | 0.0100 |" in classes


@pytest.mark.slow
def test_classes_are_scored_as_scikit_learn_does_it(tables: ModuleType) -> None:
    from sklearn import metrics

    classes = load_file(ROOT / "benchmarks" / "tables_classes.py")
    draw = np.random.default_rng(0)
    x = draw.normal(size=(700, 3))
    data = Data.from_arrays(x, (x[:, 0] + draw.normal(size=700) > 0).astype(int), test=300 / 700)
    said = classes.boosted_trees(data, 0)
    scores = classes.scores(said, data.test.y)
    assert scores["nll"] == pytest.approx(metrics.log_loss(data.test.y, said))
    assert scores["accuracy"] == pytest.approx(metrics.accuracy_score(data.test.y, said.argmax(1)))
    for said in (classes.ours(data, "tabular", 1, 0), classes.by_hand(data, 0, 2)):
        torch.testing.assert_close(said.sum(1), torch.ones(300))
        assert classes.scores(said, data.test.y)["accuracy"] > 0.6


def test_each_recipe_of_ours_is_ranked_among_itself_and_the_rivals(tables: ModuleType) -> None:
    costs = {"split": 0, "data": "yacht", "rmse": 3.0, "coverage": 0.9, "train": 50, "cost": 1.0}
    methods = (("tabular", 2.0), (tables.CHOSEN, 0.5), ("NGBoost", 1.0), ("deep ensemble", 3.0))
    page = tables.summary(pd.DataFrame([{"method": method, "nll": nll, **costs} for method, nll in methods]), ROOT)
    lines = [[part.strip() for part in line.split("|")[1:4]] for line in page.splitlines() if line.startswith("| ")]
    ranks = {method: (first, rank) for method, first, rank in lines[1:5]}
    assert ranks == {
        "tabular": ("0 of 1", "2.0"),
        tables.CHOSEN: ("1 of 1", "1.0"),
        "NGBoost": ("1 of 1", "1.0"),  # beside "tabular"
        "deep ensemble": ("0 of 1", "3.0"),
    }
