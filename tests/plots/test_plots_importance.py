"""Bars of importance and occlusion maps: drawn values, and refusals."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from helpers import plotting
from matplotlib.colors import to_hex

from workbench import plots

ax, untouched = plotting.ax, plotting.untouched  # the fixtures


def test_bars_have_the_lengths_that_were_given_highest_on_top(ax):
    values = {"aleatoric": [0.1, 0.2, 0.9, 0.0], "epistemic": [0.3, 0.8, 0.4, 0.1]}
    errors = {"aleatoric": [0.01, 0.02, 0.03, 0.04]}
    plots.importance(values, list("abcd"), ax, standard_error=errors, most=3)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["c", "b", "a"]
    blue, red = (container for container in ax.containers if hasattr(container, "patches"))
    assert [bar.get_width() for bar in blue] == [0.9, 0.2, 0.1]
    assert [bar.get_width() for bar in red] == [0.4, 0.8, 0.3]
    assert to_hex(blue[0].get_facecolor()).upper() == plots.COLOURS["aleatoric"]
    (lines,) = blue.errorbar.lines[2]
    assert [np.diff(segment[:, 0])[0] / 2 for segment in lines.get_segments()] == pytest.approx([0.03, 0.02, 0.01])
    assert red.errorbar is None
    bottom, top = ax.get_ylim()  # the highest on top, below the legend
    assert bottom == 2.5
    assert top < -0.5
    assert "3 of 4 columns" in [text.get_text() for text in ax.get_legend().get_texts()]


def test_what_does_not_vary_is_said_and_not_drawn_as_zero(ax):
    plots.importance({"aleatoric": [np.nan] * 2, "total": [0.0, 1.0]}, ["a", "b"], ax)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["total", "aleatoric: the same for all rows"]


def test_places_that_lower_and_raise_have_two_colours_and_none_has_none(ax):
    change = np.array([[0.0, 2.0], [-1.0, 0.0]])
    plots.occlusion_map(np.zeros((2, 2)), change, ax, kind="aleatoric", unit="nats")
    drawn = ax.images[1]
    np.testing.assert_array_equal(drawn.get_array(), change)
    assert drawn.get_clim() == (-2, 2)
    np.testing.assert_allclose(drawn.get_alpha(), 0.85 * np.abs(change) / 2)
    assert to_hex(drawn.cmap(1.0)).upper() == plots.COLOURS["aleatoric"]
    assert to_hex(drawn.cmap(0.0)).upper() == "#F0E442"
    assert ax.figure.axes[1].get_ylabel() == "less when covered (nats)"


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: plots.importance({"bias": [1.0]}, ["a"]), "found bias"),
        (lambda: plots.importance({}, ["a"]), "found {}"),
        (lambda: plots.importance({"total": [1.0]}, ["a", "b"]), r"expected 1 names.*found \['a', 'b'\]"),
        (lambda: plots.importance({"total": [1.0]}, 5), "expected 1 names.*found 5"),
        (lambda: plots.importance({3: [1.0], "bias": [1.0]}, ["a"]), "found 3, bias"),
        (lambda: plots.importance({"total": [1.0, np.nan]}, ["a", "b"]), "1 of 2 values are NaN"),
        (lambda: plots.importance({"total": [np.nan]}, ["a"]), "NaN for every column"),
        (lambda: plots.importance({"total": [1.0], "error": [1.0, 2.0]}, ["a"]), "shapes do not match"),
        (lambda: plots.importance({"total": [1.0]}, ["a"], standard_error={"error": [1.0]}), "error is not among"),
        (lambda: plots.importance({"total": [1.0]}, ["a"], standard_error={"total": [-1.0]}), "at least 0, found -1"),
        (lambda: plots.importance({"total": [1.0]}, ["a"], most=0), "most"),
        (lambda: plots.occlusion_map(np.ones((2, 2)), np.ones((2, 3))), "shapes do not match"),
        (lambda: plots.occlusion_map(np.ones((2, 2)), np.ones((2, 2)), kind="bias"), "found 'bias'"),
        (lambda: plots.occlusion_map(np.ones((2, 2)), np.full((2, 2), np.nan)), "NaN or infinite"),
        (lambda: plots.occlusion_map(np.ones((2, 2)), np.ones((2, 2)), strength=2), "strength"),
    ],
)
def test_what_is_refused(draw, said):
    with pytest.raises(ValueError, match=said):
        draw()
    assert plt.get_fignums() == []
