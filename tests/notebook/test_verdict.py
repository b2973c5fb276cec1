"""record_comparison: verdicts on tables with a known answer."""

from __future__ import annotations

import math
from typing import Any

import nbformat
import numpy as np
import pytest
from nbformat import v4
from scipy import stats

from workbench import record_comparison
from workbench.experiments.paired import Comparison, differences, stated_test
from workbench.notebook import comparison as module
from workbench.notebook import read_records
from workbench.notebook.verdict import verdict

NAN = float("nan")
PLAIN = [5.0, 5.4, 4.9, 5.2, 5.1]
NOISE = [0.05, -0.04, 0.03, -0.05, 0.01]


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a kernel would have been shown."""
    shown: list[Any] = []

    def display(_: str, __: list[str], data: Any, stamp: Any) -> None:
        shown.append(v4.new_output("display_data", data, metadata={"workbench": stamp}))

    monkeypatch.setattr(module, "_display", display)
    return shown


def shifted(by: float, times: float = 1.0) -> list[float]:
    return [p + by + times * n for p, n in zip(PLAIN, NOISE, strict=True)]


def test_no_difference_names_the_cheapest() -> None:
    scores = {"plain": {"rmse": PLAIN}, "vote": {"rmse": shifted(0)}, "neo": {"rmse": PLAIN}}
    text = record_comparison(scores, passes={"plain": 1, "vote": 5, "neo": 1})
    assert text.startswith("No difference in rmse beyond noise over 5 splits, and plain is cheapest (1 pass).")
    assert "5 pass" not in text


def test_one_better_by_far_and_one_worse() -> None:
    scores = {"plain": {"rmse": PLAIN}, "vote": {"rmse": shifted(-1)}, "sample": {"rmse": shifted(1)}}
    text = record_comparison(
        scores, passes={"plain": 1, "vote": 5, "sample": 20}, units={"rmse": "MPa"}, labels={"rmse": "RMSE"}
    )
    assert text.startswith("Beyond noise over 5 splits, vote (by 1.000 ± 0.054 MPa, 5 passes) has a smaller RMSE")
    assert "than plain (1 pass)" in text
    assert "Worse beyond noise: RMSE (sample)." in text


@pytest.mark.parametrize(("metric", "better", "word"), [("accuracy", 0.1, "higher"), ("nll", -0.1, "smaller")])
def test_the_direction_is_that_of_the_metric(metric: str, better: float, word: str) -> None:
    scores = {"plain": {metric: PLAIN}, "good": {metric: shifted(better, 0.1)}, "bad": {metric: shifted(-better, 0.1)}}
    text = record_comparison(scores)
    assert f"good (by 0.1000 ± 0.0054) has a {word} {metric} than plain" in text
    assert f"Worse beyond noise: {metric} (bad)" in text


def test_a_gap_is_no_advantage() -> None:
    """A model that failed on a split is not better for what it did on the others."""
    gap = [*shifted(-1)[:3], NAN, shifted(-1)[4]]
    text = record_comparison({"plain": {"rmse": PLAIN}, "vote": {"rmse": gap}, "neo": {"rmse": PLAIN}})
    assert text.startswith("No difference in rmse beyond noise over 5 splits")
    assert "Not judged: vote has no rmse on split 3" in text
    both = record_comparison({"plain": {"rmse": [NAN, *PLAIN[1:]]}, "vote": {"rmse": shifted(-1)}})
    assert both.startswith("Nothing can be said of rmse: plain has no rmse on split 0")


def test_one_split_says_nothing_about_noise(outputs: list[Any]) -> None:
    text = record_comparison({"plain": {"rmse": [5.0]}, "vote": {"rmse": [1.0]}})
    assert text.startswith("One split: no statement about noise, where vote has the smallest rmse.")
    assert "★" not in outputs[0].data["text/html"]
    assert "±" not in outputs[0].data["text/html"]


def test_a_width_counts_only_where_the_intervals_cover() -> None:
    scores = {
        "plain": {"crps": PLAIN, "picp90": [0.9] * 5, "mpiw90": PLAIN},
        "narrow": {"crps": PLAIN, "picp90": [0.5] * 5, "mpiw90": shifted(-3)},
        "good": {"crps": PLAIN, "picp90": [0.91] * 5, "mpiw90": shifted(-1)},
    }
    assert "Better beyond noise in other metrics: mpiw90 (good)" in record_comparison(scores)


def test_p_values_are_those_of_scipy_and_holm(outputs: list[Any]) -> None:
    rng = np.random.default_rng(0)
    plain = rng.normal(size=6)
    models = {f"m{i}": plain + rng.normal(0.4 * i, 0.4, size=6) for i in range(4)}
    record_comparison({"plain": {"rmse": plain}, **{k: {"rmse": v} for k, v in models.items()}})
    nb = v4.new_notebook(cells=[v4.new_code_cell("", outputs=outputs)])
    records = read_records(nbformat.reads(nbformat.writes(nb), as_version=4))
    compared = differences(records.comparisons["comparison"])
    alone = {k: stats.ttest_rel(v, plain) for k, v in models.items()}
    order, before = sorted(alone, key=lambda k: alone[k].pvalue), 0.0
    for rank, k in enumerate(order):
        before = max(before, min(1.0, (len(order) - rank) * alone[k].pvalue))
        got = compared[k, "rmse"]
        assert got.p == pytest.approx(before)
        assert (got.low, got.high) == pytest.approx(tuple(alone[k].confidence_interval(0.95)))
        assert got.better is (False if before < 0.05 else None)
    table = records.tables["comparison"]
    assert table["model"] == [m for m in ("plain", *models) for _ in range(6)]
    assert table["rmse"] == [*plain, *(v for m in models.values() for v in m)]
    assert verdict(records.comparisons["comparison"]) == outputs[0].data["text/plain"].split("\n")[0]


def test_splits_of_the_same_rows_are_not_independent(outputs: list[Any]) -> None:
    scores = {"plain": {"rmse": PLAIN}, "vote": {"rmse": shifted(-0.06)}}
    halves = []
    for rows in (None, (90, 10)):
        outputs.clear()
        record_comparison(scores, rows=rows)
        nb = v4.new_notebook(cells=[v4.new_code_cell("", outputs=outputs)])
        (d,) = differences(read_records(nb).comparisons["comparison"]).values()
        halves.append((d.high - d.low) / 2)
    assert halves[1] / halves[0] == pytest.approx(math.sqrt((1 / 5 + 1 / 9) * 5))


def test_false_alarms_are_as_rare_as_said() -> None:
    """Five models that are all the same: a difference is claimed in about one of twenty tables, not in one of five."""
    rng, claims, tables = np.random.default_rng(1), 0, 150
    for _ in range(tables):
        values = rng.normal(size=(6, 5))
        text = record_comparison({f"m{i}": {"rmse": v} for i, v in enumerate(values)})
        claims += "No difference in rmse" not in text
    assert claims / tables < 0.1


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        ({"plain": {"rmse": [1.0]}}, {}, "at least two models"),
        ({"a": {"rmse": [1, 2]}, "b": {"rmse": [1]}}, {}, r"one number per split.*'b\[rmse\]': 1"),
        ({"a": {"rmse": []}, "b": {"rmse": []}}, {}, "one number per split"),
        ({"a": {"zeal": [1, 2]}, "b": {"zeal": [1, 3]}}, {}, r"pass higher=\{'zeal': True\}"),
        ({"a": {"rmse": [1, 2]}, "b": {"rmse": [1, 3]}}, {"reference": "c"}, "reference names 'c'; there are a, b"),
        ({"a": {"rmse": [1, 2]}, "b": {"rmse": [1, 3]}}, {"splits": [0, 0]}, "does not name the 2 splits"),
        ({"a": {"split": [1, 2]}, "b": {"split": [1, 3]}}, {}, "cannot be called split"),
        ({"a": {"rmse": [1, "x"]}, "b": {"rmse": [1, 3]}}, {}, r"a\[rmse\] has 'x'"),
    ],
)
def test_what_cannot_be_compared_is_named(scores: Any, options: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        record_comparison(scores, **options)


@pytest.mark.parametrize(
    ("models", "metrics", "correction"),
    [
        (["vote"], ["rmse"], " 95 %; the splits"),
        (["vote"], ["rmse", "crps"], " 95 %; the splits"),
        (["vote", "neo"], ["rmse"], " 95 %, corrected by Holm's method for 2 models; the splits"),
        (
            ["vote"],
            ["rmse", "crps", "nll"],
            " 95 %, corrected by Holm's method for all metrics other than rmse together; the splits",
        ),
        (
            ["vote", "neo"],
            ["rmse", "nll"],
            " 95 %, corrected by Holm's method for 2 models and for all metrics other than rmse together; the splits",
        ),
    ],
)
def test_a_correction_is_stated_where_there_is_one(models: list[str], metrics: list[str], correction: str) -> None:
    scores = {name: dict.fromkeys(metrics, PLAIN) for name in ["plain", *models]}
    comparison = Comparison(scores, range(5), dict.fromkeys(metrics, False), "plain", "rmse")
    assert correction in stated_test(comparison)


def test_a_line_of_a_cell_ends_in_no_sign(outputs: list[Any]) -> None:
    scores = {"plain": {"rmse": PLAIN}, "vote": {"rmse": [*shifted(-1)[:4], NAN]}, "neo": {"rmse": shifted(-1)}}
    record_comparison(scores)
    shown = outputs[0].data["text/html"].partition("<table>")[2].partition("</table>")[0]
    for kept in ("rmse\xa0↓", "5.120 ±\xa0", "★\xa04.1"):
        assert kept in shown
    assert not any(loose in shown for loose in ("± ", "★ ", " ↓"))
    assert " (1 missing)" in shown
