"""The linked plot of `Explorer`: all rows as points over two risks, to choose and select rows; in reports also without a kernel."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.errors import require
from workbench.plots._common import COLOURS, MODELS, SERIES, TOTAL_ON_DARK, natural_scale
from workbench.widgets.explorer.exploration import Exploration

MODULE = Path(__file__).parents[1] / "static" / "linked.js"
MISSING = "The interactive plot needs anywidget: pip install 'risk-workbench[lab]'"
MAX_STILL = 5000  # with more rows, a page without kernel has only the static picture
BUFFERS = ("rows", "numbers", "predicted", "target", "passing", "selected", "order")
PALETTE = tuple(dict.fromkeys(shade for shade, _ in MODELS))  # colours of classes, none of them the colour of a risk


# ---- content of the plot
def rows_of(e: Exploration) -> dict[str, Any]:
    """Return the constant part of the plot's state: the numbers of all rows, and their names and units."""
    metrics = []
    predicted, target = e.pairs()
    for name in e.rankings:
        scale, width = natural_scale(e.values_of(e.rows, name).numpy())
        metrics.append(
            {
                "name": name,
                "short": f"1 − {name}" if name.startswith("confidence") else name,
                "label": e.axis_label(name),
                "unit": e.unit(name),
                "colour": COLOURS.get(name.partition(" of ")[0], ""),
                "scale": scale,
                "width": width,
            }
        )
    spec = {
        "data": f"{e.data.name}, test rows",
        "metrics": metrics,
        "classes": list(e.class_names),
        "unit": e.data.target.unit,
        "palette": list(PALETTE),
        "right": SERIES[0],
        "wrong": SERIES[1],
        "total": COLOURS["total"],
        "totalOnDark": TOTAL_ON_DARK,
    }
    numbers = torch.stack([e.values_of(e.rows, name) for name in e.rankings])
    return {
        "spec": spec,
        "rows": _bytes(e.rows, "<i4"),
        "numbers": _bytes(numbers, "<f4"),
        "predicted": _bytes(predicted, "<f4"),
        "target": _bytes(target, "<f4"),
    }


def state_of(e: Exploration) -> dict[str, Any]:
    """Return the changing part of the plot's state: chosen row, which rows pass the filter, which are selected [n], and the key order.

    Arrow keys move through the rows that pass, in ranked order, selected or not, so that more rows can be selected by keys.
    """
    places = torch.searchsorted(e.rows, e.ranked)
    return {
        "row": e.row,
        "passing": _bytes(e._passing, "u1"),
        "selected": _bytes(torch.isin(e.rows, e.selection), "u1"),
        "order": _bytes(places[e._passing[places]], "<i4"),
    }


def axes_of(e: Exploration) -> dict[str, str]:
    """Return the initial axes and colouring."""
    return {"x": e.rankings[0] if e.by == "error" else e.by, "y": "error", "colour": "wrong"}


def undrawn(e: Exploration, across: str) -> int:
    """Return the number of rows that the plot can't show, since its error or the number across is NaN or infinite."""
    return int((~(e.values_of(e.rows, across).isfinite() & e.values_of(e.rows, "error").isfinite())).sum())


def _bytes(values: Tensor, kind: str) -> bytes:
    packed: bytes = values.detach().cpu().numpy().astype(kind).tobytes()
    return packed


# ---- widget
@cache
def _widget() -> Any:
    """Return the widget class; made on first use, as it needs anywidget."""
    base: Any = require("anywidget").AnyWidget
    t = require("traitlets")

    class LinkedPlot(base):
        _esm = MODULE.read_text(encoding="utf-8")
        spec = t.Dict().tag(sync=True)
        rows, numbers, predicted, target = (t.Bytes().tag(sync=True) for _ in range(4))
        passing, selected, order = (t.Bytes().tag(sync=True) for _ in range(3))
        row = t.Int().tag(sync=True)
        x, y, colour = (t.Unicode().tag(sync=True) for _ in range(3))

    return LinkedPlot


def linked_plot(e: Exploration, act: Callable[[Callable[[Any], Any], Any], None]) -> Any:
    """Return the plot as a widget, or None if anywidget is not installed.

    Args:
        e: exploration that it shows and changes.
        act: calls a function with a value, and shows errors.
    """
    try:
        widget = _widget()(**rows_of(e), **state_of(e), **axes_of(e))
    except ModuleNotFoundError as error:
        if error.name != "anywidget":
            raise
        return None
    widget.on_msg(lambda _, message, __: act(lambda content: handle(e, content), message))
    return widget


def handle(e: Exploration, message: Mapping[str, Any]) -> None:
    """Handle a message of the plot: choose a row, brush rows, toggle the selection of a row, or clear the selection."""
    kind = message.get("kind")
    if kind == "choose":
        e.select(message["row"])
    elif kind == "toggle":
        e.toggle(message["row"])
    elif kind == "brush":
        across, up = message["across"], message["up"]
        x, y = ((float(low), float(high)) for low, high in (message["x"], message["y"]))
        if across == up:  # both ranges of the drag apply to the same number
            x = max(x[0], y[0]), min(x[1], y[1])
            if x[0] > x[1]:
                e.selection = e.selection if message.get("add") else None
                return
        e.brush({up: y, across: x}, add=bool(message.get("add")))
    elif kind == "clear":
        e.selection = None
    else:
        raise ValueError(f"unknown message of the plot: {message!r}; expected the kind choose, toggle, brush or clear")


# ---- without a kernel
def still(e: Exploration, instead: str) -> str:
    """Return the plot for pages without a kernel, as HTML without scripts.

    Args:
        e: exploration.
        instead: HTML shown where no script turns the data into a plot; reports of `workbench.notebook.render` have one.
    """
    if len(e.rows) > MAX_STILL:
        return instead
    state = {**rows_of(e), **state_of(e), **axes_of(e)}
    state.update({name: base64.b64encode(state[name]).decode() for name in BUFFERS})
    return f'<div class="wb-linked-still" data-wb-linked="{html.escape(json.dumps(state))}">{instead}</div>'


__all__ = ["MISSING", "MODULE", "axes_of", "handle", "linked_plot", "rows_of", "state_of", "still", "undrawn"]
