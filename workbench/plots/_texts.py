"""Texts that fit their places: broken into lines, and names shortened where there is no room for lines."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.text import Text

SHORTEST_LINE = 8  # characters: shorter lines than this would be no words
LEFT = 4.6  # inches that names of rows leave the Axes in a wide figure
LOWEST_NAME = 5.0  # font size in points of names of rows that lie close together


@contextmanager
def no_glyph_warnings() -> Iterator[None]:
    """Suppress warnings about characters missing in matplotlib's font, where texts are measured, or drawn for a page whose fonts have them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


@no_glyph_warnings()
def break_lines(text: Text, room: float) -> None:
    """Break a text into lines of at most some pixels along its direction; a formula stays whole."""
    words, length = text.get_text(), _length(text)
    if not words or length <= room or (text.get_parse_math() and words.count("$") > 1):
        return
    lines = words.split("\n")
    widest = int(max(map(len, lines)) * room / length) + 2  # of words with narrow letters, more go into a line
    for width in range(max(widest, SHORTEST_LINE), SHORTEST_LINE - 1, -1):
        text.set_text("\n".join(part for line in lines for part in textwrap.wrap(line, width) or [""]))
        if _length(text) <= room:
            return


def _length(text: Text) -> float:
    box = text.get_window_extent()
    return box.height if text.get_rotation() == 90 else box.width


def label_axes(ax: Axes, x: str, y: str | None = None) -> None:
    """Name the axes, in as many lines as are needed for texts no longer than the Axes."""
    ax.set_xlabel(x)
    if y is not None:
        ax.set_ylabel(y)
    fit_labels(ax)


@no_glyph_warnings()
def fit_labels(ax: Axes) -> None:
    """Break the labels of both axes into lines that are no longer than these."""
    xlabel, ylabel = ax.get_xlabel(), ax.get_ylabel()
    _break_labels(ax)
    engine, broken = ax.figure.figure.get_layout_engine(), (xlabel, ylabel) != (ax.get_xlabel(), ax.get_ylabel())
    if engine is not None and broken:  # several lines leave the Axes less room
        engine.execute(ax.figure.figure)
        ax.set(xlabel=xlabel, ylabel=ylabel)
        _break_labels(ax)


def fit_bar(bar: Colorbar, ax: Axes) -> None:
    """Break the label of a colour bar of Axes into lines that are no longer than it."""
    for axis in (bar.ax.xaxis, bar.ax.yaxis):
        axis.label.set_parse_math(ax.xaxis.label.get_parse_math())
    fit_labels(bar.ax)


def _break_labels(ax: Axes) -> None:
    from matplotlib import rcParams

    ax.apply_aspect()
    box = ax.get_window_extent()
    room = min(box.width, most_room(ax))
    break_lines(ax.xaxis.label, room)
    break_lines(ax.yaxis.label, box.height)
    factor = ax.xaxis.get_offset_text()  # of the ticks, such as 1e12, at the right end of the axis
    extent = factor.get_window_extent() if factor.get_text() else None
    if extent is not None and ax.xaxis.label.get_window_extent().width > room - 2 * extent.width:
        ax.xaxis.labelpad = rcParams["axes.labelpad"] + 1.2 * extent.height * 72 / ax.figure.dpi


def column_width(ax: Axes) -> float:
    """Return the width in pixels of the column of the figure that Axes stand in."""
    width, spec = ax.figure.bbox.width, ax.get_subplotspec()
    if spec is None:
        return width
    ratios = np.asarray(spec.get_gridspec().get_width_ratios())
    return width * ratios[spec.colspan.start : spec.colspan.stop].sum() / ratios.sum()


def most_room(ax: Axes) -> float:
    """Return a width in pixels that no layout can make the Axes exceed: that of their column of the figure, less the labels beside them."""
    shown = ax.get_tightbbox(for_layout_only=True)
    width = column_width(ax)
    return width if shown is None else width - (shown.width - ax.get_window_extent().width)


@no_glyph_warnings()
def name_rows(ax: Axes, places: Sequence[float] | Any, names: Sequence[str]) -> None:
    """Write names beside the y axis, one for each place.

    They leave the Axes half of the column of the figure, or LEFT inches of a wide one: longer ones are broken into lines, and lose their
    middle where rows lie too close for lines. Letters are smaller than usual where rows lie even closer.
    """
    ax.set_yticks(places, names)
    labels = ax.get_yticklabels()
    for label in labels:
        label.set_parse_math(ax.xaxis.label.get_parse_math())  # off where names with $ are shown literally
    height = 0.65 * ax.get_window_extent().height / len(names) * 72 / ax.figure.dpi  # a legend takes the rest
    size = float(labels[0].get_fontsize())
    if height < 1.1 * size:
        size = max(height / 1.1, LOWEST_NAME)
        ax.tick_params(axis="y", labelsize=size)
    width = column_width(ax)
    room, lines = max(width / 2, width - LEFT * ax.figure.dpi), max(int(height / (1.25 * size)), 1)
    lengths = [label.get_window_extent().width for label in labels]
    if max(lengths) > room:
        fitting = [
            name if length <= room else shortened(name, int(len(name) * room / length), lines)
            for name, length in zip(names, lengths, strict=True)
        ]
        ax.set_yticks(places, fitting)


def shortened(name: str, width: int, lines: int) -> str:
    """Return a name in at most so many lines of so many characters, without its middle if it is too long.

    Example:
        >>> shortened("annual heating demand", 14, 2), shortened("annual heating demand", 14, 1)
        ('annual heating\\ndemand', 'annual…demand')
    """
    width = max(width, SHORTEST_LINE)
    parts = textwrap.wrap(name, width)
    for kept in range(min(len(name), width * lines) - 1, 0, -1):
        if len(parts) <= lines:
            break
        middle = f"{name[: -(-kept // 2)].rstrip()}…{name[len(name) - kept // 2 :].lstrip()}"
        parts = textwrap.wrap(middle, width)
    return "\n".join(parts)


__all__ = [
    "break_lines",
    "column_width",
    "fit_bar",
    "fit_labels",
    "label_axes",
    "most_room",
    "name_rows",
    "no_glyph_warnings",
    "shortened",
]
