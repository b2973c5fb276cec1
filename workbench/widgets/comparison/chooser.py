"""Form to choose data and a model, shown in place of the comparison until both are known."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

from workbench.errors import require

from ..common.pictures import STYLE
from .choice import TASKS, Choice, Chosen
from .controls import CSS
from .offers import Offer, size_in_words

_STYLE = {"description_width": "4.5rem"}
_WIDE = {"width": "auto", "max_width": "34rem"}


class Chooser:
    """Menus for data and model with the equivalent code, and a button to start; afterwards the comparison below that code.

    Args:
        choice: model and data given in code, and the offers.
        take: called with the chosen model and data; its errors are shown, and the form stays.
        may_change: raises an error if the choice can't be changed any more.
        style: CSS for the page.

    Attributes:
        root: widget to display.
        data, model: menus, whose values are indices of offers; `target` and `task` are for a DataFrame.
        compare, refresh, others: buttons to start the comparison, read the variables again, and change the choice.
        code, about, status: HTML shown.
    """

    def __init__(
        self,
        choice: Choice,
        take: Callable[[Chosen | None, Chosen | None], None],
        may_change: Callable[[], None],
        style: str,
    ) -> None:
        w = require("ipywidgets")
        self._choice, self._take, self._may_change = choice, take, may_change
        self._offers: dict[str, list[Offer]] = {"data": [], "model": []}
        self._updating = False
        menu = {"style": _STYLE, "layout": _WIDE}
        self.data = w.Dropdown(options=[], description="data", tooltip="Data to train and test on", **menu)
        self.model = w.Dropdown(options=[], description="model", tooltip="Model to wrap", **menu)
        self.target = w.Dropdown(options=[], description="target", tooltip="Column to predict", **menu)
        self.task = w.Dropdown(options=list(TASKS.items()), description="targets are", tooltip="Kind of target", **menu)
        self.about = {name: w.HTML().add_class("wb-choice-note") for name in ("data", "model")}
        self.compare = w.Button(
            icon="arrow-right", button_style="primary", tooltip="Set up the comparison", layout={"width": "auto"}
        ).add_class("wb-compare")
        self.refresh = w.Button(
            description="Refresh",
            icon="refresh",
            tooltip="Read the notebook's variables again",
            layout={"width": "auto"},
        ).add_class("wb-look")
        self.others = w.Button(
            description="Choose others",
            icon="pencil",
            tooltip="Choose other data or another model",
            layout={"width": "auto"},
        ).add_class("wb-others")
        self.code, self.status = w.HTML().add_class("wb-code"), w.HTML().add_class("wb-status")
        self.data.add_class("wb-choose-data")
        self.model.add_class("wb-choose-model")
        self._style = w.HTML(f"<style>{STYLE}{CSS}{style}</style>", layout={"height": "0px", "margin": "0px"})
        buttons = w.HBox([self.compare, self.refresh]).add_class("wb-buttons")
        saved = [] if choice.saved is None else [w.HTML(_note(f"{choice.saved}: choose these to continue."))]
        title = w.HTML('<p class="wb-section">Choose data and a model</p>')
        chosen = [self.data, self.about["data"], self.target, self.task, self.model, self.about["model"]]
        self._form = [title, *saved, *chosen, self.code, buttons, self.status]
        self._header = w.HBox([self.code, self.others]).add_class("wb-buttons")
        self.root = w.VBox([self._style, *self._form]).add_class("wb-comparison").add_class("wb-choice")
        for control in (self.data, self.model, self.target, self.task):
            control.observe(self._changed, "value")
        self.compare.on_click(lambda _: self._compare())
        self.refresh.on_click(lambda _: self.show_form())
        self.others.on_click(lambda _: self._choose_others())

    # ---- display
    def show_form(self) -> None:
        """Show the form with the current offers; selected ones stay selected if they still exist."""
        self._updating = True
        try:
            for name, menu in (("data", self.data), ("model", self.model)):
                before = self._offer(name)
                chosen = getattr(self._choice, name)
                first = [] if chosen is None else [Offer(f"{chosen.code}: chosen in code", chosen.code, "chosen")]
                there = self._choice.data_offers() if name == "data" else self._choice.model_offers()
                self._offers[name] = offers = [*first, *(o for o in there if not first or o.code != chosen.code)]
                menu.options = [(offer.label, number) for number, offer in enumerate(offers)]
                same = [number for number, offer in enumerate(offers) if before and offer.code == before.code]
                menu.value = same[0] if same else 0
        finally:
            self._updating = False
        self.root.children = [self._style, *self._form]
        self._changed({"owner": self.data})
        self.status.value = ""

    def show(self, comparison: Any) -> None:
        """Show the comparison, below the equivalent code."""
        model, data = self._choice.model, self._choice.data
        assert model is not None
        assert data is not None
        self._write(model.code, data.code)
        self.status.value = ""
        self.root.children = [self._style, self._header, self.status, comparison]

    def _changed(self, change: Any) -> None:
        """Update notes, code and button to match the menus."""
        data, model = self._offer("data"), self._offer("model")
        if self._updating or data is None or model is None:
            return
        if change["owner"] is self.data:
            self._list_columns(data)
            if model.kind == "ready" and not self._choice.of_session(data, model):
                name = "cnn" if data.images else "tabular" if data.table else "mlp"
                suited = next(offer for offer in self._offers["model"] if offer.code == repr(name))
                model = suited
                self._updating = True
                self.model.value = self._offers["model"].index(suited)
                self._updating = False
        frame = data.kind == "DataFrame"
        self.target.layout.display = self.task.layout.display = None if frame else "none"
        self.about["data"].value, self.about["model"].value = _note(data.note), _note(model.note)
        code = self._choice.frame_code(data, self._target(), self.task.value) if frame else data.code
        self._write(model.code, code)
        self.compare.description = (
            "Compare" if data.bytes is None else f"Download {size_in_words(data.bytes)} and compare"
        )
        self.status.value = ""

    def _list_columns(self, offer: Offer) -> None:
        try:
            columns = self._choice.columns(offer) if offer.kind == "DataFrame" else []
        except ValueError:  # the variable is gone; the error is shown when it is taken
            columns = []
        self._columns = columns
        self._updating = True
        self.target.options = [(str(column), number) for number, column in enumerate(columns)]
        self.target.value = len(columns) - 1 if columns else None
        self._updating = False

    def _target(self) -> Any:
        return None if self.target.value is None else self._columns[self.target.value]

    def _write(self, model: str, data: str) -> None:
        self.code.value = f"<pre>{html.escape(self._choice.line(model, data))}</pre>"

    def _offer(self, name: str) -> Offer | None:
        number = (self.data if name == "data" else self.model).value
        return None if number is None else self._offers[name][number]

    # ---- actions of the buttons
    def _compare(self) -> None:
        data, model = self._offer("data"), self._offer("model")
        if self.compare.disabled or data is None or model is None:
            return
        self.compare.disabled = True
        loading = "Reading" if data.bytes is None else f"Downloading {size_in_words(data.bytes)}:"
        # on many rows that takes a while: the network tries embeddings
        building = f" and choosing how {model.code} embeds its columns" if "tabular" in model.code else ""
        self.status.value = _message(f"{loading} {data.code}{building} …")
        try:
            column = self._target() if data.kind == "DataFrame" else None
            of_data = (
                self._choice.data if data.kind == "chosen" else self._choice.take_data(data, column, self.task.value)
            )
            self._take(self._choice.model if model.kind == "chosen" else self._choice.take_model(model), of_data)
        except Exception as error:
            self.status.value = _message(f"{error}", "wb-error")
        finally:
            self.compare.disabled = False

    def _choose_others(self) -> None:
        try:
            self._may_change()
        except RuntimeError as error:
            self.status.value = _message(f"{error}", "wb-error")
            return
        self.show_form()


def _note(text: str) -> str:
    return f'<p class="wb-help">{html.escape(text)}</p>' if text else ""


def _message(text: str, kind: str = "") -> str:
    return f'<span role="status" class="{kind}">{html.escape(text)}</span>'
