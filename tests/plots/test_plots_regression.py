"""Figures of real values: the drawn values equal an independent computation."""

from __future__ import annotations

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from helpers import plotting
from helpers.plotting import N, band, legend_texts, line
from scipy.stats import norm, spearmanr

from workbench import metrics, plots

ax, rng, untouched = plotting.ax, plotting.rng, plotting.untouched  # the fixtures


def test_bands_of_many_rows_draw_those_that_show(rng, ax):
    x = rng.random(100_000)
    y, risk = np.sin(x), np.full(x.size, 0.1)
    y[500], risk[700], risk[800] = 9.0, 20.0, np.nan
    plots.bands(x, y, risk, truth=(x, -y), observed=(x, y), ax=ax)
    drawn = line(ax, "prediction").get_xydata()
    assert len(drawn) < 25_000
    assert {tuple(point) for point in drawn.tolist()} <= set(zip(x.tolist(), y.tolist(), strict=True))
    assert (drawn[:, 0].min(), drawn[:, 0].max(), drawn[:, 1].max()) == (x.min(), x.max(), 9.0)
    assert (np.diff(drawn[:, 0]) > 0).all()
    assert line(ax, "truth").get_ydata().min() == -9.0
    edge = band(ax, "aleatoric")
    assert edge[:, 1].max() == pytest.approx(y[700] + 40)
    assert len(edge) < 50_000


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


@pytest.mark.slow
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
    levels = np.arange(1, 20) / 20  # those of the tables; at 0 and 1 no curve can be wrong
    inside = [((y - (half := norm.ppf(0.5 + p / 2) * risk) <= target) & (target <= y + half)).mean() for p in levels]
    gap = np.abs(inside - levels).mean()
    assert f"{gap:.3f}" != f"{np.abs(np.array(expected) - x).mean():.3f}"
    assert legend_texts(ax)[1:] == ["observed (n = 80)", f"calibration error {gap:.3f}"]
    assert legend_texts(ax)[2].endswith(f"{float(metrics.calibration_error(y, risk, target)):.3f}")


def test_coverage_of_zero_risk(ax):
    plots.coverage([1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 2], ax=ax)
    observed = line(ax, "observed").get_ydata()
    assert set(observed[:-1]) == {0.75}
    assert observed[-1] == 1


def test_bins_of_equal_risks_do_not_depend_on_the_order_of_the_rows(ax):
    risk = torch.tensor([0.0] * 30 + [1.0] * 30)  # such as votes that agree or do not
    error = torch.cat([torch.arange(30.0), torch.arange(30.0) + 5])
    plots.risk_against_error(risk, error, ax, n_bins=4)
    np.testing.assert_allclose(ax.lines[-1].get_ydata(), [14.5, 14.5, 19.5, 19.5])
    np.testing.assert_allclose(ax.lines[-1].get_xdata(), [0, 0, 1, 1])


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


@pytest.mark.slow
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


def test_several_targets_have_a_picture_each(rng):
    y, target = rng.normal(size=(2, N, 4)) * [1, 10, 100, 1000]
    risk = np.abs(rng.normal(size=(N, 4)))
    axes = plots.targets(y, torch.tensor(target), risk, names=list("abcd"), units=["K", "m", "s", ""], kind="epistemic")
    assert axes.shape == (4,)
    assert len(axes[0].figure.axes) == 4  # no empty ones
    for i, ax in enumerate(axes):
        np.testing.assert_array_equal(ax.collections[0].get_offsets(), np.stack([target[:, i], y[:, i]], 1))
        rmse = np.sqrt(np.mean((y[:, i] - target[:, i]) ** 2))
        assert any(
            text.startswith(f"RMSE {rmse:,.0f}" if rmse >= 999.5 else f"RMSE {rmse:.3g}") for text in legend_texts(ax)
        )
        assert ax.get_title() == "abcd"[i]
        assert np.ptp(ax.get_xlim()) < 20 * 10**i
    assert [ax.get_ylabel() for ax in axes[:2]] == ["prediction (K)", "prediction (m)"]
    assert axes[3].get_position().y0 < axes[0].get_position().y0  # three side by side


def test_what_targets_refuses_leaves_no_figure():
    with pytest.raises(ValueError, match="target 2: prediction: 1 of 3 values are NaN"):
        plots.targets([[1, 1], [1, np.nan], [1, 1]], np.ones((3, 2)))
    assert plt.get_fignums() == []
