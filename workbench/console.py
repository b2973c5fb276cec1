"""Progress bars, also in programs that have no console to show them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def progress_bar(iterable: Iterable[Any] | None = None, *, disable: bool | None = False, **options: Any) -> Any:
    """Return a bar of tqdm, or a disabled one in a program without a console (pythonw, 2>&-), where tqdm would fail.

    Args:
        iterable: what to go through, if anything.
        disable: as for tqdm; None: disabled where the output is no terminal.
        **options: more arguments of tqdm.

    Example:
        >>> list(progress_bar([1, 2], delay=2))
        [1, 2]
    """
    from tqdm.auto import tqdm

    return tqdm(iterable, disable=disable if sys.stderr is not None else True, **options)
