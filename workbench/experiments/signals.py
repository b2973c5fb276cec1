"""Signals during long runs: SIGTERM stops them as Ctrl-C does, and neither interrupts the writing of results."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def _handled(handler: Callable[..., None], *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals by a handler within the context. No effect outside the main thread, where Python allows no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, signal.SIG_DFL if old_handler is None else old_handler)


def sigterm_as_interrupt() -> contextlib.AbstractContextManager[None]:
    """Raise KeyboardInterrupt on SIGTERM, so that workers and lock are cleaned up as after Ctrl-C."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    return _handled(stop, signal.SIGTERM)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay SIGINT and SIGTERM to the end of the context, so that all files are written."""
    received: list[int] = []
    with _handled(lambda number, _: received.append(number), signal.SIGINT, signal.SIGTERM):
        yield
    for number in received[:1]:
        signal.raise_signal(number)


__all__ = ["sigterm_as_interrupt", "uninterrupted"]
