"""The table of `Explorer` that says what each of several models makes of the chosen row."""

from __future__ import annotations

import html
import math

from workbench.plots import COLOURS
from workbench.widgets.common.cases import FAR, number, with_spread
from workbench.widgets.common.predictions import Predictions, risk_unit
from workbench.widgets.explorer.exploration import Exploration


def side_by_side(e: Exploration) -> str:
    """Prediction and risks of each model as HTML, the bars of all models on one scale; "" of a single model.

    Standard deviations or entropies share the scale, whose end is the largest of them; that of vacuitic risk ends at `FAR`.
    """
    if len(e.models) < 2:
        return ""
    by_model = e.each_model()
    names = [name for name in COLOURS if any(name in answers.risk for answers in by_model.values())]
    risks = [value for answers in by_model.values() for name, value in answers.risk.items() if name != "vacuitic"]
    sizes = [risk.item() for risk in risks if bool(risk.isfinite().all())]
    top = max(sizes, default=0.0)
    heads = "".join(f"<th>{html.escape(head)}</th>" for head in ("model", "prediction", *names))
    lines = []
    for model, answers in by_model.items():
        cells = [_prediction(e, answers)]
        for name in names:
            value = answers.risk[name].item() if name in answers.risk else None
            cells.append("–" if value is None else _bar(e, name, value, FAR if name == "vacuitic" else top))
        here = ' class="wb-current" aria-current="true"' if model == e.model else ""
        lines.append(f"<tr{here}><td>{html.escape(model)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    case = f"row {e.row}{', edited' if e.edits else ''}"
    caption = f"{case}, by each model; bars of all models have one scale"
    return (
        f'<div class="wb-wide"><table class="wb-listing wb-models"><caption>{caption}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _prediction(e: Exploration, answers: Predictions) -> str:
    if e.data.classes is None or answers.probs is None:
        total = answers.risk["total"].item() if "total" in answers.risk else None
        return f"<b>{html.escape(with_spread(answers.y.item(), total, e.data.target.unit))}</b>"
    best = int(answers.y)
    said = html.escape(f"{e.data.classes[best]}, {100 * answers.probs[0, best].item():.0f} %")
    return f'<b class="wb-wrong">{said}</b>' if best != int(e.target) else f"<b>{said}</b>"


def _bar(e: Exploration, name: str, value: float, top: float) -> str:
    share = min(max(value / top, 0.0), 1.0) if top > 0 and math.isfinite(value) else 0.0
    colour = "var(--jp-ui-font-color2,#666)" if name == "total" else COLOURS[name]
    text = html.escape(number(value, risk_unit(e.data, e.output, name), 3))
    return f'{text}<div class="wb-length"><div style="width:{100 * share:.1f}%;background:{colour}"></div></div>'


__all__ = ["side_by_side"]
