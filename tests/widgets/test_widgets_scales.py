"""Images of several models in a comparison: a colour means the same number in all of them."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest
import torch
from helpers.map_rows import Depth, class_maps, rng, value_maps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch import nn

from workbench import data, plots, vote
from workbench.data import Data
from workbench.plots._scales import common_range
from workbench.widgets import Comparison
from workbench.widgets.common import pictures
from workbench.widgets.comparison import panels
from workbench.widgets.comparison.scales import shared


def compared(model, dataset, *wrappers):
    return Comparison(model, dataset, [*wrappers], epochs=2).start(block=True)


def moons():
    return data.toy.moons(n_train=60, n_test=30)


def small():
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))


def ends(findings, kept, kind):
    """The ends of the colours of a kind in the panel of a model, as drawn."""
    figure = Figure()
    panels.draw(figure, findings.view, kept.answers, "", findings.scales)
    if findings.view.kind == "maps":
        drawn = [ax.images[0].get_clim() for ax in figure.axes if ax.get_title().startswith(kind)]
    else:
        bars = [ax for ax in figure.axes if ax.get_ylabel().startswith(kind)]
        drawn = [ax._colorbar.mappable.get_clim() for ax in bars]
    return drawn[0] if drawn else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "make_data"), [(lambda: nn.Conv2d(3, 3, 1), class_maps), (Depth, value_maps), (small, moons)]
)
def test_panels_of_all_models_have_one_scale_a_kind(model, make_data):
    comparison = compared(model, make_data(), "vote(n_voters=4)", "sample", "vote(n_voters=2)")
    findings = comparison._findings
    scales = [ends(findings, kept, "epistemic") for kept in findings.present]
    scales = [limits for limits in scales if limits is not None]
    assert len(scales) == 3
    assert len(set(scales)) == 1
    tops = [np.quantile(k.answers.risk["epistemic"], 0.98) for k in findings.present if "epistemic" in k.answers.risk]
    assert scales[0] == (0.0, pytest.approx(max(tops)))
    assert "Colours of one kind are the same for all models." in findings.panel(findings.present[0])


@pytest.mark.slow
def test_a_panel_is_drawn_again_when_another_model_widens_the_scale():
    comparison = Comparison(Depth, value_maps(), ["vote(n_voters=2)", "sample"], epochs=1)
    comparison._repr_mimebundle_()
    rows = comparison.controls.rows
    rows["sample"].tick.value = False
    comparison.start(block=True)
    rows["sample"].tick.value = True
    comparison.start(block=True)
    pattern = r"epistemic</text>.*?>([-\d.e]+ to [-\d.e]+)"
    said = [re.search(pattern, rows[name].panel.value, re.S) for name in ("vote(n_voters=2)", "sample")]
    assert said[0][1] == said[1][1]


@pytest.mark.slow
def test_an_outlier_leaves_colours_for_the_others_and_is_named():
    findings = compared(Depth, value_maps(), "vote(n_voters=4)", "sample", "vote(n_voters=2)")._findings
    answers = [kept.answers for kept in findings.present]
    wild = dataclasses.replace(
        answers[2], y=1000 * answers[2].y, risk={name: 1000 * risk for name, risk in answers[2].risk.items()}
    )
    with_it, without = shared(findings.view, [*answers, wild]), shared(findings.view, answers)
    assert with_it == without
    figure = Figure()
    panels.draw(figure, findings.view, wild, "", with_it)
    title = next(ax.get_title() for ax in figure.axes if ax.get_title().startswith("epistemic"))
    assert f"here up to {float(wild.risk['epistemic'].max()):.2g}" in title
    # of two models neither is the usual one: both count
    assert shared(findings.view, [answers[2], wild])["epistemic"][1] > 100 * without["epistemic"][1]


@pytest.mark.parametrize(
    ("ranges", "wanted"),
    [
        ([(0, 1), (0, 2), (0, 90)], (0, 2)),
        ([(0, 1), (-90, 2), (0, 2)], (0, 2)),
        ([(0, 0), (0, 0), (0, 3)], (0, 3)),  # most say nothing: then the one that does has the colours
        ([(0, 1), (0, 90)], (0, 90)),
    ],
)
def test_the_range_of_several_models(ranges, wanted):
    assert common_range(ranges) == wanted


@pytest.mark.slow
def test_the_matrix_names_the_model_that_its_colours_do_not_hold():
    x = torch.rand(20, 1, 6, 8, generator=rng(0))
    models = {f"m{i}": vote.Wrapper(2)(Depth()) for i in range(4)}
    with torch.no_grad():
        for p in models["m3"].parameters():
            p.copy_(1000 * torch.randn(p.shape, generator=rng(1)))
    axes = plots.matrix(models, (x, x[:, 0]))
    tops = [ax.images[0].norm.vmax for ax in axes[1:, -1]]
    assert len(set(tops)) == 1
    assert tops[0] < 10
    labels = [ax.get_xlabel() for ax in axes[0, 0].figure.axes]
    assert any("epistemic" in label and "beyond it: m3 up to" in label for label in labels)


@pytest.mark.slow
def test_what_has_no_label_is_not_white_as_what_is_right_and_classes_have_one_colour_everywhere():
    comparison = compared(lambda: nn.Conv2d(3, 3, 1), class_maps(), "vote(n_voters=2)")
    figure = pictures.finish(comparison.matrix())
    errors = figure.axes[4]  # of the plain model, below the input
    assert errors.images[0].get_array().mask.any()
    assert to_hex(errors.get_facecolor(), keep_alpha=True) == "#999999ff"
    findings = comparison._findings
    panel = Figure()
    panels.draw(panel, findings.view, findings.present[0].answers, "", findings.scales)
    prediction = next(ax for ax in panel.axes if ax.get_title() == "prediction").images[0]
    of_matrix = figure.axes[5].images[0]
    for number in range(3):
        assert prediction.cmap(prediction.norm(number)) == of_matrix.cmap(of_matrix.norm(number))
    assert [text.get_text() for text in panel.legends[0].get_texts()] == ["road", "sky", "tree"]


@pytest.mark.slow
def test_points_of_a_table_are_seen_on_light_and_on_dark_pages():
    x = torch.randn(60, 4, generator=rng(0))
    comparison = compared(lambda: nn.Linear(4, 1), (x, x.sum(1)), "vote(n_voters=3)")
    figure = pictures.finish(comparison.matrix())
    drawn = [ax for ax in figure.axes if len(ax.collections) and len(ax.collections[0].get_offsets()) > 1]
    assert drawn
    assert {to_hex(ax.get_facecolor(), keep_alpha=True) for ax in drawn} == {"#bbbbbbff"}


@pytest.mark.slow
def test_letters_on_the_colours_of_a_text_stay_dark_on_dark_pages():
    x = torch.randint(0, 9, (40, 5), generator=rng(0))
    d = Data.from_arrays(x, x % 3, classes=3, task="classification")
    comparison = compared(lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)), d, "vote(n_voters=2)")
    figure = pictures.finish(comparison.matrix())
    words = [text for text in figure.axes[3].texts if text.get_text().isdigit()]
    assert len(words) == 5
    assert {to_hex(text.get_color()) for text in words} == {"#010101"}


@pytest.mark.slow
def test_curves_of_all_models_have_one_axis_that_holds_their_bands_and_the_data():
    comparison = compared(
        lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), data.toy.sine_gap(), "vote", "sculpt"
    )
    findings = comparison._findings
    limits = set()
    for kept in findings.present:
        figure = Figure()
        panels.draw(figure, findings.view, kept.answers, "", findings.scales)
        limits.add(figure.axes[0].get_ylim())
    assert len(limits) == 1
    (low, high) = limits.pop()
    sculpted = next(kept.answers for kept in findings.present if kept.name == "sculpt")
    assert low < float((sculpted.y - 2 * sculpted.risk["aleatoric"]).min())
    assert high > float((sculpted.y + 2 * sculpted.risk["aleatoric"]).max())
    assert low < float(findings.data.train.y.min())
    assert "The axis is the same for all models." in findings.panel(findings.present[0])


@pytest.mark.slow
def test_labels_of_colour_bars_are_whole_and_ticks_of_bars_lie_apart():
    x = torch.randn(60, 4, generator=rng(0))
    table = compared(lambda: nn.Linear(4, 1), (x, x.sum(1)), "neo").matrix()
    pictures.svg(table, "")
    assert "vacuitic risk\n(standardized)" in [ax.get_xlabel() for ax in table.axes]
    images = torch.rand(60, 1, 8, 8, generator=rng(1)), torch.arange(60) % 3
    strip = compared(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), images, "vote(n_voters=2)").matrix()
    strip.canvas.draw()
    for ax in strip.axes[-4:]:
        boxes = [
            label.get_window_extent() for label in ax.get_xticklabels() if label.get_text() and label.get_visible()
        ]
        boxes = [box for box in boxes if ax.bbox.x0 - 1 <= (box.x0 + box.x1) / 2 <= ax.bbox.x1 + 1]
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
