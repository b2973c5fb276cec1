"""Widgets of `Explorer` for rows with several targets: the ranked list, the chosen row as a picture or a table, and abstention."""

from __future__ import annotations

import html
from typing import Any

import torch
from torch import Tensor

from workbench.errors import require
from workbench.plots.selective import of_kinds
from workbench.widgets.common import pictures
from workbench.widgets.common.cases import format_number
from workbench.widgets.explorer.landscape import line
from workbench.widgets.explorer.models_page import bar
from workbench.widgets.explorer.place_picture import PlacePicture, page_of_place
from workbench.widgets.explorer.ranking import OF, targets_of
from workbench.widgets.explorer.row_pictures import Picture, numbers_of_models, row_body
from workbench.widgets.explorer.scene import MAX_REFUSED, STYLE
from workbench.widgets.explorer.selection_panel import SelectionPanel
from workbench.widgets.explorer.several import SeveralExploration
from workbench.widgets.explorer.view import ExplorerView, _row

MAX_SAVED = 200_000  # characters of an SVG in a saved notebook; larger pictures are saved as PNG


class SeveralView(ExplorerView):
    """The widgets of an explorer of rows with several targets."""

    explorer: SeveralExploration

    def _arranged(self, e: Any) -> Any:
        w = require("ipywidgets")
        self.chosen = w.HTML().add_class("wb-chosen")
        self.places = PlacePicture(e, self._act)
        row = w.VBox([self.chosen, self.places.widget], layout={"flex": "1 1 360px", "min_width": "260px"})
        self.panel = self._new_panel()
        self.select_page = w.VBox([self.panel.widget])
        style = w.HTML(self._style, layout={"display": "none"})
        return w.VBox([style, self.error, _row([self.rank, row]), self.refusing, self.select_page]).add_class(
            "wb-explorer"
        )

    def _new_panel(self) -> SelectionPanel:
        e = self.explorer
        return SelectionPanel(e, self._act, lambda rows: listing(e, rows, ""))

    def _more_controls(self) -> None:
        self.panel.update_controls()

    def update(self, what: str) -> None:
        """Update the widgets after a change of "model", "ranking", "case", "coverage", "selection", "filter" or "place"."""
        e = self.explorer
        if what == "model":
            self._renew()
            what = "ranking"
        listed = what in ("ranking", "selection", "filter")
        self._controls(listed=listed)
        if listed or what == "case":
            self.panel.update_plot()
        if listed:
            self.panel.update_rows()
        if what in ("ranking", "case"):
            self.chosen.value = head_of_row(e)
            if self._drawn.get("row", (None,))[0] != e.row:  # the picture does not depend on the ranking
                self.places.show(row_body(e))
                self._drawn["row"] = e.row, None
        if what in ("ranking", "case", "place"):
            self.places.update()
        if what in ("ranking", "coverage"):
            self._coverage_picture()

    def _coverage_picture(self) -> None:
        e, (_, picture, over) = self.explorer, self.frames["coverage"]
        if e.refusing_by is None:
            picture.value = over.value = self.refused.value = ""
            self._drawn.pop("coverage", None)
            self.left.value = '<div class="wb-caption">The model measures no risk to refuse rows by.</div>'
            return
        if self._drawn.get("coverage", (None,))[0] != e.selective.by:
            figure, ax = coverage_figure(e)
            picture.value = pictures.svg(figure, f"mean error over coverage, by {', '.join(e.refusals)}")
            self._drawn["coverage"] = e.selective.by, ax
        over.value = line(self._drawn["coverage"][1], e.coverage)
        lines = e.summary(), e.areas_in_words()
        self.left.value = "".join(f"<div>{html.escape(text)}</div>" for text in lines)
        self.refused.value = refused_rows(e)


# ---- the chosen row
def head_of_row(e: SeveralExploration) -> str:
    """Return the row and its ranking numbers by each model as HTML."""
    known = targets_of(e.data, e.data.test.y[e.row][None])[1]
    share = "" if bool(known.all()) else f", {int(known.sum()):,} of {known.numel():,} positions have a class"
    numbers = numbers_of_models(e) if len(e.models) > 1 else _numbers(e)
    unranked = '<div class="wb-caption">not among the ranked rows</div>'
    return f'<div><b>row {e.row}</b><span class="wb-name">{share}</span></div>{numbers or unranked}'


def _numbers(e: SeveralExploration) -> str:
    """Return the ranking numbers of the row as one line of HTML."""
    ranks = {name: pair for name in e.rankings if OF not in name and (pair := e.rank_of(e.model, name)) is not None}
    numbers = [f"{_label(name)} {format_number(value, e.unit(name), 3)}" for name, (value, _) in ranks.items()]
    return f'<div class="wb-caption">{html.escape("; ".join(numbers))}</div>' if numbers else ""


def _label(name: str) -> str:
    """Return the label of the numbers of a ranking: "confidence" ranks by 1 - confidence."""
    return f"1 - {name}" if name.startswith("confidence") else name


