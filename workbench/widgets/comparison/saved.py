"""What a saved notebook shows of a comparison where there is no kernel: the last table and pictures, beside the widget."""

from __future__ import annotations

from ..common import cases, pictures
from ..common.saved import SavedOutput
from .controls import CSS
from .figure import overview
from .findings import Findings

MOST_BYTES = 450_000
RESOLUTIONS = (80, 56, 40)  # pixels per inch of the picture, the first that leaves it small enough


def saved_output(findings: Findings) -> SavedOutput:
    """The output of the cell of a comparison."""
    return SavedOutput(
        lambda: saved_page(findings),
        lambda: (findings.table(), [kept.id for kept in findings.present]),
        "the comparison as it was saved",
    )


def saved_page(findings: Findings) -> str:
    """The table and the pictures as HTML without scripts, of less than half a megabyte; pictures with hover as far as they have room."""
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
    panels = f'<div class="wb-panels" style="display:none">{panels}</div>'  # an untrusted notebook has no styles, and shows the image
    alt = f"comparison of {', '.join(kept.name for kept in trained)} on {findings.data.name}"
    for dpi, hover in [(RESOLUTIONS[0], True), *((dpi, False) for dpi in RESOLUTIONS)]:
        figure = overview(findings.view, trained, findings.frame(), findings.data.target.unit, findings.marked())
        image = pictures.image(
            pictures.small_png(figure, dpi), alt, attributes='class="wb-pixels"' if hover else 'class="wb-only"'
        )
        page = f"{opened}{panels if hover else ''}</div>{image}</div>"
        if len(page.encode()) <= MOST_BYTES:
            return page
    return f"{opened}<p>The pictures are too large to be saved.</p></div></div>"
