"""Reports in a browser: how the styles of a page and of its outputs interact."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import nbformat
import torch
from helpers import executed_reports
from helpers.widget_cases import pictures as pictures_of_stripes
from helpers.widget_cases import voters

from workbench import vote
from workbench.notebook.report import render
from workbench.widgets import Comparison, Explorer
from workbench.widgets.common import pictures
from workbench.widgets.comparison.saved import saved_page
from workbench.widgets.explorer.linked import still
from workbench.widgets.explorer.models_page import side_by_side
from workbench.widgets.explorer.scene import STYLE

folder = executed_reports.folder  # the fixture


def test_the_tables_of_an_index_fit_on_paper(browser: Any, folder: Path) -> None:
    paper = 688  # pixels, A4 less its margins; Chromium shrinks, and then cuts off, what is wider
    page = browser.new_page(viewport={"width": paper, "height": 990})
    page.emulate_media(media="print")
    page.goto((folder / "index.html").as_uri())
    assert page.locator("table.runs thead th").count() > 8
    assert page.evaluate("document.documentElement.scrollWidth") <= paper
    page.close()


def test_a_static_picture_is_shown_once(browser: Any, tmp_path: Path, monkeypatch: Any) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **options: sent.append(data))
    figure = pictures.new_figure(2, 1)
    figure.subplots().plot([1, 2])
    pictures.display_static("<p>all that it shows</p>", figure, "a line")
    cell = nbformat.v4.new_code_cell("pass", outputs=[nbformat.v4.new_output("display_data", data=sent[0])])
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "static.ipynb")
    page = browser.new_page()
    page.goto(render(tmp_path / "static.ipynb").as_uri())
    assert page.get_by_text("all that it shows").is_visible()
    assert page.locator("img.wb-pixels").count() == 1
    assert not page.locator("img.wb-pixels").is_visible()
    page.close()


def test_a_long_name_leaves_room_for_the_numbers_of_its_model(browser: Any) -> None:
    name = "voters as in the second revision of the paper, with_five_of_them_and_half_the_learning_rate"
    models = {name: voters(), "b": voters()}
    comparison = Comparison(voters().unwrap(), pictures_of_stripes(), {name: vote.Wrapper(2)}, epochs=1)
    explorer = Explorer(models, pictures_of_stripes())
    page = browser.new_page(viewport={"width": 480, "height": 800})
    for html in (saved_page(comparison.start(block=True)._findings), f"<style>{STYLE}</style>{side_by_side(explorer)}"):
        page.set_content(f"<!doctype html>{html}")
        row = page.locator("tr", has_text=name).first
        first, second = (row.locator("th, td").nth(i).bounding_box() for i in range(2))
        assert second["x"] + second["width"] <= 480
        assert first["width"] >= 90  # not a letter per line
    page.close()


def test_the_cases_of_an_explorer_can_be_pointed_at_and_brushed(browser: Any, shots: Path, tmp_path: Path) -> None:
    explorer = Explorer(voters(), pictures_of_stripes())
    explorer._answers.risk["total"][[3, 4]] = torch.tensor([math.nan, math.inf])
    page_of = still(explorer, "<p>the picture</p>")
    bad = '<script>document.title = "bad"</script><img src="x:y" onerror="document.title = \'bad\'"><p data-wb-linked="{">kept</p>'
    cell = nbformat.v4.new_code_cell(
        "pass", outputs=[nbformat.v4.new_output("display_data", data={"text/html": f"{page_of}{bad}"})]
    )
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "linked.ipynb")
    path = render(tmp_path / "linked.ipynb")
    for scheme, width in itertools.product(("light", "dark"), (390, 900, 1440)):
        page = browser.new_page(viewport={"width": width, "height": 700}, color_scheme=scheme)
        errors: list[str] = []
        page.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
        page.goto(path.as_uri())
        plot, status = page.locator(".wb-linked-plot"), page.locator(".wb-linked-status")
        page.wait_for_function("() => document.querySelector('.wb-linked-status').innerText")
        assert status.inner_text() == "30 rows"
        assert not page.get_by_text("the picture").is_visible()
        assert page.get_by_text("kept").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        plot.focus()
        plot.press("Home")
        assert f"row {int(explorer.ranked[0])}" in page.locator(".wb-linked-tip").inner_text()
        page.screenshot(path=shots / f"report-linked-{scheme}-{width}.png")
        page.locator("select[aria-label=across]").select_option("total")
        page.wait_for_function("() => document.querySelector('.wb-linked-status').innerText.includes('not drawn')")
        assert status.inner_text() == "30 rows · 2 not drawn: NaN or infinite"
        box = plot.bounding_box()
        page.mouse.move(box["x"] + 20, box["y"] + 2)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] - 4, steps=3)
        page.mouse.up()
        page.wait_for_function("() => document.querySelector('.wb-linked-status').innerText.includes('selected')")
        assert status.inner_text() == "30 rows · 28 selected · 2 not drawn: NaN or infinite"
        assert page.title() != "bad"
        assert not errors
        page.close()
