"""The widgets of `Explorer` where rows have several targets: the ranked list, the chosen row as a picture or a table, and abstention."""

from __future__ import annotations

import html
import io
from typing import Any

import torch
from torch import Tensor

from workbench import plots
from workbench.errors import require
from workbench.plots._answers import Answer, Subject
from workbench.plots._row_panels import steps
from workbench.plots.maps import MAX_CLASSES
from workbench.plots.selective import of_kinds
from workbench.widgets.common import pictures
from workbench.widgets.common.cases import number
from workbench.widgets.common.positions import is_map
from workbench.widgets.explorer.landscape import line
from workbench.widgets.explorer.ranking import OF, targets_of
from workbench.widgets.explorer.scene import MOST_REFUSED, STYLE
from workbench.widgets.explorer.selection_panel import SelectionPanel
from workbench.widgets.explorer.several import SeveralExploration
from workbench.widgets.explorer.view import ExplorerView, _row

MOST_ROWS = 40  # columns or labels of the table of a row; of more the riskiest
MOST_STEPS = 160  # tokens or steps of a picture


class SeveralView(ExplorerView):
    """The widgets of an explorer of rows with several targets.

    Args:
        explorer: what they show and set.
    """

    explorer: SeveralExploration

    def _arranged(self, e: Any) -> Any:
        w = require("ipywidgets")
        self.chosen = w.HTML().add_class("wb-chosen")
        self.chosen.layout.flex, self.chosen.layout.min_width = "1 1 360px", "260px"
        self.panel = SelectionPanel(e, self._act, lambda rows: listing(e, rows, ""))
        style = w.HTML(f"<style>{STYLE}</style>", layout={"display": "none"})
        return w.VBox([style, self.error, _row([self.rank, self.chosen]), self.refusing, self.panel.widget]).add_class(
            "wb-explorer"
        )

    def _more_controls(self) -> None:
        self.panel.update_controls()

    def update(self, what: str) -> None:
        """Show what has changed: "ranking", "case", "coverage", "selection" or "filter"."""
        listed = what in ("ranking", "selection", "filter")
        self._controls(listed=listed)
        if listed or what == "case":
            self.panel.update_plot()
        if listed:
            self.panel.update_rows()
        if self._drawn.get("row", (None,))[0] != self.explorer.row:  # another ranking leaves its picture as it is
            self.chosen.value = chosen_row(self.explorer)
            self._drawn["row"] = self.explorer.row, None
        if what in ("ranking", "coverage"):
            self._coverage_picture()

    def _coverage_picture(self) -> None:
        e, (_, picture, over) = self.explorer, self.frames["coverage"]
        if e.refusing_by is None:
            picture.value = over.value = self.refused.value = ""
            self._drawn.pop("coverage", None)
            self.left.value = '<div class="wb-caption">the model measures no risk to refuse by</div>'
            return
        if self._drawn.get("coverage", (None,))[0] != e.selective.by:
            figure, ax = coverage_figure(e)
            picture.value = pictures.svg(figure, f"mean error over coverage, by {', '.join(e.refusals)}")
            self._drawn["coverage"] = e.selective.by, ax
        over.value = line(self._drawn["coverage"][1], e.coverage)
        lines = e.summary(), e.areas_in_words()
        self.left.value = "".join(f"<div>{html.escape(said)}</div>" for said in lines)
        self.refused.value = refused_rows(e)


# ---- the chosen row
def chosen_row(e: SeveralExploration, body: bytes | str | None = None) -> str:
    """The row as HTML: its picture or table (made, if none is given), and its numbers."""
    body = row_body(e) if body is None else body
    if isinstance(body, bytes):
        body = pictures.image(body, f"row {e.row}: truth, prediction and risks", attributes='class="wb-picture"')
    known = targets_of(e.data, e.data.test.y[e.row][None])[1]
    share = "" if bool(known.all()) else f", {int(known.sum()):,} of {known.numel():,} positions have a class"
    return f'<div><b>row {e.row}</b><span class="wb-name">{share}</span></div>{_numbers(e)}<div class="wb-wide">{body}</div>'


def row_body(e: SeveralExploration) -> bytes | str:
    """Maps, tokens and steps of the row as PNG, columns and labels as a table in HTML."""
    if e.data.task == "labels" or e.columns:
        return _table_of_columns(e, targets_of(e.data, e.data.test.y[e.row][None])[0][0])
    return _row_picture(e)


