"""`Comparison` in a real JupyterLab: train, stop, change, reload, fail, save and reopen."""

from __future__ import annotations

import nbformat

from workbench.notebook import read_records

TRAIN, STOP, STATUS, BAR = "button.wb-train", "button.wb-stop", ".wb-status", ".wb-progress .progress-bar"
METRICS = ".jupyter-widgets.wb-metrics"


def choose(nb, epochs, ticked):
    """Set the number of epochs, and which models are ticked."""
    box = nb.page.locator(".wb-epochs input")
    box.fill(str(epochs))
    box.press("Tab")
    for box in nb.page.locator(".wb-check").all():
        if (name := box.inner_text().strip()) != "plain":
            box.locator("input").set_checked(name in ticked)


def test_train_stop_and_train_others(notebook):
    nb = notebook("comparison.ipynb")
    page = nb.page
    for cell in ("parameters", "imports", "model"):
        nb.run(cell)
    nb.measure("first paint", nb.run, "comparison", shown=TRAIN)
    nb.until(STATUS, "Train starts 4 models")
    nb.photograph("comparison-new", ".wb-comparison")

    choose(nb, 100_000, ["vote"])
    nb.until(STATUS, "Train starts 2 models: plain, vote.")
    nb.measure("Train is answered", nb.press, TRAIN, shown=f"{STOP}:not([disabled])")
    nb.until(STATUS, "epoch")
    nb.until(".wb-panel", "plain")
    page.locator(".wb-panel svg.wb-picture").first.wait_for()
    page.wait_for_function("bar => parseFloat(document.querySelector(bar).style.width) > 0", arg=BAR)
    seen = page.locator(STATUS).inner_text()
    assert nb.insert("6 * 7").inner_text() == "42"
    page.wait_for_function("([s, old]) => document.querySelector(s).innerText != old", arg=[STATUS, seen])
    page.locator(".wb-pick select").select_option("sample")
    page.locator(".wb-form", has_text="n_samples").wait_for()
    page.locator(".wb-pick select").select_option("vote")
    page.locator(".wb-form", has_text="n_voters").wait_for()
    nb.measure("a click while it trains", nb.choose, ".wb-pick select", "sample", shown=".wb-form", text="n_samples")
    nb.measure("Stop", nb.press, STOP, shown=f"{STATUS} b", text="Stopped")
    assert "plain stopped in epoch" in page.locator(STATUS).inner_text()
    assert "stopped in epoch" in page.locator(METRICS).inner_text()
    assert nb.insert("next(comparison.models['plain'].parameters()).isfinite().all().item()").inner_text() == "True"

    choose(nb, 2, ["vote+neo", "sculpt"])
    page.locator(TRAIN).click()
    nb.until(STATUS, "Done: 3 of 3 trained", 120)
    assert page.locator(f"{METRICS} tbody th").all_inner_texts()[:3] == ["plain", "vote+neo", "sculpt"]
    saved = page.locator(".wb-static .wb-metrics")  # what a saved notebook shows where there is no kernel
    assert saved.count() == 1
    assert not saved.is_visible()
    spot = page.locator(".jupyter-widgets.wb-panel:has-text('vote+neo') .wb-spot").nth(7)
    assert not spot.locator(".wb-tip").is_visible()
    spot.locator(".wb-mark").first.hover(force=True)
    assert spot.locator(".wb-tip").is_visible()
    assert "vacuitic" in spot.locator(".wb-tip").text_content()
    nb.photograph("comparison-trained", ".wb-comparison")
    page.locator(".wb-matrix").get_by_text("All models in one matrix").click()
    picture = page.locator(".wb-matrix svg.wb-picture")
    picture.wait_for()
    assert {"plain", "vote+neo", "sculpt", "vacuitic"} <= set(picture.locator("text").all_text_contents())
    fold, drawn = (
        page.locator(place).bounding_box() for place in (".jupyter-widgets.wb-comparison", ".wb-matrix svg.wb-picture")
    )
    assert drawn["x"] >= fold["x"]
    assert drawn["x"] + drawn["width"] <= fold["x"] + fold["width"]
    nb.photograph("comparison-matrix", ".wb-comparison")


def test_reload_while_it_trains_then_save_and_open_again(notebook):
    nb = notebook("comparison.ipynb")
    page = nb.page
    nb.command("notebook:run-all-cells")
    assert "Nothing is trained yet" in page.locator(".jp-OutputArea-output", has_text="Nothing").inner_text()
    choose(nb, 40, ["vote+neo"])
    nb.save()
    page.locator(TRAIN).click()
    nb.until(STATUS, "epoch")
    nb.reload()
    page.locator(STOP).wait_for()
    nb.until(STATUS, "Done: 2 of 2 trained", 120)
    assert page.locator(".wb-panel svg.wb-picture:visible").count() >= 2
    for cell in ("snapshot", "results", "checks"):
        nb.run(cell)
    page.locator(".wb-static svg.wb-picture").first.wait_for()
    nb.save()
    assert "accuracy_vote_neo" in read_records(nb.file)
    assert all(check.holds for check in read_records(nb.file).checks.values())
    print(f"\n[browser] saved notebook: {nb.file.stat().st_size / 1000:.0f} kB", end=" ")
    assert nb.file.stat().st_size < 500_000

    nb.lab.end_kernels()
    nb.reload()
    page.locator(".wb-static svg.wb-picture").first.wait_for()
    assert not page.locator(".wb-static img.wb-pixels").is_visible()
    nb.photograph("comparison-reopened", ".wb-static")

    stranger = nbformat.read(nb.file, 4)
    stranger.metadata["from"] = "somebody else"  # its signature is gone: JupyterLab does not trust it
    nbformat.write(stranger, nb.lab.root / "stranger.ipynb")
    other = notebook("stranger.ipynb")
    picture = other.page.locator(".jp-OutputArea-output img[alt^='comparison of plain, vote+neo']")
    picture.first.wait_for()
    assert picture.first.evaluate("image => image.naturalWidth") > 500


