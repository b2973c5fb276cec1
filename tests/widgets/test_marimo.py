"""Widgets in marimo, which does not show ipywidgets: a page without scripts, through the method that it looks for."""

from __future__ import annotations

import pytest
from helpers.widget_cases import Outline, pictures, voters
from test_explorer_several import made
from torch import nn

from workbench.widgets import Comparison, Explorer

pytest.importorskip("ipywidgets")


@pytest.mark.slow
def test_an_explorer_is_a_page_without_widgets() -> None:
    for explorer in (made("maps"), made("labels"), Explorer(voters(), pictures())):
        kind, page = explorer._mime_()
        assert kind == "text/html"
        assert f"row {explorer.row}" in page
        assert "<script" not in page
        Outline(page)


@pytest.mark.slow
def test_a_comparison_is_its_table_and_pictures_or_words_before() -> None:
    comparison = Comparison(nn.Linear(10, 1), "diabetes", ["vote"], epochs=1)
    assert comparison._mime_() == ("text/html", "<pre>Comparison of plain, vote on diabetes</pre>")
    kind, page = comparison.start(block=True)._mime_()
    assert kind == "text/html"
    assert page.count("<table") == 1
    assert "<svg" in page
    assert "<script" not in page
    assert Comparison()._mime_()[1].startswith("<pre>Comparison: ")
