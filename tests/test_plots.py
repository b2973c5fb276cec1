"""Figures: what is drawn equals an independent computation, and nothing of the caller's is changed."""

from __future__ import annotations

import doctest
import importlib
import itertools
import subprocess
import sys
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from scipy.integrate import trapezoid
from scipy.stats import norm, spearmanr

from workbench import plots

N = 60


@pytest.fixture(autouse=True)
def untouched():
    """No plot changes rcParams or random state, for all tests here."""
    settings, torch_state = matplotlib.rcParams.copy(), torch.get_rng_state()
    numpy_state = repr(np.random.get_state())  # noqa: NPY002
    yield
    plt.close("all")
    assert matplotlib.rcParams == settings
    assert repr(np.random.get_state()) == numpy_state  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), torch_state)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.fixture
def ax():
    return Figure(figsize=(6.4, 4.8)).subplots()


def legend_texts(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def line(ax, start):
    """The one line whose label starts so."""
    (found,) = [item for item in ax.lines if item.get_label().startswith(start)]
    return found


def band(ax, start):
    (found,) = [item for item in ax.collections if item.get_label().startswith(start)]
    return found.get_paths()[0].vertices


def probabilities(rng, n=N, classes=4):
    scores = rng.random((n, classes)) ** 3
    return scores / scores.sum(1, keepdims=True), rng.integers(0, classes, n)


def calls(rng):
    """Every function once, with realistic input."""
    x, risk = rng.normal(size=N), rng.random(N) + 0.1
    p, y = probabilities(rng)
    xx, yy = np.meshgrid(np.linspace(-1, 1, 7), np.linspace(0, 1, 5))
    frame = pd.DataFrame({"epoch": range(4), "loss": [4.0, 3.0, 2.0, 1.0]})
    return {
        "bands": lambda **k: plots.bands(x, x**3, risk, risk, x, observed=(x, x), truth=(x, x**3), **k),
        "coverage": lambda **k: plots.coverage(x, risk, x + risk, **k),
        "decision_map": lambda **k: plots.decision_map(xx, yy, xx * yy, points=(np.stack([x, x], 1), x > 0), **k),
        "history": lambda **k: plots.history(frame, **k),
        "ood_histogram": lambda **k: plots.ood_histogram(risk, risk + 1, **k),
        "predicted_against_true": lambda **k: plots.predicted_against_true(x, x + risk, risk, **k),
        "reliability": lambda **k: plots.reliability(p, y, **k),
        "risk_against_error": lambda **k: plots.risk_against_error(risk, risk**2, **k),
        "risk_split": lambda **k: plots.risk_split(risk, risk[::-1], **k),
        "roc": lambda **k: plots.roc(risk, risk + 1, **k),
    }


NAMES = sorted(set(plots.__all__) - {"COLOURS", "ood"})


# ---------------------------------------------------------------------------------------------- common to all functions


@pytest.mark.parametrize("name", NAMES)
def test_given_axes_are_used_and_no_figure_is_left_open(name, rng, ax):
    assert calls(rng)[name](ax=ax) is ax
    assert plt.get_fignums() == []
    assert ax.get_xlabel()
    assert ax.get_ylabel() or name == "risk_split"  # which has names of cases there
    assert not ax.spines["top"].get_visible()
    ax.figure.canvas.draw()


@pytest.mark.parametrize("name", NAMES)
def test_without_axes_one_new_figure_is_made(name, rng):
    ax = calls(rng)[name]()
    assert plt.get_fignums() == [ax.figure.number]
    assert ax.figure.get_constrained_layout()


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_cut_off_or_runs_into_another(name, rng):
    ax = calls(rng)[name]()
    ax.figure.canvas.draw()
    drawn, page = ax.get_tightbbox(), ax.figure.bbox
    assert drawn.x0 >= page.x0 - 1
    assert drawn.y0 >= page.y0 - 1
    assert drawn.x1 <= page.x1 + 1
    assert drawn.y1 <= page.y1 + 1
    low, high = sorted(ax.get_xlim())
    texts = [label for label in ax.get_xticklabels() if low <= label.get_position()[0] <= high]
    low, high = sorted(ax.get_ylim())
    texts += [label for label in ax.get_yticklabels() if low <= label.get_position()[1] <= high]
    texts += [ax.xaxis.label, ax.yaxis.label, ax.get_legend()]
    boxes = [box for box in (text.get_window_extent() for text in texts) if box.width > 1]
    assert len(boxes) > 5
    assert not any(box.overlaps(other) for i, box in enumerate(boxes) for other in boxes[i + 1 :])


@pytest.mark.parametrize("name", ["coverage", "risk_against_error", "roc", "reliability"])
def test_tensors_with_gradient_and_low_precision_draw_as_arrays_do(name):
    a = torch.arange(1.0, 9.0) / 8
    b, c = a.flip(0), (a * 2).sqrt()
    p, y = torch.stack([a, 1 - a], 1), torch.tensor([0, 1] * 4)
    inputs = {"coverage": (a, b, c), "risk_against_error": (a, b), "roc": (a, b), "reliability": (p, y)}[name]
    draw = getattr(plots, name)
    low = [v.to(torch.bfloat16) if v.is_floating_point() else v for v in inputs]
    asked = [v.clone().requires_grad_() if v.is_floating_point() else v for v in low]
    first, second = draw(*asked), draw(*[v.double().numpy() for v in low])
    for one, other in zip(first.lines, second.lines, strict=True):
        np.testing.assert_array_equal(one.get_xydata(), other.get_xydata())


def test_dark_ground_keeps_text_and_lines_light(rng):
    with plt.style.context("dark_background"):
        for name, draw in calls(rng).items():
            ax = draw()
            for artist in ax.lines:
                light = matplotlib.colors.rgb_to_hsv(matplotlib.colors.to_rgb(artist.get_color()))[2]
                assert light > 0.5, name


def test_colours_are_distinct_also_in_greys():
    grey = [np.dot(matplotlib.colors.to_rgb(c), (0.2126, 0.7152, 0.0722)) for c in plots.COLOURS.values()]
    assert list(plots.COLOURS) == ["aleatoric", "epistemic", "vacuitic", "total"]
    assert np.diff(sorted(grey)).min() > 0.03


@pytest.mark.parametrize("module", ["_common", "classification", "detection", "regression", "summary"])
def test_examples_run(module):
    failed, tried = doctest.testmod(importlib.import_module(f"workbench.plots.{module}"))
    assert failed == 0
    assert tried > 0 or module == "_common"


def test_import_loads_no_heavy_library():
    heavy = "('matplotlib', 'pandas', 'scipy', 'sklearn')"
    code = f"import sys, workbench.plots; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---------------------------------------------------------------------------------------------------------- regression


def test_bands_add_variances_and_sort(rng, ax):
    x, y = rng.permutation(N) / 10, rng.normal(size=N)
    noise, model = rng.random(N) + 0.5, rng.random(N) + 0.5
    plots.bands(torch.tensor(x)[:, None], y, noise, model, level=3, ax=ax)
    order = np.argsort(x)
    np.testing.assert_allclose(line(ax, "prediction").get_xydata(), np.stack([x, y], 1)[order])
    inner, total = 3 * model, 3 * (noise**2 + model**2) ** 0.5
    for start, lower, upper in [("epistemic", y - inner, y + inner), ("plus aleatoric", y + inner, y + total)]:
        edge = band(ax, start)
        for side in (lower, upper):
            for point in np.stack([x, side], 1):
                assert np.isclose(edge, point).all(1).any()
    outermost = np.concatenate([c.get_paths()[0].vertices[:, 1] for c in ax.collections])
    assert outermost.min() == pytest.approx((y - total).min())
    assert legend_texts(ax) == ["epistemic, ±3 sd", "plus aleatoric, ±3 sd", "prediction"]


def test_bands_with_aleatoric_alone_reaches_the_prediction(ax):
    plots.bands([0, 1, 2], [5, 5, 5], aleatoric=[1, 2, 3], ax=ax)
    edge = band(ax, "aleatoric, ±2 sd")
    assert (edge[:, 1].min(), edge[:, 1].max()) == (-1, 11)


def test_bands_strip_has_the_vacuitic_risk_in_order_and_below_the_data(ax):
    plots.bands([2, 0, 1], [1, 2, 3], vacuitic=[5.0, 0.0, np.nan], ax=ax)
    (strip,) = [c for c in ax.collections if c.get_label() == "_vacuitic"]
    assert strip.get_array().tolist() == [[0.0, None, 5.0]]
    assert (strip.norm.vmin, strip.norm.vmax) == (0, 4)
    np.testing.assert_allclose(strip.get_coordinates()[0, :, 0], [0, 0.5, 1.5, 2])
    lowest = ax.transAxes.inverted().transform(ax.transData.transform([0, 1]))[1]
    assert lowest > strip.get_coordinates()[..., 1].max()
    assert "vacuitic, 0 to 4 or more" in legend_texts(ax)
    assert "vacuitic: 1 of 3 not finite, left out" in legend_texts(ax)


def test_bands_legend_covers_no_data(rng, ax):
    x = np.linspace(-1, 1, 50)
    plots.bands(x, x**2, 1 + x**2, 1 + x**2, x, observed=(x, x), ax=ax)
    ax.figure.canvas.draw()
    highest = max(ax.transData.transform(c.get_paths()[0].vertices)[:, 1].max() for c in ax.collections[:2])
    assert ax.get_legend().get_window_extent().y0 >= highest


def test_bands_leave_a_gap_where_risk_is_missing(ax):
    plots.bands(np.arange(6), np.zeros(6), epistemic=[1, 1, np.nan, 1, 1, np.inf], ax=ax)
    (filled,) = ax.collections
    assert len(filled.get_paths()) == 2
    assert not np.isclose(np.concatenate([p.vertices for p in filled.get_paths()])[:, 0], 2).any()
    assert legend_texts(ax)[-1] == "epistemic: 2 of 6 not finite, left out"


def test_bands_truth_and_observed(ax):
    plots.bands([0, 1], [0, 1], observed=([3, 4, 5], [6, 7, 8]), truth=([1, 0], [10, 20]), ax=ax)
    assert line(ax, "truth").get_xydata().tolist() == [[0, 20], [1, 10]]
    assert ax.collections[0].get_offsets().tolist() == [[3, 6], [4, 7], [5, 8]]
    assert "observed (n = 3)" in legend_texts(ax)


def test_bands_drawn_twice_cut_nothing_off(ax):
    plots.bands([0, 1], [0, 1], [1, 1], ax=ax)
    plots.bands([0, 1], [50, 60], [1, 1], ax=ax)
    assert ax.get_ylim()[0] < -2
    assert ax.get_ylim()[1] > 62


def test_coverage_is_the_share_within_normal_intervals(rng, ax):
    y, risk, target = rng.normal(size=(3, 40, 2))
    risk = np.abs(risk)
    plots.coverage(y, risk, target, ax=ax)
    x, observed = line(ax, "observed").get_data()
    expected = []
    for level in x:
        low, high = norm.interval(level, y, risk)
        expected.append(((low <= target) & (target <= high)).mean())
    np.testing.assert_allclose(observed, expected, atol=1e-12)
    gap = np.abs(np.array(expected) - x).mean()
    assert legend_texts(ax)[1] == f"observed (n = 80), mean gap {gap:.3f}"


def test_coverage_of_zero_risk(ax):
    plots.coverage([1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 2], ax=ax)
    observed = line(ax, "observed").get_ydata()
    assert set(observed[:-1]) == {0.75}
    assert observed[-1] == 1


def test_risk_against_error_bins_and_correlation(rng, ax):
    risk = rng.random(100)
    error = risk + rng.random(100)
    error[:3], risk[3:5] = [5, 6, 7], np.nan
    plots.risk_against_error(torch.tensor(risk)[:, None], error, kind="epistemic", unit="K", n_bins=7, ax=ax)
    table = pd.DataFrame({"risk": risk, "error": error}).dropna()
    rho = spearmanr(table.risk, table.error).statistic
    assert legend_texts(ax)[0] == f"Spearman {rho:.2f} (n = 98)"
    assert legend_texts(ax)[-1] == "2 of 100 risk values not finite, dropped"
    means = table.groupby(pd.qcut(table.risk, 7), observed=True).mean()  # 98 rows: 14 in each of 7 bins
    np.testing.assert_allclose(line(ax, "mean of 7 bins").get_xydata(), means.to_numpy())
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("epistemic risk (K)", "absolute error (K)")
    assert matplotlib.colors.same_color(ax.collections[0].get_facecolor()[0, :3], plots.COLOURS["epistemic"])


def test_risk_against_error_of_constant_risk_has_no_correlation(ax):
    plots.risk_against_error([1, 1, 1], [1, 2, 3], ax=ax)
    assert legend_texts(ax)[0] == "Spearman undefined (all values equal) (n = 3)"


def test_scales_follow_the_range(rng):
    wide, narrow = np.exp(3 * rng.normal(size=500)), rng.random(500) + 1
    both = plots.risk_against_error(wide, wide)
    assert (both.get_xscale(), both.get_yscale()) == ("log", "log")
    assert plots.risk_against_error(narrow, narrow).get_yscale() == "linear"
    assert plots.ood_histogram(rng.normal(size=500), wide * 100, kind="vacuitic").get_xscale() == "symlog"
    assert plots.ood_histogram(wide, wide * 100).get_xscale() == "log"
    assert plots.ood_histogram(narrow, narrow).get_xscale() == "linear"


def test_many_points_are_thinned_and_the_legend_says_so(rng, ax):
    risk, error = rng.random((2, 7001))
    plots.risk_against_error(risk, error, ax=ax)
    drawn = ax.collections[0].get_offsets()
    assert len(drawn) == len(np.unique(drawn, axis=0)) == 5000
    assert set(map(tuple, drawn)) <= set(zip(risk, error, strict=True))
    rho = spearmanr(risk, error).statistic  # over all points, drawn or not
    assert legend_texts(ax)[0] == f"Spearman {rho:.2f} (5,000 of 7,001 drawn)"


def test_predicted_against_true(rng, ax):
    y, target, risk = rng.normal(size=(3, N, 1))
    risk = np.abs(risk)
    risk[4] = np.nan
    plots.predicted_against_true(y, torch.tensor(target), risk, ax, unit="MPa", level=2)
    keep = np.arange(N) != 4
    y, target, risk = y[keep, 0], target[keep, 0], risk[keep, 0]
    np.testing.assert_array_equal(ax.collections[0].get_offsets(), np.stack([target, y], 1))
    bars = np.array(ax.containers[0].lines[2][0].get_segments())
    np.testing.assert_allclose(bars[:, :, 1], np.stack([y - 2 * risk, y + 2 * risk], 1))
    rmse = np.sqrt(np.mean((y - target) ** 2))
    expected = [
        "ideal",
        f"RMSE {rmse:.3g} MPa (n = 59)",
        "total risk, ±2 sd",
        "1 of 60 risk values not finite, dropped",
    ]
    assert legend_texts(ax) == expected
    first, last = line(ax, "ideal").get_xydata()
    assert first[0] == first[1]
    assert last[0] == last[1]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("true value (MPa)", "prediction (MPa)")


# ------------------------------------------------------------------------------------------------------ classification


def test_reliability_bins_counts_and_error(rng, ax):
    p, y = probabilities(rng, 300)
    plots.reliability(torch.tensor(p), torch.tensor(y), n_bins=8, ax=ax)
    rows, ece = [], 0.0
    for i in range(8):
        inside = [
            (row.max(), row.argmax() == k) for row, k in zip(p, y, strict=True) if i / 8 < row.max() <= (i + 1) / 8
        ]
        if inside:
            confidence, accuracy = np.mean(inside, axis=0)
            rows.append((confidence, accuracy, len(inside)))
            ece += len(inside) / 300 * abs(confidence - accuracy)
    np.testing.assert_allclose(line(ax, "ECE").get_xydata(), [row[:2] for row in rows])
    assert legend_texts(ax) == ["ideal", f"ECE {ece:.3f} (n = 300)", "rows per bin"]
    assert [text.get_text() for text in ax.texts] == [str(row[2]) for row in rows]
    np.testing.assert_allclose([bar.get_height() for bar in ax.patches], [row[2] / 300 for row in rows])


def test_decision_map_draws_value_and_points(rng, ax):
    xx, yy = torch.meshgrid(torch.linspace(-1, 1, 4), torch.linspace(0, 3, 6), indexing="ij")
    value = xx + 10 * yy
    x, y = rng.normal(size=(20, 2)), rng.integers(0, 2, 20)
    plots.decision_map(xx, yy, value.reshape(-1, 1), ax, label="risk (nats)", points=(x, y))
    mesh = ax.collections[0]
    np.testing.assert_allclose(mesh.get_array(), value.numpy())
    corners = mesh.get_coordinates()  # each node in the middle of its cell
    middle = (corners[1:, 1:] + corners[:-1, 1:] + corners[1:, :-1] + corners[:-1, :-1]) / 4
    np.testing.assert_allclose(middle, np.stack([xx, yy], -1), atol=1e-6)
    for label, scatter in enumerate(ax.collections[1:]):
        np.testing.assert_array_equal(scatter.get_offsets(), x[y == label])
    assert legend_texts(ax) == ["class 0", "class 1"]
    assert ax.figure.axes[1].get_ylabel() == "risk (nats)"


def test_decision_map_says_what_is_blank_and_keeps_limits(ax):
    xx, yy = np.meshgrid([0, 1, 2], [0, 1])
    plots.decision_map(xx, yy, np.array([[1, np.nan, 2], [3, 4, 5]]), ax, limits=(0, 9))
    assert legend_texts(ax) == ["1 of 6 values not finite, blank"]
    assert ax.collections[0].get_clim() == (0, 9)


# ----------------------------------------------------------------------------------------------------------- detection


def brute_auroc(known, unknown):
    return np.mean([[(u > k) + 0.5 * (u == k) for k in known] for u in unknown])


def test_roc_curve_and_area(rng, ax):
    known, unknown = rng.integers(0, 9, 40).astype(float), rng.integers(3, 12, 30).astype(float)
    known[0], unknown[:2] = np.nan, np.inf
    plots.roc(torch.tensor(known)[:, None], unknown, ax, kind="vacuitic")
    known = known[1:]
    curve = line(ax, "vacuitic").get_xydata()
    possible = {((known >= t).mean(), (unknown >= t).mean()) for t in np.unique([*known, *unknown])} | {(0.0, 0.0)}
    for x, y in curve:
        assert any(np.isclose([x, y], point).all() for point in possible)
    area = brute_auroc(known, unknown)
    assert trapezoid(curve[:, 1], curve[:, 0]) == pytest.approx(area)
    note = "1 of 40 risk_in values NaN, dropped"
    assert legend_texts(ax) == ["chance", f"vacuitic: AUROC {area:.3f}", note]


def test_roc_curves_of_several_risks_share_axes(ax):
    plots.roc([0, 1], [2, 3], ax, kind="epistemic")
    plots.roc([0, 1], [0, 1], ax, kind="aleatoric", label="noise")
    assert legend_texts(ax) == ["chance", "epistemic: AUROC 1.000", "noise: AUROC 0.500"]


@pytest.mark.parametrize("spread", [1.0, 4.0])  # linear and logarithmic axis
def test_ood_histogram_loses_no_input(rng, ax, spread):
    known, unknown = np.exp(spread * rng.normal(size=200)), np.exp(spread * rng.normal(size=77))
    known[3] = np.nan
    plots.ood_histogram(known, unknown, ax, labels=("train", "holiday"), n_bins=13)
    known = known[~np.isnan(known)]
    for values, patch in zip((known, unknown), (ax.patches[0], ax.patches[2]), strict=True):
        vertices = patch.get_xy()
        edges = np.unique(vertices[:, 0])
        assert len(edges) == 14
        expected = [np.mean((values >= a) & ((values < b) | (b == edges[-1]))) for a, b in itertools.pairwise(edges)]
        np.testing.assert_allclose(vertices[1:27:2, 1], expected)
        assert sum(expected) == pytest.approx(1)
    assert legend_texts(ax) == ["train (n = 199)", "holiday (n = 77)", "1 of 200 risk_in values not finite, dropped"]


def test_ood_histogram_of_one_value(ax):
    plots.ood_histogram([1.0], [1.0, 1.0], ax)
    assert max(ax.patches[0].get_xy()[:, 1]) == 1


def test_ood_is_both_side_by_side():
    left, right = plots.ood([0.0, 1.0], [2.0, 3.0], kind="vacuitic")
    assert legend_texts(left)[0] == "in distribution (n = 2)"
    assert legend_texts(right)[1] == "vacuitic: AUROC 1.000"
    assert left.figure is right.figure
    with pytest.raises(ValueError, match="risk_out"):
        plots.ood([0.0], [np.nan])
    assert plt.get_fignums() == [left.figure.number]  # the refused one is closed


# ------------------------------------------------------------------------------------------------------------- summary


def test_history_marks_the_best_epoch(ax):
    frame = pd.DataFrame({"epoch": [3, 1, 2, 4], "loss": [5, 9, 7, np.nan], "validation_loss": [8, 9.5, 7.25, 9]})
    before = frame.copy()
    plots.history(frame, ax)
    assert line(ax, "training loss").get_ydata()[:3].tolist() == [9, 7, 5]
    assert line(ax, "validation loss").get_xydata().tolist() == [[1, 9.5], [2, 7.25], [3, 8], [4, 9]]
    assert line(ax, "best").get_xydata().tolist() == [[2, 7.25]]
    assert legend_texts(ax)[2:] == ["best: 7.25 in epoch 2", "training loss: 1 of 4 not finite"]
    pd.testing.assert_frame_equal(frame, before)


def test_history_without_validation_and_over_orders_of_magnitude(ax):
    plots.history(pd.DataFrame({"epoch": [0, 1], "loss": [1e4, 1.0], "validation_loss": [np.nan, np.nan]}), ax)
    assert legend_texts(ax) == ["training loss", "best: 1 in epoch 1"]
    assert ax.get_yscale() == "log"


def test_history_of_a_training_that_diverged(ax):
    plots.history(pd.DataFrame({"epoch": [1, 2], "loss": [np.nan, np.inf]}), ax)
    assert legend_texts(ax) == ["training loss", "training loss: 2 of 2 not finite"]


def test_risk_split_shares_are_of_the_variance(ax):
    plots.risk_split([3, 0, 1, 5], [4, 0, 2, np.nan], labels=["a", "none", "c", "lost"], ax=ax)
    noise, model = ([(bar.get_x(), bar.get_width()) for bar in bars] for bars in ax.containers)
    np.testing.assert_allclose(noise, [(0, 36), (0, 0), (0, 20)])
    np.testing.assert_allclose(model, [(36, 64), (0, 0), (20, 80)])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "none", "c"]
    assert ax.yaxis_inverted()
    assert legend_texts(ax) == ["aleatoric", "epistemic", "1 of 4 risk values not finite, dropped"]


