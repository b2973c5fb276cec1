"""What a saved notebook shows of a comparison where there is no kernel: the last table and pictures, beside the widget."""

from __future__ import annotations

import uuid
from typing import Any

from workbench.errors import require

from ..common import cases, pictures
from .controls import CSS
from .figure import overview
from .findings import Findings

MOST_BYTES = 450_000
RESOLUTIONS = (80, 56, 40)  # pixels per inch of the picture, the first that leaves it small enough


class SavedOutput:
    """A second output of the cell, which is brought up to date with the widget and hidden by its style while it is alive.

    Args:
        findings: what it shows.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._id, self._shown = f"wb-saved-{uuid.uuid4().hex[:12]}", False
        self._content: Any = None

    @property
    def style(self) -> str:
        """CSS for the widget: where it is shown, the output is not."""
        return f".{self._id}{{display:none!important}}"

    def display(self) -> None:
        """Put the output into the cell that runs; outside of IPython nothing happens."""
        if _in_ipython():
            self._shown, self._content = True, None
            self._send(self._page(), update=False)

    def update(self) -> None:
        """Bring the output up to date, if what it shows has changed."""
        if self._shown and self._now() != self._content:
            self._send(self._page(), update=True)

    def clear(self) -> None:
        """Leave nothing until something else is trained: the same is shown elsewhere."""
        if self._shown:
            self._send("", update=True)

    def _now(self) -> Any:
        return self._findings.table(), [kept.id for kept in self._findings.present]

    def _send(self, page: str, update: bool) -> None:
        self._content = self._now()
        data = {"text/html": f'<div class="{self._id}">{page}</div>', "text/plain": "the comparison as it was saved"}
        require("IPython.display").display(data, raw=True, display_id=self._id, update=update)

    def _page(self) -> str:
        return saved_page(self._findings)


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


def _in_ipython() -> bool:
    return require("IPython").get_ipython() is not None
