"""User-given names and displayed numbers: no name becomes markup or a formula, and a number is written alike everywhere."""

from __future__ import annotations

import html
import re
import warnings
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pandas as pd
import pytest
import torch
from helpers.token_cases import hostile
from torch import nn

from workbench import vote
from workbench.data import Card, Column, Data, Split
from workbench.widgets import Comparison, Explorer, TokenRisks
from workbench.widgets.common import pictures
from workbench.widgets.common.cases import cases, exact, figures, format_number, grid
from workbench.widgets.common.predictions import Predictions
from workbench.widgets.comparison.figure import overview
from workbench.widgets.comparison.panels import draw, view_of
from workbench.widgets.comparison.saved import saved_page
from workbench.widgets.comparison.scores import COLUMNS, scores
from workbench.widgets.explorer import neighbours
from workbench.widgets.explorer.confusion import confusion_table
from workbench.widgets.explorer.editing import Editor

w = pytest.importorskip("ipywidgets")

MARKUP = '<img src=x onerror="alert(1)">'
NAMES = (MARKUP, "income $10k-$20k", r"\frac $\foo$", "温度 🌡", "a|b, c", "x" * 90)


def named(classes: tuple[str, ...] | None = None) -> Data:
    """Rows whose columns, target, classes and name are of the worst kind."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, len(NAMES), generator=generator)
    y = x[:, :1] if classes is None else torch.arange(60) % len(classes)
    columns, card = tuple(map(Column, NAMES)), Card("made up", "computed", "none", "none")
    task = "regression" if classes is None else "classification"
    target = Column(f"price $ {MARKUP}", "$")
    return Data(MARKUP, task, Split(x[:40], y[:40]), Split(x[40:], y[40:]), columns, target, card, classes)


def model(outputs: int) -> Any:
    return lambda: nn.Linear(len(NAMES), outputs)


def pages(comparison: Comparison, explorer: Explorer) -> list[str]:
    """All HTML of both, every page of the explorer opened."""
    comparison.controls.matrix_fold.selected_index = 0
    comparison._repr_mimebundle_()
    assert explorer.widget is not None
    view: Any = explorer._view
    for page in range(len(view.tabs.children)):
        view.tabs.selected_index = page
        assert explorer.message == ""
    markup, todo = [saved_page(comparison._findings)], [comparison.controls.root, explorer.widget]
    while todo:
        widget = todo.pop()
        todo += getattr(widget, "children", ())
        markup += [widget.value] if isinstance(widget, w.HTML) else []
    return markup


@pytest.mark.slow
@pytest.mark.parametrize("classes", [None, (MARKUP, "$10k-$20k", "温度 🌡", r"\frac $\foo$")], ids=["values", "classes"])
def test_no_name_is_read_as_markup_or_a_formula(classes: tuple[str, ...] | None) -> None:
    data = named(classes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of letters that matplotlib's fonts lack, and the page's have
        name = f"vote $a$ $b$ {MARKUP}"
        comparison = Comparison(model(len(classes or ".")), data, {name: vote.Wrapper(2)}, epochs=1)
        comparison.start(block=True)
        markup = pages(comparison, Explorer(comparison.models[name], data))
    assert comparison.errors == {}
    for page in markup:
        assert "<img src=x" not in page
        assert "no picture" not in page
    for widget in (
        comparison.controls.rows[name].tick,
        Explorer(comparison.models[name], data)._editor._sliders[NAMES[1]],
    ):
        shown = widget.description  # in which JupyterLab would draw a formula, but not across tags
        assert "$" not in shown
        assert "<span>&#36;</span>" in shown
        assert "<img" not in shown
        assert widget.description_allow_html


@pytest.mark.slow
def test_what_was_closed_is_shown_again() -> None:
    pytest.importorskip("anywidget")
    data = named()
    comparison = Comparison(model(1), data, {"vote": vote.Wrapper(2)}, epochs=1)
    explorer, shown = Explorer(vote.Wrapper(2)(nn.Linear(len(NAMES), 1)), data), TokenRisks(hostile())
    comparison.controls.epochs.value = 7
    roots = [comparison.controls.root, explorer.widget, shown.widget]
    everything = [widget for root in roots for widget in within(root)]
    assert len(everything) > 100
    for widget in everything:  # as by `ipywidgets.Widget.close_all()`
        widget.close()
    with patch("IPython.display.display") as display:
        explorer._ipython_display_()
        shown._ipython_display_()
    sent = [comparison._repr_mimebundle_(), *(call.args[0] for call in display.call_args_list)]
    view = "application/vnd.jupyter.widget-view+json"
    assert [bundle[view]["model_id"] for bundle in sent] == [root.model_id for root in roots]
    assert all(widget.comm is not None for widget in everything)
    assert comparison._settings().training.epochs == 7


def within(widget: Any) -> list[Any]:
    """A widget and all its children, with their layouts and styles."""
    parts = [getattr(widget, name, None) for name in ("layout", "style")]
    children = [descendant for child in getattr(widget, "children", ()) for descendant in within(child)]
    return [widget, *(part for part in parts if isinstance(part, w.Widget)), *children]


def test_pictures_of_letters_that_matplotlib_lacks_warn_of_nothing() -> None:
    figure = pictures.new_figure(3, 2)
    pictures.paint(figure.subplots()).set(xlabel="温度")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "温度" in pictures.svg(figure, "nothing")


def test_long_labels_and_tips_keep_their_beginning_and_end() -> None:
    figure = pictures.new_figure(3, 2)
    ax = pictures.paint(figure.subplots())
    ax.set(ylabel="pressure " * 20 + "(kPa)")
    page = pictures.svg(figure, "a long label", [pictures.Spot(ax, 0.5, 0.5, ["say " * 80 + "end"])])
    label = ax.get_ylabel()
    assert len(label) < 40
    assert label.startswith("pressure")
    assert label.endswith("(kPa)")
    [(left, wide)] = re.findall(r'<rect rx="2" x="(\d+)" y="\d+" width="(\d+)"', page)
    assert int(left) + int(wide) <= 3 * 72
    assert "…" in page


def test_long_names_in_heads_of_tables_are_shortened_with_the_whole_as_tooltip() -> None:
    data = named(("short", "y" * 90))
    explorer = Explorer(vote.Wrapper(2, output="logits")(nn.Linear(len(NAMES), 2)), data)
    for page in (confusion_table(explorer), grid(explorer.wrapped, data, k=2), near(explorer)):
        heads = re.findall(r"<th[^>]*>([^<]*)</th>", page)
        assert all(len(html.unescape(head)) <= 48 for head in heads)
        assert heads
    assert confusion_table(explorer).count(f'title="{"y" * 90}"') == 2
    assert f'title="{"x" * 90}"' in grid(explorer.wrapped, data, k=2)
    assert f"<th>{html.escape(NAMES[1])}</th>" in near(explorer)  # neither cut nor with a tooltip


def near(explorer: Explorer) -> str:
    """The nearest cases with their features."""
    return neighbours.page(explorer.neighbours, explorer.data, explorer.space, explorer.x)


def test_classes_that_are_written_from_right_to_left_leave_numbers_where_they_belong() -> None:
    names = ("خروف", "שועל", "goat")
    data = named(names)
    x = data.test.x[:8]
    answers = Predictions(torch.arange(8) % 3, {}, torch.eye(3)[torch.arange(8) % 3])
    shown = cases(data, x, answers, [f"row {i}" for i in range(8)], output="probs")
    assert [case.prediction for case in shown[:3]] == [
        "\u2068خروف\u2069, 100 %",
        "\u2068שועל\u2069, 100 %",
        "goat, 100 %",
    ]
    assert "\u2068خروف\u2069, 100 %" in figures(shown[0])
    assert "goat, 100 %" in figures(shown[2])  # of a class "7" it would else be "7 100 %"


@pytest.mark.slow
def test_the_calibration_error_of_the_picture_is_that_of_the_table() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(120, 3, generator=generator).softmax(1)
    # calibrated: bins are off to both sides, so that their number counts
    y = probs.multinomial(1, generator=generator)[:, 0]
    rows, columns = Split(torch.randn(120, 3, generator=generator), y), tuple(map(Column, "abc"))
    card = Card("made up", "computed", "none", "none")
    data = Data("drawn", "classification", rows, rows, columns, Column("y"), card, ("a", "b", "c"))
    answers = Predictions(probs.argmax(1), {"total": torch.special.entr(probs).sum(1)}, probs)
    figure = pictures.new_figure(6, 3)
    draw(figure, view_of(data), answers)
    drawn = re.search(r">ECE ([\d.]+) \(n = 120\)<", pictures.svg(figure, "reliability"))
    assert drawn is not None
    assert drawn[1] == f"{scores(answers, data, y)['ece']:.3f}"


def test_numbers_are_written_without_powers_of_ten_where_people_do() -> None:
    assert [format_number(v, "$", 2) for v in (12.34, 130.0, 99.7, 1e8)] == ["12 $", "130 $", "100 $", "1e+08 $"]
    assert [format_number(v, "", 3) for v in (999.6, 1068.0, -1068.0)] == ["1000", "1068", "-1068"]
    assert [COLUMNS["rmse"].text(v) for v in (1098.2, 999.7, 12.345, 0.012)] == ["1,098", "1,000", "12.3", "0.0120"]
    for value in (1000000.4375, 1615511.5, 209.8, 0.00012, 491.0, 3.5e-13, 9.4e11):
        single = torch.tensor(value)
        assert float(exact(single)) == pytest.approx(single.item(), rel=1e-7)
        assert torch.equal(torch.tensor(float(exact(single))), single)
    assert exact(torch.tensor(1000000.4375)) == "1000000.44"


def test_one_class_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"are of one class, 'only', .* give rows of another class"):
        Comparison(model(1), named(("only",)), ["vote"])


# ---- categories
def frame() -> Data:
    colours = ["red", "blue", "green", None] * 15
    table = pd.DataFrame({"colour": colours, "size": [float(i) for i in range(60)]})
    return Data.from_dataframe(table.assign(cost=table["size"] * 2), "cost")


def test_a_case_has_one_category_at_a_time() -> None:
    data = frame()
    names = [column.name for column in data.features]
    assert names == ["colour = blue", "colour = green", "colour = red", "colour is missing", "size"]
    editor = Editor(data, lambda: None)
    red = int((data.test.x[:, 2] == 1).nonzero()[0, 0])
    editor.load(data.test.x[red])
    editor.set({"colour = blue": 1.0})
    assert editor.applied(editor.changes)[:4].tolist() == [1, 0, 0, 0]
    editor._sliders["colour is missing"].value = 1.0
    assert editor.applied(editor.changes)[:4].tolist() == [0, 0, 0, 1]
    assert [editor._sliders[name].value for name in names[:4]] == [0, 0, 0, 1]
    assert editor.active == "colour is missing"
    editor._numbers["colour = red"].value = 1.0
    assert editor.changes == {}
    editor.set({"colour = blue": 1.0, "colour = red": 1.0})  # what is asked for by code is taken as it is
    assert editor.applied(editor.changes)[:4].tolist() == [1, 0, 1, 0]


def test_columns_of_other_data_are_edited_one_by_one() -> None:
    editor = Editor(replace(frame(), encoding=None), lambda: None)
    editor.load(torch.tensor([0.0, 0.0, 1.0, 0.0, 3.0]))
    editor.set({"colour = blue": 1.0})
    assert editor.changes == {"colour = blue": 1.0}


@pytest.mark.slow
@pytest.mark.filterwarnings("error:constrained_layout not applied")
def test_the_picture_of_a_comparison_has_room_beside_long_names_and_shows_dollars() -> None:
    names = ["share_of_$a$_and_$b$", "n_voters_5_" + "x" * 150]
    comparison = Comparison(
        "linear", (torch.randn(60, 2), torch.randn(60, 1)), {name: vote.Wrapper(2) for name in names}, epochs=1
    )
    comparison.start(block=True)
    findings = comparison._findings
    figure = overview(findings.view, findings.present, findings.frame(), "", {})
    figure.draw_without_rendering()
    titles = [place._suptitle for place in figure.subfigs[1].subfigs if place._suptitle]
    heads = [cell.get_text() for cell in figure.get_axes()[0].tables[0].get_celld().values()]
    for text in (*titles, *heads):
        assert not text.get_parse_math() or "$" not in text.get_text()
    assert names[0] in [title.get_text() for title in titles]
