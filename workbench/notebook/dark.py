"""Figures on dark pages: what is black, white or grey swaps its lightness, colours and pictures stay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")
_DARKEST, _LIGHTEST = 0.1, 0.92  # lightness of white and of black on a dark page
_NEUTRAL = 0.06  # difference of the channels up to which a colour is a grey


@contextlib.contextmanager
def darkened(figure: Figure) -> Iterator[None]:
    """The figure as it is drawn on a dark page; it is as before afterwards.

    Texts, lines and bars upon an image or a map of colours stay: they were chosen to be read there.
    """
    restore: list[Callable[[], object]] = []
    try:
        kept = {id(artist) for ax in figure.axes if ax.images or _is_map(ax) for artist in _upon(ax)}
        for artist in figure.findobj():
            if id(artist) not in kept and not hasattr(artist, "patch"):  # axes and figures have theirs as a child
                _swap(artist, restore)
                box = artist.get_bbox_patch() if hasattr(artist, "get_bbox_patch") else None
                if box is not None:
                    _swap(box, restore)
        yield
    finally:
        for undo in reversed(restore):
            undo()


def _is_map(ax: Any) -> bool:
    return any(
        type(collection).__name__ in ("QuadMesh", "ContourSet", "QuadContourSet") for collection in ax.collections
    )


def _upon(ax: Any) -> Iterator[Any]:
    for artist in (*ax.texts, *ax.lines, *ax.patches, *ax.collections):
        yield from artist.findobj()


def _swap(artist: Any, restore: list[Callable[[], object]]) -> None:
    from matplotlib.collections import Collection

    for name in _COLOURS:
        get, put = getattr(artist, f"get_{name}", None), getattr(artist, f"set_{name}", None)
        if get is None or put is None or (name == "color" and hasattr(artist, "get_facecolor")):
            continue
        if isinstance(kind := getattr(artist, f"_{name}", None), str) and kind == "auto":  # follows the line
            continue
        before = get()
        if isinstance(artist, Collection):
            if artist.get_array() is not None or not len(before):
                continue
            after: Any = [_dark(colour) for colour in before]
        else:
            after = _dark(before)
        put(after)
        restore.append(partial(put, before))


def _dark(colour: Any) -> Any:
    from matplotlib.colors import to_rgba

    try:
        *channels, alpha = to_rgba(colour)
    except (ValueError, TypeError):  # "auto", "none" and colours of lists
        return colour
    if max(channels) - min(channels) > _NEUTRAL or alpha == 0:
        return colour
    lightness = _LIGHTEST - (_LIGHTEST - _DARKEST) * sum(channels) / 3
    return (lightness, lightness, lightness, alpha)
