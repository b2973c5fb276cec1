"""The linked plot of `Explorer`: all rows as points over two of their risks, which choose and select rows; in reports without a kernel."""

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
MISSING = "A plot whose points can be clicked and brushed needs anywidget: pip install 'risk-workbench[lab]'"
MAX_STILL = 5000  # rows that a page holds; of more it shows the picture alone
BUFFERS = ("rows", "numbers", "predicted", "target", "passing", "selected", "order")
PALETTE = tuple(dict.fromkeys(shade for shade, _ in MODELS))  # of classes: none of them that of a risk


# ---- what the plot shows
def rows_of(e: Exploration) -> dict[str, Any]:
    """What stays as it is: the numbers of all rows, and what they are."""
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
    """What changes: the chosen row, which rows pass the filter and which are selected [n], and the places of those that pass, in ranked order.

    Keys walk through these, selected or not: else nobody could select a second row by them.
    """
    places = torch.searchsorted(e.rows, e.ranked)
    return {
        "row": e.row,
        "passing": _bytes(e._passing, "u1"),
        "selected": _bytes(torch.isin(e.rows, e.selection), "u1"),
        "order": _bytes(places[e._passing[places]], "<i4"),
    }


def axes_of(e: Exploration) -> dict[str, str]:
    """The axes and the colour to begin with."""
    return {"x": e.rankings[0] if e.by == "error" else e.by, "y": "error", "colour": "wrong"}


def undrawn(e: Exploration, across: str, up: str) -> int:
    """How many rows have no place in the plot, since one of these numbers is NaN or infinite."""
    return int((~(e.values_of(e.rows, across).isfinite() & e.values_of(e.rows, up).isfinite())).sum())


def _bytes(values: Tensor, kind: str) -> bytes:
    packed: bytes = values.detach().cpu().numpy().astype(kind).tobytes()
    return packed


# ---- alive
@cache
def _widget() -> Any:
    """The class of the widget, made where anywidget is there."""
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
    """The plot as a widget, or None where anywidget is not installed.

    Args:
        e: what it shows and sets.
        act: calls a function with a value, and shows what goes wrong.
    """
    try:
        made = _widget()(**rows_of(e), **state_of(e), **axes_of(e))
    except ModuleNotFoundError as error:
        if error.name != "anywidget":
            raise
        return None
    made.on_msg(lambda _, message, __: act(lambda said: obey(e, said), message))
    return made


def obey(e: Exploration, message: Mapping[str, Any]) -> None:
    """Do what was done in the plot: choose a row, select rows by a brush, take one into the selection or out of it, or select none."""
    kind = message.get("kind")
    if kind == "choose":
        e.select(message["row"])
    elif kind == "toggle":
        e.toggle(message["row"])
    elif kind == "brush":
        across, up = message["across"], message["up"]
        x, y = ((float(low), float(high)) for low, high in (message["x"], message["y"]))
        if across == up:  # the drag's two sides both hold
            x = max(x[0], y[0]), min(x[1], y[1])
            if x[0] > x[1]:
                e.selection = e.selection if message.get("add") else None
                return
        e.brush({up: y, across: x}, add=bool(message.get("add")))
    elif kind == "clear":
        e.selection = None
    else:
        raise ValueError(f"the plot said {message!r}, which is none of choose, toggle, brush and clear")


# ---- without a kernel
def still(e: Exploration, instead: str) -> str:
    """The plot for pages without a kernel, as HTML without scripts.

    Args:
        e: what it shows.
        instead: HTML that is shown where nothing makes a plot of it; `workbench.notebook.render` does.
    """
    if len(e.rows) > MAX_STILL:
        return instead
    state = {**rows_of(e), **state_of(e), **axes_of(e)}
    state.update({name: base64.b64encode(state[name]).decode() for name in BUFFERS})
    return f'<div class="wb-linked-still" data-wb-linked="{html.escape(json.dumps(state))}">{instead}</div>'


__all__ = ["MISSING", "MODULE", "axes_of", "linked_plot", "obey", "rows_of", "state_of", "still", "undrawn"]
