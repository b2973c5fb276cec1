"""The confusion matrix of `Explorer`, whose cells filter rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from workbench.errors import require
from workbench.plots._common import SERIES
from workbench.widgets.common.cases import table_head
from workbench.widgets.explorer.exploration import Exploration

MODULE = Path(__file__).parents[1] / "static" / "confusion.js"
LONGEST_HEADS = 80  # characters of all classes' names together, beyond which they are written downwards
LONGEST_NAME = 32  # characters of a class's name; longer ones are shortened
MAX_CLASSES = 30  # with more classes there is no matrix, only the two lists of classes


@cache
def _widget() -> Any:
    """Return the widget class; made on first use, as it needs anywidget."""
    base: Any = require("anywidget").AnyWidget
    t = require("traitlets")

    class ConfusionMatrix(base):
        _esm = MODULE.read_text(encoding="utf-8")
        classes, counts, chosen = (t.List().tag(sync=True) for _ in range(3))
        right, wrong = (t.Unicode(shade).tag(sync=True) for shade in SERIES)

    return ConfusionMatrix


def confusion_matrix(e: Exploration, act: Callable[[Callable[[Any], Any], Any], None]) -> Any:
    """Return the matrix as a widget, which needs anywidget; None if rows have no single class, or there are too many classes.

    Args:
        e: exploration that it shows and filters.
        act: calls a function with a value, and shows errors.
    """
    if not 2 <= len(e.class_names) <= MAX_CLASSES:
        return None
    widget = _widget()(classes=list(e.class_names), counts=e.confusion.tolist(), chosen=chosen_cell(e))
    widget.on_msg(lambda _, message, __: act(lambda content: handle_cell(e, content), message))
    return widget


def confusion_table(e: Exploration) -> str:
    """Return the matrix as HTML without scripts, for saved notebooks and reports; "" where there is no matrix."""
    names = e.class_names
    if not 2 <= len(names) <= MAX_CLASSES:
        return ""
    counts = e.confusion
    off = counts - counts.diag().diag()
    highest = int(off.max()), int(counts.diag().max())
    lines = []
    for i, row in enumerate(counts.tolist()):
        cells = "".join(_cell(count, i == j, highest[i == j]) for j, count in enumerate(row))
        lines.append(f"<tr>{_head(names[i], 'row')}{cells}</tr>")
    heads = "".join(_head(name, "col") for name in names)
    right = int(counts.diag().sum())
    caption = f"Rows by true class (down) and predicted class (across): {right:,} of {int(counts.sum()):,} are right"
    upright = " wb-upright" if sum(min(len(name), LONGEST_NAME) for name in names) > LONGEST_HEADS else ""
    return (
        f'<div class="wb-wide"><table class="wb-listing wb-confused{upright}"><caption>{caption}</caption>'
        f"<thead><tr><td></td>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _head(name: str, scope: str) -> str:
    return table_head(name, f' scope="{scope}"', LONGEST_NAME)


def _cell(count: int, right: bool, highest: int) -> str:
    if not count:
        return "<td>·</td>"
    red, green, blue = (int(SERIES[not right][at : at + 2], 16) for at in (1, 3, 5))
    share = 0.12 + 0.48 * (count / highest) ** 0.5
    return f'<td style="background-color:rgba({red},{green},{blue},{share:.2f})">{count}</td>'


def chosen_cell(e: Exploration) -> list[int | None]:
    """Return the numbers of the true and the predicted class that rows are filtered by; None if not filtered."""
    names = e.class_names
    return [names.index(e.filters[name]) if name in e.filters else None for name in ("of_class", "predicted")]


def handle_cell(e: Exploration, message: Mapping[str, Any]) -> None:
    """Filter by the cell or class that was clicked, keeping other filters."""
    if message.get("kind") != "cell":
        raise ValueError(f"unknown message of the confusion matrix: {message!r}; expected the kind 'cell'")
    e.filter(**{**e.filters, "of_class": message["truth"], "predicted": message["predicted"]})


__all__ = ["MODULE", "chosen_cell", "confusion_matrix", "confusion_table", "handle_cell"]