def _numbers(e: SeveralExploration) -> str:
    """What the row is ranked by, one after another."""
    at = (e.rows == e.row).nonzero()
    if not len(at):
        return '<div class="wb-caption">not among the ranked rows</div>'
    said = [
        f"{_label(name)} {number(e._value(name)[at[0, 0]].item(), e.unit(name), 3)}"
        for name in e.rankings
        if OF not in name
    ]
    return f'<div class="wb-caption">{html.escape("; ".join(said))}</div>'


def _label(name: str) -> str:
    """What a ranking is called where its numbers stand: rows of low confidence come first."""
    return f"1 - {name}" if name.startswith("confidence") else name


def _row_picture(e: SeveralExploration) -> bytes | str:
    """Maps, tokens or steps of the row as PNG; or why there is none, as HTML."""
    y, risk, classes = e.prediction, e._risk, e.data.classes
    target, known = targets_of(e.data, e.data.test.y[e.row][None])
    shown = {name: value for name, value in risk.items() if value.shape == target.shape[1:]}
    if classes is not None and len(classes) > MAX_CLASSES and is_map(e.data):
        return _no_picture(f"{len(classes)} classes, and colours tell {MAX_CLASSES} apart")
    if target.ndim == 3 and min(target.shape[1:]) >= 4:
        count = 4 + len(shown)
        height, width = target.shape[1:]
        figure = _figure(1.75 * count, 1.75 * min(max(height / width, 0.4), 2.0) + 1.0)
        plots.maps(
            _pictured(e.x, (height, width)),
            y.argmax(-1)[None] if classes is not None else y[None],
            target,
            {name: value[None] for name, value in shown.items()},
            classes=classes,
            void=None if classes is None else -100,
            unit="" if classes is not None else e.data.target.unit,
            figure=figure,
        )
        return _png(figure)
    if target.ndim != 2:
        return _no_picture(
            f"targets [n, {', '.join(map(str, target.shape[1:]))}]; prediction and risk hold their numbers"
        )
    places = known[0].nonzero()[:, 0]
    last = int(places[-1]) + 1 if len(places) else 0
    at = slice(0, min(last, MOST_STEPS))  # padding is behind the last token that has a class
    if not last:
        return _no_picture("a row without a class")
    missing = ~known[0, at]

    def row(value: Tensor) -> Any:
        return value[at].double().masked_fill(missing, float("nan")).numpy()[None]

    names = (*e.data.features,)
    subject = Subject(
        e.data.test, e.data.train, tuple(map(str, names)), e.data.target.name, e.data.target.unit, classes, False
    )
    answer = Answer(
        row(y.argmax(-1) if classes is not None else y),
        None if classes is None else y[at].double().numpy()[None],
        {name: row(value) for name, value in shown.items()},
    )
    count = 1 + len([name for name in shown if name != "total"] or shown)
    figure = _figure(max(2.9, 0.03 * len(missing) + 2.0) * count, 2.7)
    steps(subject, [e.row], {f"row {e.row}": answer}, row(target[0]), None, figure)
    cut = f'<div class="wb-caption">the first {MOST_STEPS} of {last:,}</div>' if last > MOST_STEPS else ""
    drawn = _png(figure)
    return f"{pictures.image(drawn, f'row {e.row}: prediction and risks by position')}{cut}" if cut else drawn


def _no_picture(why: str) -> str:
    return f'<div class="wb-caption">no picture: {html.escape(why)}</div>'


def _pictured(x: Tensor, size: tuple[int, int]) -> Tensor:
    """The input as an image of the size of the maps; grey where it is none."""
    x = x.float()
    if x.ndim == 2:
        x = x[None]
    if x.ndim != 3:
        return torch.full((1, 1, *size), 0.5)
    x = x if len(x) in (1, 3) else x[:1]
    return (x[None] if x.shape[1:] == size else torch.nn.functional.interpolate(x[None], size)).contiguous()


