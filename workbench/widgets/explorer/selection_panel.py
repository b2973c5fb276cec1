"""The page of `Explorer` to filter, select and save rows."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

from torch import Tensor

from workbench.errors import require
from workbench.widgets.explorer.confusion import chosen_cell, confusion_matrix
from workbench.widgets.explorer.exploration import Exploration
from workbench.widgets.explorer.linked import MISSING, linked_plot, state_of

MAX_SHOWN = 12  # rows listed below the plot
ALL = "all"
Act = Callable[[Callable[[Any], Any], Any], None]


class SelectionPanel:
    """Filters, the linked plot if anywidget is installed, saved selections, and the first listed rows.

    Args:
        e: exploration that they show and change.
        act: calls a function with a value and shows errors; does nothing while controls are being updated.
        render: returns rows as HTML.
    """

    def __init__(self, e: Exploration, act: Act, render: Callable[[Tensor], str]) -> None:
        w = require("ipywidgets")
        self._explorer, self._render = e, render
        self.plot = linked_plot(e, act)
        self.matrix = None if self.plot is None else confusion_matrix(e, act)  # both need anywidget
        check = {"indent": False, "layout": {"width": "auto", "margin": "2px 8px"}}
        classes = {"options": [ALL, *e.class_names], "layout": {"width": "auto", "max_width": "190px"}}
        classes["style"] = {"description_width": "initial"}
        self.of_class = w.Dropdown(description="class", tooltip="Only rows of this true class", **classes)
        self.predicted = w.Dropdown(description="predicted", tooltip="Only rows predicted as this class", **classes)
        self.wrong = w.Checkbox(description="wrong only", tooltip="Only rows whose prediction is wrong", **check)
        self.unseen = w.Checkbox(
            description="confident and never seen",
            tooltip="Only rows with total risk in the lower half and vacuitic risk above 2 standard deviations",
            **check,
        )
        self.saved = w.Dropdown(options=[], description="saved", style={"description_width": "40px"})
        self.saved.layout.width, self.saved.tooltip = "190px", "Restore a saved selection"
        self.name = w.Text(
            placeholder="name of the selection", tooltip="Name for the selected rows", layout={"width": "160px"}
        )
        self.save = w.Button(
            description="Save",
            icon="bookmark",
            tooltip="Save the selected rows under this name",
            layout={"width": "80px"},
        ).add_class("wb-save")
        self.clear = w.Button(
            description="All rows", icon="undo", tooltip="Clear filter and selection", layout={"width": "100px"}
        ).add_class("wb-clear")
        self.words, self.rows = w.HTML().add_class("wb-listed"), w.HTML().add_class("wb-selected")
        filters = [
            *([self.of_class, self.predicted, self.wrong] if e.class_names else []),
            *([self.unseen] if e.tells_unseen else []),
        ]
        wrap = {"flex_flow": "row wrap", "align_items": "center"}
        plot = self.plot or w.HTML(f'<div class="wb-caption">{html.escape(MISSING)}</div>')
        if self.matrix is not None:  # beside the plot, below it where there is no room
            plot.layout.flex, plot.layout.min_width, plot.layout.width = "1 1 460px", "min(260px, 100%)", "auto"
            self.matrix.layout.max_width = "100%"
            plot = w.HBox([plot, self.matrix], layout={"flex_flow": "row wrap", "align_items": "flex-start"})
        bars = [
            w.HBox([*filters, self.clear], layout=wrap),
            plot,
            w.HBox([self.name, self.save, self.saved], layout=wrap),
        ]
        self.widget = w.VBox([*bars, self.words, self.rows]).add_class("wb-select")
        for control in (self.of_class, self.predicted, self.wrong, self.unseen):
            control.observe(lambda _: act(lambda _: self._filter(), None), "value")
        self.saved.observe(lambda change: act(self._recall, change["new"]), "value")
        self.save.on_click(lambda _: act(lambda _: self._save(), None))
        self.clear.on_click(lambda _: act(lambda _: self._clear(), None))

    def _filter(self) -> None:
        truth, predicted = (None if c.value == ALL else c.value for c in (self.of_class, self.predicted))
        self._explorer.filter(
            of_class=truth, predicted=predicted, wrong=self.wrong.value, confident_unseen=self.unseen.value
        )

    def _save(self) -> None:
        self._explorer.selections[self.name.value.strip()] = self._explorer.selection
        self.name.value = ""

    def _recall(self, name: str | None) -> None:
        if name:
            self._explorer.selection = self._explorer.selections[name]

    def _clear(self) -> None:
        self._explorer.filter()
        self._explorer.selection = None

    def take_axes(self, other: SelectionPanel) -> None:
        """Take over the axes and colouring of another panel's plot, as far as this model measures them."""
        if self.plot is not None and other.plot is not None:
            known = self._explorer.rankings
            for name in ("x", "y"):
                if getattr(other.plot, name) in known:
                    setattr(self.plot, name, getattr(other.plot, name))
            self.plot.colour = other.plot.colour

    def close(self) -> None:
        """Close the widgets, which also removes them from the page."""
        for widget in (self.plot, self.matrix, self.widget):
            if widget is not None:
                widget.close()

    # ---- display
    def update_controls(self) -> None:
        """Set the controls to the current state; the caller makes sure that this is not handled as user input."""
        e, chosen = self._explorer, self._explorer.filters
        self.of_class.value, self.predicted.value = (chosen.get(name, ALL) for name in ("of_class", "predicted"))
        if self.matrix is not None:
            self.matrix.chosen = chosen_cell(e)
        self.wrong.value, self.unseen.value = "wrong" in chosen, "confident_unseen" in chosen
        names = ["", *e.selections]
        if list(self.saved.options) != names:
            self.saved.options = names
        now = e.selection
        self.saved.value = next((name for name, rows in e.selections.items() if rows.equal(now)), "")
        self.save.disabled = not len(now)
        self.clear.disabled = not (len(now) or chosen)

    def update_plot(self) -> None:
        """Update chosen row, selection and filter in the plot."""
        if self.plot is not None:
            with self.plot.hold_sync():
                for name, value in state_of(self._explorer).items():
                    setattr(self.plot, name, value)

    def update_rows(self) -> None:
        """Update the list of the first listed rows."""
        e = self._explorer
        listed = e.shown
        first = listed[:MAX_SHOWN]
        text = e.shown_in_words() or f"all {len(e.rows):,} rows"
        more = f", the {MAX_SHOWN} of highest {e.axis_label(e.by)}" if len(listed) > MAX_SHOWN else ""
        self.words.value = f'<div class="wb-caption">{html.escape(text)}{more}</div>'
        self.rows.value = self._render(first) if len(first) else ""


__all__ = ["SelectionPanel"]
