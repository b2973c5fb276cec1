"""Figures in Axes of 3 x 2.4 inches, as in a paper: nothing is cut, and nothing lies on anything else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from helpers import plotting
from helpers.default_suite import one_in
from helpers.plotting import legend_texts
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.transforms import Bbox

from workbench import plots

untouched = plotting.untouched  # a fixture

N = 200
RNG = np.random.default_rng(0)
X, RISK, NOISE = RNG.normal(size=N), RNG.random(N) + 0.1, RNG.normal(size=N)
Y = X + RISK * NOISE
GRID = np.linspace(-3, 3, N)
P = RNG.dirichlet(np.full(4, 0.5), N)
XX, YY = np.meshgrid(np.linspace(-2, 2, 7), np.linspace(-1, 1, 5))
EPOCHS = np.arange(1, 41)
LOSSES = pd.DataFrame({"epoch": EPOCHS, "loss": 4 - EPOCHS / 12, "validation_loss": 4.2 - EPOCHS / 14})
UNIT = "kWh per square metre and year"
LONG = "annual heating demand per square metre of floor area"
NAMES = [f"{LONG} {k}" for k in range(10)]
MODELS = [f"vote(n_voters={k}) + sculpt(distribution=StudentT)" for k in range(5)]
WORDS = [
    f" {word}"
    for word in ["The", "quick", "brown", "fox", "jumps", "over", "the", "internationalization", "of", "dogs"]
]
HALF = np.where(X > 0, np.nan, RISK)

KINDS = {kind: np.abs(X - Y) + RNG.random(N) * k for k, kind in enumerate(plots.COLOURS)}

DRAW: dict[str, Callable[[Any], Any]] = {
    "bands": lambda ax: plots.bands(GRID, GRID, RISK, RISK, GRID, observed=(X, Y), truth=(GRID, GRID), ax=ax),
    "bands, long labels": lambda ax: plots.bands(GRID, GRID, RISK, xlabel=f"{LONG} ({UNIT})", ylabel=LONG, ax=ax),
    "coverage": lambda ax: plots.coverage(X, RISK, Y, ax),
    "coverage of few": lambda ax: plots.coverage(X, HALF, Y, ax),
    "coverage of one": lambda ax: plots.coverage([1.0], [1.0], [1.5], ax),
    "coverage_by_step": lambda ax: plots.coverage_by_step(0 * XX - 1, 0 * XX + 1, XX, ax, label=MODELS[0]),
    "coverage_over_time": lambda ax: plots.coverage_over_time(0 * X - 1, 0 * X + 1, X, 20, ax),
    "decision_map": lambda ax: plots.decision_map(XX, YY, XX * 1e12, ax, label=LONG),
    "decision_map with points": lambda ax: plots.decision_map(XX, YY, XX, ax, points=(np.stack([X, Y], 1), X > 0)),
    "fan": lambda ax: plots.fan(RNG.normal(size=(50, 6)), ax, past=X[:5], truth=X[:6], unit=UNIT),
    "history": lambda ax: plots.history(LOSSES, ax),
    "history that rises": lambda ax: plots.history(LOSSES.assign(loss=EPOCHS, validation_loss=EPOCHS + 1.0), ax),
    "history of one": lambda ax: plots.history(LOSSES[:1], ax),
    "importance": lambda ax: plots.importance({"total": RISK[:10], "epistemic": X[:10] ** 2}, list("abcdefghij"), ax),
    "importance, long names": lambda ax: plots.importance({"total": RISK[:5], "epistemic": X[:5] ** 2}, NAMES[:5], ax),
    "importance, tiny": lambda ax: plots.importance({"error": 1e-13 * RISK[:3]}, list("abc"), ax, label=LONG),
    "ood_histogram": lambda ax: plots.ood_histogram(RISK, RISK + 1, ax, labels=(LONG, f"not {LONG}"), unit=UNIT),
    "predicted_against_true": lambda ax: plots.predicted_against_true(X, Y, RISK, ax, unit="MPa"),
    "predicted_against_true, long unit": lambda ax: plots.predicted_against_true(X, Y, HALF, ax, unit=UNIT),
    "predicted_against_true of many": lambda ax: plots.predicted_against_true(*np.tile([X, Y], 40), ax=ax),
    "reliability": lambda ax: plots.reliability(P, P.argmax(1), ax=ax),
    "reliability of one": lambda ax: plots.reliability(P[:1], [0], ax=ax),
    "reliability of models": lambda ax: plots.reliability(dict.fromkeys(MODELS, P), P.argmax(1), ax=ax),
    "risk_against_error": lambda ax: plots.risk_against_error(RISK, np.abs(X - Y), ax, unit=UNIT),
    "risk_against_error, all equal": lambda ax: plots.risk_against_error(np.ones(9), np.ones(9), ax),
    "risk_coverage": lambda ax: plots.risk_coverage(RISK, np.abs(X - Y), ax, unit=UNIT),
    "risk_coverage of models": lambda ax: plots.risk_coverage(dict.fromkeys(MODELS, RISK), np.abs(X - Y), ax),
    "risk_split": lambda ax: plots.risk_split(RISK[:6], np.abs(X[:6]), NAMES[:6], ax),
    "roc": lambda ax: plots.roc(RISK, RISK + 0.2, ax, kind="vacuitic"),
    "roc, long name": lambda ax: plots.roc(RISK + 0.2, RISK, ax, label=LONG),
    "roc, no better than chance": lambda ax: plots.roc(RISK, RISK, ax),
    "sparsification": lambda ax: plots.sparsification(KINDS, np.abs(X - Y), ax),
}


def drawn(draw: Callable[[Any], Any], size: tuple[float, float] = (3, 2.4), rows: int = 1, columns: int = 1) -> Any:
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for ax in axes.ravel():
        draw(ax)
    figure.canvas.draw()
    return figure


def texts_of(ax: Any) -> list[Any]:
    """Axis labels, title, legend and the tick labels in view."""
    shown = [
        label
        for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim()))
        for label, place in zip(axis.get_ticklabels(), axis.get_ticklocs(), strict=True)
        if min(limits) <= place <= max(limits)
    ]
    named = [ax.title, ax.xaxis.label, ax.yaxis.label, ax.xaxis.get_offset_text(), *shown]
    return [text for text in named if text.get_text()] + ([ax.get_legend()] if ax.get_legend() else [])


def covered(ax: Any) -> list[str]:
    """What the legend lies on, apart from lines of reference."""
    box = ax.get_legend().get_window_extent()
    labels = []
    for line in ax.lines:
        points = line.get_transform().transform(line.get_xydata())
        reference = line.get_label() in ("ideal", "chance") or line.get_label().startswith("_")
        if not reference and (
            box.count_contains(points)
            or line.get_transform().transform_path(line.get_path()).intersects_bbox(box, False)
        ):
            labels.append(line.get_label())
    for part in ax.collections:
        if isinstance(part, PathCollection):
            shown = Bbox.intersection(box, part.get_clip_box())  # points beyond a map are hidden
            points = part.get_offset_transform().transform(part.get_offsets())
            labels += ["point"] * (0 if shown is None else shown.count_contains(points))
        if isinstance(part, LineCollection):
            paths = [part.get_transform().transform_path(path) for path in part.get_paths()]
            labels += ["error bar" for path in paths if path.intersects_bbox(box, False)]
    return labels + ["bar" for bar in ax.patches if bar.get_window_extent().overlaps(box)]


@pytest.mark.parametrize("name", one_in(4, DRAW))
def test_small_axes_have_all_texts_and_room_for_the_data(name: str) -> None:
    figure = drawn(DRAW[name])
    page = figure.bbox
    for ax in figure.axes:
        texts = texts_of(ax)
        boxes = [text.get_window_extent() for text in texts]
        for text, box in zip(texts, boxes, strict=True):
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= page.x1 + 1 and box.y1 <= page.y1 + 1
            assert inside, (text, box, page)
        for (one, first), (other, second) in itertools.combinations(zip(texts, boxes, strict=True), 2):
            ticks = (
                one in ax.get_xticklabels() + ax.get_yticklabels()
                and other in ax.get_xticklabels() + ax.get_yticklabels()
            )
            assert ticks or not first.overlaps(second), (one, other)
    main = figure.axes[0]
    names = [label.get_window_extent() for label in main.get_yticklabels() if label.get_text().startswith("annual")]
    assert all(one.y0 > other.y1 - 2 for one, other in itertools.pairwise(names))
    assert main.get_window_extent().width > 0.3 * page.width
    assert main.get_window_extent().height > 0.3 * page.height
    if main.get_legend() is not None:
        assert covered(main) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bands, long labels", "predicted_against_true, long unit", "roc"])
def test_labels_in_a_grid_of_axes_do_not_meet(name: str) -> None:
    figure = drawn(DRAW[name], (6, 4.8), 2, 2)
    labels = [label.get_window_extent() for ax in figure.axes for label in (ax.xaxis.label, ax.yaxis.label)]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(labels, 2))
    assert min(box.x0 for box in labels) >= 0
    assert max(box.y1 for box in labels) <= figure.bbox.height


@pytest.mark.parametrize("size", [(3, 2.4), None, (10, 6)])
@pytest.mark.parametrize("many", [1, 10])
def test_words_stay_on_their_backgrounds(size: Any, many: int) -> None:
    words, risk = WORDS * many, np.linspace(0.1, 1, len(WORDS) * many)
    figure = plots.tokens(words, risk).figure if size is None else drawn(lambda ax: plots.tokens(words, risk, ax), size)
    figure.canvas.draw()
    ax = figure.axes[0]
    assert len(ax.texts) == len(ax.patches) == len(words)
    for text, background in zip(ax.texts, ax.patches, strict=True):
        letters, place = text.get_window_extent(), background.get_window_extent()
        slack = 1 + 0.15 * len(text.get_text())  # at this resolution letters are whole pixels wide
        assert place.x0 - slack <= letters.x0
        assert letters.x1 <= place.x1 + slack
        assert letters.height < 1.7 * place.height  # with the line spacing around letters


@pytest.mark.slow
def test_classes_and_units_of_maps_are_whole_and_apart() -> None:
    image, labels = np.ones((2, 24, 32)), np.arange(2 * 24 * 32).reshape(2, 24, 32) % 20
    figures = [
        plots.maps(image, labels, labels, classes=[f"{LONG} {k}" for k in range(20)])[0, 0].figure,
        plots.maps(image, 1e12 * image, 1e12 * labels, {"total": 1e12 * image}, unit=UNIT)[0, 0].figure,
    ]
    for figure in figures:
        figure.canvas.draw()
        texts = [part for ax in figure.axes for part in (ax.title, ax.xaxis.label) if part.get_text().strip()]
        boxes = [part.get_window_extent() for part in (*texts, *figure.legends)]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        assert min(box.x0 for box in boxes) >= 0
        assert max(box.x1 for box in boxes) <= figure.bbox.width
        assert min(box.y0 for box in boxes) >= 0
        assert figure.axes[0].get_window_extent().height > 50


@pytest.mark.slow
def test_targets_with_long_units_do_not_meet() -> None:
    both = np.stack([X, Y], 1)
    figure = plots.targets(both, both + 1, names=[LONG, "b"], units=[UNIT, UNIT])[0].figure
    figure.canvas.draw()
    parts = [part for ax in figure.axes for part in (ax.title, ax.xaxis.label, ax.yaxis.label, ax.get_legend())]
    boxes = [part.get_window_extent() for part in parts]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert max(box.x1 for box in boxes) <= figure.bbox.width


def test_points_beyond_a_map_stay_hidden() -> None:
    ax = drawn(DRAW["decision_map with points"]).axes[0]
    assert ax.get_ylim()[1] > YY.max()  # the legend had no room
    top = ax.transData.transform((0, YY.max()))[1]
    assert [points.get_clip_box().y1 for points in ax.collections[1:]] == pytest.approx([top, top])


def test_texts_beside_boxes_stay_on_the_image() -> None:
    corners = [[0, 0, 14, 14], [25, 0, 31, 23], [20, 12, 31, 23]]
    figure = drawn(
        lambda ax: plots.boxes(
            np.ones((24, 32)), corners, ax, labels=[0, 0, 1], classes=["car", LONG], scores=[0.9] * 3
        )
    )
    ax = figure.axes[0]
    assert ax.get_window_extent().width > 0.9 * figure.bbox.width
    for text in ax.texts:
        box = text.get_window_extent()
        assert box.x0 >= -1
        assert box.x1 <= figure.bbox.width + 1
        assert box.y1 <= figure.bbox.height + 1


def test_a_long_name_loses_only_its_middle() -> None:
    ax = drawn(DRAW["importance, long names"]).axes[0]
    for label in ax.get_yticklabels():
        start, end = label.get_text().replace("\n", " ").split("…") if "…" in label.get_text() else ("annual", "0")
        assert LONG.startswith(start)
        assert any(name.endswith(end) for name in NAMES)
    wide = plots.importance({"total": RISK[:5]}, NAMES[:5])  # a new figure has room for the names
    assert sorted(label.get_text() for label in wide.get_yticklabels()) == NAMES[:5]


def test_names_are_literal_where_those_of_the_axes_are() -> None:
    ax = plt.subplots(figsize=(3, 2.4), layout="constrained")[1]
    ax.xaxis.label.set_parse_math(False)  # as for names of any kind, which may be no formula at all
    plots.importance({"total": RISK[:2]}, [r"$\foo$", "b"], ax)
    ax.figure.canvas.draw()
    assert ax.get_yticklabels()[0].get_text() in (r"$\foo$", "b")


def test_letters_follow_the_settings_of_the_user() -> None:
    with plt.rc_context({"font.size": 7, "axes.labelsize": 6, "legend.fontsize": 5}):
        ax = plots.roc(RISK, RISK + 1)
        assert ax.xaxis.label.get_fontsize() == 6
        assert ax.get_xticklabels()[0].get_fontsize() == 7
        assert ax.get_legend().get_texts()[0].get_fontsize() == pytest.approx(4.5)


@pytest.mark.slow
def test_one_row_is_seen() -> None:
    ax = plots.bands([2.0], [1.0], [0.5], [0.5], [3.0])
    ax.figure.canvas.draw()
    (line,) = (line for line in ax.lines if line.get_label() == "prediction")
    assert np.ptp(line.get_xdata()) == 1
    assert all(np.ptp(part.get_paths()[0].vertices[:, 0]) == 1 for part in ax.collections[:2])
    bounds = [part.get_paths()[0].vertices[:, 1] for part in ax.collections[:3]]
    assert np.concatenate(bounds).max() == pytest.approx(1 + 2 * np.sqrt(0.5))
    for alone in (plots.risk_coverage([1.0], [1.0]), plots.sparsification([1.0], [1.0])):
        assert alone.lines[-1].get_marker() == "o"
    several = plots.bands([2.0], [1.0], [np.nan], [0.5])
    assert legend_texts(several)[-1] == "aleatoric: 1 of 1 not finite, left out"


def test_a_loss_between_gaps_is_seen() -> None:
    loss = np.where(EPOCHS % 2 == 0, np.nan, 1.0)
    ax = plots.history(pd.DataFrame({"epoch": np.arange(100), "loss": np.resize(loss, 100)}))
    assert ax.lines[0].get_marker() == "o"
