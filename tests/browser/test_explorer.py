"""`Explorer` in a real JupyterLab: choose, edit, hover, abstain, and view images."""

from __future__ import annotations

import re

TABS = ".wb-explorer .lm-TabBar-tab"


def listed(page, place):
    """The number of a row in the list."""
    return re.search(r"row\s(\d+)", page.locator(".wb-list option").nth(place).text_content())[1]


def edited(page):
    return page.locator(".wb-chosen .wb-case").nth(1).inner_text()


def test_pick_edit_hover_and_refuse(notebook):
    nb = notebook("explorer.ipynb")
    page = nb.page
    page.evaluate(  # diabetes is everywhere
        """() => {
            const cells = window.jupyterapp.shell.currentWidget.content.widgets;
            const cell = cells.find(cell => cell.model.id === 'parameters').model.sharedModel;
            cell.setSource(cell.getSource().replace('smoke = False', 'smoke = True'));
        }"""
    )
    for cell in ("parameters", "imports", "train"):
        nb.run(cell)
    nb.measure("first paint of the explorer", nb.run, "explore", shown=".wb-explorer .wb-case")
    assert "Move a slider" in edited(page)

    picked, following = listed(page, 3), listed(page, 4)
    nb.measure("picking a case", nb.choose, ".wb-list select", 3, shown=".wb-chosen .wb-case", text=f"row {picked}")
    page.locator(".wb-rank button:has(.fa-arrow-down)").click()
    nb.until(".wb-chosen .wb-case", f"row {following}")

    handle = page.locator(".wb-edit .noUi-handle").nth(2)
    handle.focus()
    nb.measure("moving a slider", nb.key, "PageUp", shown=".wb-chosen", text="edited: ")
    first = edited(page)
    assert f"row {following}, edited" in first
    handle.press("PageUp")
    page.wait_for_function("old => document.querySelectorAll('.wb-chosen .wb-case')[1].innerText != old", arg=first)
    nb.photograph("explorer-edit", ".wb-explorer")
    page.locator("button.wb-reset").click()
    nb.until(".wb-chosen", "Move a slider")

    page.locator(TABS, has_text="All cases").click()
    spot = page.locator(".wb-explorer .wb-spot").nth(10)
    spot.locator(".wb-mark").hover(force=True)
    assert spot.locator(".wb-tip").is_visible()
    assert "epistemic" in spot.locator(".wb-tip").text_content()
    nb.photograph("explorer-all", ".wb-explorer")

    page.locator(TABS, has_text="Coverage").click()
    left = page.locator(".wb-left")
    nb.until(".wb-left", "80")
    before = left.inner_text()
    page.locator(".wb-coverage .noUi-handle").press("PageDown")
    page.wait_for_function("old => document.querySelector('.wb-left').innerText != old", arg=before)
    nb.photograph("explorer-coverage", ".wb-explorer")
    assert page.locator(".wb-message").inner_text() == ""
    nb.run("snapshot")
    nb.save()
    print(f"\n[browser] saved explorer: {nb.file.stat().st_size / 1000:.0f} kB", end=" ")
    assert nb.file.stat().st_size < 500_000


PICTURES = """
import torch
from torch import nn
from workbench import compose, fit, neo, sample, vote
from workbench.data import load
from workbench.widgets import Comparison, Explorer


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
---
wrapped = compose(vote.Wrapper(3, output="logits"), neo.Wrapper())(model())
fit(wrapped, load("digits"), epochs=3, progress=False)
explorer = Explorer({"voters": wrapped, "noise": sample.Wrapper(3, output="logits")(model())}, "digits")
explorer
---
comparison = Comparison(model, "digits", ["vote+neo"], epochs=3)
comparison
"""


def test_pictures(notebook, lab):
    lab.write("pictures.ipynb", PICTURES)
    nb = notebook("pictures.ipynb")
    page = nb.page
    nb.command("notebook:run-all-cells")
    page.locator(".wb-chosen .wb-case img").first.wait_for()
    page.locator(".wb-edit .noUi-handle").first.press("PageUp")
    nb.until(".wb-chosen", "edited: noise")
    assert page.locator(".wb-chosen .wb-case img").count() == 2
    nb.until(".wb-models caption", ", edited, by each model")
    nb.until(".wb-models .wb-current", "voters")
    row = page.locator(".wb-rank input").input_value()
    nb.choose(".wb-rank select >> nth=0", "noise")
    nb.until(".wb-models .wb-current", "noise")
    nb.until(".wb-chosen", "edited: noise")
    assert page.locator(".wb-rank input").input_value() == row
    page.locator(TABS, has_text="Places").click()
    nb.until(".wb-carriers", "The edited case, place after place")
    nb.photograph("explorer-pictures", ".wb-explorer")
    page.locator("button.wb-train").click()
    nb.until(".wb-status", "Done: 2 of 2 trained", 60)
    panel = page.locator(".wb-panel", has_text="vote+neo")
    case = panel.locator(".wb-case, .wb-spot").first
    case.hover(force=True)
    assert panel.locator(".wb-more:visible, .wb-tip:visible").count() == 1
    nb.photograph("comparison-pictures", ".wb-comparison")


