"""The whole comparison as one figure, for viewers that show no HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..common.pictures import INK, brief, new_figure
from .panels import PanelData, draw, size
from .scales import shared
from .scores import column, ordered

if TYPE_CHECKING:
    import pandas as pd

    from .trials import Trained

ROW_HEIGHT = 0.26  # of the table, in inches


def overview(
    view: PanelData, trained: Sequence[Trained], frame: pd.DataFrame, unit: str, marked: Mapping[str, Sequence[str]]
) -> Any:
    """Draw the table of scores, and below it the pictures of all models, two per row.

    Args:
        view: inputs of the pictures.
        trained: models that have a picture.
        frame: scores of the models.
        unit: unit of the target.
        marked: by column of scores, the models that are better than the plain one beyond noise.

    Returns:
        A matplotlib Figure that is not registered with pyplot.
    """
    sizes = [size(view, kept.answers) for kept in trained if kept.answers is not None]
    width, height = max(w for w, _ in sizes), max(h for _, h in sizes) + 0.35
    across = min(2, len(trained))
    down = math.ceil(len(trained) / across)
    head = ROW_HEIGHT * (len(frame) + 2.5)
    figure = new_figure(max(width * across, 10.0), head + height * down)
    parts: Any = figure.subfigures(2, 1, height_ratios=[head, height * down])
    top, rest = parts
    _table(top.subplots(), frame, unit, marked)
    scales = shared(view, [kept.answers for kept in trained if kept.answers is not None])
    places = rest.subfigures(down, across, squeeze=False).flat
    for place, kept in zip(places, trained, strict=False):
        place.set_facecolor("none")
        place.suptitle(brief(kept.name, 48), fontsize=12, color=INK, parse_math=False)
        assert kept.answers is not None
        draw(place, view, kept.answers, unit, scales)
    return figure


def _table(ax: Any, frame: pd.DataFrame, unit: str, marked: Mapping[str, Sequence[str]]) -> None:
    ax.set_axis_off()
    names = [name for name in ordered(map(str, frame)) if frame[name].notna().any()]
    if not names:
        return
    in_unit = f" ({unit})" if unit else ""
    cells = [
        ["–" if math.isnan(v := frame.loc[row, name]) else column(name).text(v) for name in names]
        for row in frame.index
    ]
    heads = [column(name).title.format(unit=in_unit).replace(" of a ", "\nof a ") for name in names]
    rows = [brief(str(name), 40) for name in frame.index]
    table = ax.table(cells, rowLabels=rows, colLabels=heads, loc="upper center", edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    table.auto_set_column_width(list(range(len(names))))
    for (row, place), cell in table.get_celld().items():
        cell.set_height(1.0 / (len(frame) + 2.5) * (1.5 if row == 0 else 1.0))
        cell.set_linewidth(0.3)
        cell.get_text().set_parse_math(False)
        if row > 0 and place >= 0 and frame.index[row - 1] in marked.get(names[place], ()):
            cell.set_text_props(fontweight="bold")
