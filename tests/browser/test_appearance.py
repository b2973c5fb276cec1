"""Appearance of widgets and reports in light and dark themes on a phone, half a screen and a full screen: legible and reachable."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest
import torch
from helpers import executed_reports
from helpers.executed_reports import executed
from helpers.widget_cases import pictures as pictures_of_stripes
from helpers.widget_cases import voters
from torch import nn

from workbench import compose, sculpt, vote
from workbench.data import Data
from workbench.notebook.report import render
from workbench.widgets import Comparison, Explorer
from workbench.widgets.explorer.linked import still

from .appearance import LOOKED_AT, check, problems
from .notebook import THEMES

folder = executed_reports.folder
# each page has one fault, and what is found of it
FAULTS = {
    "pale": ("<p style='color:#999'>pale words</p>", 'contrast 2.85: p "pale words"'),
    "pale, through": ("<p style='opacity:.5;color:#000'>pale</p>", "contrast 3.9"),
    "on a layer": ("<div style='background:rgba(0,0,0,.8)'><p style='color:#000'>dark</p></div>", "contrast 1.66"),
    "in a picture": (
        "<svg aria-label='bars' width=200 height=50><rect width=200 height=50 fill='#00f'/><text x=9 y=30>blue</text></svg>",
        'contrast 2.44: text "blue"',
    ),
    "cut": (
        "<div style='width:40px;overflow:hidden;white-space:nowrap'>much longer than that</div>",
        "cut off by div",
    ),
    "cut below": ("<div style='height:12px;overflow:hidden'>one<br>two<br>three</div>", "cut off by div"),
    "cut in a button": (
        "<button title='all of it' style='width:40px;overflow:hidden'>deletes</button>",
        "cut off by button",
    ),
    "cut in a field": ("<input title='' aria-label='path' style='width:30px' value='a long value'>", "cut off: input"),
    "cut in a menu": ("<select aria-label='of' style='width:30px'><option>a long one</select>", "cut off: select"),
    "on top": (
        "<button>one</button><button style='margin-left:-20px'>two</button>",
        'on top of each other: button "one" and button "two"',
    ),
    "in pieces": (
        "<table><tr><th style='max-width:30px;overflow-wrap:anywhere'>epistemic</table>",
        'in pieces: th "epistemic"',
    ),
    "too wide": ("<div style='width:2000px'>wide</div>", "beyond the right edge by"),
    "the page too wide": ("<div style='width:2000px'>wide</div>", "the page is"),
    "no name": ("<button><i class='fa'></i></button>", "no name: button"),
    "no label": ("<input type=number value=3>", "no name: input"),
    "no words": (
        "<img src='data:image/svg+xml,<svg xmlns=\"http://www.w3.org/2000/svg\"/>' width=60 height=60>",
        "no words for a picture: img",
    ),
    "nothing": ("", "nothing of main can be seen"),
}
FINE = """
<h1 style="color:#777">Large words may be paler</h1><p style="color:#767676">than others</p>
<div style="width:40px;overflow:hidden;white-space:nowrap" title="what is cut off is told">what is cut off is told</div>
<div style="overflow:auto;width:100px"><table style="width:900px"><tr><td>scrolls</table></div>
<button>one</button><button aria-label="two">+</button><label>three <input value="3"></label><button disabled style="color:#ccc">off</button>
<img alt="a dot" src="data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7">
"""


@pytest.fixture(scope="module")
def plain_page(browser: Any) -> Iterator[Any]:
    """A page of its own, as wide as a phone."""
    page = browser.new_page(viewport={"width": LOOKED_AT[0], "height": 300})
    yield page
    page.close()


def shown(page: Any, main: str) -> list[str]:
    page.set_content(f"<!doctype html><html lang=en><body style='background:#fff'>{main}</body>")
    return problems(page, "main")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(plain_page: Any, fault: str) -> None:
    body, said = FAULTS[fault]
    messages = shown(plain_page, f"<main>{body}</main>" if body else "<main hidden>there</main>")
    assert any(problem.startswith(said) for problem in messages), messages


def test_a_page_without_faults_has_none(plain_page: Any) -> None:
    assert shown(plain_page, f"<main>{FINE}</main>") == []


def test_what_stays_wrong_fails_and_what_is_mended_in_time_does_not(
    plain_page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = "<script>setTimeout(() => document.querySelector('p').style.color = '#000', 300)</script>"
    plain_page.set_content(f"<body style='background:#fff'><main><p style='color:#ccc'>pale</p></main>{late}</body>")
    check(plain_page, "main", "late")
    monkeypatch.setattr("browser.appearance.PATIENCE", 0.0)
    plain_page.set_content("<body style='background:#fff'><main><p style='color:#ccc'>pale</p></main></body>")
    with pytest.raises(AssertionError, match=r"bad page:\n +contrast 1\.61: p \"pale\""):
        check(plain_page, "main", "bad page")


WIDGETS = """
import torch
from torch import nn
from workbench import compose, fit, neo, vote
from workbench.widgets import Comparison, Explorer


