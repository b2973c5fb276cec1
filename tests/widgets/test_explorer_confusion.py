"""The confusion matrix in `Explorer`, and the rows of a cell that is chosen in it, without a browser."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
from helpers.widget_cases import beams, pictures, voters
from sklearn.metrics import confusion_matrix
from test_explorer import ensemble

from workbench.widgets import Explorer
from workbench.widgets.explorer.scene import SavedPage

pytest.importorskip("ipywidgets")
NAMES = ("top", "middle", "<below>")


@pytest.fixture
def explorer() -> Explorer:
    return Explorer(voters(), pictures())


def panel(explorer: Explorer) -> Any:
    assert explorer.widget is not None
    return explorer._view.panel  # type: ignore[union-attr]


def click(explorer: Explorer, truth: int | None, predicted: int | None) -> None:
    """What the matrix says in a browser."""
    said = json.loads(json.dumps({"kind": "cell", "truth": truth, "predicted": predicted}))
    panel(explorer).matrix._handle_custom_msg(said, [])


def test_a_pair_of_classes_lists_the_rows_of_one_cell(explorer: Explorer) -> None:
    y = explorer.data.test.y
    predicted = explorer.wrapped.eval()(explorer.data.test.x).argmax(1)
    assert explorer.confusion.tolist() == confusion_matrix(y, predicted, labels=range(3)).tolist()
    ranked = explorer.ranked.tolist()
    for i, truth in enumerate(NAMES):
        for j, taken in enumerate(NAMES):
            explorer.filter(of_class=truth, predicted=j)
            wanted = [row for row in ranked if y[row] == i and predicted[row] == j]
            assert explorer.shown.tolist() == wanted
            assert len(wanted) == explorer.confusion[i, j]
            assert explorer.filters == {"of_class": truth, "predicted": taken}
            assert explorer.shown_in_words() == f"{len(wanted)} of 30 rows: class {truth}, predicted {taken}"
    explorer.filter(predicted="top")
    assert explorer.shown.tolist() == [row for row in ranked if predicted[row] == 0]
    explorer.filter(predicted="top", wrong=True)
    assert explorer.shown.tolist() == [row for row in ranked if predicted[row] == 0 and y[row] != 0]


def test_the_matrix_is_of_the_rows_that_were_asked() -> None:
    explorer = Explorer(voters(), pictures(), max_rows=10)
    predicted = explorer.wrapped.eval()(explorer.data.test.x[explorer.rows]).argmax(1)
    truth = explorer.data.test.y[explorer.rows]
    assert explorer.confusion.tolist() == confusion_matrix(truth, predicted, labels=range(3)).tolist()


@pytest.mark.slow
def test_what_is_refused_changes_nothing(explorer: Explorer) -> None:
    explorer.filter(predicted="top")
    for wrong in ("bottom", 3, -1, True):
        with pytest.raises(ValueError, match=f"predicted={wrong!r}: the classes of stripes are top, middle, <below>"):
            explorer.filter(predicted=wrong)
    assert explorer.filters == {"predicted": "top"}
    values = Explorer(ensemble(), beams())
    with pytest.raises(ValueError, match="the classes of beams are none"):
        values.filter(predicted=0)
    with pytest.raises(ValueError, match="rows of beams have no single class"):
        _ = values.confusion
    assert panel(values).matrix is None


def test_cells_and_lists_of_classes_say_the_same(explorer: Explorer) -> None:
    pytest.importorskip("anywidget")
    p = panel(explorer)
    assert p.matrix.counts == explorer.confusion.tolist()
    assert p.matrix.chosen == [None, None]
    p.wrong.value = True
    click(explorer, 2, 1)
    assert explorer.filters == {"of_class": "<below>", "predicted": "middle", "wrong": True}
    assert (p.of_class.value, p.predicted.value, p.wrong.value) == ("<below>", "middle", True)
    assert p.matrix.chosen == [2, 1]
    p.of_class.value = "all"
    assert explorer.filters == {"predicted": "middle", "wrong": True}
    assert p.matrix.chosen == [None, 1]
    click(explorer, 0, None)
    assert explorer.filters == {"of_class": "top", "wrong": True}
    p.clear.click()
    assert p.matrix.chosen == [None, None]
    p.matrix._handle_custom_msg({"kind": "dance"}, [])
    assert "expected the kind 'cell'" in explorer.message


def test_without_a_plot_the_two_lists_choose(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.widgets.explorer.selection_panel.linked_plot", lambda *_: None)  # no anywidget
    p = panel(explorer)
    assert p.matrix is None
    p.predicted.value = "middle"
    assert explorer.filters == {"predicted": "middle"}


@pytest.mark.slow
def test_without_a_kernel_the_matrix_is_a_table(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **options: sent.append(data))
    predicted = explorer.wrapped.eval()(explorer.data.test.x).argmax(1)
    wanted = confusion_matrix(explorer.data.test.y, predicted, labels=range(3)).tolist()
    explorer.snapshot()
    for page in (sent[0]["text/html"], SavedPage(explorer)()):
        table = page.partition('wb-confused">')[2].partition("</table>")[0]
        assert f"{sum(wanted[i][i] for i in range(3))} of 30 are right" in table
        heads, *lines = table.partition("<thead>")[2].split("<tr>")[1:]
        assert re.findall(r">([^<>]+)</th>", heads) == [html.escape(name) for name in NAMES]
        assert [re.findall(r"<td[^>]*>([^<]+)</td>", line) for line in lines] == [
            [str(count) if count else "·" for count in row] for row in wanted
        ]
        assert [html.unescape(re.findall(r'<th scope="row">([^<]+)</th>', line)[0]) for line in lines] == list(NAMES)
    Explorer(ensemble(), beams()).snapshot()
    assert 'wb-confused">' not in sent[-1]["text/html"]
