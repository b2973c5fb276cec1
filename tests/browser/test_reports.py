"""Reports in a browser: what the styles of a page and those of its outputs make of each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat

from workbench.notebook.report import render
from workbench.widgets.common import pictures


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
