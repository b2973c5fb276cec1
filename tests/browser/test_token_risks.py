"""Text coloured by risk, in a report and in a real JupyterLab: pointer, touch, keyboard, screen-reader names, two themes, three widths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
from helpers.token_cases import WORDS, hostile

from workbench.notebook.report import render

from .appearance import LOOKED_AT, check
from .notebook import THEMES

TIP, SAID = ".wb-tokens-tip", ".wb-tokens-said"


def token(page: Any, place: int) -> Any:
    return page.locator(".wb-token").nth(place)


def focused(page: Any) -> int:
    return int(page.evaluate("document.activeElement.dataset.place"))


def assert_on_the_screen(page: Any, width: int, height: int) -> None:
    box = page.locator(TIP).bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert box["y"] >= 0
    assert box["y"] + box["height"] <= height


@pytest.fixture
def report(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """A page with the texts, and one element whose data can't be read."""
    broken = "<p data-wb-tokens='{\"content\": 3}'>kept</p>"
    html = f"{hostile().html('epistemic')}{broken}"
    cell = nbformat.v4.new_code_cell("pass", outputs=[nbformat.v4.new_output("display_data", data={"text/html": html})])
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "texts.ipynb")
    page = browser.new_page(viewport={"width": 900, "height": 800})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: errors.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(render(tmp_path / "texts.ipynb").as_uri())
    page.locator(".wb-tokens").wait_for()
    yield page
    assert page.title() == "texts"  # no token ran
    assert page.get_by_text("kept").is_visible()
    page.close()
    assert not errors


def test_hover_shows_alternatives_and_what_each_voter_says(report: Any) -> None:
    page, written = report, hostile()
    assert page.locator(".wb-token").count() == len(WORDS) + 5
    assert not page.locator(TIP).is_visible()
    token(page, 3).hover()
    tip = page.locator(TIP)
    assert tip.is_visible()
    rows = tip.locator("tbody tr")
    names = ["␣42", *(WORDS[i].replace(" ", "␣") for i in written.alternatives[0, 3].tolist())]
    assert rows.locator("th").all_inner_texts() == names
    share = written.alternative_probs[0, 3, 0]
    assert rows.nth(1).locator("td").first.inner_text() == f"{share:.3f}"
    each = written.member_alternative_probs[:, 0, 3, 0]  # type: ignore[index]
    assert rows.nth(1).locator("td").last.inner_text() == f"{each.min():.3f} – {each.max():.3f}"
    assert rows.nth(1).locator("i").count() == 3
    assert "epistemic risk" in tip.inner_text()
    page.mouse.move(5, 5)
    assert not tip.is_visible()
    token(page, 1).hover()
    assert "total risk not finite" in tip.inner_text()


def test_grounds_are_shares_of_the_chosen_risk(report: Any) -> None:
    page, written = report, hostile()

    def shares() -> list[float]:
        colours = page.locator(".wb-token").evaluate_all("all => all.map(e => getComputedStyle(e).backgroundColor)")
        return [float(colour.rstrip(")").split("/")[1]) if "/" in colour else 0.0 for colour in colours]

    for kind, values in (("epistemic", written.risk.epistemic), ("-log probability", -written.log_probs)):
        page.locator("select[aria-label='colour by']").select_option(kind)
        flat = [*values[0].tolist(), *values[1, :5].tolist()]
        flat = [value if abs(value) < 1e9 else 0.0 for value in flat]
        assert shares() == pytest.approx([0.62 * max(value, 0) / max(flat) for value in flat], abs=2e-3)
        page.get_by_role("button", name="Riskiest token").click()
        assert focused(page) == flat.index(max(flat))
    assert "−log probability" in token(page, 0).get_attribute("aria-label")


def test_keys_walk_and_screen_readers_hear_where(report: Any) -> None:
    page = report
    assert page.locator(".wb-token[tabindex='0']").count() == 1
    texts = page.get_by_role("listbox")
    assert texts.count() == 2
    assert texts.first.get_attribute("aria-label").startswith(f"prompt 1: {len(WORDS)} tokens. Arrow keys move")
    token(page, 0).focus()
    for key, place in (
        *(("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", len(WORDS) - 1), ("PageDown", len(WORDS))),
        *(("ArrowRight", len(WORDS) + 1), ("PageUp", 0), ("End", len(WORDS) - 1), ("Home", 0)),
    ):
        page.keyboard.press(key)
        assert focused(page) == place, key
    page.keyboard.press("ArrowDown")  # beyond the line break
    below = focused(page)
    assert below >= 6
    page.keyboard.press("ArrowUp")
    assert focused(page) < below
    token(page, 3).focus()
    assert token(page, 3).get_attribute("aria-label").startswith("“42”, epistemic risk ")
    assert "“42”, written, " in page.locator(SAID).text_content()
    assert token(page, 7).get_attribute("aria-label").startswith("empty token, ")
    assert token(page, 5).get_attribute("aria-label").startswith("line break, ")
    assert page.locator(TIP).is_visible()
    page.keyboard.press("Enter")
    assert token(page, 3).get_attribute("aria-selected") == "true"
    page.mouse.move(5, 5)
    assert page.locator(TIP).is_visible()  # it is kept
    page.keyboard.press("Escape")
    assert not page.locator(TIP).is_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    assert focused(page) == 3


