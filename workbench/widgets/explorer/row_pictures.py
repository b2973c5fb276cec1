"""The chosen row with several targets as a picture (maps, tokens, steps) or a table (columns, labels), by all models on shared scales."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench import plots
from workbench.plots._answers import Answer, Subject
from workbench.plots._images import MAX_CLASSES
from workbench.plots._row_panels import images, steps
from workbench.widgets.common import pictures
from workbench.widgets.common.cases import format_number
from workbench.widgets.common.positions import is_map
from workbench.widgets.explorer.models_page import Line, table
from workbench.widgets.explorer.ranking import OF, targets_of
from workbench.widgets.explorer.several import SeveralExploration

MAX_ROWS = 40  # lines in the table of a row; of more columns or labels, those of highest risk
MAX_STEPS = 160  # tokens or steps in a picture


@dataclass(frozen=True)
class Picture:
    """A picture whose panels all show the same places.

    Args:
        markup: an ``<svg>`` element in the colours of the page.
        alt: alternative text.
        panels: left, top, width and height of each panel, as shares of the picture.
        size: number of rows and columns of places in each panel.
        pixels: the picture as PNG on white; None if not needed.
        caption: text below the picture.
    """

    markup: str
    alt: str
    panels: tuple[tuple[float, float, float, float], ...]
    size: tuple[int, int]
    pixels: bytes | None = None
    caption: str = ""


def row_body(e: SeveralExploration) -> Picture | str:
    """Return maps, tokens and steps of the row as a picture, or columns and labels as an HTML table; or HTML that says why there is none."""
    key = e.row, e.model
    if e._body[0] != key:  # drawn once for both the widget and its saved output
        e._body = key, _body(e)
    body: Picture | str = e._body[1]
    return body


def _body(e: SeveralExploration) -> Picture | str:
    if e.data.task == "labels" or e.columns:
        return table_of_columns(e, targets_of(e.data, e.data.test.y[e.row][None])[0][0])
    return _row_picture(e)


def _row_picture(e: SeveralExploration) -> Picture | str:
    classes = e.data.classes
    target, known = targets_of(e.data, e.data.test.y[e.row][None])
    if classes is not None and len(classes) > MAX_CLASSES and is_map(e.data):
        return _no_picture(f"{len(classes)} classes, and there are colours for {MAX_CLASSES}")
    if target.ndim == 3 and min(target.shape[1:]) >= 4:
        return _maps(e, target) if len(e.models) == 1 else _maps_of_models(e, target, known)
    if target.ndim != 2:
        return _no_picture(
            f"targets [n, {', '.join(map(str, target.shape[1:]))}]; see explorer.prediction and explorer.risk"
        )
    places = known[0].nonzero()[:, 0]
    if not len(places):
        return _no_picture("the row has no class")
    return _steps(e, target, known, int(places[-1]) + 1)  # padding follows the last token that has a class


def _no_picture(why: str) -> str:
    return f'<div class="wb-caption">no picture: {html.escape(why)}</div>'


def _maps(e: SeveralExploration, target: Tensor) -> Picture:
    """Draw image, truth, prediction, error and risks of one model side by side."""
    y, risk, classes = *e.predicted_by(e.model), e.data.classes
    shown = {name: value for name, value in risk.items() if value.shape == target.shape[1:]}
    height, width = target.shape[1:]
    figure = pictures.themed_figure(1.75 * (4 + len(shown)), 1.75 * min(max(height / width, 0.4), 2.0) + 1.0)
    axes = plots.maps(
        _pictured(e.x, (height, width)),
        y.argmax(-1)[None] if classes is not None else y[None],
        target,
        {name: value[None] for name, value in shown.items()},
        classes=classes,
        void=None if classes is None else -100,
        unit="" if classes is not None else e.data.target.unit,
        figure=figure,
    )
    return _picture(figure, axes.ravel(), (height, width), f"row {e.row}: truth, prediction and risks")


def _maps_of_models(e: SeveralExploration, target: Tensor, known: Tensor) -> Picture:
    """Draw input and truth, and below them errors, prediction and risks of each model, each column on one scale."""
    height, width = target.shape[1:]
    truth = target.double().masked_fill(~known, float("nan")).numpy()
    x = _pictured(e.x, (height, width))
    axes = images(
        _subject(e), x[None] if x.ndim == 3 else x, [e.row], _answers(e, target), truth, pictures.themed_figure
    )
    drawn = [ax for ax in axes.ravel() if ax.images]
    alt = f"row {e.row}: truth, and prediction and risks of {', '.join(e.models)}"
    return _picture(axes[0, 0].figure, drawn, (height, width), alt)


def _steps(e: SeveralExploration, target: Tensor, known: Tensor, last: int) -> Picture:
    """Draw prediction and risks over tokens or steps, one row of panels for each model."""
    at = slice(0, min(last, MAX_STEPS))
    missing = ~known[:, at]

    def shown(value: Any) -> Any:
        return torch.as_tensor(value)[:, at].double().masked_fill(missing, float("nan")).numpy()

    answers = {}
    for name, answer in _answers(e, target).items():
        probs = None if answer.probs is None else answer.probs[:, at]
        answers[name] = Answer(shown(answer.value), probs, {kind: shown(value) for kind, value in answer.risk.items()})
    if len(answers) == 1:
        answers = {f"row {e.row}": next(iter(answers.values()))}
    axes = steps(_subject(e), [e.row], answers, shown(target), None, pictures.themed_figure)
    cut = f"; the first {MAX_STEPS} of {last:,}" if last > MAX_STEPS else ""
    alt = f"row {e.row}: prediction and risks by position{cut}"
    return _picture(axes[0, 0].figure, axes.ravel(), (1, missing.shape[1]), alt, cut.removeprefix("; "))


def _subject(e: SeveralExploration) -> Subject:
    names = tuple(map(str, e.data.features))
    return Subject(e.data.test, e.data.train, names, e.data.target.name, e.data.target.unit, e.data.classes, False)


def _answers(e: SeveralExploration, target: Tensor) -> dict[str, Answer]:
    """Return the answers of each model for the row, without risks that have one number for the whole row."""
    by_model = {}
    for name, answers in e.each_model().items():
        risk = {kind: value.double().numpy() for kind, value in answers.risk.items() if value.shape == target.shape}
        probs = None if answers.probs is None else answers.probs.double().numpy()
        by_model[name] = Answer(answers.y.numpy(), probs, risk)
    return by_model


def _pictured(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the input as an image of the size of the maps; plain grey if it is not an image."""
    x = x.float()
    if x.ndim == 2:
        x = x[None]
    if x.ndim != 3:
        return torch.full((1, 1, *size), 0.5)
    x = x if len(x) in (1, 3) else x[:1]
    return (x[None] if x.shape[1:] == size else torch.nn.functional.interpolate(x[None], size)).contiguous()


