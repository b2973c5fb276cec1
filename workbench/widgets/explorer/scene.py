"""Pictures of `Explorer`: the chosen case, its surroundings, all cases, and the static pages for saved notebooks and snapshots."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import torch

from workbench.widgets.common import pictures
from workbench.widgets.common.cases import STYLE as CASES
from workbench.widgets.common.cases import card, isolated, render_cases
from workbench.widgets.common.pictures import Spot
from workbench.widgets.common.predictions import per_row, predict_cases
from workbench.widgets.explorer import neighbours
from workbench.widgets.explorer.confusion import confusion_table
from workbench.widgets.explorer.exploration import Exploration
from workbench.widgets.explorer.landscape import (
    POINTS,
    dot,
    draw_along,
    draw_coverage,
    draw_overview,
    draw_plane,
    line,
    plane_grid,
    risk_label,
)
from workbench.widgets.explorer.linked import still, undrawn
from workbench.widgets.explorer.models_page import side_by_side

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EDITED_NUMBERS = 2**25  # numbers in all inputs of a curve along a knob, which has fewer points for large images

MAX_REFUSED = 8  # number of refused or listed cases shown

STYLE = f"""{pictures.STYLE}{CASES}
.wb-explorer .widget-html-content,.wb-static{{line-height:1.35}}
.wb-explorer .widget-html{{height:auto}}
.wb-explorer .lm-TabBar-content{{flex-wrap:wrap}}
.wb-explorer .lm-TabBar-tab{{flex:0 1 auto!important;min-width:fit-content!important}}
.wb-explorer .lm-TabBar-tab{{color:var(--jp-ui-font-color1,inherit)!important}}
.wb-number .widget-label{{position:absolute;width:1px!important;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}}
.wb-explorer .wb-message{{color:var(--jp-error-color1,#d32f2f);white-space:pre-wrap}}
.wb-pair{{display:flex;flex-wrap:wrap;gap:8px}}
.wb-pair .wb-case{{width:200px;font-size:13px}}
.wb-pair .wb-pictured{{width:306px;display:grid;grid-template-columns:96px 1fr;column-gap:8px;align-items:start}}
.wb-pair .wb-pictured img{{width:96px;grid-row:2/span 4}}
.wb-pair .wb-pictured .wb-name{{grid-column:1/span 2}}
.wb-pair .wb-figures{{font-size:11px;margin-top:4px}}
.wb-pair .wb-idle{{border-style:dashed;color:var(--jp-ui-font-color2,color-mix(in srgb,currentColor 72%,transparent))}}
.wb-cases .wb-near{{width:72px;padding:4px;font-size:10px}}
.wb-frame{{position:relative;width:fit-content;max-width:100%;overflow:visible}}
.wb-frame .jupyter-widgets{{margin:0}}
.wb-frame .wb-over{{position:absolute;left:0;top:0;right:0;bottom:0;height:100%;pointer-events:none}}
.wb-frame .wb-over .widget-html-content{{position:absolute;left:0;top:0;right:0;bottom:0}}
.wb-here{{position:absolute;box-sizing:border-box;width:14px;height:14px;margin:-7px 0 0 -7px;border-radius:50%;
border:2.5px solid var(--jp-ui-font-color1,currentColor);box-shadow:0 0 0 1.5px var(--jp-layout-color0,Canvas)}}
.wb-models .wb-length{{height:7px;min-width:84px;margin-top:2px;border-radius:1px;overflow:hidden;
background:var(--jp-layout-color3,color-mix(in srgb,currentColor 15%,transparent))}}
.wb-models .wb-length div{{height:100%}}
.wb-models .wb-model{{white-space:normal;overflow-wrap:anywhere;min-width:7em}}
.wb-models .wb-current td:first-child{{font-weight:600;box-shadow:inset 3px 0 var(--jp-brand-color1,#1976d2)}}
.wb-confused :is(th,td){{text-align:center;padding:3px 6px}}
.wb-confused th{{min-width:0;max-width:none;white-space:nowrap}}
.wb-confused.wb-upright thead th{{writing-mode:vertical-rl;text-align:right}}
.wb-line{{position:absolute;width:0;border-left:2px solid var(--jp-ui-font-color1,currentColor);opacity:.5}}
.wb-static .wb-frame{{display:inline-block;vertical-align:top;margin:0 12px 8px 0}}
.wb-static section{{margin-bottom:10px}}
"""


def pair(e: Exploration, still: bool = False) -> str:
    """Return the case beside its edited version as HTML; without edits, beside a hint unless the page is static (`still`)."""
    if e.edits:
        edits = ", ".join(f"{isolated(name)} {e._editor.text(name)}" for name in e.edits)
        edited = f'{card(e.case(edited=True), e.output, hover=False)}<div class="wb-caption">edited: {html.escape(edits)}</div>'
    elif still:
        edited = ""
    else:
        edited = '<div class="wb-case wb-idle">Move a slider below to see the edited case here.</div>'
    return f'<div class="wb-pair">{card(e.case(), e.output, hover=False)}<div>{edited}</div></div>'


def refused(e: Exploration) -> str:
    """Return the refused cases as HTML, highest risk first."""
    rows = e.abstained
    if not len(rows):
        return '<div class="wb-caption">every case is answered</div>'
    some = f", the {MAX_REFUSED} of highest risk" if len(rows) > MAX_REFUSED else ""
    caption = f"refused: {len(rows):,}{some}"
    return render_cases(e.cases(rows[:MAX_REFUSED]), caption, e.output)


def in_plane(e: Exploration) -> bool:
    return e.data.input_shape == (2,) and len(e._editor.knobs) == 2


def along_key(e: Exploration) -> tuple[Any, ...]:
    """Return what the picture along the active knob depends on: everything but the value of that knob."""
    knob = e._editor.active
    return knob, tuple(sorted((name, value) for name, value in e.edits.items() if name != knob))


def draw_edit(ax: Axes, e: Exploration) -> str:
    """Draw the risk around the case, in the plane of two inputs or along the knob changed last; return the alternative text."""
    if in_plane(e):
        by = e.selective.by if e.by == "error" and len(e.rankings) > 1 else e.by
        xx, yy = plane_grid(e.data)
        answers = predict_cases(e.wrapped, e.data, torch.stack([xx.flatten(), yy.flatten()], 1))
        value = answers.y.float() if by == "error" else per_row(answers, by, torch.zeros(0))
        draw_plane(ax, e.data, e.output, by, xx, yy, value)
        return f"{risk_label(e.data, e.output, by)} over the plane of the two inputs"
    editor = e._editor
    knob = editor.knobs[editor.active]
    points = max(9, min(POINTS, EDITED_NUMBERS // e.data.test.x[0].numel()))  # each a prediction of the whole input
    values = torch.linspace(min(knob.low, editor.value(knob.name)), max(knob.high, editor.value(knob.name)), points)
    if e.data.input_shape == (1,):  # a single input: also cover the range of the test rows
        test = e.data.test.x
        values = torch.linspace(min(knob.low, test.min().item()), max(knob.high, test.max().item()), 2 * POINTS)
    x = torch.stack([editor.applied({**e.edits, knob.name: value}) for value in values.tolist()])
    draw_along(ax, e.data, e.output, knob, values, predict_cases(e.wrapped, e.data, x))
    return f"prediction and risks of row {e.row} along {knob.label}"


def mark_edit(ax: Axes, e: Exploration) -> str:
    """Return the mark of the case in the picture of `draw_edit`, as HTML."""
    if in_plane(e):
        return dot(ax, *e.x.tolist())
    value = e._editor.value(e._editor.active)
    mark = dot(ax, value, e.prediction.item()) if e.data.classes is None else ""
    return line(ax, value) + mark


def draw_all(ax: Axes, e: Exploration) -> tuple[list[Spot], str]:
    """Draw all cases by their risk and error; return the tooltips and the alternative text."""
    by = _across(e)
    answers, y = e.answers(), e.data.test.y[e.rows]
    value = answers.y.float() if by == "error" else per_row(answers, by, y)
    spots = draw_overview(ax, e.data, e.output, by, value, per_row(answers, "error", y), e.tell)
    if by == "error":
        ax.set_xlabel(f"predicted {e.data.target}")
    return spots, f"error over {by} of {len(e.rows):,} test cases"


def _across(e: Exploration) -> str:
    """Return the name of the risk on the x axis of the plot of all cases."""
    return e.rankings[0] if e.by == "error" else e.by


def mark_all(ax: Axes, e: Exploration) -> str:
    """Return the mark of the edited case in the plot of all cases, as HTML."""
    by, target = _across(e), e.target.reshape(1, -1) if e.data.classes is None else e.target[None]
    value = e._current.y.float() if by == "error" else per_row(e._current, by, target)
    return dot(ax, value.item(), per_row(e._current, "error", target).item())


def all_cases(e: Exploration, marked: bool = True) -> tuple[str, Any, str]:
    """Return the plot of all cases as HTML with tooltips, as a figure, and its alternative text."""
    figure = pictures.new_figure(6.4, 3.4)
    ax = pictures.paint(figure.subplots())
    spots, alt = draw_all(ax, e)
    drawn = f'<div class="wb-frame">{pictures.svg(figure, alt, spots)}{mark_all(ax, e) if marked else ""}</div>'
    missing = undrawn(e, _across(e))
    note = f'<div class="wb-caption">{missing:,} rows not drawn: NaN or infinite</div>' if missing else ""
    return drawn + note, figure, alt


class SavedPage:
    """The explorer in a saved notebook without a kernel: the plot of all cases, and the first listed cases.

    Args:
        e: exploration; each call returns its current state.
    """

    def __init__(self, e: Exploration) -> None:
        self._explorer = e
        # key, HTML and fallback of the last picture, which a brush does not change
        self._drawn: tuple[Any, str, str] = (None, "", "")

    def __call__(self) -> str:
        e = self._explorer
        drawn_for = e.model, e.by, e._model_versions
        if self._drawn[0] != drawn_for:
            plot, figure, alt = all_cases(e, marked=False)
            fallback = pictures.image(pictures.small_png(figure, 80), alt, attributes='class="wb-pixels"')
            self._drawn = drawn_for, plot, fallback
        _, plot, fallback = self._drawn
        listed = e.shown_in_words() or f"the {MAX_REFUSED} of highest {risk_label(e.data, e.output, e.by)}"
        model = f", {e.model}" if len(e.models) > 1 else ""
        first = render_cases(e.cases(e.shown[:MAX_REFUSED]), f"{e.data.name}{model}: {listed}", e.output)
        return (
            f'<div class="wb-static"><style>{STYLE}</style>{still(e, plot)}{confusion_table(e)}{first}{fallback}</div>'
        )


def snapshot(e: Exploration) -> None:
    """See `Explorer.snapshot`."""
    has_risk, can_edit = len(e.rankings) > 1, bool(e._editor.knobs)
    pages = [still(e, all_cases(e)[0])]
    whole = pictures.new_figure(6 + 4.5 * (has_risk + can_edit), 3.6)
    axes = whole.subplots(1, 1 + has_risk + can_edit, squeeze=False)[0]
    for ax in axes:
        pictures.paint(ax)
    if can_edit:
        figure = pictures.new_figure(5.4, 3.4)
        ax = pictures.paint(figure.subplots())
        alt = draw_edit(ax, e)
        pages.insert(0, f'<div class="wb-frame">{pictures.svg(figure, alt)}{mark_edit(ax, e)}</div>')
        draw_edit(axes[0], e)
    draw_all(axes[int(can_edit)], e)
    refusing = ""
    if has_risk:
        figure = pictures.new_figure(4.4, 3.4)
        ax = pictures.paint(figure.subplots())
        draw_coverage(ax, e.data, e.refusals, e.refusal_error)
        pages.append(f'<div class="wb-frame">{pictures.svg(figure, "risk-coverage curve")}{line(ax, e.coverage)}</div>')
        draw_coverage(axes[-1], e.data, e.refusals, e.refusal_error)
        axes[-1].axvline(e.coverage, color=pictures.INK, linewidth=1)
        lines = e.summary(), e.areas_in_words()
        summary = "".join(f"<div>{html.escape(words)}</div>" for words in lines)
        refusing = f"<section>{summary}{refused(e)}</section>"
    listed = e.shown_in_words()
    caption = (
        f"{e.data.name}: the cases of highest {risk_label(e.data, e.output, e.by)}{f'; {listed}' if listed else ''}"
    )
    page = "".join(
        [
            f'<div class="wb-explorer"><section>{pair(e, still=True)}{side_by_side(e)}</section>',
            f"<section>{neighbours.page(e.neighbours, e.data, e.space, e.x)}</section>",
            f"<section>{render_cases(e.cases(e.shown[:MAX_REFUSED]), caption, e.output)}</section>",
            f"<section>{confused}</section>" if (confused := confusion_table(e)) else "",
            f"<section>{''.join(pages)}</section>{refusing}</div>",
        ]
    )
    pictures.display_static(
        page,
        whole,
        f"{e.data.name}, row {e.row}: {'risk around the case, ' if can_edit else ''}all cases, risk and coverage",
        style=CASES + STYLE,
    )


__all__ = [
    "STYLE",
    "SavedPage",
    "all_cases",
    "along_key",
    "draw_all",
    "draw_edit",
    "in_plane",
    "mark_all",
    "mark_edit",
    "pair",
    "refused",
    "snapshot",
]
