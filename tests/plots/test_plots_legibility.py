"""Figures of unusual data: texts stay inside, legends beside the data, and ticks where they mean something."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from helpers import plotting
from helpers.plotting import legend_texts

from workbench import plots
from workbench.risk import Risk

ax, untouched = plotting.ax, plotting.untouched  # the fixtures

N = 200
RNG = np.random.default_rng(0)
LONG = ["annual heating demand per square metre of floor area", "température", "c"]
SEVEN = [f"vote(n_voters={k}) + sculpt(distribution=StudentT)" for k in range(2, 9)]
Y, X = RNG.normal(size=N), RNG.normal(size=(N, 3))
P = RNG.dirichlet(np.full(4, 0.5), N)


def drawn(ax: Any) -> Any:
    ax.figure.canvas.draw()
    return ax.figure._get_renderer()


def covered(ax: Any) -> list[str]:
    """Lines and bars that the legend lies on."""
    drawn(ax)
    box = ax.get_legend().get_window_extent()
    lines = [line for line in ax.lines if line.get_label() not in ("ideal", "chance") and line.get_path().vertices.size]
    labels = [
        line.get_label()
        for line in lines
        if line.get_transform().transform_path(line.get_path()).intersects_bbox(box, False)
    ]
    return labels + ["bar" for bar in ax.patches if bar.get_width() and bar.get_window_extent().overlaps(box)]


LEGENDS: dict[str, Callable[[], Any]] = {
    "a risk that is too large": lambda: plots.coverage(Y, np.full(N, 3.0), np.zeros(N)),
    "a risk that is too small": lambda: plots.coverage(Y, np.full(N, 0.3), np.zeros(N)),
    "probabilities that are too low": lambda: plots.reliability(0.7 * P + 0.075, P.argmax(1)),
    "seven models": lambda: plots.reliability(
        {name: (P ** (0.3 * k)) / (P ** (0.3 * k)).sum(1, keepdims=True) for k, name in enumerate(SEVEN, 1)},
        P.argmax(1),
    ),
    "a risk that is lower on unknown inputs": lambda: plots.roc(Y + 2, Y),
    "bars of one length": lambda: plots.importance({"aleatoric": [1.0] * 14, "vacuitic": [1.0] * 14}, "abcdefghijklmn"),
}


@pytest.mark.parametrize("case", LEGENDS)
def test_a_legend_covers_no_data(case: str) -> None:
    assert covered(LEGENDS[case]()) == []


NAMED: dict[str, Callable[[], Any]] = {
    "importance": lambda: plots.importance({"aleatoric": [0.3, 0.2, 0.1]}, LONG),
    "risk_split": lambda: plots.risk_split([1, 2, 3], [3, 2, 1], LONG),
    "one target": lambda: plots.targets(X[:, :1], X[:, :1], names=LONG[:1])[0],
    "targets": lambda: plots.targets(X, X + 1, names=[LONG[0], LONG[0].replace(" ", "_"), "c"])[0],
}


@pytest.mark.parametrize("name", NAMED)
def test_long_names_stay_inside_and_apart(name: str) -> None:
    ax = NAMED[name]()
    renderer, figure = drawn(ax), ax.figure
    texts = [
        part
        for a in figure.axes
        for part in (a.title, a.xaxis.label, a.yaxis.label, a.get_legend(), *a.get_yticklabels())
    ]
    boxes = [
        text.get_window_extent(renderer)
        for text in texts
        if text is not None and getattr(text, "get_text", lambda: "legend")()
    ]
    assert min(box.x0 for box in boxes) >= 0
    assert max(box.x1 for box in boxes) <= figure.bbox.width
    titles = [a.title.get_window_extent(renderer) for a in figure.axes if a.title.get_text()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(titles))


@pytest.mark.slow
def test_no_share_above_one_has_a_tick() -> None:
    ends = np.full((N, 3), 1.5)
    by_step = over_time = None
    for name in SEVEN:
        by_step = plots.coverage_by_step(-ends, ends, X, by_step, label=name)
        over_time = plots.coverage_over_time(-ends, ends, X, 50, over_time, label=name)
    for ax in (by_step, over_time, LEGENDS["seven models"]()):
        drawn(ax)
        low, high = ax.get_ylim()
        ticks = [tick for tick in ax.get_yticks() if low <= tick <= high]
        assert high > 1.02
        assert len(ticks) >= 2
        assert max(ticks) < 1 + 1e-6


def test_steps_and_epochs_have_whole_numbers() -> None:
    one = pd.DataFrame({"epoch": [1], "loss": [2.0]})
    axes = [
        plots.history(one),
        plots.coverage_by_step([[-1.0]], [[1.0]], [[0.0]]),
        plots.fan(X[:, :1], past=[1.0, 2.0]),
    ]
    for ax in axes:
        low, high = ax.get_xlim()
        ticks = np.array([tick for tick in ax.get_xticks() if low <= tick <= high])
        assert 1 in ticks
        assert (ticks == ticks.round()).all()


def test_a_forecast_of_one_step_is_seen(ax: Any) -> None:
    plots.fan(X[:, :1], ax, truth=[0.5])
    drawn(ax)
    for band in ax.collections:
        points = band.get_paths()[0].vertices
        assert np.ptp(points[:, 0]) > 0
        low, high = np.quantile(X[:, 0], [0.05, 0.95] if band.get_label().startswith("90") else [0.25, 0.75])
        assert (points[:, 1].min(), points[:, 1].max()) == pytest.approx((low, high))
    assert all(np.ptp(line.get_xdata()) > 0 for line in ax.lines)


def test_a_single_window_is_seen() -> None:
    one, several = (plots.coverage_over_time(-X[:n] - 9, X[:n] + 9, X[:n], 5).lines[-1] for n in (5, 6))
    assert len(one.get_xdata()) == 1
    assert one.get_marker() == "o"
    assert several.get_marker() == "None"
    plt.close("all")


def test_labels_of_a_wide_range_on_both_sides_of_zero_are_apart() -> None:
    ax = plots.ood_histogram(Y, np.concatenate([Y + 3, [1e5, -1e3]]), kind="vacuitic")
    renderer = drawn(ax)
    low, high = ax.get_xlim()
    boxes = [
        label.get_window_extent(renderer)
        for tick, label in zip(ax.get_xticks(), ax.get_xticklabels(), strict=True)
        if low <= tick <= high
    ]
    assert len(boxes) > 3
    assert all(left.x1 + left.height / 2 < right.x0 for left, right in itertools.pairwise(boxes))


def test_more_classes_than_markers_look_alike(ax: Any) -> None:
    grid = np.meshgrid(np.linspace(-2, 2, 5), np.linspace(-2, 2, 5))
    plots.decision_map(*grid, grid[0], ax, points=(X[:, :2], np.arange(N) % 30))
    assert legend_texts(ax) == ["data of 30 classes"]
    drawn_points = [part for part in ax.collections if part.get_label() == "data of 30 classes"]
    assert len(drawn_points[0].get_offsets()) == N


def test_a_huge_risk_leaves_the_predictions_readable(ax: Any) -> None:
    risk = np.full(N, 0.1)
    risk[[3, 5]] = 1e5
    plots.predicted_against_true(Y + 0.1, Y, risk, ax)
    assert np.ptp(ax.get_ylim()) < 4 * np.ptp(Y)
    assert legend_texts(ax)[-1] == "2 error bars longer than drawn"


def test_usual_risks_are_drawn_whole(ax: Any) -> None:
    risk = np.abs(X[:, 0])
    plots.predicted_against_true(Y, Y, risk, ax)
    low, high = ax.get_ylim()
    assert low < (Y - risk).min()
    assert (Y + risk).max() < high
    assert "longer" not in "".join(legend_texts(ax))
    plt.close("all")


def test_what_is_one_or_the_same_is_said_so(ax: Any) -> None:
    assert legend_texts(plots.risk_against_error([1.0], [2.0], ax))[-1] == "mean of 1 bin"
    without_error = plots.risk_coverage(Risk(epistemic=torch.arange(9.0), total=torch.arange(9.0)), torch.zeros(9))
    assert legend_texts(without_error)[2:] == ["epistemic: AURC 0", "total: AURC 0"]  # none is the lowest
