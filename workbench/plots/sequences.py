"""Figures of sequences: forecasts over a horizon, and tokens of a text by their risk."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.plots._common import (
    COLOURS,
    Array,
    Values,
    array,
    finite,
    ink,
    legend,
    new_axes,
    not_negative,
    risk_label,
    same_rows,
    same_shape,
    vector,
    whole_numbers,
    with_unit,
)
from workbench.plots._images import shades_of
from workbench.plots._texts import fit_bar, label_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LETTER = (0.625, 1.4)  # room for a letter in a line, and height of a line, relative to the size of the font


def fan(
    samples: Values,
    ax: Axes | None = None,
    *,
    past: Values | None = None,
    truth: Values | None = None,
    levels: Sequence[float] = (0.9, 0.5),
    unit: str = "",
) -> Axes:
    """Draw a forecast as central intervals of sampled paths at each step, with the past and the observed future.

    Args:
        samples: paths [samples, steps], such as `predictive(x).sample((500,))` of one row.
        ax: Axes to draw on; a new figure if None.
        past: values before the forecast [m], drawn at steps -m + 1 to 0.
        truth: observed future [steps].
        levels: shares of the paths within the bands, between 0 and 1.
        unit: unit of the values, for the label.

    Returns:
        The Axes; steps count from 1.

    Raises:
        ValueError: for shapes that do not match, fewer than two paths, levels outside 0 to 1, or numbers that are not finite.

    Example:
        >>> import torch
        >>> paths = torch.linspace(-1, 1, 200)[:, None] * torch.arange(12)
        >>> fan(paths, truth=torch.zeros(12)).get_legend_handles_labels()[1]
        ['90 % of paths', '50 % of paths', 'median', 'what came']
    """
    paths = array(samples, "samples")
    if paths.ndim != 2 or len(paths) < 2:
        raise ValueError(
            f"samples: expected two paths or more, [samples, steps], found {list(paths.shape)}; of several rows or series pick one"
        )
    known = {name: vector(value, name) for name, value in (("past", past), ("truth", truth)) if value is not None}
    finite(samples=paths, **known)
    if "truth" in known:
        same_shape(**{"one path": paths[0], "truth": known["truth"]})
    if not levels or not all(0 < level < 1 for level in levels):
        raise ValueError(f"levels: expected shares between 0 and 1, found {list(levels)}")
    ax = new_axes(ax)
    steps = np.arange(1, paths.shape[1] + 1.0)
    if len(steps) == 1:  # drawn as wide as half a step
        steps, paths = np.array([0.75, 1.25]), np.repeat(paths, 2, 1)
        known |= {"truth": np.repeat(known["truth"], 2)} if "truth" in known else {}
    for opacity, level in zip(np.linspace(0.25, 0.5, len(levels)), sorted(levels, reverse=True), strict=True):
        low, high = np.quantile(paths, [(1 - level) / 2, (1 + level) / 2], axis=0)
        label = f"{100 * level:g} % of paths"
        ax.fill_between(steps, low, high, color=COLOURS["aleatoric"], alpha=opacity, linewidth=0, label=label)
    ax.plot(steps, np.median(paths, 0), color=COLOURS["aleatoric"], linewidth=1.8, label="median")
    if "past" in known:
        ax.plot(np.arange(1 - len(known["past"]), 1), known["past"], color=ink(ax), linewidth=1.4, label="past")
    if "truth" in known:
        ax.plot(steps, known["truth"], color=ink(ax), linestyle=(0, (4, 2)), linewidth=1.2, label="what came")
    whole_numbers(ax)
    label_axes(ax, "step", with_unit("value", unit))
    legend(ax, columns=2, headroom=True)
    return ax


def coverage_by_step(
    lower: Values, upper: Values, target: Values, ax: Axes | None = None, *, level: float = 0.9, label: str = "coverage"
) -> Axes:
    """Draw the share of targets within their interval, for each step of a horizon.

    The band around the nominal level has the 95 % limits of a share of that many independent rows, 1.96 standard errors of the binomial;
    shares of rows that overlap in time vary more.

    Args:
        lower, upper: ends of the intervals [rows, steps].
        target: [rows, steps]; NaN after the end of a series.
        ax: Axes to draw on; a new figure if None. Call it again with the same Axes to compare models.
        level: the nominal coverage, between 0 and 1.
        label: name in the legend.

    Returns:
        The Axes.

    Raises:
        ValueError: for shapes that do not match, ends that are NaN or in the wrong order, a step without targets, or a level outside 0 to 1.

    Example:
        >>> import torch
        >>> y = torch.linspace(-2, 2, 300)[:, None].expand(300, 6)
        >>> ax = coverage_by_step(torch.full_like(y, -1.64), torch.full_like(y, 1.64), y)
        >>> ax.get_legend_handles_labels()[1]
        ['nominal', 'chance, n = 300', 'coverage']
    """
    same_rows(lower=lower, upper=upper, target=target)
    low, high, y = array(lower, "lower"), array(upper, "upper"), array(target, "target")
    same_shape(lower=low, upper=high, target=y)
    if y.ndim != 2:
        raise ValueError(f"target: expected [rows, steps], found {list(y.shape)}")
    if np.isnan(low).any() or np.isnan(high).any() or (low > high).any():
        raise ValueError("lower and upper: expected ends of intervals, found NaN or a lower end above the upper one")
    if not 0 < level < 1:
        raise ValueError(f"level: expected a share between 0 and 1, found {level:g}")
    known = ~np.isnan(y)
    if not known.any(0).all():
        raise ValueError(f"target: no number at step {int(np.flatnonzero(~known.any(0))[0]) + 1}")
    n = known.sum(0)
    shares = ((y >= low) & (y <= high)).sum(0) / n
    ax = new_axes(ax)
    steps = np.arange(1, y.shape[1] + 1)
    if "nominal" not in ax.get_legend_handles_labels()[1]:
        error = 1.96 * np.sqrt(level * (1 - level) / n)
        ax.axhline(level, color=ink(ax), linestyle=(0, (4, 2)), linewidth=1, alpha=0.7, label="nominal")
        rows = f"{n.min():,}" if n.min() == n.max() else f"{n.min():,} to {n.max():,}"
        limits: tuple[Array, Array] = (np.clip(level - error, 0, 1), np.clip(level + error, 0, 1))
        ax.fill_between(steps, *limits, color=ink(ax), alpha=0.12, linewidth=0, label=f"chance, n = {rows}")
    ax.plot(steps, shares, marker="o", markersize=4, linewidth=1.6, label=label)
    whole_numbers(ax)
    label_axes(ax, "step", "share of targets inside")
    legend(ax, headroom=True, highest=1)
    return ax


def coverage_over_time(
    lower: Values,
    upper: Values,
    target: Values,
    window: int,
    ax: Axes | None = None,
    *,
    level: float = 0.9,
    label: str = "coverage",
) -> Axes:
    """Draw the share of targets within their interval over a moving window of times, to show where coverage was lost.

    The band around the nominal level has the limits of a share of `window` independent times, 1.96 standard errors. The steps of one forecast
    count as one, since their errors are correlated; shares of forecasts that overlap vary more.

    Args:
        lower, upper: ends of the intervals [times, ...] in the order of time; they may be infinite, and an empty interval covers nothing.
        target: same shape; NaN where it is not known.
        window: number of times in a share.
        ax: Axes to draw on; a new figure if None. Call it again with the same Axes to compare methods.
        level: the nominal coverage, between 0 and 1.
        label: name in the legend.

    Returns:
        The Axes; each share is drawn at the last time of its window, counted from 0.

    Raises:
        ValueError: for shapes that do not match, ends that are NaN, no targets, or a level or window out of range.

    Example:
        >>> import torch
        >>> y = torch.linspace(-1, 3, 200)
        >>> ax = coverage_over_time(torch.full_like(y, -2), torch.full_like(y, 2), y, window=50)
        >>> int(ax.get_lines()[-1].get_xdata()[0]), ax.get_legend_handles_labels()[1]
        (49, ['nominal', 'chance, n = 50', 'coverage'])
    """
    if not 0 < level < 1:
        raise ValueError(f"level: expected a share between 0 and 1, found {level:g}")
    from workbench.metrics import coverage_over_time as shares_of

    shares = shares_of(lower, upper, target, window, void=float("nan")).numpy(force=True)
    ax = new_axes(ax)
    times = np.arange(window - 1, window - 1 + len(shares))
    if "nominal" not in ax.get_legend_handles_labels()[1]:
        error = 1.96 * np.sqrt(level * (1 - level) / window)
        ax.axhline(level, color=ink(ax), linestyle=(0, (4, 2)), linewidth=1, alpha=0.7, label="nominal")
        ax.axhspan(
            max(0.0, level - error),
            min(1.0, level + error),
            color=ink(ax),
            alpha=0.12,
            linewidth=0,
            label=f"chance, n = {window:,}",
        )
    marker = "o" if len(shares) == 1 else None  # a line of one point shows nothing
    ax.plot(times, shares, marker=marker, markersize=4, linewidth=1.6, label=label)
    whole_numbers(ax)
    label_axes(ax, "time", f"share inside, of the last {window:,}")
    legend(ax, headroom=True, highest=1)
    return ax


def tokens(
    words: Sequence[str],
    risk: Values,
    ax: Axes | None = None,
    *,
    kind: str = "total",
    unit: str = "nats",
    width: int = 60,
    highest: float | None = None,
) -> Axes:
    """Write a text with the risk of each token as its background colour.

    Args:
        words: tokens as text; one that begins with a space, "Ġ" or "▁" begins a word.
        risk: one number per token, [n] or [n, 1], at least 0; tokens where it is NaN, such as padding, have no background.
        ax: Axes to write on; a new figure if None.
        kind: which risk it is: aleatoric, epistemic, vacuitic or total; for colour and label.
        unit: unit of the risk, for the label.
        width: characters per line. Letters become smaller where the Axes are too small for such lines.
        highest: risk of the darkest background, to make texts comparable; the highest risk if None.

    Returns:
        The Axes, with a colour bar of the risk.

    Raises:
        ValueError: if there are not as many risks as tokens, for negative risks, no finite risk, or an unknown kind.

    Example:
        >>> import torch
        >>> ax = tokens(["The", " answer", " is", " 42"], torch.tensor([0.1, 0.2, 0.1, 2.3]), kind="epistemic")
        >>> [text.get_text() for text in ax.texts]
        ['The', 'answer', 'is', '42']
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    values = vector(risk, "risk")
    if np.ndim(words) != 1:
        raise ValueError(f"words: expected a text for each of {len(values)} risks, found {words!r:.60}")
    if len(words) != len(values) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"words: expected a text for each of {len(values)} risks, found {len(words)} of them")
    not_negative(risk=values)
    numbers = values[np.isfinite(values)]
    if not numbers.size:
        raise ValueError(f"risk: none of its {values.size} values is a finite number")
    if width < 1:
        raise ValueError(f"width: expected at least 1 character, found {width}")
    if highest is not None and not 0 <= highest < np.inf:
        raise ValueError(f"highest: expected a finite risk of at least 0, found {highest:g}")
    label = risk_label(kind, unit)
    empty = np.where(np.isnan(values), "", "∅")  # a sign, so that the background of an empty token can be seen
    spelled = [_spelled(word, width) or str(sign) for word, sign in zip(words, empty, strict=True)]
    lines = _draw_words(None, spelled, width)
    ax = new_axes(ax, (width * 0.085 + 0.2, 0.3 * lines + 0.9), linear="xy")
    ax.set(xticks=[], yticks=[])
    shades = shades_of(kind, dark=False)
    scale = Normalize(0, highest or float(numbers.max()) or 1.0)
    bar = ax.figure.colorbar(
        ScalarMappable(scale, shades), ax=ax, location="bottom", fraction=0.08, pad=0.04, aspect=40, format="%g"
    )
    bar.set_label(label)
    if (engine := ax.figure.figure.get_layout_engine()) is not None:
        engine.execute(ax.figure.figure)  # the size of the letters depends on that of the Axes
    fit_bar(bar, ax)
    place = ax.get_window_extent().transformed(ax.figure.dpi_scale_trans.inverted())
    size = 72 * min(place.width / width / LETTER[0], place.height / lines / LETTER[1], 10 / 72)
    _draw_words(ax, spelled, width, np.where(np.isnan(values)[:, None], np.nan, shades(scale(values))), size=size)
    return ax


