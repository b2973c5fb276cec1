"""Figures of classes, detection, abstention and training: the drawn values equal an independent computation."""

from __future__ import annotations

import itertools
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from helpers import plotting
from helpers.plotting import N, legend_texts, line, probabilities
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.integrate import trapezoid

from workbench import Risk, calibration, metrics, plots, sculpt

ax, rng, untouched = plotting.ax, plotting.rng, plotting.untouched  # the fixtures


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


def test_reliability_puts_shares_of_voters_in_the_bins_of_the_metric(ax):
    votes = torch.arange(6, 10)  # of ten, each on the edge of a bin
    probs, y = torch.stack([votes, 10 - votes], -1).float() / 10, torch.tensor([0, 0, 0, 1])
    plots.reliability(probs, y, n_bins=10, ax=ax)
    np.testing.assert_allclose(line(ax, "ECE").get_xdata(), [0.6, 0.7, 0.8, 0.9], rtol=1e-6)
    assert f"ECE {metrics.ece(probs, y, n_bins=10).item():.3f} (n = 4)" in legend_texts(ax)


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


@pytest.mark.parametrize(
    ("limits", "arrows"), [(None, "neither"), ((0, 5), "neither"), ((0, 4), "max"), ((2, 9), "min"), ((2, 3), "both")]
)
def test_colour_bar_of_decision_map_says_where_values_are_beyond_it(ax, limits, arrows):
    xx, yy = np.meshgrid([0, 1, 2], [0, 1])
    plots.decision_map(xx, yy, np.array([[1, np.nan, 2], [3, 4, 5]]), ax, limits=limits)
    assert ax.collections[0].colorbar.extend == arrows


def test_decision_map_names_the_classes_of_its_points(rng, ax):
    xx, yy = np.meshgrid([0, 1, 2], [0, 1])
    points = (rng.normal(size=(20, 2)), np.arange(20) % 2 * 2)
    plots.decision_map(xx, yy, xx, ax, points=points, classes=("cat", "dog", "hare"))
    assert legend_texts(ax) == ["cat", "hare"]
    with pytest.raises(ValueError, match="classes: 2 names, but a label of points is 2"):
        plots.decision_map(xx, yy, xx, points=points, classes=("cat", "dog"))


@pytest.mark.parametrize(("shift", "note"), [(0.0, "log scale"), (2.0, "log scale above")])
def test_decision_map_of_many_orders_of_magnitude_is_logarithmic_and_says_so(ax, shift, note):
    xx, yy = np.meshgrid(np.linspace(-6, 6, 9), np.linspace(-6, 6, 9))
    value = np.exp((xx**2 + yy**2) / 3) - shift
    plots.decision_map(xx, yy, value, ax, label="risk")
    colours = ax.collections[0].norm(value)
    assert (colours.min(), colours.max()) == (0, 1)
    assert 0.1 < np.median(np.asarray(colours)) < 0.9  # in proportion, the median would be 1e-7
    assert ax.figure.axes[1].get_ylabel().startswith(f"risk, {note}")


def test_decision_map_of_many_small_and_some_large_values_is_in_proportion(ax):
    """As entropies are: those near zero differ by orders of magnitude that say nothing."""
    xx, yy = np.meshgrid(np.linspace(0, 9, 10), np.linspace(0, 9, 10))
    plots.decision_map(xx, yy, np.where(xx < 8, 10.0 ** (-xx - 1), 0.5), ax, label="risk")
    assert ax.figure.axes[1].get_ylabel() == "risk"


@pytest.mark.parametrize("value", [[1.0, 2, 50, 99], [0.0, 0, 0, 1e9], [3.0, 3, 3, 3]])
def test_decision_map_of_one_order_or_mostly_one_value_is_in_proportion(ax, value):
    xx, yy = np.meshgrid([0, 1], [0, 1])
    plots.decision_map(xx, yy, value, ax, label="risk")
    assert ax.collections[0].norm(float(np.mean([min(value), max(value)]))) in (0.5, 0)
    assert ax.figure.axes[1].get_ylabel() == "risk"


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


