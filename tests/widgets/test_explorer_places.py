"""One position of the chosen row in `Explorer`: what all models predict there, and where it lies in the image."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import numpy as np
import pytest
import torch
from helpers.widget_cases import Outline, beams, pictures, voters
from test_explorer_several import CASES, made
from test_explorer_several_models import made as made_of_models
from test_explorer_several_models import view, widths

from workbench import attributions
from workbench.notebook.values import UNTYPESET
from workbench.plots import COLOURS
from workbench.widgets import Explorer
from workbench.widgets.explorer.place_picture import page_of_place
from workbench.widgets.explorer.row_pictures import Picture, row_body

pytest.importorskip("anywidget")


# ---- without widgets
def test_at_a_place_of_a_map_stands_what_the_voters_say_of_that_pixel() -> None:
    explorer = made_of_models("maps")
    explorer.select(5).place = (2, 4)
    by_model = explorer.at_place()
    assert list(by_model) == ["voters", "heads"]
    members = [copy.deepcopy(member).eval() for member in explorer.models["voters"].voters()]
    with torch.no_grad():
        p = torch.stack([member(explorer.data.test.x[5:6])[0, :, 2, 4].softmax(0) for member in members]).double()
    total, aleatoric = torch.special.entr(p.mean(0)).sum(), torch.special.entr(p).sum(1).mean()
    torch.testing.assert_close(by_model["voters"]["prediction"].double(), p.mean(0), rtol=1e-4, atol=1e-5)
    assert by_model["voters"]["total"].item() == pytest.approx(total.item(), rel=1e-4)
    assert by_model["voters"]["epistemic"].item() == pytest.approx((total - aleatoric).item(), rel=1e-3, abs=1e-6)
    explorer.model = "heads"
    assert torch.equal(by_model["heads"]["prediction"], explorer.prediction[2, 4])
    assert explorer.place == (2, 4)  # it stays with another model, and with another row
    explorer.step()
    assert torch.equal(explorer.at_place()["heads"]["prediction"], explorer.prediction[2, 4])


def test_places_of_tokens_and_of_depth() -> None:
    explorer = made("tokens")
    explorer.place = 1  # type: ignore[assignment]
    assert explorer.place == (1,)
    assert torch.equal(explorer.at_place()["model"]["prediction"], explorer.prediction[1])
    depth = made("depth")
    depth.place = np.int64(3), 7  # type: ignore[assignment]
    assert depth.place == (3, 7)
    assert depth.at_place()["model"]["epistemic"].item() == depth.risk.epistemic[3, 7].item()
    depth.place = None
    assert depth.place is None


def test_of_a_picture_it_is_what_covering_changes_by_each_model_and_with_edits() -> None:
    explorer = Explorer({"a": voters(), "b": voters(share=1)}, pictures())
    mean = explorer.data.train.x.mean((0, 2, 3))[:, None, None]
    for _ in range(2):
        explorer.place = (2, 5)
        for name, model in explorer.models.items():
            wanted = attributions.occlusion(model, explorer.x[None], baseline=mean)
            for risk, change in wanted.change.items():
                assert explorer.at_place()[name][risk].item() == pytest.approx(change[0, 2, 5].item(), abs=1e-6)
        explorer.edit(brightness=0.4)


def test_what_is_no_place_is_refused_and_nothing_changes() -> None:
    explorer = made("maps")
    with pytest.raises(ValueError, match=r"none is chosen; set one, explorer.place = \(3, 3\)"):
        explorer.at_place()
    explorer.place = (1, 1)
    for wrong in ((7, 0), (0, -1), (1,), 3, (1, 2, 3), (True, 1), (1.0, 2), "ab"):
        with pytest.raises(ValueError, match=r"place: expected \(row, column\), whole numbers from 0 to 6, 6; found"):
            explorer.place = wrong  # type: ignore[assignment]
        assert explorer.place == (1, 1)
    with pytest.raises(ValueError, match="whole numbers from 0 to 4; found 5"):
        made("tokens").place = 5  # type: ignore[assignment]
    for explorer in (made("columns"), made("labels"), Explorer(voters_of_beams(), beams())):
        with pytest.raises(ValueError, match="have no places"):
            explorer.place = (0, 0)
        with pytest.raises(ValueError, match=r"place: none is chosen$"):
            explorer.at_place()


def voters_of_beams() -> Any:
    from test_explorer import ensemble

    return ensemble()


# ---- where places lie in the picture
def colour_at(picture: Picture, panel: int, row: int, column: int) -> tuple[int, ...]:
    from PIL import Image

    assert picture.pixels is not None
    pixels = np.asarray(Image.open(io.BytesIO(picture.pixels)).convert("RGB"))
    left, top, width, height = picture.panels[panel]
    x = left + width * (column + 0.5) / picture.size[1]
    y = top + height * (row + 0.5) / picture.size[0]
    colour = pixels[int(y * pixels.shape[0]), int(x * pixels.shape[1])]
    return tuple(int(v) for v in colour)


def shade_of(number: int) -> tuple[int, ...]:
    from matplotlib import colormaps

    return tuple(round(255 * v) for v in colormaps["tab10"](number)[:3])


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_the_pixel_at_a_place_has_the_colour_of_its_class(several: bool) -> None:
    """Each place of truth and prediction, looked up in the picture: off by one, or by a margin, shows another class."""
    explorer = made_of_models("maps") if several else made("maps")
    picture = row_body(explorer)  # type: ignore[arg-type]
    assert isinstance(picture, Picture)
    assert picture.size == (7, 7)
    truth = explorer.target
    best = {name: answers.y[0] for name, answers in explorer.each_model().items()}
    # panels row by row: input and truth, then error, prediction and risks of each model; of one model image, truth, prediction
    panels = {"voters": 3, "heads": 7} if several else {"model": 2}
    assert len({tuple(b.flatten().tolist()) for b in best.values()}) == len(panels)
    for row in range(7):
        for column in range(7):
            if truth[row, column] != -100:  # void is hatched
                assert colour_at(picture, 1, row, column) == shade_of(int(truth[row, column]))
            for name, panel in panels.items():
                assert colour_at(picture, panel, row, column) == shade_of(int(best[name][row, column]))


@pytest.mark.slow
def test_the_bars_of_positions_stand_where_their_places_are() -> None:
    explorer = made("tokens")
    lengths = (explorer.data.test.y != -100).sum(1)
    explorer.select(lengths.tolist().index(5))
    picture = row_body(explorer)  # type: ignore[arg-type]
    assert isinstance(picture, Picture)
    assert picture.size == (1, 5)
    from matplotlib.colors import to_rgb
    from PIL import Image

    assert picture.pixels is not None
    pixels = np.asarray(Image.open(io.BytesIO(picture.pixels)).convert("RGB")).astype(int)
    left, top, width, height = picture.panels[-1]
    high, wide = pixels.shape[:2]
    rows = slice(int(top * high) + 2, int((top + height) * high) - 2)
    filled = []
    for column in range(5):
        x = int((left + width * (column + 0.5) / 5) * wide)
        orange = np.abs(pixels[rows, x] - 255 * np.array(to_rgb(COLOURS["epistemic"]))).sum(1) < 12
        filled.append(orange.mean())
    epistemic = explorer.risk.epistemic
    assert torch.equal(torch.tensor(filled).argsort(), epistemic.argsort())
    # the axis goes to .95 of its height, matplotlib's margin
    assert filled == pytest.approx((0.952 * epistemic / epistemic.max()).tolist(), abs=0.05)


# ---- widgets
@pytest.mark.slow
def test_clicks_and_keys_choose_places_and_all_models_say_what_is_there() -> None:
    explorer = made_of_models("maps")
    v = view(explorer)
    plot = v.places.plot
    assert "Click on a place" in v.places.said.value
    assert (plot.place, plot.size, plot.turn) == ([], [7, 7], 0)
    plot._handle_custom_msg({"kind": "riskiest", "turn": 1}, [])
    known = explorer.target != -100
    assert explorer.place is not None
    riskiest = explorer.risk.epistemic.masked_fill(~known, -1)
    assert riskiest[explorer.place] == riskiest.max()
    plot._handle_custom_msg({"kind": "place", "row": 3, "column": 6, "turn": 2}, [])
    assert (explorer.place, plot.place, plot.turn) == ((3, 6), [3, 6], 2)
    page = Outline(v.places.said.value)
    said = "".join(page.words)
    truth = explorer.target[3, 6].item()
    assert f"Place (3, 6): truth {['road', 'sky', 'tree'][truth] if truth >= 0 else 'no class'}" in said
    by_model = explorer.at_place()
    for name in ("voters", "heads"):
        best = by_model[name]["prediction"].argmax()
        words = f"{['road', 'sky', 'tree'][best]}, {100 * by_model[name]['prediction'][best]:.0f} %"
        assert words in said
        assert f"{name}: {words}; " in plot.said
    risks = [by_model[m][r].item() for m in by_model for r in ("aleatoric", "epistemic", "total") if r in by_model[m]]
    shares = [p.item() for i in order_of(by_model) for p in (by_model[m]["prediction"][i] for m in by_model)]
    wanted = [100 * risk / max(risks) for risk in risks] + [100 * share for share in shares]
    assert widths(v.places.said.value) == pytest.approx(wanted, abs=0.06)
    v.next.click()
    assert plot.place == [3, 6]
    assert "".join(Outline(v.places.said.value).words) != said
    plot._handle_custom_msg({"kind": "place", "row": 7, "column": 0, "turn": 3}, [])
    assert "place: expected" in explorer.message
    assert (explorer.place, plot.turn) == ((3, 6), 3)
    plot._handle_custom_msg({"kind": "none", "turn": 4}, [])
    assert (explorer.place, plot.place, explorer.message) == (None, [], "")
    plot._handle_custom_msg({"kind": "other", "turn": 5}, [])
    assert "expected the kind place, riskiest or none" in explorer.message


def order_of(by_model: Any) -> list[int]:
    """Classes, likeliest by any model first."""
    order: list[int] = (
        torch.stack([f["prediction"] for f in by_model.values()]).amax(0).argsort(descending=True).tolist()
    )
    return order


@pytest.mark.slow
def test_positions_are_chosen_by_their_column() -> None:
    explorer = made("tokens")
    lengths = (explorer.data.test.y != -100).sum(1).tolist()
    explorer.select(lengths.index(4))
    plot = view(explorer).places.plot
    plot._handle_custom_msg({"kind": "place", "row": 0, "column": 2, "turn": 1}, [])
    assert (explorer.place, plot.place) == ((2,), [0, 2])
    assert plot.said.startswith("position 2: truth ")
    explorer.select(lengths.index(1)).place = 4  # type: ignore[assignment]
    assert (plot.size, plot.place) == ([1, 1], [])  # padding is not drawn
    assert "position 4: truth no class" in plot.said


@pytest.mark.slow
def test_the_places_of_a_picture_say_what_covering_changes() -> None:
    explorer = Explorer({"a": voters(), "b": voters(share=1)}, pictures())
    v = view(explorer)
    explorer.place = (0, 1)
    v.tabs.selected_index = v.tabs.titles.index("Places")
    plot = v.places.plot
    assert (plot.place, plot.size, len(plot.panels)) == ([0, 1], [6, 6], 3)
    assert "<svg" in plot.markup
    plot._handle_custom_msg({"kind": "place", "row": 4, "column": 2, "turn": 1}, [])
    assert explorer.place == (4, 2)
    page = v.places.said.value
    assert "Place (4, 2): pixel " in page
    assert "truth of the picture" in page
    by_model = explorer.at_place()
    names = ("aleatoric", "epistemic", "total", "prediction")
    top = max(abs(by_model[m][r].item()) for m in by_model for r in names[:3])
    most = max(abs(by_model[m]["prediction"].item()) for m in by_model)
    wanted = [100 * abs(by_model[m][r].item()) / (most if r == "prediction" else top) for m in by_model for r in names]
    assert widths(page) == pytest.approx(wanted, abs=0.06)
    assert len(re.findall("#F0E442", page)) == sum(by_model[m][r].item() < 0 for m in by_model for r in names)
    explorer.model = "b"
    assert (explorer.message, plot.place) == ("", [4, 2])
    assert page_of_place(explorer)[0] == plot.said


@pytest.mark.slow
def test_without_anywidget_the_picture_is_there_and_the_way_by_code_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'anywidget'", name="anywidget")

    monkeypatch.setattr("workbench.widgets.explorer.place_picture._widget", missing)
    monkeypatch.setattr("workbench.widgets.explorer.linked._widget", missing)
    explorer = made("depth")
    v = view(explorer)
    assert v.places.plot is None
    assert "<svg" in v.places.still.value
    assert "explorer.place" in v.places.still.value
    explorer.place = (0, 0)
    assert "Place (0, 0): truth " in v.places.said.value


@pytest.mark.slow
def test_a_snapshot_says_what_is_at_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **options: sent.append(data))
    explorer = made_of_models("maps")
    explorer.place = (1, 2)
    explorer.snapshot()
    assert "Place (1, 2): truth " in sent[0]["text/html"]
    Outline(sent[0]["text/html"])
    assert set(CASES) == {"maps", "tokens", "columns", "labels", "depth"}


@pytest.mark.slow
def test_the_saved_output_is_of_the_row_that_was_last_and_hidden_by_the_widget(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython
    import IPython.display

    sent: list[Any] = []
    monkeypatch.setattr(IPython, "get_ipython", lambda: "a shell")
    monkeypatch.setattr(IPython.display, "display", lambda data, **options: sent.append((data, options)))
    explorer = made_of_models("maps")
    explorer._ipython_display_()
    (widget, _), (first, options) = sent
    assert widget["application/vnd.jupyter.widget-view+json"]["model_id"] == explorer.widget.model_id
    assert widget["text/plain"] == repr(explorer)  # for viewers without widgets
    assert f"<b>row {explorer.row}</b>" in first["text/html"]
    assert "data:image/png" in first["text/html"]
    explorer.step()
    page = sent[-1][0]["text/html"]
    assert (options["update"], sent[-1][1]["update"]) == (False, True)
    assert f"<b>row {explorer.row}</b>" in page
    assert "<script" not in page
    Outline(page)
    count = len(sent)
    explorer.place = (1, 1)
    assert len(sent) == count  # walking sends no pages
    hidden = f".{options['display_id']}{{display:none!important}}"
    assert hidden in explorer.widget.children[0].value
    explorer.snapshot()
    assert sent[-1][0]["text/html"] == f'<div class="{options["display_id"]} {UNTYPESET}"></div>'