LINKED = """
import torch
from torch import nn
from workbench import compose, fit, neo, vote
from workbench.data import load
from workbench.widgets import Explorer

torch.manual_seed(0)
layers = nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
wrapped = compose(vote.Wrapper(3, output="logits"), neo.Wrapper())(nn.Sequential(*layers))
fit(wrapped, load("digits"), epochs=3, progress=False)
explorer = Explorer(wrapped, "digits")
explorer
"""
# which rows lie between these pixels of the plot, computed from its margins and scales
WITHIN = """
import numpy as np


def places(name, first, last):
    metric = next(metric for metric in explorer._view.panel.plot.spec["metrics"] if metric["name"] == name)
    values = explorer.values_of(explorer.rows, name).double().numpy()
    at = {{"log": np.log10, "linear": np.asarray, "symlog": lambda v: np.arcsinh(v / metric["width"])}}[metric["scale"]](values)
    room = 0.04 * np.ptp(at)
    return first + (last - first) * (at - at.min() + room) / (np.ptp(at) + 2 * room)


x, y = places("total", 58, {width} - 10), places("vacuitic", {height} - 38, 8)
within = (x >= {left}) & (x <= {right}) & (y >= {top}) & (y <= {bottom})
within = explorer.rows[within].tolist()
(within == explorer.selection.tolist(), len(within), explorer.message)
"""


