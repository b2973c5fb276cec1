"""Positions of maps and images in a real JupyterLab: clicked, walked by keyboard and read, with several models side by side."""

from __future__ import annotations

import itertools
import re

from .appearance import LOOKED_AT, check
from .notebook import THEMES

MAPS = """
import torch
from torch import nn
from workbench import compose, fit, sculpt, vote
from workbench.data import Data
from workbench.outputs import Logits
from workbench.widgets import Explorer

torch.manual_seed(0)
x = torch.nn.functional.interpolate(torch.randn(60, 3, 4, 6), (16, 24), mode="bilinear")
y = (x[:, 0] > 0).long() + (x[:, 1] > 0.3).long()
y[torch.rand(y.shape) < 0.05] = 255
maps = Data.from_arrays(x, y, classes=["road", "sky", "tree"], void=255, name="patches")


def net():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))


scores = Logits(dim=1)
models = {"voters": vote.Wrapper(3, output=scores)(net()), "heads": compose(vote.Wrapper(2), sculpt.Wrapper(), output=scores)(net())}
for model in models.values():
    fit(model, maps, epochs=3, progress=False)
explorer = Explorer(models, maps)
explorer
---
linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
digits = Explorer({"three": vote.Wrapper(3, output="logits")(linear), "two": vote.Wrapper(2, output="logits")(linear)}, "digits")
digits
"""
TALL = 2400
SAID = ".wb-place:visible"


def look(nb, shots, what, selector):
    """Whether it can be read in both themes and at all widths."""
    faults = []
    for theme, width in itertools.product(THEMES, LOOKED_AT):
        nb.wear(THEMES[theme])
        nb.page.set_viewport_size({"width": width, "height": TALL})
        try:
            check(nb.page, selector, f"{what} {theme} {width}")
        except AssertionError as error:
            faults.append(str(error))
        nb.page.screenshot(path=shots / f"look-{what}-{theme}-{width}.png")
    nb.wear(THEMES["light"])
    nb.page.set_viewport_size({"width": 1280, "height": TALL})
    assert not faults, "\n".join(faults)


def truth_at(place):
    row, column = place
    cell = f"t = int(explorer.target[{row}, {column}]); 'no class' if t < 0 else maps.classes[t]"
    return cell


def test_places_are_clicked_and_walked(notebook, lab, shots):
    lab.write("places.ipynb", MAPS)
    nb = notebook("places.ipynb")
    page = nb.page
    nb.command("notebook:run-all-cells")
    nb.command("application:toggle-left-area")
    page.set_viewport_size({"width": 1280, "height": TALL})
    plot = page.locator(".wb-places-plot:visible").first
    plot.locator("svg").wait_for()
    nb.until(".wb-chosen caption", "by each model, with its rank")
    nb.until(".wb-place", "Click on a place")

    # where the picture shows a place is told by the kernel's own boxes; a click there chooses it
    place = (3, 17)
    cell = f"p = explorer._view.places.plot.panels[1]; [p[0] + p[2] * ({place[1]} + 0.5) / 24, p[1] + p[3] * ({place[0]} + 0.5) / 16]"
    across, down = map(float, re.findall(r"[\d.]+", nb.insert(cell).inner_text()))
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    plot.click(position={"x": across * box["width"], "y": down * box["height"]})
    nb.until(SAID, f"Place {place}")
    truth = nb.insert(truth_at(place)).inner_text().strip("'")
    assert f"Place {place}: truth {truth}." in page.locator(SAID).first.inner_text()
    assert plot.locator(".wb-places-mark").count() == 10  # input, truth, and of two models error, prediction, two risks

    # keys: one place, ten places, at the edge, and JupyterLab's own stay out of it
    cells = page.locator(".jp-Cell").count()
    plot.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        plot.press(key)
    nb.until(SAID, "Place (4, 19)")
    plot.press("Shift+ArrowRight")
    nb.until(SAID, "Place (4, 23)")
    assert "place (4, 23): truth" in plot.locator("xpath=..").locator(".wb-places-said").inner_text()
    page.locator(".wb-list select").first.select_option(index=1)
    nb.until(".wb-chosen", "row ")
    look(nb, shots, "places-maps", ".jupyter-widgets.wb-explorer")
    page.set_viewport_size({"width": 760, "height": TALL})
    lines = """heads => heads.map(head => {
        const range = document.createRange();
        range.selectNodeContents(head);
        return new Set([...range.getClientRects()].map(box => box.top)).size;
    })"""
    heads = page.locator(".jupyter-widgets.wb-explorer .wb-listing th:first-child:visible", has_text="row")
    assert set(heads.evaluate_all(lines)) == {1}  # "row" is one word, not "ro" above "w"
    page.set_viewport_size({"width": 1280, "height": TALL})
    plot.press("Home")
    page.wait_for_function("() => !document.querySelector('.wb-place').innerText.includes('(4, 23)')")
    plot.press("Escape")
    nb.until(".wb-place", "Click on a place")
    assert page.locator(".jp-Cell").count() == cells
    assert nb.insert("(explorer.place, explorer.message)").inner_text() == "(None, '')"

    # a picture: what covering a place changes
    page.locator(".wb-explorer .lm-TabBar-tab", has_text="Places").click()
    covered = page.locator(".wb-places-plot:visible").nth(1)
    covered.locator("svg").wait_for()
    covered.focus()
    covered.press("ArrowDown")
    nb.until(SAID, "How much each falls when the place is covered")
    look(nb, shots, "places-pictures", ".jupyter-widgets.wb-explorer")
    assert nb.insert("(len(digits.place), digits.message)").inner_text() == "(2, '')"
