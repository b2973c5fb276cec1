"""Filtered, brushed and named selections of rows in `Explorer`, and the linked plot, without a browser."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from html import unescape
from typing import Any

import numpy as np
import pytest
import torch
from helpers.widget_cases import beams, pictures, voters
from test_explorer import ensemble
from torch import nn

from workbench import compose, neo, vote
from workbench.widgets import Explorer
from workbench.widgets.explorer import linked

INF = math.inf


@pytest.fixture
def explorer() -> Explorer:
    return Explorer(voters(), pictures())


def strange() -> Explorer:
    """Of a model that measures vacuitic risk; every third row is far from what was seen."""
    torch.manual_seed(0)
    made = pictures()
    wrapped = compose(vote.Wrapper(3, output="logits"), neo.Wrapper())(
        nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3))
    )
    wrapped.fit([(made.train.x, made.train.y)])
    made.test.x[::3] *= 4
    return Explorer(wrapped, made)


def by_hand(explorer: Explorer, **ranges: tuple[float, float]) -> list[int]:
    """Rows within ranges, one by one, of what the model itself says."""
    _, risks = explorer.wrapped.eval()(explorer.data.test.x[explorer.rows], return_risk=True)
    return [
        row
        for i, row in enumerate(explorer.rows.tolist())
        if all(low <= risks[name][i].item() <= high for name, (low, high) in ranges.items())
    ]


# ---- rows
def test_a_brush_selects_the_rows_within_its_rectangle() -> None:
    explorer = Explorer(ensemble(), beams())
    aleatoric, epistemic = (explorer.answers().risk[name] for name in ("aleatoric", "epistemic"))
    drawn = torch.Generator().manual_seed(0)
    rectangles = [
        {
            name: tuple(torch.rand(2, generator=drawn).sort().values.mul(np.ptp(v)).add(v.min()).tolist())
            for name, v in pair.items()
        }
        for pair in [{"aleatoric": aleatoric.numpy(), "epistemic": epistemic.numpy()}] * 8
    ]
    counts = []
    for ranges in rectangles:
        assert explorer.brush(**ranges).selection.tolist() == by_hand(explorer, **ranges)
        counts.append(len(explorer.selection))
    assert 0 < max(counts) < 30
    value = epistemic[7].item()
    assert explorer.brush(epistemic=(value, value)).selection.tolist() == [7]  # both ends belong to it


def test_a_second_brush_replaces_or_adds(explorer: Explorer) -> None:
    middle = explorer.values[10].item()
    high = explorer.brush({explorer.by: (middle, INF)}).selection
    assert high.tolist() == sorted(explorer.ranked[:11].tolist())
    low = explorer.brush({explorer.by: (-INF, explorer.values[25].item())}).selection
    assert low.tolist() == sorted(explorer.ranked[25:].tolist())
    assert explorer.brush({explorer.by: (middle, INF)}, add=True).selection.tolist() == sorted(
        [*high.tolist(), *low.tolist()]
    )


def test_rows_of_a_drawn_part_keep_their_own_numbers() -> None:
    explorer = Explorer(ensemble(), beams(), max_rows=10)
    picked = explorer.brush(epistemic=(0, INF)).selection
    assert picked.equal(explorer.rows)
    assert not picked.equal(torch.arange(10))
    missing = next(row for row in range(30) if row not in picked.tolist())
    with pytest.raises(ValueError, match=f"row {missing} is not among the 10 rows"):
        explorer.selection = [missing]
    assert explorer.selection.equal(picked)


def test_nan_lies_in_no_rectangle_and_is_counted(explorer: Explorer) -> None:
    explorer._answers.risk["total"][[3, 4]] = torch.tensor([math.nan, INF])
    assert explorer.brush(total=(-INF, INF)).selection.tolist() == [row for row in range(30) if row != 3]
    assert linked.undrawn(explorer, "total") == 2
    assert linked.undrawn(explorer, "confidence") == 0
    assert all(math.isfinite(metric["width"]) for metric in linked.rows_of(explorer)["spec"]["metrics"])


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda e: e.brush(), "name a risk and its range"),
        (lambda e: e.brush(vacuitic=(0, 1)), "can be ranked by aleatoric, epistemic"),
        (lambda e: e.brush(error=(2, 1)), "must be a pair .lowest, highest."),
        (lambda e: e.brush(error=(math.nan, 1)), "must be a pair .lowest, highest."),
        (lambda e: e.brush(error=3), "error=3 must be a pair .lowest, highest."),
        (lambda e: e.brush(error=(0, "a")), "must be a pair .lowest, highest."),
        (lambda e: e.toggle(99), "row 99 is not among the 30 rows"),
        (lambda e: setattr(e, "selection", [0.5]), "expected row numbers as integers"),
        (lambda e: setattr(e, "selection", torch.ones(30, dtype=torch.bool)), r"explorer.rows\[mask\]"),
        (lambda e: setattr(e, "selection", torch.zeros(2, 2, dtype=torch.long)), r"integers \[n\]; found torch.int64"),
        (lambda e: e.filter(of_class="bottom"), "the classes of stripes are top, middle, <below>"),
        (lambda e: e.filter(of_class=3), "the classes of stripes are"),
        (lambda e: e.filter(confident_unseen=True), "compose it with neo"),
        (lambda e: e.selections.__setitem__("none", []), "no row is selected"),
        (lambda e: e.selections.__setitem__(" ", [1]), "name to save the selection under"),
        (lambda e: linked.handle(e, {"kind": "dance"}), "expected the kind choose, toggle, brush or clear"),
    ],
)
def test_what_is_refused_changes_nothing(explorer: Explorer, act: Any, message: str) -> None:
    explorer.filter(wrong=True).selection = [2, 1]
    with pytest.raises(ValueError, match=message):
        act(explorer)
    assert explorer.selection.tolist() == [1, 2]
    assert explorer.filters == {"wrong": True}


# ---- filters
def test_filters_list_the_rows_that_meet_all_of_them(explorer: Explorer) -> None:
    y = explorer.data.test.y
    predicted = explorer.wrapped.eval()(explorer.data.test.x).argmax(1)
    ranked = explorer.ranked.tolist()
    explorer.filter(of_class="<below>")
    assert explorer.shown.tolist() == [row for row in ranked if y[row] == 2]
    counts = set()
    for number, name in enumerate(explorer.class_names):
        explorer.filter(of_class=number, wrong=True)
        wanted = [row for row in ranked if y[row] == number and predicted[row] != number]
        counts.add(len(wanted))
        assert explorer.shown.tolist() == wanted
        assert explorer.filters == {"of_class": name, "wrong": True}
        assert explorer.shown_in_words() == f"{len(wanted)} of 30 rows: class {name}, wrong"
    assert len(counts) > 1
    assert explorer.ranked.tolist() == ranked  # ranking, coverage and abstention are of all rows
    assert len(explorer.abstained) == 6
    assert explorer.filter().shown.tolist() == ranked


def test_confident_and_never_seen() -> None:
    explorer = strange()
    risk = explorer.answers().risk
    explorer.filter(confident_unseen=True)
    middle = sorted(risk["total"].tolist())[14]
    wanted = [r for r in explorer.ranked.tolist() if risk["total"][r] <= middle and risk["vacuitic"][r] > 2]
    assert wanted
    assert explorer.shown.tolist() == wanted


def test_a_brush_takes_only_what_the_filter_shows(explorer: Explorer) -> None:
    explorer.filter(of_class="top").brush(error=(0, INF))
    assert explorer.selection.tolist() == [row for row in range(30) if explorer.data.test.y[row] == 0]
    explorer.filter(of_class="middle")
    assert explorer.shown.tolist() == []
    assert explorer.step().row == explorer.row


def test_arrows_walk_through_what_is_listed(explorer: Explorer) -> None:
    rows = explorer.ranked[[20, 5, 9]]
    explorer.selection = rows
    assert explorer.shown.tolist() == explorer.ranked[[5, 9, 20]].tolist()
    assert [explorer.step().row for _ in range(4)] == explorer.ranked[[5, 9, 20, 20]].tolist()


def test_values_have_no_classes_to_filter_by() -> None:
    explorer = Explorer(ensemble(), beams())
    with pytest.raises(ValueError, match="no single class that is right or wrong"):
        explorer.filter(wrong=True)
    with pytest.raises(ValueError, match="the classes of beams are none"):
        explorer.filter(of_class=0)


def test_selections_are_kept_by_name(explorer: Explorer) -> None:
    explorer.selection = [9, 3, 3]
    explorer.selections["odd ones"] = explorer.selection
    explorer.selection = None
    assert explorer.selections["odd ones"].tolist() == [3, 9]
    explorer.selections["odd ones"].fill_(0)  # a copy
    explorer.selection = explorer.selections["odd ones"]
    assert explorer.selection.tolist() == [3, 9]
    assert explorer.selection.dtype == torch.int64
    assert repr(explorer.selections) == "{'odd ones': 2 rows}"
    del explorer.selections["odd ones"]
    with pytest.raises(KeyError, match="no selection is saved as 'odd ones'; there are none"):
        explorer.selections["odd ones"]


@pytest.mark.slow
def test_rows_of_several_targets_are_brushed_as_well() -> None:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    wrapped = vote.Wrapper(3, output="values")(nn.Linear(2, 2))
    explorer = Explorer(wrapped, (x, x * 2))
    assert type(explorer).__name__ == "SeveralExplorer"
    explorer.brush(epistemic=(explorer.values[2].item(), INF))
    assert explorer.selection.tolist() == sorted(explorer.ranked[:3].tolist())
    with pytest.raises(ValueError, match="no single class"):
        explorer.filter(wrong=True)
    v = view(explorer)
    assert [f"<td>{row}</td>" in v.panel.rows.value for row in range(len(explorer.rows))] == [
        row in explorer.selection.tolist() for row in range(len(explorer.rows))
    ]
    if v.panel.plot is not None:
        numbers = np.frombuffer(v.panel.plot.numbers, "<f4").reshape(len(explorer.rankings), -1)
        for name, values in zip(explorer.rankings, numbers, strict=True):
            assert values.tolist() == explorer.values_of(explorer.rows, name).float().tolist()
        message(explorer, kind="choose", row=int(explorer.ranked[2]))
        assert explorer.row == int(explorer.ranked[2])


# ---- widgets
def view(explorer: Explorer) -> Any:
    assert explorer.widget is not None
    return explorer._view


def message(explorer: Explorer, **said: Any) -> None:
    """What the plot says in a browser."""
    plot = view(explorer).panel.plot
    plot._handle_custom_msg(json.loads(json.dumps(said)), [])


@pytest.mark.slow
def test_the_plot_knows_the_numbers_of_all_rows(explorer: Explorer) -> None:
    pytest.importorskip("anywidget")
    plot = view(explorer).panel.plot
    numbers = np.frombuffer(plot.numbers, "<f4").reshape(len(explorer.rankings), 30)
    for name, values in zip(explorer.rankings, numbers, strict=True):
        explorer.by = name
        order = np.argsort(-values, kind="stable")
        assert order.tolist() == explorer.ranked.tolist() == np.frombuffer(plot.order, "<i4").tolist()
    predicted = explorer.wrapped.eval()(explorer.data.test.x).argmax(1)
    assert np.frombuffer(plot.predicted, "<f4").tolist() == predicted.tolist()
    assert np.frombuffer(plot.target, "<f4").tolist() == explorer.data.test.y.tolist()


@pytest.mark.slow
def test_a_click_in_the_plot_moves_the_explorer_and_the_other_way_round(explorer: Explorer) -> None:
    pytest.importorskip("anywidget")
    v = view(explorer)
    row = int(explorer.ranked[7])
    message(explorer, kind="choose", row=row)
    assert explorer.row == v.list.value == v.number.value == v.panel.plot.row == row
    assert f"row {row}<" in v.pair.value
    v.next.click()
    assert v.panel.plot.row == int(explorer.ranked[8])
    explorer.filter(of_class="top")
    message(explorer, kind="toggle", row=row)
    # keys walk through all that pass the filter, so that a second row can be selected
    walked = explorer.rows[np.frombuffer(v.panel.plot.order, "<i4").tolist()]
    assert walked.tolist() == [r for r in explorer.ranked.tolist() if explorer.data.test.y[r] == 0]
    message(explorer, kind="choose", row=30)
    assert "row must be a whole number from 0 to 29" in explorer.message
    assert explorer.row == int(explorer.ranked[8])


@pytest.mark.slow
def test_a_brush_in_the_plot_fills_the_list_and_the_cards() -> None:
    pytest.importorskip("anywidget")
    explorer = Explorer(ensemble(), beams(), max_rows=20)
    v = view(explorer)
    v.tabs.selected_index = v._select_tab
    aleatoric, epistemic = (explorer.answers().risk[name].median().item() for name in ("aleatoric", "epistemic"))
    rectangle = {"aleatoric": (0.0, aleatoric), "epistemic": (epistemic, 1e6)}
    message(
        explorer, kind="brush", across="aleatoric", up="epistemic", x=[0.0, aleatoric], y=[epistemic, 1e6], add=False
    )
    wanted = by_hand(explorer, **rectangle)
    assert explorer.selection.tolist() == wanted
    assert 0 < len(wanted) < 20
    assert [row for _, row in v.list.options] == explorer.shown.tolist()
    assert explorer.rows[np.frombuffer(v.panel.plot.selected, "u1").astype(bool)].tolist() == wanted
    assert f"{len(wanted)} of 20 rows: selected" in v.panel.words.value
    assert [f"row {row}<" in v.panel.rows.value for row in explorer.rows.tolist()] == [
        row in wanted for row in explorer.rows.tolist()
    ]
    message(explorer, kind="toggle", row=wanted[0])
    assert explorer.selection.tolist() == wanted[1:]
    message(explorer, kind="clear")
    assert len(explorer.selection) == 0
    message(explorer, kind="brush", across="epistemic", up="epistemic", x=[0, epistemic], y=[epistemic, 9], add=False)
    assert explorer.answers().risk["epistemic"][torch.searchsorted(explorer.rows, explorer.selection)].tolist() == [
        epistemic
    ]
    assert explorer.message == ""


@pytest.mark.slow
def test_filters_and_saved_selections_by_their_controls() -> None:
    explorer = strange()
    v = view(explorer)
    panel = v.panel
    v.tabs.selected_index = v._select_tab
    panel.of_class.value = "middle"
    panel.unseen.value = True
    assert explorer.filters == {"of_class": "middle", "confident_unseen": True}
    assert [row for _, row in v.list.options] == explorer.shown.tolist()
    explorer.filter(wrong=True)
    assert (panel.of_class.value, panel.wrong.value, panel.unseen.value) == ("all", True, False)
    panel.clear.click()
    assert explorer.filters == {}
    assert panel.save.disabled
    explorer.selection = [4, 2]
    panel.save.click()
    assert "name to save the selection under" in explorer.message
    panel.name.value = "two"
    panel.save.click()
    assert explorer.message == panel.name.value == ""
    assert panel.saved.value == "two"
    explorer.selection = None
    assert panel.saved.value == ""
    panel.saved.value = "two"
    assert explorer.selection.tolist() == [2, 4]


@pytest.mark.slow
def test_without_anywidget_it_says_in_a_line_what_brings_it(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    linked._widget.cache_clear()
    try:
        v = view(explorer)
        assert v.panel.plot is None
        assert linked.MISSING in unescape(v.panel.widget.children[1].value)
        v.panel.wrong.value = True
        assert explorer.filters == {"wrong": True}
        assert [row for _, row in v.list.options] == explorer.shown.tolist()
        explorer.step()
        assert explorer.message == ""
    finally:
        linked._widget.cache_clear()


@pytest.mark.slow
def test_the_package_starts_without_anywidget() -> None:
    code = (
        "import sys, workbench, workbench.widgets.explorer.linked; print({'anywidget', 'traitlets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