def test_click_and_brush_in_the_linked_plot(notebook, lab):
    lab.write("linked.ipynb", LINKED)
    nb = notebook("linked.ipynb")
    page = nb.page
    nb.command("notebook:run-all-cells")
    page.locator(TABS, has_text="Select").click()
    plot = page.locator(".wb-linked-plot")
    nb.until(".wb-linked-status", "360 rows")
    nb.until(".wb-listed", "all 360 rows")
    nb.photograph("explorer-linked", ".wb-explorer")
    page.locator("select[aria-label=across]").select_option("total")
    page.locator("select[aria-label=up]").select_option("vacuitic")
    plot.scroll_into_view_if_needed()

    # the keyboard walks in ranked order, and JupyterLab's own keys stay out of it
    first, third = listed(page, 0), listed(page, 2)
    plot.focus()
    for _ in range(2):
        plot.press("ArrowDown")
    assert f"3 of 360: row {third}" in page.locator(".wb-linked-said").inner_text()
    tip = page.locator(".wb-linked-tip")
    assert tip.is_visible()
    assert f"row {third}" in tip.inner_text()
    assert f"row {first}" in page.locator(".wb-chosen .wb-case").first.inner_text()
    plot.press("Enter")
    nb.until(".wb-chosen .wb-case", f"row {third}")
    assert page.locator(".jp-Cell").count() == 1

    # the keyboard selects two rows
    plot.press("Space")
    nb.until(".wb-linked-status", "1 selected")
    plot.press("ArrowDown")
    plot.press("Space")
    nb.until(".wb-linked-status", "2 selected")
    assert page.locator(".wb-list option").count() == 2
    plot.press("Escape")
    page.wait_for_function("() => !document.querySelector('.wb-linked-status').innerText.includes('selected')")

    # a click on the point below the tip's place, found by hovering
    box = plot.bounding_box()
    places = (
        (box["x"] + box["width"] * a / 24, box["y"] + box["height"] * b / 24)
        for b in range(22, 1, -1)
        for a in range(3, 23)
    )
    for x, y in places:
        page.mouse.move(x, y)
        if tip.is_visible() and f"row {third}\n" not in tip.inner_text():
            break
    pointed = re.search(r"row (\d+)", tip.inner_text())[1]
    page.mouse.click(x, y)
    nb.until(".wb-chosen .wb-case", f"row {pointed}")
    page.wait_for_function("row => document.querySelector('.wb-rank input').value === row", arg=pointed)

    # a brush
    width, height = box["width"], box["height"]
    left, top, right, bottom = 0.5 * width, 5, 0.9 * width, 0.8 * height
    page.mouse.move(box["x"] + left, box["y"] + top)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * width, box["y"] + 0.5 * height, steps=3)
    page.mouse.move(box["x"] + right, box["y"] + bottom, steps=3)
    page.mouse.up()
    nb.until(".wb-linked-status", "selected")
    nb.until(".wb-listed", "selected")
    count = int(re.search(r"([\d,]+) selected", page.locator(".wb-linked-status").inner_text())[1])
    assert 5 < count < 300
    assert page.locator(".wb-list option").count() == min(count, 200)
    cell = WITHIN.format(width=width, height=height, left=left, top=top, right=right, bottom=bottom)
    assert nb.insert(cell).inner_text() == f"(True, {count}, '')"
    nb.photograph("explorer-brushed", ".wb-explorer")
    # a cell of the confusion matrix, by the pointer and by keys
    cells = page.locator(".wb-confusion tbody td button[aria-disabled=false]")
    cells.first.click()
    name = re.search(r"true (\d), predicted (\d): (\d+) row", cells.first.get_attribute("aria-label"))
    nb.until(".wb-listed", f"class {name[1]}, predicted {name[2]}")
    assert cells.first.get_attribute("aria-pressed") == "true"
    cells.first.press("ArrowLeft")  # to the head of its row, of the class 0
    page.keyboard.press("Enter")
    nb.until(".wb-listed", "rows: class 0; ")
    assert page.locator(".jp-Cell").count() == 2  # none was added by keys of JupyterLab
    page.keyboard.press("Escape")
    page.wait_for_function("() => !document.querySelector('.wb-listed').innerText.includes('class')")

    page.locator("label", has_text="wrong only").locator("input").check()
    nb.until(".wb-linked-status", "hidden by the filter")
    page.locator(".wb-select input[type=text]").fill("odd")
    page.locator("button.wb-save").click()
    page.locator(".wb-select select option", has_text="odd").wait_for(state="attached")  # the kernel has it by now
    assert nb.insert("len(explorer.selections['odd'])").inner_text() == str(count)
    plot.focus()
    plot.press("Escape")
    page.locator("button.wb-save[disabled]").wait_for()
    assert nb.insert("(len(explorer.selection), explorer.message)").inner_text() == "(0, '')"
    nb.save()
    nb.lab.end_kernels()
    nb.reload()  # without a kernel the picture stands where the widget was
    saved = page.locator(".wb-static svg.wb-picture")
    saved.first.wait_for()
    assert page.locator(".wb-static .wb-caption", has_text="rows: wrong").count() == 1  # as it was last
    page.get_by_text("Error displaying widget").wait_for(state="attached")
    assert not page.get_by_text("Error displaying widget").is_visible()
    assert nb.file.stat().st_size < 500_000


NAMED = r"""
import pandas as pd
import torch
from torch import nn
from workbench import compose, sculpt, vote
from workbench.data import Data
from workbench.widgets import Explorer

torch.manual_seed(0)
columns = ["price $x$ in $y$", r"\(z^2\)", r"\[z\]", "<script>document.title='read as a script'</script>"]
frame = pd.DataFrame({name: torch.randn(60).numpy() for name in columns})
frame["kind"] = [["cat $q$ or $r$", "<img src=x onerror=document.title='read'>", "c" * 90][i % 3] for i in range(60)]
names = Data.from_dataframe(frame, target="kind")
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
wrapped = compose(vote.Wrapper(3), sculpt.Wrapper(), output="logits")(net)
explorer = Explorer({"model $m$ of $n$": wrapped, "<b>other": wrapped}, names)
explorer
"""


def test_names_are_texts_that_stay_in_their_cards(notebook, lab):
    lab.write("names.ipynb", NAMED)
    nb = notebook("names.ipynb")
    page = nb.page
    nb.command("notebook:run-all-cells")
    page.locator(".wb-explorer .wb-case").first.wait_for()
    labels = page.locator(".wb-edit .widget-hslider .widget-label").all_inner_texts()
    assert labels[:3] == ["price $x$ in $y$", r"\(z^2\)", r"\[z\]"]
    page.wait_for_timeout(500)  # in which formulas would be drawn
    assert page.locator(".wb-explorer mjx-container").count() == 0
    assert "read" not in page.title()
    for card in page.locator(".wb-pair .wb-case").all():
        assert card.evaluate("e => e.scrollWidth <= e.clientWidth")