def model():
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1))
---
chosen = Comparison(epochs=2)
chosen
---
comparison = Comparison(model, "diabetes", ["sculpt", "vote+neo"], epochs=2)
comparison.start(block=True)
comparison
---
explorer = Explorer(comparison.models["vote+neo"], "diabetes")
explorer
"""
TALL = 2600  # pixels, so that all of a notebook is on the screen
TABS = ".wb-explorer .lm-TabBar-tab"


def test_widgets_look_right(notebook: Any, lab: Any, shots: Path) -> None:
    lab.write("appearance.ipynb", WIDGETS)
    nb = notebook("appearance.ipynb")
    page = nb.page
    nb.command("notebook:run-all-cells")
    page.locator(".wb-explorer .wb-case").first.wait_for()
    page.locator(".jupyter-widgets.wb-panel svg.wb-picture").first.wait_for()
    nb.command("application:toggle-left-area")
    faults = []
    for theme in THEMES:
        nb.wear(THEMES[theme])
        for width in LOOKED_AT:
            page.set_viewport_size({"width": width, "height": TALL})
            for what, selector in (
                ("choice", ".wb-choice"),
                ("comparison", ".wb-comparison:not(.wb-choice)"),
                *((f"explorer-{tab}", ".wb-explorer") for tab in range(page.locator(TABS).count())),
            ):
                if what.startswith("explorer"):
                    page.locator(TABS).nth(int(what[-1])).click()
                try:
                    check(page, f".jupyter-widgets{selector}", f"{what} {theme} {width}")
                except AssertionError as error:
                    faults.append(str(error))
            page.screenshot(path=shots / f"look-widgets-{theme}-{width}.png")
    assert not faults, "\n".join(faults)


def comparison_snapshot(monkeypatch: pytest.MonkeyPatch) -> str:
    """What `snapshot()` of a comparison leaves in a cell."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **options: sent.append(data))

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1))

    Comparison(model, "diabetes", ["sculpt", "vote+neo"], epochs=1).start(block=True).snapshot()
    return str(sent[0]["text/html"])


def explorer_snapshot(monkeypatch: pytest.MonkeyPatch) -> str:
    """What `snapshot()` of an explorer leaves in a cell, with the confusion matrix."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **options: sent.append(data))
    Explorer({"whole": voters(), "shared": voters(share=1)}, pictures_of_stripes()).snapshot()
    flowers = [f"meadow buttercup {i}" for i in range(20)]  # so many long names have no room beside each other
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    classes = Data.from_arrays(x, torch.arange(200) % 20, classes=flowers)
    Explorer(vote.Wrapper(2, output="logits")(nn.Linear(5, 20)), classes).snapshot()
    assert all("wb-confused" in page["text/html"] for page in sent)
    Explorer(compose(vote.Wrapper(2), sculpt.Wrapper())(nn.Linear(5, 3)), Data.from_arrays(x, x[:, :3])).snapshot()
    return "".join(page["text/html"] for page in sent)


def report(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A report with all that reports have: a failed check, scores, a table, code, an error, pictures, widgets that stand still."""
    scores = {"plain_rmse": 3.0, "vote_rmse": 2.5}
    run = executed(
        place, "many_a_0", {"data": "a", "epochs": 5}, "ok", {"vote is better": (False, {"vote": 3.5})}, **scores
    )
    nb = nbformat.read(run.output, 4)
    table = pd.DataFrame(torch.rand(4, 12, generator=torch.Generator().manual_seed(0)).numpy()).add_prefix(
        "a long name "
    )
    outputs = [
        nbformat.v4.new_output("display_data", {"text/html": comparison_snapshot(monkeypatch)}),
        nbformat.v4.new_output(
            "display_data", {"text/html": still(Explorer(voters(), pictures_of_stripes()), "<p>the picture</p>")}
        ),
        nbformat.v4.new_output("display_data", {"text/html": explorer_snapshot(monkeypatch)}),
        nbformat.v4.new_output("display_data", {"text/html": table.to_html()}),
        nbformat.v4.new_output("stream", name="stderr", text="a warning"),
        nbformat.v4.new_output(
            "error", ename="ValueError", evalue="bad", traceback=["\x1b[0;31mValueError\x1b[0m: bad " + "long " * 60]
        ),
    ]
    words = "## Words\n\nA [link](https://example.org), `code`, $x^2$ and\n\n> a quotation\n\n| a | b |\n|---|---|\n| 1 | 2 |"
    nb.cells += [
        nbformat.v4.new_markdown_cell(words),
        nbformat.v4.new_code_cell("x = 1  # " + "long " * 40, outputs=outputs),
    ]
    nbformat.write(nb, run.output)
    return render(Path(run.output))


def test_reports_look_right(
    browser: Any, shots: Path, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"report": report(tmp_path / "one", monkeypatch), "index": folder / "index.html"}
    page, faults = browser.new_page(), []
    for what, path in pages.items():
        page.goto(path.as_uri())
        if what == "report":
            page.wait_for_function("() => document.querySelector('.wb-linked-status').innerText")
            page.locator("#code").check()
            assert page.evaluate(
                "[...document.querySelectorAll('.error pre')].map(e => e.scrollWidth > e.clientWidth)"
            ) == [False]
        for scheme, width in itertools.product(("light", "dark"), LOOKED_AT):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 800})
            try:
                check(page, "body", f"{what} {scheme} {width}")
            except AssertionError as error:
                faults.append(str(error))
            page.screenshot(path=shots / f"look-{what}-{scheme}-{width}.png", full_page=True)
    page.close()
    assert not faults, "\n".join(faults)
