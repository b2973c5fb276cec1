"""The widgets of `Explorer`, operated without a browser, and its static image."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.widget_cases import CARD, Outline, beams, pictures, voters
from test_explorer import ensemble
from torch import nn

from workbench import compose, vote
from workbench.data import Column, Data, Split
from workbench.widgets import Explorer

widgets = pytest.importorskip("ipywidgets")


@pytest.fixture
def explorer() -> Explorer:
    built = Explorer(ensemble(), beams())
    assert built.widget is built.widget
    return built


def view(explorer: Explorer) -> Any:
    assert explorer.widget is not None
    return explorer._view


def sliders(explorer: Explorer) -> dict[str, Any]:
    return explorer._editor._sliders


def every(widget: Any) -> Iterator[Any]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from every(child)


def test_the_list_is_ranked_and_picks_a_case(explorer: Explorer) -> None:
    v = view(explorer)
    assert [row for _, row in v.list.options] == explorer.ranked.tolist()
    assert v.list.options[0][0] == f"1.  row {explorer.row}:  {explorer.values[0].item():.4g} MPa"
    v.list.value = int(explorer.ranked[5])
    assert explorer.row == v.number.value == int(explorer.ranked[5])
    assert f"row {explorer.row}<" in v.pair.value
    v.next.click()
    v.next.click()
    v.previous.click()
    assert explorer.row == v.list.value == int(explorer.ranked[6])
    v.number.value = 3
    assert explorer.row == v.list.value == 3


@pytest.mark.slow
def test_another_ranking_keeps_the_case(explorer: Explorer) -> None:
    v = view(explorer)
    row = explorer.row
    v.by.value = "error"
    assert explorer.by == "error"
    assert [r for _, r in v.list.options] == explorer.ranked.tolist()
    assert explorer.row == v.list.value == row


def test_a_slider_edits_the_case_and_reset_puts_it_back(explorer: Explorer) -> None:
    v, slider = view(explorer), sliders(explorer)["load"]
    value = slider.value
    slider.value = value + 1
    assert explorer.edits == {"load": value + 1}
    y, _ = explorer.wrapped.eval()(explorer.x[None], return_risk=True)
    assert explorer.case(edited=True).prediction in v.pair.value
    torch.testing.assert_close(explorer.prediction, y[0])
    explorer._editor.reset_button.click()
    assert explorer.edits == {}
    assert slider.value == value
    assert "wb-idle" in v.pair.value


@pytest.mark.slow
def test_sliders_cover_the_training_range_and_widen_for_a_case_outside(explorer: Explorer) -> None:
    low, high = (v.item() for v in explorer.data.train.x[:, 0].aminmax())
    slider = sliders(explorer)["load"]
    inside = next(i for i, x in enumerate(explorer.data.test.x[:, 0].tolist()) if low < x < high)
    explorer.select(inside)
    assert (slider.min, slider.max) == (low, high)
    explorer.edit(load=high + 10)
    assert (slider.value, slider.max) == (high + 10, high + 10)
    explorer.select(inside)
    assert (slider.min, slider.max) == (low, high)
    assert explorer.edits == {}


def test_a_value_that_the_browser_rounds_to_a_step_is_no_edit(explorer: Explorer) -> None:
    slider = sliders(explorer)["load"]
    slider.value += 0.4 * slider.step
    assert explorer.edits == {}


def decimals() -> Data:
    """Whole numbers and tenths from 102 on, as cement in concrete has; the last feature has more digits than anybody reads."""
    generator = torch.Generator().manual_seed(1)
    tenths = torch.randint(1020, 5400, (60,), generator=generator).double() / 10
    x = torch.stack([(tenths * 10 / 3).round(), tenths, torch.rand(60, generator=generator).double()], 1).float()
    x[0], x[50, :2] = torch.tensor([332.3, 102.3, 0.5]), torch.tensor([491.0, 209.8])
    y = x.sum(1, keepdim=True)
    columns = (Column("whole"), Column("tenths"), Column("share"))
    return Data("decimals", "regression", Split(x[:40], y[:40]), Split(x[40:], y[40:]), columns, Column("sum"), CARD)


@pytest.mark.slow
def test_numbers_show_what_the_model_gets_to_the_digit_of_the_data() -> None:
    explorer = Explorer(ensemble(3), decimals())
    assert explorer.widget is not None
    numbers, editor = explorer._editor._numbers, explorer._editor
    for row, x in enumerate(explorer.data.test.x):
        explorer.select(row)
        shown = torch.tensor([number.value for number in numbers.values()])
        assert torch.equal(shown, x)  # to the last bit
        assert torch.equal(explorer.x, x)
    explorer.select(10)
    assert (numbers["whole"].value, numbers["tenths"].value) == (491, 209.8)
    assert (editor.text("whole"), editor.text("tenths")) == ("491", "209.8")
    assert ("whole", "491") in explorer.case().inputs
    assert ("tenths", "209.8") in explorer.case().inputs
    assert not any(slider.readout for slider in sliders(explorer).values())


@pytest.mark.slow
def test_a_number_that_is_typed_is_what_the_model_gets() -> None:
    explorer = Explorer(ensemble(3), decimals())
    v, numbers = view(explorer), explorer._editor._numbers
    explorer.select(10)
    numbers["tenths"].value = 210.03
    assert explorer.x[1] == torch.tensor(210.03)
    assert "edited: tenths 210.03" in v.pair.value
    torch.testing.assert_close(explorer.prediction, explorer.wrapped.eval()(explorer.x[None], return_risk=True)[0][0])
    slider = sliders(explorer)["tenths"]
    slider.value = slider.min + 33 * slider.step
    assert explorer.x[1].item() == torch.tensor(numbers["tenths"].value).item() == pytest.approx(slider.value)
    numbers["tenths"].value = 209.8
    assert explorer.edits == {}
    numbers["whole"].value = float("nan")
    assert (numbers["whole"].value, explorer.edits) == (491, {})


@pytest.mark.slow
def test_of_many_features_those_that_are_asked_for_have_sliders() -> None:
    explorer = Explorer(ensemble(10), "diabetes")
    names = [column.name for column in explorer.data.features]
    assert explorer.widget is not None
    assert list(sliders(explorer)) == names[:8]
    assert "along age" in view(explorer).frames["edit"][1].value
    explorer._editor.choice.value = names[9]
    assert f"along {explorer.data.features[9]}" in view(explorer).frames["edit"][1].value
    assert explorer._editor._box.children[0].children[0] is sliders(explorer)[names[9]]
    explorer.edit({names[8]: 100.0})
    assert sliders(explorer)[names[8]].value == 100
    assert len(explorer._editor._box.children) == 8


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: Explorer(ensemble(), beams()), lambda: Explorer(voters(), pictures())])
def test_every_control_says_what_it_is_for(make: Any) -> None:
    kinds = (widgets.Button, widgets.Dropdown, widgets.FloatSlider, widgets.Select, widgets.BoundedIntText)
    controls = [widget for widget in every(make().widget) if isinstance(widget, kinds)]
    assert len(controls) >= 9
    assert all(control.tooltip for control in controls)


@pytest.mark.slow
def test_pictures_are_drawn_when_their_tab_is_opened(explorer: Explorer) -> None:
    v = view(explorer)
    drawn = {name: frame[1] for name, frame in v.frames.items()}
    assert "<svg" in drawn["edit"].value
    assert drawn["all"].value == drawn["coverage"].value == ""
    v.tabs.selected_index = 1
    assert drawn["all"].value.count("wb-spot") == 30
    assert f"row {explorer.row}<" in drawn["all"].value
    v.tabs.selected_index = 2
    assert "wb-line" in v.frames["coverage"][2].value
    v.tabs.selected_index = 3
    assert "this case" in v.table.value
    assert explorer.message == ""


@pytest.mark.slow
def test_the_coverage_slider_says_what_is_refused_and_what_is_left(explorer: Explorer) -> None:
    v = view(explorer)
    v.tabs.selected_index = 2
    v.coverage.value = 0.5 + 1e-16 * 4  # as browsers add up the steps of a slider
    assert explorer.coverage == 0.5
    assert "answers 15 of 30 cases (50 %)" in v.left.value
    rows = re.findall(r"<td>row (\d+)</td>", v.refused.value)
    assert [int(row) for row in rows] == explorer.abstained[:8].tolist()
    v.coverage.value = 1.0
    assert "every case is answered" in v.refused.value


@pytest.mark.slow
def test_the_mark_lies_where_the_case_is() -> None:
    explorer = Explorer(ensemble(), beams())
    v = view(explorer)
    v.tabs.selected_index = 1
    ax = v._drawn["all"][1]
    places = {}
    for row in explorer.ranked[:3].tolist():
        explorer.select(row)
        left, top = (float(x) for x in re.findall(r"(?:left|top):([\d.]+)%", v.frames["all"][2].value))
        places[row] = left
        error = abs(explorer.prediction.item() - explorer.target.item())
        across, up = ax.transData.inverted().transform(ax.figure.transFigure.transform((left / 100, 1 - top / 100)))
        assert across == pytest.approx(explorer.risk.epistemic, rel=0.01)
        assert up == pytest.approx(error, rel=0.01, abs=0.01)
    assert list(places.values()) == sorted(places.values(), reverse=True)


@pytest.mark.slow
def test_one_and_two_inputs_and_classes_have_pictures_of_their_risk() -> None:
    x = torch.linspace(-2, 2, 60)[:, None]
    line = Explorer(ensemble(1), (x, x**2))
    plane = Explorer(ensemble(), beams())
    classes = Explorer(voters(), pictures()).edit(rotation=10)
    pages = [view(explorer).frames["edit"][1].value for explorer in (line, plane, classes)]
    for page, words in zip(pages, ("along x", "plane of the two inputs", "along rotation"), strict=True):
        assert words in page.split("<svg")[1].split(">")[0]
    assert all(explorer.message == "" for explorer in (line, plane, classes))


@pytest.mark.slow
def test_an_error_is_said_in_the_widget_and_the_rest_goes_on() -> None:
    class Wall(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool((x[:, 0] > 100).any()):
                raise RuntimeError("beams <bend>")
            return super().forward(x)

    explorer = Explorer(vote.Wrapper(2)(Wall(2, 1)), beams())
    v, slider = view(explorer), sliders(explorer)["load"]
    slider.max = 1000
    slider.value = 900
    assert "beams <bend>" in explorer.message
    assert "beams &lt;bend&gt;" in v.error.value
    slider.value = 1.0
    assert explorer.message == v.error.value == ""
    assert explorer.edits == {"load": 1.0}


@pytest.mark.slow
def test_an_edit_that_cannot_be_predicted_is_undone_and_named() -> None:
    class Table(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x[:, 0] > 30).any():
                raise RuntimeError("no such entry")
            return super().forward(x)

    explorer = Explorer(vote.Wrapper(2)(Table(2, 1)), beams())
    name, other = list(explorer._editor.knobs)[:2]
    assert explorer.widget is not None
    explorer._editor._sliders[other].value = explorer._editor._sliders[other].max
    kept, prediction = explorer.edits, explorer.prediction.clone()
    explorer._editor._numbers[name].value = 31.0
    assert "no such entry" in explorer.message
    assert f"row {explorer.row}, edited: {other}=" in explorer.message
    assert f"{name}=31" in explorer.message
    assert explorer.edits == kept  # else the prediction would be that of another input
    assert torch.equal(explorer.prediction, prediction)
    with torch.no_grad():
        torch.testing.assert_close(prediction, explorer.wrapped.eval()(explorer.x[None])[0])


@pytest.mark.slow
def test_the_plain_baseline_says_why_it_cannot_abstain() -> None:
    explorer = Explorer(compose()(nn.Linear(2, 1)), beams())
    v = view(explorer)
    v.tabs.selected_index = 2
    assert "the plain baseline measures no risk" in explorer.message
    v.tabs.selected_index = 1
    assert explorer.message == ""
    assert "wb-spot" in v.frames["all"][1].value


@pytest.mark.slow
def test_a_control_that_was_refused_goes_back() -> None:
    explorer = Explorer(vote.Wrapper(2, output="logits")(nn.Sequential(nn.Conv2d(1, 3, 6), nn.Flatten())), pictures())
    v = view(explorer)
    v.space.value = "features"
    assert "needs a linear layer" in explorer.message
    assert explorer.space == v.space.value == "inputs"
    explorer.step()
    assert explorer.message == ""


@pytest.mark.slow
def test_what_cannot_be_drawn_does_not_stop_what_was_asked_for() -> None:
    explorer = Explorer(compose()(nn.Linear(2, 1)), beams())
    view(explorer).tabs.selected_index = 2
    explorer.coverage = 0.4
    assert explorer.coverage == view(explorer).coverage.value == 0.4
    assert "the plain baseline measures no risk" in explorer.message


@pytest.mark.slow
def test_a_part_of_many_rows_is_said_to_be_one() -> None:
    explorer = Explorer(ensemble(), beams(), max_rows=10)
    assert "10 of 30 test rows, drawn at random" in view(explorer).note.value


@pytest.mark.slow
def test_moving_along_one_feature_does_not_draw_again() -> None:
    x = torch.linspace(-2, 2, 90)[:, None] * torch.tensor([1.0, -1.0, 0.5])
    explorer = Explorer(ensemble(3), (x, x[:, 0]))
    v = view(explorer)
    explorer.edit(x2=0.1)
    picture, mark = v.frames["edit"][1].value, v.frames["edit"][2].value
    explorer.edit(x2=0.2)
    assert v.frames["edit"][1].value == picture
    assert v.frames["edit"][2].value != mark
    explorer.edit(x1=0.2)
    assert v.frames["edit"][1].value != picture


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: Explorer(ensemble(), beams()), lambda: Explorer(voters(), pictures())])
def test_the_snapshot_is_html_without_scripts_and_a_picture(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, **_: shown.append(bundle))
    explorer = make()
    explorer.snapshot()
    (bundle,) = shown
    assert bundle["image/png"].startswith("iVBOR")
    page = bundle["text/html"]
    assert len(page) < 400_000
    assert f"row {explorer.row}" in page
    assert "<script" not in page
    assert page.count('class="wb-spot"') == 30
    assert explorer.summary().split(":")[0] in page.replace("&lt;", "<")
    for part in re.findall(r"<div class=\"wb-pair\">.*?</section>", page):
        Outline(f"<section>{part}")


@pytest.mark.slow
def test_rows_of_constant_features_are_shown_without_anything_to_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, **_: shown.append(bundle))
    explorer = Explorer(ensemble(), (torch.ones(60, 2), torch.randn(60)))
    assert not view(explorer).problem
    explorer.snapshot()
    (bundle,) = shown
    assert bundle["image/png"].startswith("iVBOR")
    assert 'class="wb-spot"' in bundle["text/html"]


def test_rows_of_one_class_are_refused_as_such() -> None:
    x = torch.randn(60, 2)
    with pytest.raises(ValueError, match="all rows of your data are of one class"):
        Explorer(vote.Wrapper(2, output="logits")(nn.Linear(2, 2)), (x, torch.zeros(60, dtype=torch.int64)))


@pytest.mark.slow
def test_nothing_is_drawn_through_pyplot(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    monkeypatch.setattr("matplotlib.pyplot.figure", lambda *_, **__: pytest.fail("pyplot was used"))
    for tab in range(4):
        view(explorer).tabs.selected_index = tab
    assert dict(mpl.rcParams) == before
    assert math.isfinite(explorer.risk.total)


@pytest.mark.slow
def test_a_click_while_a_cell_sets_the_controls_is_not_lost(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Jupyter handles messages of widgets in another thread than cells
    panel, first, clicks = view(explorer).panel, explorer.row, []
    update = panel.update_controls

    def click_meanwhile() -> None:
        if not clicks:
            clicks.append(threading.Thread(target=view(explorer).next.click))
            clicks[0].start()
            clicks[0].join(0.2)
        update()

    monkeypatch.setattr(panel, "update_controls", click_meanwhile)
    explorer.step(1)
    clicks[0].join()
    assert explorer.row == explorer.ranked[2].item() != first