def _letters_on(shade: Array) -> str:
    """Return black (nearly: widgets give black the colour of the page's text) or white, whichever is readable on a background [4], RGBA.

    The contrast is at least 4.5 (WCAG 2, relative luminance).
    """
    channels = np.where(shade[:3] <= 0.04045, shade[:3] / 12.92, ((shade[:3] + 0.055) / 1.055) ** 2.4)
    return "#010101" if float(channels @ [0.2126, 0.7152, 0.0722]) > 0.179 else "#FFFFFF"


def _draw_words(
    ax: Axes | None,
    words: Sequence[str],
    width: int,
    shades: Array | None = None,
    *,
    framed: Array | None = None,
    frame: Any = None,
    size: float = 8,
) -> int:
    """Draw words in lines, each on its background colour, some in a frame.

    Args:
        ax: Axes to draw on; None only counts the lines.
        words: words as returned by `_spelled`.
        width: characters per line.
        shades: background colours [words, 4], RGBA; NaN for none.
        framed: whether each word has a frame [words].
        frame: colour of the frames.
        size: font size in points.

    Returns:
        The number of lines.
    """
    places, lines = _set_in_lines(words, width)
    if ax is None or shades is None:
        return lines
    from matplotlib.patches import Rectangle

    for i, (word, (line, column)) in enumerate(zip(words, places, strict=True)):
        blank = len(word) - len(word.lstrip(" ")) if word.strip(" ") else 0  # a token of spaces is shown whole
        begin = column + blank
        room, shaded = column + _width(word) - begin, not np.isnan(shades[i]).any()
        backgrounds = []
        if shaded:
            backgrounds.append(Rectangle((begin, line - 0.42), room, 0.84, facecolor=shades[i], linewidth=0))
        if framed is not None and framed[i]:
            backgrounds.append(Rectangle((begin, line - 0.42), room, 0.84, fill=False, edgecolor=frame, linewidth=1.3))
        for background in backgrounds:  # without the limits of the data, which would be computed anew for each
            background.set_in_layout(False)
            ax.add_artist(background)
        ax.text(
            begin + room / 2,
            line,
            word.strip(" ").replace("$", r"\$"),
            family="monospace"
            if word.isascii()
            else ["monospace", "sans-serif"],  # the second has more of the characters
            fontsize=size,
            ha="center",
            va="center",
            color=_letters_on(shades[i]) if shaded else ink(ax),
            in_layout=False,  # texts fit into their places, and to measure thousands takes long
        )
    ax.set(xlim=(0, width), ylim=(lines - 0.4, -0.6), xticks=[], yticks=[])
    ax.grid(False)
    ax.spines[:].set_visible(False)
    return lines