# ----------------------------------------------------------------------------------------------------------- selective


def test_risk_coverage_is_the_mean_error_of_the_rows_answered(rng, ax):
    risk, error = rng.random(N), rng.random(N) ** 2
    plots.risk_coverage(risk, error, ax, kind="epistemic", unit="K")
    ordered, best = error[np.argsort(risk)], np.sort(error)
    means = [ordered[: k + 1].mean() for k in range(N)]
    drawn = line(ax, "epistemic")
    np.testing.assert_allclose(drawn.get_xdata(), np.arange(1, N + 1) / N)
    np.testing.assert_allclose(drawn.get_ydata(), means)
    np.testing.assert_allclose(line(ax, "best order").get_ydata(), [best[: k + 1].mean() for k in range(N)])
    np.testing.assert_allclose(line(ax, "random order").get_ydata(), error.mean())
    assert drawn.get_color() == plots.COLOURS["epistemic"]
    assert f"epistemic: AURC {np.mean(means):.3g}" in legend_texts(ax)
    assert ax.get_ylabel() == "mean error of rows answered (K)"
    assert ax.get_ylim()[0] <= 0


def test_risk_coverage_of_several_risks_shares_axes_and_drops_nan(rng, ax):
    error = rng.random(N)
    plots.risk_coverage(error, error, ax)
    plots.risk_coverage(np.r_[np.nan, np.inf, np.ones(N - 2)], error, ax, kind="vacuitic", label="constant")
    texts = legend_texts(ax)
    assert texts.count("best order") == 1
    assert "1 of 60 risk values NaN, dropped" in texts
    kept = torch.as_tensor(np.r_[1.0, np.zeros(N - 2)])
    wanted = metrics.aurc(kept, torch.as_tensor(error[1:])).item()
    assert f"constant: AURC {wanted:.3g}" in texts


def test_risk_coverage_draws_the_curve_of_selective(ax):
    risk, error = torch.tensor([0.5, 0.1, 0.5]), torch.tensor([1.0, 0.0, 0.0])
    with torch.random.fork_rng():
        wrapped = sculpt.Wrapper()(torch.nn.Linear(1, 1))
    chosen = calibration.Selective(wrapped, "total", risk, error)
    plots.risk_coverage(chosen.risk, chosen.error, ax)
    np.testing.assert_allclose(line(ax, "total").get_xydata(), torch.stack(list(chosen.curve), 1))


def test_sparsification_draws_the_curves_and_numbers_of_the_metrics(rng, ax):
    error = torch.as_tensor(rng.random((3, 4, 5)) ** 2)
    risk = Risk(aleatoric=torch.as_tensor(rng.random((3, 4, 5))), total=error + 0.1, vacuitic=torch.zeros(3))
    keep = torch.as_tensor(rng.random((3, 4, 5)) < 0.7)
    plots.sparsification(risk, error, ax, mask=keep)
    errors, n = error[keep].numpy(), int(keep.sum())

    def left(order):  # from all rows to one, of those in rising order
        return [errors[order][: n - k].mean() / errors.mean() for k in range(n)]

    by = risk.aleatoric[keep].numpy()
    drawn, oracle = line(ax, "aleatoric"), line(ax, "oracle")
    np.testing.assert_allclose(drawn.get_xdata(), np.arange(n) / n, atol=1e-12)
    np.testing.assert_allclose(drawn.get_ydata(), left(np.argsort(by)))
    np.testing.assert_allclose(oracle.get_ydata(), left(np.argsort(errors)))
    np.testing.assert_allclose(line(ax, "random order").get_ydata(), 1)
    assert drawn.get_color() == plots.COLOURS["aleatoric"]
    area = np.mean(np.array(left(np.argsort(by))) - left(np.argsort(errors)))
    assert f"aleatoric: AUSE {area:.3g}" in legend_texts(ax)
    assert f"aleatoric: AUSE {metrics.ause(risk.aleatoric, error, mask=keep).item():.3g}" in legend_texts(ax)
    assert "total: AUSE 0" in legend_texts(ax)
    assert not any("vacuitic" in text for text in legend_texts(ax))  # one number an image


