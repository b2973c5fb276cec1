"""Widgets of `Explorer`."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from workbench.errors import require
from workbench.widgets.common import pictures
from workbench.widgets.common.cases import format_number, render_cases
from workbench.widgets.explorer import neighbours
from workbench.widgets.explorer.carriers_page import carriers_page, carriers_title
from workbench.widgets.explorer.exploration import Exploration
from workbench.widgets.explorer.landscape import draw_coverage, line
from workbench.widgets.explorer.models_page import side_by_side
from workbench.widgets.explorer.place_picture import PlacePicture
from workbench.widgets.explorer.scene import (
    STYLE,
    along_key,
    draw_all,
    draw_edit,
    in_plane,
    mark_all,
    mark_edit,
    pair,
    refused,
)
from workbench.widgets.explorer.selection_panel import SelectionPanel

MAX_RANKED = 200  # lines of the ranked list
EDIT, ALL, COVERAGE, NEAR = range(4)  # numbers of the first tabs


class ExplorerView:
    """The widgets of an explorer.

    Args:
        explorer: exploration that they show and change.
        style: further CSS for the page.
    """

    def __init__(self, explorer: Exploration, style: str = "") -> None:
        self.explorer, self.problem = explorer, ""
        self._style = f"<style>{STYLE}{style}</style>"
        self._updating = self._guarding = False
        self._lock = threading.RLock()  # with Jupyter's subshells, clicks are handled in another thread than cells
        self._drawn: dict[str, tuple[Any, Any]] = {}  # picture -> what it depended on when drawn, and its Axes
        self._make_controls(explorer)
        self.widget = self._arranged(explorer)
        self._observe()
        self.update("ranking")

    def _make_controls(self, e: Exploration) -> None:
        """Make the controls that rank, choose and refuse cases."""
        w = require("ipywidgets")
        narrow = {"description_width": "64px"}
        self.by = w.Dropdown(
            options=e.rankings, value=e.by, description="rank by", style=narrow, layout={"width": "auto"}
        )
        self.by.tooltip = "Risk (or error) that orders the list, highest first"
        self.list = w.Select(options=[], rows=9, layout={"width": "auto", "height": "190px"}).add_class("wb-list")
        self.list.tooltip = "Test rows, highest first; the arrows below step through them"
        self.previous = w.Button(icon="arrow-up", tooltip="Previous case in the list", layout={"width": "40px"})
        self.next = w.Button(icon="arrow-down", tooltip="Next case in the list", layout={"width": "40px"})
        self.number = w.BoundedIntText(
            e.row, min=0, max=len(e.data.test) - 1, description="row", style={"description_width": "28px"}
        )
        self.number.layout.width, self.number.tooltip = "112px", "Number of the test row"
        self.note, self.error = w.HTML(), w.HTML().add_class("wb-message")
        several = {"options": list(e.models), "value": e.model, "tooltip": "Model to explore"}
        self.model = w.Dropdown(description="model", style=narrow, layout={"width": "auto"}, **several)
        self.rank = w.VBox(
            [
                *([self.model] if len(e.models) > 1 else []),
                self.by,
                self.list,
                w.HBox([self.previous, self.next, self.number]),
                self.note,
            ],
            layout={"width": "236px", "flex": "0 0 auto"},
        ).add_class("wb-rank")
        self.coverage = w.FloatSlider(
            e.coverage,
            min=0.01,
            max=1,
            step=0.01,
            description="coverage",
            readout_format=".0%",
            style=narrow,
            layout={"width": "auto"},
            tooltip="Share of cases that are answered, those of lowest risk first",
        )
        self.left, self.refused = w.HTML().add_class("wb-left"), w.HTML().add_class("wb-refused")
        self.frames = {name: _frame() for name in ("edit", "all", "coverage")}
        self.refusing = _row(
            [_column([self.coverage, self.left, self.frames["coverage"][0]], "320px"), _column([self.refused], "360px")]
        ).add_class("wb-coverage")

    def _arranged(self, e: Exploration) -> Any:
        """Arrange the whole widget, for cases with one target."""
        w = require("ipywidgets")
        self.side = w.HTML()
        self.pair, self.near = w.HTML().add_class("wb-chosen"), w.HTML().add_class("wb-neighbours")
        self.space = w.Dropdown(
            options=["inputs", "features"],
            value=e.space,
            description="near in",
            style={"description_width": "64px"},
            layout={"width": "170px"},
        )
        self.space.tooltip = (
            "Distance between standardized inputs, or between the features before the last linear layer"
        )
        self.table = w.HTML().add_class("wb-features")
        near = w.VBox([self.space, self.near], layout={"flex": "1 1 180px", "min_width": "180px"})
        # cards of pictures take the full width, with the neighbours in a row below
        wide = "1 1 100%" if e._editor.pictured else "0 1 auto"
        pair_box = w.VBox([self.pair], layout={"flex": wide, "min_width": "200px"})
        chosen = _row([pair_box, near])
        chosen.layout.flex, chosen.layout.min_width = "1 1 260px", "260px"
        edit = _row([_column([e._editor.widget], "300px"), _column([self.frames["edit"][0]], "360px")])
        pages = {
            "Edit": edit,
            "All cases": w.VBox([self.frames["all"][0]]),
            "Coverage": self.refusing,
        }
        if not e._editor.pictured:
            pages["Neighbours"] = self.table
        self.panel = self._new_panel()
        pages["Select"] = self.select_page = w.VBox([self.panel.widget])
        self._select_tab = len(pages) - 1
        self.carriers, self.places = w.HTML().add_class("wb-carriers"), PlacePicture(e, self._act)
        pages[carriers_title(e)] = w.VBox([self.carriers, self.places.widget])
        self._carriers_tab = len(pages) - 1
        self.tabs = w.Tab(list(pages.values()), titles=tuple(pages))
        self._on(self.space, "value", lambda value: setattr(e, "space", value))
        self._on(self.tabs, "selected_index", lambda _: self.update("tab"))
        e._editor.choice.observe(lambda _: self._act(lambda _: self._edit_picture()), "value")
        return w.VBox(
            [
                w.HTML(self._style, layout={"display": "none"}),
                self.error,
                _row([self.rank, chosen]),
                *([self.side] if len(e.models) > 1 else []),
                self.tabs,
            ]
        ).add_class("wb-explorer")

    def _new_panel(self) -> SelectionPanel:
        e = self.explorer
        return SelectionPanel(e, self._act, lambda rows: render_cases(e.cases(rows), "", e.output))

    def _renew(self) -> None:
        """Discard what was drawn for another model."""
        e, before = self.explorer, self.panel
        self._drawn.clear()
        stale = [*(widget for frame in self.frames.values() for widget in frame[1:]), self.left, self.refused]
        for widget in stale:
            widget.value = ""
        quiet, self._updating = self._updating, True
        try:
            self.by.options = e.rankings
        finally:
            self._updating = quiet
        self.panel = self._new_panel()
        self.panel.take_axes(before)
        self.select_page.children = [self.panel.widget]
        before.close()

    def _on(self, widget: Any, name: str, act: Callable[[Any], Any]) -> None:
        widget.observe(lambda change: self._act(act, change["new"]), name)

    def _observe(self) -> None:
        e = self.explorer
        self._on(self.model, "value", lambda value: setattr(e, "model", value))
        self._on(self.by, "value", lambda value: setattr(e, "by", value))
        self._on(self.list, "value", lambda value: None if value is None else e.select(value))
        self._on(self.number, "value", lambda value: e.select(value))
        # browsers add up steps, to 0.8000000000000002
        self._on(self.coverage, "value", lambda value: setattr(e, "coverage", round(value, 9)))
        self.previous.on_click(lambda _: self._act(lambda _: e.step(-1)))
        self.next.on_click(lambda _: self._act(lambda _: e.step(1)))

    def _act(self, act: Callable[[Any], Any], value: Any = None) -> None:
        # a click waits for a cell that is just updating controls, instead of being ignored as an update
        with self._lock:
            if not self._updating:
                with self.guarded():
                    act(value)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Show errors in the widget, since the traceback of a callback would not be seen."""
        with self._lock:
            if self._guarding:  # the outermost context shows the error
                yield
                return
            self._guarding = True
            try:
                yield
            except Exception as problem:
                notes = "".join(f" ({note})" for note in getattr(problem, "__notes__", ()))
                self._show_problem(f"{type(problem).__name__}: {problem}{notes}")
                self._controls()
            else:
                self._show_problem("")
            finally:
                self._guarding = False

    def _show_problem(self, text: str) -> None:
        self.problem = text
        self.error.value = f'<div role="alert">{html.escape(text)}</div>' if text else ""

    # ---- display
    def update(self, what: str) -> None:
        """Update the widgets after a change, see `Exploration._refresh`, or of the "tab"."""
        e = self.explorer
        if what == "model":
            self._renew()
            what = "ranking"
        listing = what in ("ranking", "selection", "filter")
        self._controls(listed=listing)
        if listing or what == "case":
            self.panel.update_plot()
        if what in ("ranking", "case", "edit"):
            self.pair.value, self.side.value = pair(e), side_by_side(e)
        if what in ("ranking", "case", "edit", "neighbours"):
            self.near.value = neighbours.page(e.neighbours, e.data, e.space)
        if (tab := self.tabs.selected_index) == self._select_tab:
            if listing or what == "tab":
                self.panel.update_rows()
        elif tab == self._carriers_tab:
            self._carriers_picture()
        elif tab == EDIT and what not in ("coverage", "selection", "filter", "selections", "place"):
            self._edit_picture()
        elif tab == ALL and what != "place":
            self._all_picture()
        elif tab == NEAR and what != "place":
            self.table.value = neighbours.page(e.neighbours, e.data, e.space, e.x)
        elif tab == COVERAGE and what in ("ranking", "coverage", "tab"):
            self._coverage_picture()

    def _controls(self, listed: bool = False) -> None:
        """Set the controls to the current state, also after an error."""
        e, quiet, self._updating = self.explorer, self._updating, True
        try:
            if listed:
                self._list()
            self.list.value = e.row if e.row in {row for _, row in self.list.options} else None
            self.model.value = e.model
            self.by.value, self.number.value, self.coverage.value = e.by, e.row, e.coverage
            self._more_controls()
        finally:
            self._updating = quiet

    def _more_controls(self) -> None:
        """Set the controls that depend on the kind of case."""
        self.space.value = self.explorer.space
        self.panel.update_controls()

    def _list(self) -> None:
        e = self.explorer
        unit = e.unit(e.by)
        shown = e.shown
        rows = shown[:MAX_RANKED]
        listed = zip(rows.tolist(), e.values_of(rows).tolist(), strict=True)
        self.list.options = [
            (f"{i + 1}.  row {row}:  {format_number(value, unit)}", row) for i, (row, value) in enumerate(listed)
        ]
        notes = []
        if len(e.rows) < len(e.data.test):
            notes.append(f"{len(e.rows):,} of {len(e.data.test):,} test rows{e.left_out}")
        if e.shown_in_words():
            notes.append(e.shown_in_words())
        if len(shown) > MAX_RANKED:
            notes.append(f"the first {MAX_RANKED} are listed")
        self.note.value = f'<span class="wb-name">{"; ".join(notes)}</span>'

    def _edit_picture(self) -> None:
        e, (_, picture, over) = self.explorer, self.frames["edit"]
        key: Any = ("plane", e.by) if in_plane(e) else (e.row, along_key(e))
        if self._drawn.get("edit", (None,))[0] != key:
            if not e._editor.knobs:
                return
            figure = pictures.new_figure(5.4, 3.4)
            ax = pictures.paint(figure.subplots())
            alt = draw_edit(ax, e)
            picture.value = pictures.svg(figure, alt)
            self._drawn["edit"] = key, ax
        over.value = mark_edit(self._drawn["edit"][1], e)

    def _all_picture(self) -> None:
        e, (_, picture, over) = self.explorer, self.frames["all"]
        if self._drawn.get("all", (None,))[0] != e.by:
            figure = pictures.new_figure(8, 3.6)
            ax = pictures.paint(figure.subplots())
            spots, alt = draw_all(ax, e)
            picture.value = pictures.svg(figure, alt, spots)
            self._drawn["all"] = e.by, ax
        over.value = mark_all(self._drawn["all"][1], e)

    def _carriers_picture(self) -> None:
        e = self.explorer
        key = None if e.data.test.x.ndim == 2 else (e.row, tuple(e.edits.items()))
        if self._drawn.get("carriers", ("", None))[0] != key:
            self.carriers.value, picture = carriers_page(e)
            self.places.show(picture)
            self._drawn["carriers"] = key, None
        self.places.update()

    def _coverage_picture(self) -> None:
        e, (_, picture, over) = self.explorer, self.frames["coverage"]
        lines = e.summary(), e.areas_in_words()  # raises an error for a model without risks
        if "coverage" not in self._drawn:
            figure = pictures.new_figure(4.4, 3.8)
            ax = pictures.paint(figure.subplots())
            draw_coverage(ax, e.data, e.refusals, e.refusal_error)
            picture.value = pictures.svg(figure, f"mean error over coverage, by {', '.join(e.refusals)}")
            self._drawn["coverage"] = None, ax
        over.value = line(self._drawn["coverage"][1], e.coverage)
        self.left.value = "".join(f"<div>{html.escape(text)}</div>" for text in lines)
        self.refused.value = refused(e)


def _frame() -> tuple[Any, Any, Any]:
    """Return a box with a picture and a layer over it, for a mark that moves without redrawing the picture; and both."""
    w = require("ipywidgets")
    picture, over = w.HTML(), w.HTML().add_class("wb-over")
    return w.Box([picture, over]).add_class("wb-frame"), picture, over


def _row(children: list[Any]) -> Any:
    """Arrange widgets side by side, wrapping where there is no room."""
    w = require("ipywidgets")
    return w.HBox(children, layout={"flex_flow": "row wrap", "align_items": "flex-start"})


def _column(children: list[Any], width: str) -> Any:
    w = require("ipywidgets")
    return w.VBox(children, layout={"flex": f"1 1 {width}", "min_width": "min(260px, 100%)"})


__all__ = ["ExplorerView"]
