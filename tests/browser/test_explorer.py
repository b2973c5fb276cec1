"""`Explorer` in a real JupyterLab: pick, edit, hover, refuse, look at pictures."""

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
    nb.measure("first paint of the explorer", 8, nb.run, "explore", shown=".wb-explorer .wb-case")
    assert "Move a slider" in edited(page)

    picked, following = listed(page, 3), listed(page, 4)
    nb.measure("picking a case", 3, nb.choose, ".wb-list select", 3, shown=".wb-chosen .wb-case", text=f"row {picked}")
    page.locator(".wb-rank button:has(.fa-arrow-down)").click()
    nb.until(".wb-chosen .wb-case", f"row {following}")

    handle = page.locator(".wb-edit .noUi-handle").nth(2)
    handle.focus()
    nb.measure("moving a slider", 3, nb.key, "PageUp", shown=".wb-chosen", text="edited: ")
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
from workbench import compose, fit, neo, vote
from workbench.data import load
from workbench.widgets import Comparison, Explorer


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
---
wrapped = compose(vote.Wrapper(3, output="logits"), neo.Wrapper())(model())
fit(wrapped, load("digits"), epochs=3, progress=False)
explorer = Explorer(wrapped, "digits")
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
    nb.photograph("explorer-pictures", ".wb-explorer")
    page.locator("button.wb-train").click()
    nb.until(".wb-status", "Done: 2 of 2 trained", 60)
    panel = page.locator(".wb-panel", has_text="vote+neo")
    case = panel.locator(".wb-case, .wb-spot").first
    case.hover(force=True)
    assert panel.locator(".wb-more:visible, .wb-tip:visible").count() == 1
    nb.photograph("comparison-pictures", ".wb-comparison")
