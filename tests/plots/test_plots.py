"""What all figures share: style, accepted and refused inputs, and no change to the caller's objects."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from helpers import plotting
from helpers.default_suite import one_in
from helpers.plotting import N, probabilities

from workbench import plots

ax, rng, untouched = plotting.ax, plotting.rng, plotting.untouched  # the fixtures


def calls(rng):
    """Every function once, with realistic input."""
    x, risk = rng.normal(size=N), rng.random(N) + 0.1
    p, y = probabilities(rng)
    xx, yy = np.meshgrid(np.linspace(-1, 1, 7), np.linspace(0, 1, 5))
    frame = pd.DataFrame({"epoch": range(4), "loss": [4.0, 3.0, 2.0, 1.0]})
    return {
        "boxes": lambda **k: plots.boxes(rng.random((8, 9)), [[1, 1, 5, 6]], spread=[[1, 1, 1, 1]], scores=[0.5], **k),
        "coverage_by_step": lambda **k: plots.coverage_by_step(xx - 1, xx + 1, xx, **k),
        "coverage_over_time": lambda **k: plots.coverage_over_time(xx - 1, xx + 1, xx, 5, **k),
        "fan": lambda **k: plots.fan(rng.normal(size=(50, 6)), past=x[:5], truth=x[:6], **k),
        "overlay": lambda **k: plots.overlay(rng.random((8, 9)), rng.random((8, 9)), **k),
        "tokens": lambda **k: plots.tokens([" a", " word"], risk[:2], **k),
        "bands": lambda **k: plots.bands(x, x**3, risk, risk, x, observed=(x, x), truth=(x, x**3), **k),
        "coverage": lambda **k: plots.coverage(x, risk, x + risk, **k),
        "decision_map": lambda **k: plots.decision_map(xx, yy, xx * yy, points=(np.stack([x, x], 1), x > 0), **k),
        "history": lambda **k: plots.history(frame, **k),
        "importance": lambda **k: plots.importance({"prediction": risk[:5], "epistemic": x[:5]}, "abcde", **k),
        "occlusion_map": lambda **k: plots.occlusion_map(rng.random((8, 9)), rng.normal(size=(8, 9)), **k),
        "ood_histogram": lambda **k: plots.ood_histogram(risk, risk + 1, **k),
        "predicted_against_true": lambda **k: plots.predicted_against_true(x, x + risk, risk, **k),
        "reliability": lambda **k: plots.reliability(p, y, **k),
        "risk_coverage": lambda **k: plots.risk_coverage(risk, risk**2, **k),
        "risk_against_error": lambda **k: plots.risk_against_error(risk, risk**2, **k),
        "risk_split": lambda **k: plots.risk_split(risk, risk[::-1], **k),
        "roc": lambda **k: plots.roc(risk, risk + 1, **k),
        "sparsification": lambda **k: plots.sparsification({"epistemic": risk, "total": x}, risk**2, **k),
    }


NAMES = sorted(set(plots.__all__) - {"COLOURS", "maps", "matrix", "ood", "targets"})
PICTURES = {"boxes", "occlusion_map", "overlay", "tokens"}  # they have no axes to read


@pytest.mark.parametrize("name", NAMES)
def test_given_axes_are_used_and_no_figure_is_left_open(name, rng, ax):
    assert calls(rng)[name](ax=ax) is ax
    assert plt.get_fignums() == []
    assert ax.get_xlabel() or name in PICTURES
    assert ax.get_ylabel() or name in {"importance", "risk_split", *PICTURES}  # which have names of cases there
    assert not ax.spines["top"].get_visible()
    ax.figure.canvas.draw()


@pytest.mark.parametrize("name", NAMES)
def test_without_axes_one_new_figure_is_made(name, rng):
    ax = calls(rng)[name]()
    assert plt.get_fignums() == [ax.figure.number]
    assert ax.figure.get_constrained_layout()


@pytest.mark.parametrize("name", one_in(2, sorted(set(NAMES) - PICTURES)))
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


@pytest.mark.slow
def test_dark_ground_keeps_text_and_lines_light(rng):
    with plt.style.context("dark_background"):
        for name, draw in calls(rng).items():
            ax = draw()
            for artist in ax.lines:
                light = matplotlib.colors.rgb_to_hsv(matplotlib.colors.to_rgb(artist.get_color()))[2]
                assert light > 0.5, name


@pytest.mark.parametrize("module", [module.name for module in pkgutil.iter_modules(plots.__path__)])
def test_examples_run(module):
    with torch.random.fork_rng(devices=[]):  # examples make models
        failed, tried = doctest.testmod(importlib.import_module(f"workbench.plots.{module}"))
    assert failed == 0
    assert tried > 0 or module.startswith("_")


def test_import_loads_no_heavy_library():
    heavy = "('matplotlib', 'pandas', 'scipy', 'sklearn')"
    code = f"import sys, workbench.plots; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


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
        (lambda: plots.bands(ONES, ONES, level=float("inf")), "level: expected a positive"),
        (lambda: plots.predicted_against_true(ONES, ONES, ONES, level=-1), "level: expected a finite number"),
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
        (lambda: plots.risk_coverage(ONES, ONES[:3]), r"risk \[4\], error \[3\]"),
        (lambda: plots.risk_coverage(ONES, NANS), "error: 1 of 4 values are NaN"),
        (lambda: plots.risk_coverage(ONES, -ONES), "error: expected values of at least 0"),
        (lambda: plots.risk_coverage(ONES, ONES, kind="sum"), "kind: expected one of"),
        (lambda: plots.sparsification(ONES, GRID), r"risk.total \[4\], error \[3, 2\]"),
        (lambda: plots.sparsification(NANS, ONES), "risk has 1 NaN values of 4"),
        (lambda: plots.sparsification(ONES, NANS), "error: 1 of 4 values are NaN"),
        (lambda: plots.sparsification(ONES, -ONES), "error: expected values of at least 0"),
        (lambda: plots.sparsification(ONES, 0 * ONES), "error: all 4 are 0"),
        (lambda: plots.sparsification({"sum": ONES}, ONES), "kind: expected one of"),
        (lambda: plots.sparsification({}, ONES), "risk: there is none"),
        (lambda: plots.sparsification(ONES, ONES, mask=0 * ONES), "mask: it leaves none of 4"),
        (lambda: plots.targets(ONES, ONES), r"expected \[n, targets\] of at most 24 targets, found \[4\]"),
        (lambda: plots.targets(GRID, GRID.T), r"prediction \[3, 2\], target \[2, 3\]"),
        (lambda: plots.targets(GRID, GRID, names=["a"]), "names: expected one for each of 2 targets, found 1"),
        (lambda: plots.targets(GRID, GRID, columns=0), "columns: expected at least 1, found 0"),
        (lambda: plots.targets(GRID, GRID, -GRID, names=["a", "b"]), "target a: risk: expected values of at least 0"),
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


SORTED = pd.Series([1.0, 2.0, 3.0], index=["a", "b", "c"])
TABLE = pd.DataFrame({"a": [0.5, 0.5, 0.5], "b": [0.5, 0.5, 0.5]}, index=SORTED.index)


@pytest.mark.parametrize(
    "call",
    [
        lambda y: plots.bands(SORTED, y),
        lambda y: plots.coverage(SORTED, SORTED, y),
        lambda y: plots.predicted_against_true(SORTED, y),
        lambda y: plots.predicted_against_true(SORTED, SORTED, y),
        lambda y: plots.targets(TABLE, TABLE.loc[y.index]),
        lambda y: plots.reliability(TABLE, (y > 1).astype(int)),
        lambda y: plots.risk_against_error(SORTED, y),
        lambda y: plots.risk_coverage(SORTED, y),
        lambda y: plots.risk_split(SORTED, y),
        lambda y: plots.sparsification(SORTED, y),
        lambda y: plots.coverage_by_step(TABLE, TABLE, TABLE.loc[y.index]),
    ],
)
def test_rows_of_different_indices_are_not_paired(call):
    call(SORTED)
    plt.close("all")
    with pytest.raises(ValueError, match=r"row 0 has index .* so that unrelated rows would be paired"):
        call(SORTED.iloc[::-1])
    assert plt.get_fignums() == []


def test_masked_values_are_missing(ax):
    risk = np.ma.masked_equal([1.0, 2.0, -999.0, 4.0], -999.0)
    plots.risk_coverage(risk, ONES, ax)
    assert "1 of 4 risk values NaN, dropped" in str([text.get_text() for text in ax.get_legend().get_texts()])


@pytest.mark.parametrize("values", [torch.ones(3, dtype=torch.complex64), np.ones(3, dtype=complex)])
def test_complex_numbers_are_refused(values) -> None:
    with pytest.raises(TypeError, match=r"prediction: expected real numbers, found .*complex.*; draw its abs\(\)"):
        plots.coverage(values, np.ones(3), np.ones(3))


def test_what_is_no_array_is_refused_by_type():
    with pytest.raises(
        TypeError, match=r"risk: expected a tensor or an array of numbers, found dict .* risk\.epistemic"
    ):
        plots.coverage([1.0], NOT_AN_ARRAY, [1.0])


@pytest.mark.parametrize("projection", ["polar", "3d"])
def test_axes_of_other_projections_are_refused_before_anything_is_drawn(projection):
    from matplotlib.figure import Figure

    ax = Figure().add_subplot(projection=projection)
    before = len(ax.get_children())
    for draw in (
        lambda: plots.bands([0, 1], [0, 1], [1, 1], ax=ax),
        lambda: plots.overlay(np.eye(3), np.eye(3), ax=ax),
    ):
        with pytest.raises(ValueError, match=f"ax: found Axes with the projection '{projection}'"):
            draw()
    assert len(ax.get_children()) == before


@pytest.mark.parametrize("name", [*sorted(PICTURES), "importance", "risk_split"])
def test_rows_and_pixels_lie_on_linear_axes_whatever_their_scale_was(name, ax):
    ax.set_yscale("log")
    if name in PICTURES or name == "risk_split":
        ax.set_xscale("log")
    calls(np.random.default_rng(3))[name](ax=ax)
    plain = calls(np.random.default_rng(3))[name](ax=matplotlib.figure.Figure(figsize=(6.4, 4.8)).subplots())
    assert (ax.get_xscale(), ax.get_yscale()) == (plain.get_xscale(), plain.get_yscale()) == ("linear", "linear")
    assert ax.get_ylim() == plain.get_ylim()
    assert ax.get_xlim() == pytest.approx(plain.get_xlim())
    ax.figure.canvas.draw()