def test_a_touch_opens_and_one_elsewhere_closes(browser: Any, report: Any) -> None:
    context = browser.new_context(has_touch=True, viewport={"width": 390, "height": 700})
    page = context.new_page()
    page.goto(report.url)
    token(page, 2).tap()
    assert page.locator(TIP).is_visible()
    assert page.locator(f"{TIP} tbody tr").count() == 4
    token(page, 4).tap()
    assert page.locator(f"{TIP} b").inner_text() == "."
    page.touchscreen.tap(200, 690)
    assert not page.locator(TIP).is_visible()
    context.close()


def test_what_is_empty_or_nowhere_above_zero_is_said(browser: Any, tmp_path: Path) -> None:
    written = hostile(members=1)  # which disagrees with nobody
    written.risk.epistemic.zero_()
    written.mask[1] = False
    cell = nbformat.v4.new_code_cell("pass")
    cell.outputs = [nbformat.v4.new_output("display_data", data={"text/html": written.html("epistemic")})]
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "texts.ipynb")
    page = browser.new_page()
    page.goto(render(tmp_path / "texts.ipynb").as_uri())
    riskiest, ramp = page.get_by_role("button", name="Riskiest token"), page.locator(".wb-tokens-ramp")
    assert page.locator(".wb-tokens-scale").inner_text() == "0 nats for every token"
    assert riskiest.is_disabled()
    assert not ramp.is_visible()
    assert page.get_by_role("listbox").count() == 1
    assert page.get_by_text("no tokens", exact=True).is_visible()
    page.locator("select[aria-label='colour by']").select_option("aleatoric")
    assert page.locator(".wb-tokens-scale").inner_text().startswith("0")
    assert ramp.is_visible()
    assert riskiest.is_enabled()
    page.close()


def test_a_token_longer_than_the_box_of_its_alternatives_is_broken(browser: Any, tmp_path: Path) -> None:
    written = replace(hostile(), words=lambda some: ["without_a_space_" * 12 for _ in some])
    cell = nbformat.v4.new_code_cell("pass")
    cell.outputs = [nbformat.v4.new_output("display_data", data={"text/html": written.html()})]
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "texts.ipynb")
    page = browser.new_page(viewport={"width": 480, "height": 800})
    page.goto(render(tmp_path / "texts.ipynb").as_uri())
    token(page, 3).focus()
    check(page, TIP, "a long token")
    page.close()


def test_texts_can_be_read_in_both_schemes_at_all_widths(report: Any, shots: Path) -> None:
    page, faults = report, []
    for scheme, width in itertools.product(("light", "dark"), LOOKED_AT):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 800})
        for kind in ("total", "epistemic", "aleatoric", "-log probability"):
            page.locator("select[aria-label='colour by']").select_option(kind)
            page.get_by_role("button", name="Riskiest token").click()
            page.keyboard.press("ArrowLeft")
            assert_on_the_screen(page, width, 800)
            try:
                check(page, "body", f"{kind} {scheme} {width}")
            except AssertionError as error:
                faults.append(str(error))
            page.screenshot(path=shots / f"tokens-{kind.split()[0].strip('-')}-{scheme}-{width}.png")
    assert not faults, "\n".join(faults)


LIVE = """
import torch, transformers
from workbench import text, vote
from workbench.outputs import Logits
from workbench.widgets import TokenRisks

torch.manual_seed(0)
config = transformers.GPT2Config(vocab_size=30, n_layer=1, n_head=2, n_embd=8, n_positions=64, bos_token_id=1, eos_token_id=None)
model = vote.Wrapper(3, output={"logits": Logits(dim=-1)})(transformers.GPT2LMHeadModel(config)).eval()
written = text.generate(model, [[1, 2, 3], [4]], max_new_tokens=30, pad_token_id=0)
shown = TokenRisks(written)
shown
"""


def test_alive_in_a_notebook(notebook: Any, lab: Any, shots: Path) -> None:
    pytest.importorskip("transformers")
    lab.write("tokens.ipynb", LIVE)
    nb = notebook("tokens.ipynb")
    page = nb.page
    nb.command("notebook:run-all-cells")
    page.locator(".wb-token:visible").first.wait_for(timeout=120_000)
    assert page.locator(".wb-token").count() == 60
    assert not page.locator(".workbench-text").is_visible()  # what is saved is there for who has no kernel
    page.locator("select[aria-label='colour by']").select_option("epistemic")
    assert nb.insert("shown.kind").inner_text() == "'epistemic'"
    nb.insert("shown.kind = 'aleatoric'")
    page.wait_for_function("() => document.querySelector('.wb-tokens select').value === 'aleatoric'")
    cells = page.locator(".jp-Cell").count()
    token(page, 2).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert focused(page) == 3
    assert page.locator(".jp-Cell").count() == cells
    faults = []
    nb.command("application:toggle-left-area")
    for theme, width in itertools.product(THEMES, LOOKED_AT):
        nb.wear(THEMES[theme])
        page.set_viewport_size({"width": width, "height": 900})
        token(page, 3).focus()
        assert_on_the_screen(page, width, 900)
        try:  # the alternatives may be wider than the text, above all else
            check(page, f".wb-tokens-bar, .wb-tokens-text, {TIP}", f"{theme} {width}")
        except AssertionError as error:
            faults.append(str(error))
        page.screenshot(path=shots / f"tokens-live-{theme}-{width}.png")
    assert not faults, "\n".join(faults)
    nb.save()
    lab.end_kernels()
    nb.reload()  # without a kernel the text stands where the widget was, and nothing else
    page.locator(".workbench-text:visible").wait_for()
    nb.until(".workbench-text", "aleatoric risk of each token")
    page.get_by_text("Error displaying widget").wait_for(state="attached")
    assert not page.get_by_text("Error displaying widget").is_visible()
