"""Figures as inline SVG in the theme's colours, and as PNG; global state is unchanged."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest

from workbench import plots
from workbench.widgets.common import pictures
from workbench.widgets.common.pictures import INK, Spot, new_figure, paint, png, svg


def curve(n=50):
    figure = new_figure(5, 3)
    ax = paint(figure.subplots())
    x = np.linspace(-3, 3, n)
    noise = np.random.default_rng(0).normal(size=(2, 400))
    plots.bands(x, x**2, np.ones(n), np.abs(x), np.abs(x), observed=(noise[0], noise[1]), xlabel="length (m)", ax=ax)
    return figure, ax


@pytest.mark.slow
def test_svg_is_well_formed_themed_and_has_no_style_for_the_page():
    before = dict(mpl.rcParams)
    figure, _ = curve()
    text = svg(figure, 'a "curve" & more')
    root = ET.fromstring(text)[0]
    assert text.startswith('<div class="wb-figure" style="display:none">')  # for where styles are taken away
    assert ".wb-figure{display:block!important}" in pictures.STYLE
    assert root.get("aria-label") == 'a "curve" & more'
    assert dict(mpl.rcParams) == before
    assert "<style" not in text
    assert "<script" not in text
    assert INK not in text
    assert "http" not in text.replace("http://www.w3.org/", "")
    assert "var(--i)" in text
    assert "--i:var(--jp-ui-font-color1,currentColor)" in text
    assert len(text) < 60_000  # the 400 points are pixels


@pytest.mark.slow
def test_text_is_text_where_it_was_drawn():
    figure, ax = curve()
    root = ET.fromstring(svg(figure, "a curve"))
    labels = {e.text: e for e in root.iter("{http://www.w3.org/2000/svg}text")}
    assert "length (m)" in labels
    assert "prediction" in labels
    label = labels["length (m)"]
    x, y = map(float, re.match(r"translate\(([\d.]+) ([\d.]+)\)", label.get("transform")).groups())
    box = ax.xaxis.label.get_window_extent()
    scale = 72 / figure.dpi
    assert x == pytest.approx(box.x0 * scale, abs=1.5)
    assert y == pytest.approx(3 * 72 - box.y0 * scale, abs=4)
    assert float(label.get("textLength")) == pytest.approx(box.width * scale, rel=0.12)


def test_text_keeps_its_spaces():
    figure = new_figure(3, 2)
    paint(figure.subplots()).set_title("epistemic: AURC 3.81; n = 5")
    assert ">epistemic: AURC 3.81; n = 5<" in svg(figure, "a: b")


@pytest.mark.slow
def test_formulas_stay_glyphs_with_their_definitions():
    figure = new_figure(3, 2)
    ax = paint(figure.subplots())
    ax.plot([1, 2], [1e-5, 1e5])
    ax.set_yscale("log")
    text = svg(figure, "powers of ten")
    used, defined = set(re.findall(r'href="#([\w-]+)"', text)), set(re.findall(r'id="([\w-]+)"', text))
    assert any(name.startswith("DejaVu") for name in used)
    assert used <= defined


def test_spots_lie_where_their_data_are():
    figure = new_figure(4, 4)
    ax = paint(figure.subplots())
    ax.set(xlim=(0, 10), ylim=(0, 10))
    text = svg(
        figure, "spots", [Spot(ax, 5, 5, ["<b>", "two"]), Spot(ax, 5, None, ["column"], 2), Spot(ax, 50, 5, ["off"])]
    )
    assert text.count('class="wb-spot"') == 2
    assert "&lt;b&gt;" in text
    box = ax.get_window_extent()
    scale = 72 / figure.dpi
    cx, cy = map(float, re.search(r'cx="([\d.]+)" cy="([\d.]+)"', text).groups())
    assert cx == pytest.approx((box.x0 + box.x1) / 2 * scale, abs=0.1)
    assert cy == pytest.approx(4 * 72 - (box.y0 + box.y1) / 2 * scale, abs=0.1)
    width = float(re.search(r'style="stroke:none" x="[\d.]+" y="[\d.]+" width="([\d.]+)"', text)[1])
    assert width == pytest.approx(box.width * scale * 0.2, abs=0.2)


@pytest.mark.slow
def test_png_is_white_and_not_known_to_pyplot():
    import matplotlib.pyplot as plt
    from PIL import Image

    open_before = plt.get_fignums()
    figure, _ = curve()
    image = Image.open(io.BytesIO(png(figure, dpi=50))).convert("RGB")
    assert image.size == (250, 150)
    assert image.getpixel((0, 0)) == (255, 255, 255)
    assert plt.get_fignums() == open_before


@pytest.mark.slow
def test_dark_marks_keep_their_colour():
    figure = new_figure(3, 3)
    ax = paint(figure.subplots())
    xx, yy = np.meshgrid(np.linspace(0, 1, 5), np.linspace(0, 1, 5))
    points = (np.random.default_rng(0).random((20, 2)), np.arange(20) % 2)
    plots.decision_map(xx, yy, xx, ax, points=points)
    assert "#000001" in svg(figure, "a map")


def test_show_has_html_and_png_and_says_what_it_is(monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **options: shown.append((data, options)))
    figure, _ = curve()
    pictures.display_static("<p>page</p>", figure, "a curve", dpi=40)
    ((data, options),) = shown
    assert options["raw"] is True
    assert data["text/plain"] == "a curve"
    assert data["text/html"].startswith('<div class="wb-static tex2jax_ignore mathjax_ignore"><style>')
    assert data["image/png"] in data["text/html"]  # what is left where styles are taken away
    assert "<script" not in data["text/html"]