# ---- all rows
def refused_rows(e: SeveralExploration) -> str:
    """Return the refused rows with their ranking numbers as HTML, highest risk first."""
    rows = e.abstained
    if not len(rows):
        return '<div class="wb-caption">every case is answered</div>'
    some = f", the {MAX_REFUSED} of highest risk" if len(rows) > MAX_REFUSED else ""
    return listing(e, rows[:MAX_REFUSED], f"refused: {len(rows):,}{some}")


def listing(e: SeveralExploration, rows: Tensor, caption: str) -> str:
    """Return rows with their ranking numbers as a table; with several models, the current ranking by each as bars on one scale."""
    names = [name for name in e.rankings if OF not in name or name == e.by]
    at = torch.searchsorted(e.rows, rows)
    columns = [(_label(name), e.numbers_by(e.model)[name][at].tolist(), e.unit(name)) for name in names]
    models = {model: e.numbers_by(model) for model in e.models} if len(e.models) > 1 else {}
    ranked = {model: numbers[e.by][at].tolist() for model, numbers in models.items() if e.by in numbers}
    top = max((abs(value) for values in ranked.values() for value in values), default=0.0)
    heads = ["row", *(f"{_label(e.by)}, {model}" for model in ranked), *(label for label, _, _ in columns)]
    lines = []
    for i, row in enumerate(rows.tolist()):
        cells = [
            f"{format_number(values[i], e.unit(e.by), 3)}{bar(e.by, max(values[i], 0.0), top)}"
            for values in ranked.values()
        ]
        cells += [format_number(values[i], unit, 3) for _, values, unit in columns]
        lines.append(f"<tr><td>{row}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    return (
        f'<div class="wb-wide"><table class="wb-listing wb-models"><caption>{html.escape(caption)}</caption><tr>{head}</tr>'
        f"{''.join(lines)}</table></div>"
    )


def coverage_figure(e: SeveralExploration) -> tuple[Any, Any]:
    """Draw the risk-coverage curves of all risks; return the figure and its Axes."""
    figure = pictures.new_figure(4.4, 3.8)
    ax = pictures.paint(figure.subplots())
    of_kinds({name.partition(OF)[0]: risk for name, risk in e.refusals.items()}, e.refusal_error, ax, "")
    ax.set(xlabel="coverage (share answered)", ylabel=e.error_label)
    return figure, ax


def _page(e: SeveralExploration) -> tuple[str, bytes | Any]:
    """Return the current view as HTML without scripts, and as PNG or a figure."""
    top = listing(e, e.ranked[:MAX_REFUSED], f"{e.data.name}: the rows of highest {e.by}")
    body = row_body(e)
    drawn = body if isinstance(body, str) else _still(body)
    place = page_of_place(e)[1] if e.place is not None else ""
    page = f'<section>{head_of_row(e)}<div class="wb-wide">{drawn}</div>{place}</section><section>{top}</section>'
    figure = pictures.new_figure(4.4, 3)
    if e.refusing_by is not None:
        figure, ax = coverage_figure(e)
        curve = f'<div class="wb-frame">{pictures.svg(figure, "risk-coverage curve")}{line(ax, e.coverage)}</div>'
        page += f"<section>{curve}<div>{html.escape(e.summary())}</div>{refused_rows(e)}</section>"
    fallback = body.pixels if isinstance(body, Picture) and body.pixels is not None else figure
    return f'<div class="wb-explorer">{page}</div>', fallback


def _still(body: Picture) -> str:
    """Return a picture for a static page: as SVG in the colours of the page, or as PNG if that is too large to save."""
    drawn = body.markup if len(body.markup) <= MAX_SAVED or body.pixels is None else _small(body, "wb-picture")
    return f'{drawn}<div class="wb-caption">{html.escape(body.caption)}</div>'


def _small(body: Picture, kind: str) -> str:
    assert body.pixels is not None
    return pictures.image(pictures.small_png(body.pixels, 80), body.alt, attributes=f'class="{kind}"')


def saved_page(e: SeveralExploration) -> str:
    """Return the current view, for pages without a kernel or widgets."""
    body = row_body(e)
    drawn = isinstance(body, Picture) and body.pixels is not None and len(body.markup) <= MAX_SAVED
    # shown by JupyterLab in untrusted notebooks, where it removes SVG
    fallback = _small(body, "wb-pixels") if drawn and isinstance(body, Picture) else ""
    return f'<div class="wb-static"><style>{STYLE}</style>{_page(e)[0]}{fallback}</div>'


def snapshot(e: SeveralExploration) -> None:
    """See `Explorer.snapshot`."""
    page, fallback = _page(e)
    alt = f"{e.data.name}, row {e.row}: prediction and risks; risk and coverage"
    pictures.display_static(page, fallback, alt, style=STYLE)


__all__ = ["SeveralView", "coverage_figure", "head_of_row", "saved_page", "snapshot"]
