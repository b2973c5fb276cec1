"""The confusion matrix of `Explorer`, whose cells filter rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from workbench.errors import require
from workbench.plots._common import SERIES
from workbench.widgets.explorer.exploration import Exploration

MODULE = Path(__file__).parents[1] / "static" / "confusion.js"
MOST_CLASSES = 30  # of more the two lists of classes choose


@cache
def _widget() -> Any:
    """The class of the widget, made where anywidget is there."""
    base: Any = require("anywidget").AnyWidget
    t = require("traitlets")

    class ConfusionMatrix(base):
        _esm = MODULE.read_text(encoding="utf-8")
        classes, counts, chosen = (t.List().tag(sync=True) for _ in range(3))
        right, wrong = (t.Unicode(shade).tag(sync=True) for shade in SERIES)

    return ConfusionMatrix


def confusion_matrix(e: Exploration, act: Callable[[Callable[[Any], Any], Any], None]) -> Any:
    """The matrix as a widget, which needs anywidget; None where rows have no single class, or one of many.

    Args:
        e: what it shows and sets.
        act: calls a function with a value, and shows what goes wrong.
    """
    if not 2 <= len(e.class_names) <= MOST_CLASSES:
        return None
    made = _widget()(classes=list(e.class_names), counts=e.confusion.tolist(), chosen=chosen_cell(e))
    made.on_msg(lambda _, message, __: act(lambda said: obey_cell(e, said), message))
    return made


def chosen_cell(e: Exploration) -> list[int | None]:
    """Numbers of the true and of the predicted class that rows are filtered by."""
    names = e.class_names
    return [names.index(e.filters[name]) if name in e.filters else None for name in ("of_class", "predicted")]


def obey_cell(e: Exploration, message: Mapping[str, Any]) -> None:
    """Filter by the cell or class that was clicked; other filters stay."""
    if message.get("kind") != "cell":
        raise ValueError(f"the confusion matrix said {message!r}, which is no cell")
    e.filter(**{**e.filters, "of_class": message["truth"], "predicted": message["predicted"]})


__all__ = ["MODULE", "chosen_cell", "confusion_matrix", "obey_cell"]