def _table_of_columns(e: SeveralExploration, target: Tensor) -> str:
    """Columns or labels, one a line: truth, prediction and risks, each in its unit."""
    labels = e.data.task == "labels"
    names = e.columns or list(e.data.classes or map(str, range(len(target))))
    risks = {name: value for name, value in e._risk.items() if value.ndim}
    order = list(range(len(target)))
    if len(order) > MOST_ROWS:
        order = next(iter(risks.values()), e.prediction).sort(descending=True).indices[:MOST_ROWS].tolist()
    head = "".join(f"<th>{name}</th>" for name in ("label" if labels else "target", "truth", "prediction", *risks))
    lines = []
    for i in order:
        unit = "nats" if labels else e.unit_of(i)
        if labels:
            truth = {0: "no", 1: "yes"}.get(int(target[i]), "–")
            said = f"{100 * e.prediction[i].item():.0f} %"
            wrong = truth != "–" and (e.prediction[i].item() > 0.5) != (truth == "yes")
        else:
            truth, said, wrong = number(target[i].item(), unit), number(e.prediction[i].item(), unit), False
        cells = [truth, f'<span class="wb-wrong">{said}</span>' if wrong else said]
        cells += [number(value[i].item(), "" if name == "vacuitic" else unit, 3) for name, value in risks.items()]
        lines.append(f"<tr><td>{html.escape(names[i])}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    cut = f"the {MOST_ROWS} of highest risk, of {len(target):,}" if len(order) < len(target) else ""
    return f'<table class="wb-listing"><caption>{cut}</caption><tr>{head}</tr>{"".join(lines)}</table>'


# ---- all rows
def refused_rows(e: SeveralExploration, most: int = MOST_REFUSED) -> str:
    """The rows that the model would not answer, highest risk first, with what they are ranked by."""
    rows = e.abstained
    if not len(rows):
        return '<div class="wb-caption">every case is answered</div>'
    some = f", the {most} of highest risk" if len(rows) > most else ""
    return listing(e, rows[:most], f"refused: {len(rows):,}{some}")


def listing(e: SeveralExploration, rows: Tensor, caption: str) -> str:
    """Rows with their numbers, one a line."""
    names = [name for name in e.rankings if OF not in name or name == e.by]
    head = "".join(f"<th>{html.escape(_label(name))}</th>" for name in ("row", *names))
    lines = []
    for row, place in zip(rows.tolist(), torch.searchsorted(e.rows, rows).tolist(), strict=True):
        cells = "".join(f"<td>{number(e._value(name)[place].item(), e.unit(name), 3)}</td>" for name in names)
        lines.append(f"<tr><td>{row}</td>{cells}</tr>")
    return f'<table class="wb-listing"><caption>{html.escape(caption)}</caption><tr>{head}</tr>{"".join(lines)}</table>'


def coverage_figure(e: SeveralExploration) -> tuple[Any, Any]:
    """The risk-coverage curves of all risks, and their Axes."""
    figure = pictures.new_figure(4.4, 3.8)
    ax = pictures.paint(figure.subplots())
    of_kinds({name.partition(OF)[0]: risk for name, risk in e.refusals.items()}, e.refusal_error, ax, "")
    ax.set(xlabel="coverage (share answered)", ylabel=e.error_label)
    return figure, ax


def snapshot(e: SeveralExploration) -> None:
    """See `Explorer.snapshot`."""
    top = listing(e, e.ranked[:MOST_REFUSED], f"{e.data.name}: the rows of highest {e.by}")
    body = row_body(e)
    page = f"<section>{chosen_row(e, body)}</section><section>{top}</section>"
    figure = pictures.new_figure(4.4, 3)
    if e.refusing_by is not None:
        figure, ax = coverage_figure(e)
        curve = f'<div class="wb-frame">{pictures.svg(figure, "risk-coverage curve")}{line(ax, e.coverage)}</div>'
        page += f"<section>{curve}<div>{html.escape(e.summary())}</div>{refused_rows(e)}</section>"
    alt = f"{e.data.name}, row {e.row}: prediction and risks; risk and coverage"
    pictures.display_static(
        f'<div class="wb-explorer">{page}</div>', body if isinstance(body, bytes) else figure, alt, style=STYLE
    )


def _figure(width: float, height: float) -> Any:
    """A figure that pyplot knows nothing of."""
    return require("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def _png(figure: Any) -> bytes:
    """As it is: the void of maps keeps its ground."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight", metadata={"Software": None})
    return buffer.getvalue()


__all__ = ["SeveralView", "chosen_row", "coverage_figure", "row_body", "snapshot"]