FAILING = """
import torch
from torch import nn
from workbench import vote
from workbench.widgets import Comparison


class Tires(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        if self.training and Tires.tires:
            raise RuntimeError("the <layer> is tired")
        return self.layer(x)
---
x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
Tires.tires = True
comparison = Comparison(Tires, (x, x.sum(1)), ["vote"], epochs=2)
comparison
"""


def test_what_fails_is_said_and_the_rest_works(notebook, lab):
    lab.write("failing.ipynb", FAILING)
    nb = notebook("failing.ipynb")
    page = nb.page
    nb.command("notebook:run-all-cells")
    page.locator(TRAIN).click()
    nb.until(STATUS, "failed: plain, vote")
    message = page.locator(".wb-error", has_text="plain: ")
    assert "RuntimeError: the <layer> is tired" in message.inner_text()
    page.locator(".wb-traceback", has_text="Traceback").first.click()
    nb.until(".wb-traceback pre", 'raise RuntimeError("the <layer> is tired")')
    nb.photograph("comparison-failed", ".wb-comparison")
    nb.insert("Tires.tires = False")
    page.locator(TRAIN).click()
    nb.until(STATUS, "Done: 2 of 2 trained")
    assert page.locator(".wb-error").count() == 0


CHOOSING = """
import pandas as pd
import torch
from torch import nn
from workbench.widgets import Comparison

x = torch.randn(80, 3, generator=torch.Generator().manual_seed(0))
frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": x.sum(1)})


def small():
    return nn.Linear(2, 1)
---
comparison = Comparison(wrappers=["vote"], epochs=2)
comparison
"""


def test_choose_data_and_model(notebook, lab):
    lab.write("choosing.ipynb", CHOOSING)
    nb = notebook("choosing.ipynb")
    page = nb.page
    nb.command("notebook:run-all-cells")
    data, model, compare = (
        page.locator(place) for place in (".wb-choose-data select", ".wb-choose-model select", ".wb-compare")
    )
    nb.until(".wb-code", "Data.from_dataframe(frame, 'y')")
    offered = [menu.locator("option").first.inner_text().replace("\xa0", " ") for menu in (data, model)]
    assert offered == ["frame: your DataFrame 80 × 3", "small(): your function"]
    nb.photograph("comparison-choice", ".wb-choice")
    data.select_option("diabetes")
    nb.until(".wb-code", "Comparison(small, 'diabetes'")
    compare.click()
    nb.until(".wb-choice .wb-error", "Linear fails on rows [n, 10] of diabetes")
    nb.photograph("comparison-refused", ".wb-choice")
    data.select_option(index=0)
    nb.until(".wb-code", "Data.from_dataframe(frame, 'y')")
    compare.click()
    nb.until(STATUS, "Train starts 2 models: plain, vote.")
    nb.until(".wb-code", "Comparison(small, Data.from_dataframe(frame, 'y'), ['vote'], epochs=2)")
    nb.photograph("comparison-chosen", ".wb-choice")
    page.locator(TRAIN).click()
    nb.until(STATUS, "Done: 2 of 2 trained", 60)
    assert (
        nb.insert("(list(comparison.models), comparison.data.features)").inner_text().startswith("(['plain', 'vote']")
    )
    page.locator("button.wb-others").click()
    nb.until(".wb-choice .wb-error", "make another Comparison")
    saved = page.locator(".wb-static .wb-metrics", has_text="vote")
    saved.wait_for(state="attached")
    nb.save()
    nb.lab.end_kernels()
    nb.reload()  # what was chosen after the cell had run is in the saved notebook as well
    saved.wait_for()
    page.get_by_text("Error displaying widget").wait_for(state="attached")
    assert not page.get_by_text("Error displaying widget").is_visible()


LONG = """
from torch import nn
from workbench import vote
from workbench.widgets import Comparison

name = "vote, as trained by the group in the spring for the second revision of the paper, with_a_word_that_is_longer_than_its_column"
Comparison(lambda: nn.Linear(10, 1), "diabetes", {name: vote.Wrapper(2)})
"""


def test_a_long_name_stays_in_its_column(notebook, lab):
    lab.write("long.ipynb", LONG)
    nb = notebook("long.ipynb")
    nb.command("notebook:run-all-cells")
    label, column = nb.page.locator(".wb-check").nth(1), nb.page.locator(".wb-checks")
    label.wait_for()
    edges = """e => {
        const range = document.createRange();
        range.selectNodeContents(e);
        return range.getBoundingClientRect().right;
    }"""
    assert label.evaluate(edges) <= column.evaluate("e => e.getBoundingClientRect().right") + 1
    below = nb.page.locator(".wb-compose").bounding_box()["y"]
    assert label.evaluate(edges.replace("right", "bottom")) <= below + 1
    nb.photograph("comparison-long-name", ".wb-comparison")
