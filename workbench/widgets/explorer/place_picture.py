"""A picture of `Explorer` whose places can be chosen by click or keys, and the predictions of all models at the chosen place."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.errors import require
from workbench.widgets.common.cases import class_and_share, format_number, with_spread
from workbench.widgets.common.predictions import risk_unit
from workbench.widgets.explorer.exploration import Exploration
from workbench.widgets.explorer.models_page import Line, bar, table
from workbench.widgets.explorer.ranking import targets_of
from workbench.widgets.explorer.row_pictures import Picture
from workbench.widgets.explorer.several import SeveralExploration

MODULE = Path(__file__).parents[1] / "static" / "places.js"
MISSING = "Choosing a place in the picture needs anywidget: pip install 'risk-workbench[lab]'. In code: explorer.place"
HINT = "Click on a place in the picture, or go there with the arrow keys, to see its predictions; explorer.place has its coordinates."
MIN_PANEL = 76  # minimum width of a panel in pixels; on a narrow page the picture scrolls
MAX_CLASSES = 6  # classes whose probabilities are shown
Act = Callable[[Callable[[Any], Any], Any], None]


@cache
def _widget() -> Any:
    """Return the widget class; made on first use, as it needs anywidget."""
    base: Any = require("anywidget").AnyWidget
    t = require("traitlets")

    class PlacePlot(base):
        _esm = MODULE.read_text(encoding="utf-8")
        markup, alt, said = (t.Unicode().tag(sync=True) for _ in range(3))
        panels, size, place = (t.List().tag(sync=True) for _ in range(3))
        least, turn = (t.Int().tag(sync=True) for _ in range(2))

    return PlacePlot


class PlacePicture:
    """The picture, or HTML in its place, and below it the predictions at the chosen place.

    Args:
        e: exploration that it shows and changes.
        act: calls a function with a value, and shows errors.
    """

    def __init__(self, e: Exploration, act: Act) -> None:
        w = require("ipywidgets")
        self._explorer, self._pictured = e, False
        self.still, self.said = w.HTML(), w.HTML().add_class("wb-place")
        self.plot = None
        if e.place_shape:
            try:
                self.plot = _widget()(layout={"display": "none"})
            except ModuleNotFoundError as error:
                if error.name != "anywidget":
                    raise
            else:
                self.plot.on_msg(lambda plot, message, __: self._handle(act, plot, message))
        self.widget = w.VBox([*([self.plot] if self.plot is not None else []), self.still, self.said])

    def _handle(self, act: Act, plot: Any, message: Mapping[str, Any]) -> None:
        act(lambda content: handle_place(self._explorer, content), message)
        # acknowledge the message also if it failed, so that the page returns to our place; the page ignores older acknowledgements
        plot.turn = int(message.get("turn", 0))

    def show(self, picture: Picture | str) -> None:
        """Show another picture, or HTML."""
        interactive = self.plot is not None and isinstance(picture, Picture)
        if self.plot is not None:
            self.plot.layout.display = "" if interactive else "none"
        self._pictured = isinstance(picture, Picture)
        if isinstance(picture, str):
            self.still.value = picture
        elif self.plot is None:
            drawn = f'<div class="wb-wide">{picture.markup}</div>'
            self.still.value = f"{drawn}{_below(picture.caption)}{_below(MISSING)}"
        else:
            self.still.value = _below(picture.caption)
            across = len({round(left, 2) for left, *_ in picture.panels})
            with self.plot.hold_sync():
                self.plot.markup, self.plot.alt = picture.markup, picture.alt
                self.plot.panels, self.plot.size = [list(panel) for panel in picture.panels], list(picture.size)
                self.plot.least = MIN_PANEL * across

    def update(self) -> None:
        """Update the predictions at the chosen place of the chosen row."""
        e = self._explorer
        if not self._pictured:
            self.said.value = ""
            return
        words, page = page_of_place(e)
        self.said.value = page
        if self.plot is not None:
            place = list(e.place or ())
            place = [0, *place] if len(place) == 1 else place
            # False in padding
            inside = all(number < count for number, count in zip(place, self.plot.size, strict=False))
            with self.plot.hold_sync():
                self.plot.place, self.plot.said = place if inside else [], words


def _below(caption: str) -> str:
    return f'<div class="wb-caption">{html.escape(caption)}</div>' if caption else ""


def handle_place(e: Exploration, message: Mapping[str, Any]) -> None:
    """Handle a message of the picture: choose a place, the riskiest place, or none."""
    kind = message.get("kind")
    if kind == "place":
        place = message["row"], message["column"]
        e.place = place if len(e.place_shape) == 2 else place[1:]
    elif kind == "riskiest":
        e.place = e.riskiest_place()
    elif kind == "none":
        e.place = None
    else:
        raise ValueError(f"unknown message of the picture: {message!r}; expected the kind place, riskiest or none")


# ---- predictions at a place
def page_of_place(e: Exploration) -> tuple[str, str]:
    """Return the predictions of all models at the chosen place, as text and as HTML; without a place, a hint."""
    if e.place is None:
        return "", _below(HINT)
    return _page_of_target(e) if isinstance(e, SeveralExploration) else _page_of_occlusion(e)


def place_in_words(e: Exploration) -> str:
    """Return the chosen place as text, such as "place (3, 5)"."""
    place = e.place or ()
    return f"position {place[0]}" if len(place) == 1 else f"place ({', '.join(map(str, place))})"


def _page_of_target(e: SeveralExploration) -> tuple[str, str]:
    """Return prediction, probabilities and risks at a place of several targets, as text and as HTML."""
    at, classes, unit = e.at_place(), e.data.classes, e.place_unit()
    target, known = (answers[0][e.place] for answers in targets_of(e.data, e.data.test.y[e.row][None]))
    truth = "no class" if not bool(known) else classes[int(target)] if classes else format_number(target.item(), unit)
    whole = [name for name, value in e.predicted_by(e.model)[1].items() if not value.ndim]
    lines, words = [], []
    for model, answers in at.items():
        sizes = {name: value.item() for name, value in answers.items() if name != "prediction"}
        prediction, wrong = (
            with_spread(answers["prediction"].item(), sizes.get("total"), unit) if classes is None else "",
            False,
        )
        if classes is not None:
            best = int(answers["prediction"].argmax())
            prediction = class_and_share(classes[best], answers["prediction"][best].item())
            wrong = bool(known) and best != int(target)
        notes = dict.fromkeys(whole, "(whole row)")
        cell = f"<b{' class=wb-wrong' if wrong else ''}>{html.escape(prediction)}</b>"
        lines.append(Line(model, (cell,), sizes, notes))
        risks = ", ".join(
            f"{name} {format_number(size, '' if name == 'vacuitic' else unit, 2)}" for name, size in sizes.items()
        )
        words.append(f"{model}: {prediction}; {risks}" if risks else f"{model}: {prediction}")
    head = f"{place_in_words(e)}: truth {truth}"
    caption = f"{_capitalized(head)}. Bars of one kind share a scale."
    page = table(
        lines, ("prediction",), html.escape(caption), lambda _, name: "" if name == "vacuitic" else unit, e.model
    )
    probs = {model: answers["prediction"] for model, answers in at.items()}
    shares = "" if classes is None else _probabilities(probs, classes, int(target) if bool(known) else None)
    return f"{head}. {'. '.join(words)}", f"{page}{shares}"


def _capitalized(words: str) -> str:
    return words[:1].upper() + words[1:]


def _probabilities(probs: Mapping[str, Tensor], classes: tuple[str, ...], truth: int | None) -> str:
    """Return the most likely classes of all models, and the true one, as bars from 0 to 1."""
    highest = torch.stack(list(probs.values())).amax(0)
    shown = highest.sort(descending=True, stable=True).indices[:MAX_CLASSES].tolist()
    shown += [truth] if truth is not None and truth not in shown else []
    lines = []
    for i in shown:
        cells = [f"{100 * p[i].item():.1f} %{bar('prediction', p[i].item(), 1.0)}" for p in probs.values()]
        name = html.escape(classes[i]) + (" (true)" if i == truth else "")
        lines.append(
            f"<tr><td>{f'<b>{name}</b>' if i == truth else name}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        )
    heads = "".join(f"<th>{html.escape(head)}</th>" for head in ("class", *probs))
    some = f"Probabilities of classes{f': {len(shown)} of {len(classes)}' if len(shown) < len(classes) else ''}"
    return (
        f'<div class="wb-wide"><table class="wb-listing wb-models"><caption>{some}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _page_of_occlusion(e: Exploration) -> tuple[str, str]:
    """Return how covering a place of the picture changes prediction and risks, as text and as HTML."""

    def unit(name: str) -> str:
        return "" if name == "prediction" and e.data.classes is not None else risk_unit(e.data, e.output, name)

    place, lines, words = e.place or (0, 0), list[Line](), list[str]()
    for model, answers in e.at_place().items():
        sizes = {name: value.item() for name, value in answers.items()}
        lines.append(Line(model, (), sizes))
        changes = [
            f"{name} {'falls' if size >= 0 else 'rises'} by {format_number(abs(size), unit(name), 2)}"
            for name, size in sizes.items()
        ]
        words.append(f"{model}: {', '.join(changes)}")
    pixel = e.x.reshape(-1, *e.place_shape)[:, place[0], place[1]]
    shade = ", ".join(format_number(value, "", 3) for value in pixel[:3].tolist())
    truth = e.data.classes[int(e.target)] if e.data.classes else format_number(e.target.item(), e.data.target.unit)
    head = f"{place_in_words(e)}: {'pixel' if len(pixel) == 1 else 'channels'} {shade}; truth of the picture {truth}"
    more = ", yellow: how much it rises" if any(size < 0 for line in lines for size in line.sizes.values()) else ""
    caption = (
        f"{_capitalized(head)}. How much each falls when the place is covered{more}; bars of one kind share a scale."
    )
    page = table(lines, (), html.escape(caption), lambda _, name: unit(name), e.model, signed=True)
    return f"{head}. When covered, {'. '.join(words)}", page


__all__ = ["MODULE", "PlacePicture", "handle_place", "page_of_place", "place_in_words"]
