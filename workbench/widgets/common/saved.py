"""Static output of a widget for saved notebooks without a kernel: a second output of its cell."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from workbench.errors import require
from workbench.notebook.values import UNTYPESET


class SavedOutput:
    """A second output of a cell, which follows the widget and is hidden by CSS while the widget is shown.

    Args:
        page: returns the HTML of the output, without scripts.
        now: returns what the page depends on; the page is made again when this changes.
        words: plain text for viewers without HTML.
    """

    def __init__(self, page: Callable[[], str], now: Callable[[], Any], words: str) -> None:
        self.page, self._now, self._words = page, now, words
        self._id, self._shown = f"wb-saved-{uuid.uuid4().hex[:12]}", False
        self._content: Any = None

    @property
    def style(self) -> str:
        """CSS that hides the output wherever the widget is shown."""
        return f".{self._id}{{display:none!important}}"

    def display(self) -> None:
        """Add the output to the running cell; does nothing outside IPython."""
        if _in_ipython():
            self._shown, self._content = True, None
            self._send(self.page(), update=False)

    def update(self) -> None:
        """Update the output if its content has changed."""
        if self._shown and self._now() != self._content:
            self._send(self.page(), update=True)

    def clear(self) -> None:
        """Empty the output until the next change, since a snapshot shows the same."""
        if self._shown:
            self._send("", update=True)

    def _send(self, page: str, update: bool) -> None:
        self._content = self._now()
        data = {"text/html": f'<div class="{self._id} {UNTYPESET}">{page}</div>', "text/plain": self._words}
        require("IPython.display").display(data, raw=True, display_id=self._id, update=update)


def _in_ipython() -> bool:
    return require("IPython").get_ipython() is not None


__all__ = ["SavedOutput"]