def _spelled(word: str, width: int) -> str:
    """Return a token as it is drawn: on one line, with escapes for invisible characters, and cut to the length of a line."""
    from workbench.text.pieces import visible

    word = word.replace("Ġ", " ").replace("▁", " ").replace("\r\n", "\n").replace("\n", "↵").replace("\t", " ")
    word = visible(word)
    if _width(word) <= width:
        return word
    return f"{word[: sum(end < width for end in accumulate(map(_width, word)))]}…"


def _width(word: str) -> int:
    """Return the columns that a token takes: two for a Chinese character or an emoji, none for an accent of its own."""
    if word.isascii():
        return len(word)
    return sum(
        0 if unicodedata.category(char) in ("Mn", "Me", "Cf") else 1 + (unicodedata.east_asian_width(char) in "WF")
        for char in word
    )


def _set_in_lines(words: Sequence[str], width: int) -> tuple[list[tuple[int, int]], int]:
    """Return line and column of each token, and the number of lines; lines break before words, and inside those longer than a line."""
    places: list[tuple[int, int]] = []
    line = column = 0
    for i, word in enumerate(words):
        whole = _width(word)
        if word.startswith(" ") or i == 0:
            rest = takewhile(lambda later: not words[later].startswith(" "), range(i + 1, len(words)))
            whole += sum(_width(words[later]) for later in rest)
        if column and column + min(whole, width) > width:
            line, column = line + 1, 0
        places.append((line, column))
        column += _width(word)
    return places, line + 1
