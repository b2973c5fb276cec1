"""Dark mode of figures: black, white and grey are inverted, while colours and images stay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")
_DARKEST, _LIGHTEST = 0.1, 0.92  # lightness of inverted white and black
_NEUTRAL = 0.06  # maximum difference of the RGB channels of a grey


@contextlib.contextmanager
def darkened(figure: Figure) -> Iterator[None]:
    """Give a figure dark-mode colours within the context, and restore it afterwards.

    Texts, lines and bars on top of an image or a colour map keep their colours, which were chosen for that background.
    """
    restore: list[Callable[[], object]] = []
    try:
        unchanged = {id(artist) for ax in figure.axes if ax.images or _is_map(ax) for artist in _on_top(ax)}
        for artist in figure.findobj():
            # the patches of axes and figures are visited as their children
            if id(artist) not in unchanged and not hasattr(artist, "patch"):
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


def _on_top(ax: Any) -> Iterator[Any]:
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
        colour_before = get()
        if isinstance(artist, Collection):
            if artist.get_array() is not None or not len(colour_before):
                continue
            colour_after: Any = [_dark(colour) for colour in colour_before]
        else:
            colour_after = _dark(colour_before)
        put(colour_after)
        restore.append(partial(put, colour_before))


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
