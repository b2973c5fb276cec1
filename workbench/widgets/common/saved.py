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
        child, message = ".jp-OutputArea-child", "> .jp-OutputArea-output:not(:has(*))"
        # of JupyterLab without a kernel, above this output or below: "Error displaying widget: model not found"
        self._hides_message = (
            f"{child}:has(+ {child} .{self._id}) {message},{child}:has(.{self._id}) + {child} {message}{{display:none}}"
        )
        self._content: Any = None

    @property
    def style(self) -> str:
        """CSS that hides the output wherever the widget is shown."""
        return f".{self._id}{{display:none!important}}"

    def display(self, widget: Any = None, words: str = "") -> None:
        """Display the widget if given, with plain text for viewers without widgets, and in IPython this output below it."""
        inside = _in_ipython()
        page = self.page() if inside else ""  # drawing may warn, which must not come between the two
        if widget is not None:
            bundle = reopen(widget)._repr_mimebundle_()
            data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
            require("IPython.display").display({**data, "text/plain": words}, metadata=metadata, raw=True)
        if inside:
            self._shown = True
            self._send(page, update=False)

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
        style = f"<style>{self._hides_message}</style>" if page else ""
        data = {"text/html": f'<div class="{self._id} {UNTYPESET}">{style}{page}</div>', "text/plain": self._words}
        require("IPython.display").display(data, raw=True, display_id=self._id, update=update)


def reopen(widget: Any) -> Any:
    """Return a widget after opening it and all within it again, where it was closed, as by `ipywidgets.Widget.close_all()`."""
    kind = require("ipywidgets").Widget
    for name in widget.keys:
        values = getattr(widget, name)
        for value in values if isinstance(values, list | tuple) else [values]:
            if isinstance(value, kind):
                reopen(value)
    if widget.comm is None:
        widget.open()
        del widget._repr_mimebundle_  # closing sets it to None
    return widget


def _in_ipython() -> bool:
    return require("IPython").get_ipython() is not None


__all__ = ["SavedOutput", "reopen"]