def test_sparsification_of_many_pixels_draws_few_points(rng, ax):
    risk, error = rng.random(20_000), rng.random(20_000)
    plots.sparsification({"epistemic": risk}, error, ax)
    drawn = line(ax, "epistemic")
    curve = metrics.sparsification_curve(risk, error)
    assert len(drawn.get_xdata()) == 1000
    np.testing.assert_allclose(drawn.get_ydata()[[0, -1]], curve.error[[0, -1]])


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


@pytest.mark.slow
def test_names_of_many_cases_have_lines_of_their_own(ax):
    """Thousands of bars, numbers and names would lie on each other, and take minutes to draw."""
    noise = np.linspace(0, 1, 2000)
    plots.risk_split(noise, 1 - noise, labels=[f"case {i}" for i in range(2000)], ax=ax)
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == [f"case {i}" for i in range(0, 2000, 100)]
    assert list(ax.get_yticks()) == list(range(0, 2000, 100))
    assert not ax.texts
    share = 100 * noise**2 / (noise**2 + (1 - noise) ** 2)
    for shape, ends in zip(ax.patches, (share, np.full(2000, 100.0)), strict=True):  # one for each risk
        np.testing.assert_allclose(shape.get_data().values, ends)


def test_all_risks_on_one_axis_and_the_lowest_named(ax):
    """Of a Risk each kind has its curve; the one in the order of the errors is the best there is."""
    error = torch.rand(40, generator=torch.Generator().manual_seed(0))
    noise = torch.rand(40, generator=torch.Generator().manual_seed(1))
    risk = Risk(aleatoric=noise, epistemic=3 * error, vacuitic=torch.zeros(40, 2), total=error + 5)
    plots.risk_coverage(risk, error[:, None], ax, unit="K")
    labels = ax.get_legend_handles_labels()[1]
    best = metrics.aurc(error, error).item()
    assert labels == [
        "random order",
        "best order",
        f"aleatoric: AURC {metrics.aurc(noise, error).item():.3g}",
        f"epistemic: AURC {best:.3g}, lowest",  # both rank rows alike
        f"total: AURC {best:.3g}, lowest",
    ]
    curves = {line.get_label().partition(":")[0]: line.get_ydata() for line in ax.lines}
    np.testing.assert_array_equal(curves["epistemic"], curves["best order"])
    with pytest.raises(ValueError, match="risk is that of one"):
        plots.risk_coverage(risk, {"a": error}, ax)


def test_areas_of_several_risks_are_of_the_same_rows(ax):
    error = np.array([1.0, 2.0, 3.0, 4.0])
    risk = Risk(aleatoric=torch.tensor([1.0, 2.0, 3.0, np.nan]), epistemic=torch.tensor([4.0, 3.0, 2.0, 1.0]))
    plots.risk_coverage(risk, error, ax)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    wanted = metrics.aurc(torch.tensor([4.0, 3.0, 2.0]), torch.tensor([1.0, 2.0, 3.0])).item()
    assert f"epistemic: AURC {wanted:.3g}" in labels
    assert "1 of 4 rows with a NaN risk, dropped" in labels


@pytest.mark.parametrize("width", [3.4, 4.2, 5.0, 6.4])
def test_the_legend_lies_inside_narrow_axes(width: float) -> None:
    draw = torch.Generator().manual_seed(0)
    risk = Risk(**{name: torch.rand(60, generator=draw) for name in ("aleatoric", "epistemic", "vacuitic", "total")})
    figure = Figure(figsize=(width, 3.6), layout="constrained")
    ax = plots.risk_coverage(risk, 50 * torch.rand(60, generator=draw), ax=figure.subplots())
    FigureCanvasAgg(figure).draw()
    box, room = ax.get_legend().get_window_extent(), ax.get_window_extent()
    assert room.x0 <= box.x0
    assert box.x1 <= room.x1
    assert room.width > 0.6 * figure.bbox.width