# ----------------------------------------------------------------------------------------------------------- bad input

ONES, NANS = np.ones(4), np.array([1, np.nan, 1, 1])
GRID = np.ones((3, 2))
NOT_A_PAIR: Any = ONES
NOT_AN_ARRAY: Any = {"aleatoric": 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.bands(ONES, np.ones(3)), r"x \[4\], prediction \[3\]"),
        (lambda: plots.bands(ONES, np.ones((4, 2))), r"prediction: expected shape .* found \[4, 2\]; pick one output"),
        (lambda: plots.bands(ONES, NANS), r"prediction: 1 of 4 values are NaN or infinite, the first at \[1\]"),
        (lambda: plots.bands(ONES, ONES, -ONES), "aleatoric: expected values of at least 0, found -1"),
        (lambda: plots.bands(ONES, ONES, level=0), "level: expected a positive"),
        (lambda: plots.bands(ONES, ONES, observed=(ONES, ONES[:2])), r"observed: .* x \[4\], y \[2\]"),
        (lambda: plots.bands(ONES, ONES, truth=NOT_A_PAIR), r"truth: expected a pair \(x, y\), found ndarray"),
        (lambda: plots.coverage(GRID, GRID, np.ones((3, 3))), r"prediction \[3, 2\], risk \[3, 2\], target \[3, 3\]"),
        (lambda: plots.coverage(ONES, -ONES, ONES), "risk: expected values of at least 0"),
        (lambda: plots.coverage(ONES, ONES * np.nan, ONES), "risk: none of its 4 values is a finite number"),
        (lambda: plots.coverage([], [], []), r"prediction: nothing to draw, its shape is \[0\]"),
        (lambda: plots.risk_against_error(ONES, -ONES), "error: expected values of at least 0"),
        (lambda: plots.risk_against_error(ONES, ONES, kind="both"), "kind: expected one of aleatoric, .* found 'both'"),
        (lambda: plots.risk_against_error(ONES, ONES, n_bins=0), "n_bins: expected at least 1, found 0"),
        (lambda: plots.predicted_against_true(ONES, np.ones(5)), r"prediction \[4\], target \[5\]"),
        (lambda: plots.predicted_against_true(ONES, ONES, np.ones(5)), r"prediction \[4\], risk \[5\]"),
        (lambda: plots.reliability(GRID, [0, 1]), r"found probabilities \[3, 2\], target \[2\]"),
        (lambda: plots.reliability(GRID, [0, 1, 1]), r"a sum of 2 in row 0; pass logits.softmax"),
        (lambda: plots.reliability(GRID / 2, [0, 1, 2]), "expected integers from 0 to 1, found values from 0 to 2"),
        (lambda: plots.reliability(GRID / 2, [0, 1, 1], 0), "n_bins: expected at least 1"),
        (lambda: plots.decision_map(GRID, GRID, GRID.T), r"xx \[3, 2\], yy \[3, 2\], value \[2, 3\]"),
        (lambda: plots.decision_map(GRID, GRID, GRID, points=(GRID, [1])), r"points: .* found x \[3, 2\], y \[1\]"),
        (lambda: plots.decision_map(GRID, GRID, GRID * np.nan), "value: none of its 6 values"),
        (lambda: plots.ood_histogram(GRID, ONES), r"risk_in: expected shape \[n\]"),
        (lambda: plots.ood_histogram(ONES, ONES, n_bins=0), "n_bins: expected at least 1"),
        (lambda: plots.roc(ONES, ONES, kind="sum"), "kind: expected one of"),
        (lambda: plots.roc(ONES, ONES * np.nan), "risk_out: none of its 4 values"),
        (lambda: plots.history(pd.DataFrame({"step": [1]})), "no column epoch or loss, found step"),
        (lambda: plots.history(pd.DataFrame({"epoch": [], "loss": []})), "nothing to draw"),
        (lambda: plots.risk_split(ONES, ONES, labels=["a"]), "labels: expected 4, one for each case, found 1"),
        (lambda: plots.risk_split(ONES, -ONES), "epistemic: expected values of at least 0"),
    ],
)
def test_bad_input_is_refused_before_a_figure_is_made(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert plt.get_fignums() == []


def test_what_is_no_array_is_refused_by_type():
    with pytest.raises(
        TypeError, match=r"risk: expected a tensor or an array of numbers, found dict .* risk\.epistemic"
    ):
        plots.coverage([1.0], NOT_AN_ARRAY, [1.0])
