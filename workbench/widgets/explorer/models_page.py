"""Tables of `Explorer` with the predictions and risks of several models for the chosen row, with bars on shared scales."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from workbench.plots import COLOURS
from workbench.plots._common import SERIES
from workbench.plots.importance import RAISED
from workbench.widgets.common.cases import FULL_VACUITIC, class_and_share, format_number, with_spread
from workbench.widgets.common.predictions import Predictions, risk_unit
from workbench.widgets.explorer.exploration import Exploration
from workbench.widgets.explorer.ranking import OF

DEVIATIONS = ("aleatoric", "epistemic", "total")  # risks with the same unit, which share a scale


@dataclass(frozen=True)
class Line:
    """A line of a table, with the results of one model.

    Args:
        model: name of the model.
        cells: HTML cells before the bars.
        sizes: numbers drawn as bars, by name; missing ones were not measured.
        notes: notes after the numbers, by the same names.
        about: group of the line; lines of different groups have separate scales.
    """

    model: str
    cells: Sequence[str]
    sizes: Mapping[str, float]
    notes: Mapping[str, str] = field(default_factory=dict)
    about: str = ""


def table(
    lines: Sequence[Line],
    heads: Sequence[str],
    caption: str,
    unit: Callable[[Line, str], str],
    current: str,
    *,
    signed: bool = False,
) -> str:
    """Return lines as an HTML table: models, cells, and bars on shared scales.

    Standard deviations or entropies share a scale up to the largest of them; that of vacuitic risk ends at `FULL_VACUITIC`, of confidence at 1.

    Args:
        lines: lines of the models.
        heads: headers of the cells.
        caption: caption of the table, as HTML.
        unit: returns the unit of a name in a line.
        current: name of the current model.
        signed: whether bars show changes: then each scale ends at the largest change, and negative bars are yellow, as in
            `plots.occlusion_map`. Otherwise negative numbers have no bar.
    """
    known = {name: None for line in lines for name in line.sizes}
    names = [*(name for name in COLOURS if name in known), *(name for name in known if name not in COLOURS)]
    fixed = {} if signed else {"vacuitic": FULL_VACUITIC, "confidence": 1.0}
    tops: dict[tuple[str, str], float] = {}
    for line in lines:
        for name, size in line.sizes.items():
            if math.isfinite(size):
                scale = line.about, scale_of(name)
                tops[scale] = fixed.get(scale_of(name), max(tops.get(scale, 0.0), abs(size)))
    body = []
    for line in lines:
        cells = list(line.cells)
        for name in names:
            if name not in line.sizes:
                cells.append("–")
                continue
            size = line.sizes[name]
            note = f' <span class="wb-name">{html.escape(line.notes[name])}</span>' if name in line.notes else ""
            length = bar(name, size if signed else max(size, 0.0), tops.get((line.about, scale_of(name)), 0.0))
            cells.append(f"{html.escape(format_number(size, unit(line, name), 3))}{note}{length}")
        here = ' class="wb-current" aria-current="true"' if line.model == current and len(lines) > 1 else ""
        model = f'<td class="wb-model">{html.escape(line.model)}</td>'
        body.append(f"<tr{here}>{model}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    shown = ("model", *heads, *(f"1 - {name}" if name.startswith("confidence") else name for name in names))
    return (
        f'<div class="wb-wide"><table class="wb-listing wb-models"><caption>{caption}</caption>'
        f"<thead><tr>{''.join(f'<th>{html.escape(head)}</th>' for head in shown)}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def scale_of(name: str) -> str:
    """Return the name of the scale of a risk; risks of the same unit and column share one."""
    risk, of, column = name.partition(OF)
    return f"deviation{of}{column}" if risk in DEVIATIONS else name


def bar(name: str, size: float, top: float) -> str:
    """Return a number as a bar in the colour of its risk, which is full at `top`; negative ones are yellow."""
    share = min(abs(size) / top, 1.0) if top > 0 and math.isfinite(size) else 0.0
    risk = name.partition(OF)[0]
    colour = RAISED if size < 0 else COLOURS.get(risk, SERIES[0] if risk == "prediction" else SERIES[1])
    colour = "var(--jp-ui-font-color2,#666)" if colour == COLOURS["total"] else colour
    return f'<div class="wb-length"><div style="width:{100 * share:.1f}%;background:{colour}"></div></div>'


def side_by_side(e: Exploration) -> str:
    """Return prediction and risks of the chosen row by each model as HTML; "" with a single model."""
    if len(e.models) < 2:
        return ""
    lines = [
        Line(model, [_prediction(e, answers)], {name: value.item() for name, value in answers.risk.items()})
        for model, answers in e.each_model().items()
    ]
    case = f"row {e.row}{', edited' if e.edits else ''}"
    caption = f"{case}, by each model; bars of all models share scales"
    return table(lines, ("prediction",), caption, lambda _, name: risk_unit(e.data, e.output, name), e.model)


def _prediction(e: Exploration, answers: Predictions) -> str:
    if e.data.classes is None or answers.probs is None:
        total = answers.risk["total"].item() if "total" in answers.risk else None
        return f"<b>{html.escape(with_spread(answers.y.item(), total, e.data.target.unit))}</b>"
    best = int(answers.y)
    cells = html.escape(class_and_share(e.data.classes[best], answers.probs[0, best].item()))
    return f'<b class="wb-wrong">{cells}</b>' if best != int(e.target) else f"<b>{cells}</b>"


__all__ = ["Line", "bar", "scale_of", "side_by_side", "table"]