def _picture(figure: Any, axes: Iterable[Any], size: tuple[int, int], alt: str, caption: str = "") -> Picture:
    """Make a `Picture` of a figure: in the colours of the page, and as PNG on white."""
    markup = pictures.svg(figure, alt)
    figure.set_layout_engine("none")  # keeps the panels of the PNG where those of the SVG are
    panels = tuple(panel(ax, size, figure.bbox_inches) for ax in axes)
    return Picture(markup, alt, panels, size, pictures.png(figure, 100), caption)


def panel(ax: Any, size: tuple[int, int], box: Any) -> tuple[float, float, float, float]:
    """Return where the places of an Axes are within a box, after layout: left, top, width and height as shares of the box.

    Args:
        ax: Axes of an image of that size, or with positions from 0 along the x axis.
        size: number of rows and columns of places.
        box: matplotlib Bbox of the visible part of the figure, in inches.
    """
    rows, columns = size
    inches = ax.figure.dpi_scale_trans.inverted()
    edges = inches.transform(ax.transData.transform([(-0.5, rows - 0.5), (columns - 0.5, -0.5)]))
    if rows == 1:  # a position is as high as the panel
        edges[:, 1] = inches.transform(ax.bbox.get_points())[:, 1]
    (left, bottom), (right, top) = edges.tolist()
    x0, y1, wide, high = (float(side) for side in (box.x0, box.y1, box.width, box.height))
    return (left - x0) / wide, (y1 - top) / high, (right - left) / wide, (top - bottom) / high


