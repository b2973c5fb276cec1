"""Static output of a comparison: its table and pictures for saved notebooks without a kernel, and for snapshots."""

from __future__ import annotations

from collections.abc import Callable

from ..common import cases, pictures
from ..common.saved import SavedOutput
from .controls import CSS
from .figure import overview
from .findings import Findings

MAX_BYTES = 450_000  # of the saved page
RESOLUTIONS = (80, 56, 40)  # pixels per inch of the picture; the first with which the page is small enough is used


def saved_output(findings: Callable[[], Findings | None]) -> SavedOutput:
    """Return the saved output of a comparison, which is empty while there are no findings."""

    def page() -> str:
        present = findings()
        return "" if present is None else saved_page(present)

    def now() -> tuple[str, list[str]]:
        present = findings()
        return ("", []) if present is None else (present.table(), [kept.id for kept in present.present])

    return SavedOutput(page, now, "the comparison as it was saved")


def saved_page(findings: Findings) -> str:
    """Return table and pictures as HTML without scripts, in less than half a megabyte; pictures have tooltips if that fits."""
    table = findings.table()
    if not table:
        return ""
    trained = [kept for kept in findings.present if kept.answers is not None]
    metrics = f'<div class="wb-comparison"><div class="wb-metrics">{table}</div>'
    style = pictures.STYLE + CSS + ".wb-only{max-width:100%}" + (cases.STYLE if findings.view.kind == "images" else "")
    opened = f'<div class="wb-static"><style>{style}</style>{metrics}'
    if not trained:
        return f"{opened}</div></div>"
    panels = "".join(f'<div class="wb-panel">{findings.panel(kept, losses=False)}</div>' for kept in trained)
    panels = f'<div class="wb-panels" style="display:none">{panels}</div>'  # untrusted notebooks drop styles and show the image
    alt = f"comparison of {', '.join(kept.name for kept in trained)} on {findings.data.name}"
    for dpi in RESOLUTIONS:
        figure = overview(findings.view, trained, findings.frame(), findings.data.target.unit, findings.marked())
        png = pictures.small_png(figure, dpi)
        for tooltips, name in [(panels, "wb-pixels"), ("", "wb-only")] if dpi == RESOLUTIONS[0] else [("", "wb-only")]:
            image = pictures.image(png, alt, attributes=f'class="{name}"')
            page = f"{opened}{tooltips}</div>{image}</div>"
            if len(page.encode()) <= MAX_BYTES:
                return page
    return f"{opened}<p>The pictures are too large to save.</p></div></div>"


def display_snapshot(findings: Findings) -> None:
    """Display a static picture in the running cell.

    Raises:
        ValueError: if nothing is trained with the current settings.
    """
    trained = [kept for kept in findings.present if kept.answers is not None]
    if not trained:
        others = ", ".join(kept.name for kept in findings.kept if kept.wrapped is not None)
        before = f" with the current settings, only {others} with others" if others else " yet"
        raise ValueError(f"snapshot: nothing is trained{before}; start(block=True) first")
    panels = "".join(f'<div class="wb-panel">{findings.panel(kept, losses=False)}</div>' for kept in trained)
    metrics = f'<div class="wb-metrics">{findings.table()}</div>'
    page = f'<div class="wb-comparison">{metrics}<div class="wb-panels" style="display:none">{panels}</div></div>'
    figure = overview(findings.view, trained, findings.frame(), findings.data.target.unit, findings.marked())
    alt = f"comparison of {', '.join(kept.name for kept in trained)} on {findings.data.name}"
    pictures.display_static(page, figure, alt, CSS + (cases.STYLE if findings.view.kind == "images" else ""))
