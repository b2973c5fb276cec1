"""What a saved notebook shows of a widget where there is no kernel: a second output of its cell."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from workbench.errors import require
from workbench.notebook.values import UNTYPESET


class SavedOutput:
    """A second output of the cell, which is brought up to date with the widget and hidden by its style while that is alive.

    Args:
        page: makes its HTML, without scripts.
        now: what it depends on; it is made again when that has changed.
        words: what it is, for what shows no HTML.
    """

    def __init__(self, page: Callable[[], str], now: Callable[[], Any], words: str) -> None:
        self.page, self._now, self._words = page, now, words
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
            self._send(self.page(), update=False)

    def update(self) -> None:
        """Bring the output up to date, if what it shows has changed."""
        if self._shown and self._now() != self._content:
            self._send(self.page(), update=True)

    def clear(self) -> None:
        """Leave nothing until something else is shown: the same is shown elsewhere."""
        if self._shown:
            self._send("", update=True)

    def _send(self, page: str, update: bool) -> None:
        self._content = self._now()
        data = {"text/html": f'<div class="{self._id} {UNTYPESET}">{page}</div>', "text/plain": self._words}
        require("IPython.display").display(data, raw=True, display_id=self._id, update=update)


def _in_ipython() -> bool:
    return require("IPython").get_ipython() is not None


__all__ = ["SavedOutput"]