# ---- columns and labels
def table_of_columns(e: SeveralExploration, target: Tensor) -> str:
    """Return a table with a line for each column or label: truth, prediction and risks with units; with several models, a line for each."""
    names = e.columns or list(e.data.classes or map(str, range(len(target))))
    risks = {name: value for name, value in e.predicted_by(e.model)[1].items() if value.ndim}
    order = list(range(len(target)))
    if len(order) > MAX_ROWS:
        order = next(iter(risks.values()), e.prediction).sort(descending=True).indices[:MAX_ROWS].tolist()
    cut = f"the {MAX_ROWS} of highest risk, of {len(target):,}" if len(order) < len(target) else ""
    if len(e.models) > 1:
        return _columns_of_models(e, target, names, order, cut)
    labels = e.data.task == "labels"
    head = "".join(f"<th>{name}</th>" for name in ("label" if labels else "target", "truth", "prediction", *risks))
    lines = []
    for i in order:
        unit = "nats" if labels else e.unit_of(i)
        cells = [*_truth_and_prediction(e, target, e.prediction, i)]
        cells += [
            format_number(value[i].item(), "" if name == "vacuitic" else unit, 3) for name, value in risks.items()
        ]
        lines.append(f"<tr><td>{html.escape(names[i])}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f'<table class="wb-listing"><caption>{cut}</caption><tr>{head}</tr>{"".join(lines)}</table>'


def _truth_and_prediction(e: SeveralExploration, target: Tensor, y: Tensor, i: int) -> tuple[str, str]:
    if e.data.task != "labels":
        return html.escape(format_number(target[i].item(), e.unit_of(i))), html.escape(
            format_number(y[i].item(), e.unit_of(i))
        )
    truth, prediction = {0: "no", 1: "yes"}.get(int(target[i]), "–"), f"{100 * y[i].item():.0f} %"
    wrong = truth != "–" and (y[i].item() > 0.5) != (truth == "yes")
    return truth, f'<span class="wb-wrong">{prediction}</span>' if wrong else prediction


def _columns_of_models(e: SeveralExploration, target: Tensor, names: list[str], order: list[int], cut: str) -> str:
    """Return a line for each model and column or label; numbers of one unit share a scale."""
    labels = e.data.task == "labels"
    lines, units = list[Line](), dict[str, str]()
    for i in order:
        units[names[i]] = "nats" if labels else e.unit_of(i)
        for model in e.models:
            y, risk = e.predicted_by(model)
            sizes = {kind: value[i].item() for kind, value in risk.items() if value.ndim}
            about = "" if labels else names[i]  # each target has its own unit and scales
            cells = html.escape(names[i]), *_truth_and_prediction(e, target, y, i)
            lines.append(Line(model, cells, sizes, about=about))
    heads = ("label" if labels else "target", "truth", "prediction")

    def unit(line: Line, name: str) -> str:
        return "" if name == "vacuitic" else units.get(line.about, "nats")

    each = "" if labels else " for each target"
    return table(lines, heads, f"{cut}{'; ' * bool(cut)}bars of all models share scales{each}", unit, e.model)


def numbers_of_models(e: SeveralExploration) -> str:
    """Return the ranking numbers of the row by each model, with bars on shared scales and its rank; "" if the row is not ranked."""
    known = {name: None for model in e.models for name in e.numbers_by(model) if OF not in name or name == e.by}
    lines = []
    for model in e.models:
        ranks = {name: pair for name in known if (pair := e.rank_of(model, name)) is not None}
        sizes, notes = (
            {name: value for name, (value, _) in ranks.items()},
            {name: f"#{at}" for name, (_, at) in ranks.items()},
        )
        lines.append(Line(model, (), sizes, notes))
    if not any(line.sizes for line in lines):
        return ""
    caption = (
        f"row {e.row} by each model, with its rank (#) among {len(e.rows):,} rows; bars of all models share scales"
    )
    return table(lines, (), caption, lambda _, name: e.unit(name), e.model)


__all__ = ["Picture", "numbers_of_models", "panel", "row_body", "table_of_columns"]