@pytest.mark.parametrize(("width", "layouts"), [(12.0, 0), (14.0, 1)])
def test_a_figure_is_laid_out_for_a_legend_only_where_that_can_make_room(width: float, layouts: int) -> None:
    """Two columns of the legend are wider than a panel as it is: a layout may help in wide panels, in narrow ones none does."""
    draw = torch.Generator().manual_seed(0)
    figure = Figure(figsize=(width, 4), layout="constrained")
    executed: list[Any] = []
    engine: Any = figure.get_layout_engine()
    execute = engine.execute
    engine.execute = lambda drawn: executed.append(drawn) or execute(drawn)
    for ax in figure.subplots(1, 3):
        plots.risk_against_error(torch.rand(60, generator=draw), torch.rand(60, generator=draw), ax, kind="total")

    assert len(executed) == layouts


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.3), (0.6, 9.0), (100.0, 8000.0), (3.0, 3000.0)])
def test_numbers_along_a_logarithmic_axis_do_not_overlap(low: float, high: float) -> None:
    draw = torch.Generator().manual_seed(0)
    risk = low * (high / low) ** torch.rand(89, generator=draw)
    figure = Figure(figsize=(4.1, 3.7), layout="constrained")
    ax = plots.risk_against_error(risk, torch.exp(3 * torch.randn(89, generator=draw)), figure.subplots())
    FigureCanvasAgg(figure).draw()
    assert ax.get_xscale() == ax.get_yscale() == "log"
    left, right = ax.get_xlim()
    labels = [
        label
        for minor in (False, True)
        for place, label in zip(ax.get_xticks(minor=minor), ax.get_xticklabels(minor=minor), strict=True)
        if label.get_text() and left <= place <= right
    ]
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.x0)
    assert len(boxes) >= 2
    assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))


def nodes(value):
    """Return a grid, and on it values of which one is another."""
    xx, yy = np.meshgrid(np.linspace(-1, 1, 20), np.linspace(-1, 1, 10))
    values = xx + 2
    values[0, 0] = value
    return xx, yy, values


@pytest.mark.slow
def test_huge_values_are_drawn_or_refused(ax):
    xx, yy, values = nodes(1e300)  # would be on a logarithmic scale
    with pytest.raises(ValueError, match=r"value: colours can't show numbers from 1 to 1e\+300; give limits="):
        plots.decision_map(xx, yy, values, ax=ax)
    with pytest.raises(ValueError, match=r"value: colours can't show numbers from -1\.7e"):
        plots.decision_map(xx, yy, 1.7e308 * xx, ax=ax)
    with pytest.raises(ValueError, match=r"limits: colours can't show numbers from -1e\+308 to 1e\+308"):
        plots.decision_map(xx, yy, xx, limits=(-1e308, 1e308), ax=ax)
    with pytest.raises(ValueError, match=r"value: colours can't show numbers from 1e-300 to 3e-300"):
        plots.decision_map(xx, yy, 1e-300 * (xx + 2), ax=ax)
    for value, options in (
        (values, {"limits": (0, 3)}),
        (1e300 * xx, {}),
        (nodes(1e100)[2], {}),
        (nodes(1e200)[2] - 2, {}),
        (0 * xx, {}),
    ):
        figure = plots.decision_map(xx, yy, value, **options).figure
        figure.canvas.draw()
        mesh = figure.axes[0].collections[0]
        colours = mesh.to_rgba(mesh.get_array()).reshape(-1, 4)
        shown = np.clip(value, *options.get("limits", (-np.inf, np.inf))).ravel()
        order = np.argsort(shown)
        assert np.isfinite(colours).all()
        assert (np.diff(mesh.norm(shown[order])) >= 0).all()
