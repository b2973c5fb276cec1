"""The page of `Explorer` that shows which columns or places carry the risk."""

from __future__ import annotations

import html

from workbench import plots
from workbench.widgets.common import pictures
from workbench.widgets.common.cases import format_number
from workbench.widgets.common.predictions import CAUSES, risk_unit
from workbench.widgets.explorer.carriers import REPEATS
from workbench.widgets.explorer.exploration import Exploration
from workbench.widgets.explorer.row_pictures import Picture, panel

MAX_RISING = 3  # number of columns named without which the error rises most


def carriers_title(e: Exploration) -> str:
    """Return the title of the page."""
    return "Features" if e.data.test.x.ndim == 2 else "Places"


def carriers_page(e: Exploration) -> tuple[str, Picture | str]:
    """Return HTML and a picture: bars for the columns of a table and "", or a text and maps over the chosen picture."""
    return (_bars(e), "") if e.data.test.x.ndim == 2 else _maps(e)


def _drawn(names: tuple[str, ...]) -> list[str]:
    """Return the names drawn: the prediction and the risks by cause, or the total if there are none."""
    causes = [name for name in CAUSES if name in names]
    return ["prediction", *(causes or [name for name in names if name == "total"])]


def _bars(e: Exploration) -> str:
    importance = e.importance
    names = [name for name in _drawn(importance.names) if not bool(importance.mean[name].isnan().all())]
    count = min(len(importance.columns), 12)
    explanation = (
        f"Each column shuffled over {importance.rows:,} test rows: mean and standard error of {REPEATS} permutations. 0: the risk does not "
        "depend on the column; 1: without it, the risk carries no information."
    )
    picture = '<div class="wb-caption">Prediction and risks are the same for all rows.</div>'
    if names:
        figure = pictures.new_figure(6.4, min(1.1 + 0.13 * count * (len(names) + 1), 9.0) + 0.4)
        ax = pictures.paint(figure.subplots())
        mean, spread = ({name: by[name] for name in names} for by in (importance.mean, importance.standard_error))
        plots.importance(mean, [pictures.brief(name) for name in importance.columns], ax, standard_error=spread)
        alt = "importance of columns: " + "; ".join(
            f"{name}: {', '.join(importance.ranked(name)[:3])}" for name in names
        )
        picture = pictures.svg(figure, alt)
    rise, error = importance.mean["error"], importance.standard_error["error"]
    place = {column: i for i, column in enumerate(importance.columns)}
    rising = [place[column] for column in importance.ranked("error")[:MAX_RISING]]
    unit = risk_unit(e.data, e.output, "error")
    words = [
        f"{importance.columns[i]} {format_number(rise[i].item(), '', 2)} ± {format_number(error[i].item(), unit, 2)}"
        for i in rising
    ]
    rises = f"The mean error rises most without {'; '.join(words)}."
    return f'<div class="wb-caption">{explanation}</div>{picture}<div class="wb-caption">{html.escape(rises)}</div>'


def _maps(e: Exploration) -> tuple[str, Picture]:
    occlusion = e._occlusion_of(e.model)
    names = _drawn(occlusion.names)
    figure = pictures.new_figure(2.5 * len(names), 2.5)
    image = e.x if e.x.ndim == 2 or len(e.x) in (1, 3) else e.x[:1]
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for ax, name in zip(axes, names, strict=True):
        unit = "" if name == "prediction" and e.data.classes is not None else risk_unit(e.data, e.output, name)
        plots.occlusion_map(image, occlusion.change[name][0], pictures.paint(ax), kind=name, unit=unit)
    case = "The edited case" if e.edits else f"Row {e.row}"
    explanation = (
        f"{case}, place after place covered by the mean training pixel ({' x '.join(map(str, occlusion.window))} at a time). "
        "A place in the colour of a risk carries that risk: covering it lowers the risk. Yellow: covering it raises the risk."
    )
    if e.data.classes is not None:
        explanation += " Prediction: the probability of the predicted class."
    alt = f"{case}: by how much {', '.join(names)} falls where a place is covered"
    drawn, size = pictures.svg(figure, alt), (e.place_shape[0], e.place_shape[1])
    panels = tuple(panel(ax, size, figure.bbox_inches) for ax in axes)
    return f'<div class="wb-caption">{html.escape(explanation)}</div>', Picture(drawn, alt, panels, size)


__all__ = ["carriers_page", "carriers_title"]
