"""Input checks, Axes, legends and scales shared by all figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
import torch

from workbench.core.batches.arrays import check_columns, check_index, numbers_of
from workbench.errors import require
from workbench.plots._texts import break_lines, most_room, no_glyph_warnings, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.legend import Legend
    from numpy.typing import ArrayLike

Values: TypeAlias = Union[torch.Tensor, "ArrayLike"]
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: One colour for each risk, in every figure: the blue, vermilion and green of Okabe and Ito (2008), with steps in lightness, so that they
#: are told apart with every kind of colour blindness and in greyscale print, and have a contrast of 3 on white and on dark pages.
COLOURS: dict[str, str] = {"aleatoric": "#0570AE", "epistemic": "#CF5F17", "vacuitic": "#02AA6F", "total": "#444444"}
TOTAL_ON_DARK = "#BBBBBB"  # dark grey would vanish on a dark background
# for two series that are not risks, one darker; contrast of at least 3 on white and on black
SERIES = (
    "#3E97CF",
    "#B55888",
)
SHADES = ("#56B4E9", "#CC79A7", "#E69F00", "#7F6BD0", "#8C6D31", "#888888")
DASHES: tuple[Any, ...] = ("-", (0, (6, 1.5)), "-.")  # none of those of reference lines
#: One colour and line style for each of several models (Okabe and Ito), none of them the colour of a risk. Of the first six, those of one
#: style differ in lightness, for readers and printers without colours.
MODELS = tuple((SHADES[i % 6], DASHES[(i + i // 6) % 3]) for i in range(18))
SMALL = 0.78  # letters of a legend that has little room, relative to the usual ones
# shares of the height of the Axes: up to the first a legend is low enough to stay as large as it is, and it takes at most the second
LOW, HIGHEST = 0.45, 0.7
LINE = 0.15  # height in inches of a line of names beside an axis
REFERENCE = 1.5  # zorder of lines of reference, which a legend may cover: below that of data
MAX_POINTS = 5000  # more points only overlap, and make vector files too large to open


def array(value: Values, name: str) -> Array:
    """Convert a tensor, array or list of real numbers to a float64 array; refuse empty input."""
    dtype = str(getattr(value, "dtype", ""))
    if "complex" in dtype:
        raise TypeError(f"{name}: expected real numbers, found {dtype}; draw its abs(), real or imag")
    try:
        result = (
            value.detach().cpu().double().numpy()
            if isinstance(value, torch.Tensor)
            else np.asarray(numbers_of(value), dtype=np.float64)
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name}: expected a tensor or an array of numbers, found {type(value).__name__} ({error}); "
            "if this is a Risk, pass one of its parts, such as risk.epistemic"
        ) from error
    if result.size == 0:
        raise ValueError(f"{name}: nothing to draw, its shape is {list(result.shape)}")
    return result


def vector(value: Values, name: str) -> Array:
    """Convert [n] or [n, 1] to an array [n]."""
    result = array(value, name)
    if result.ndim == 2 and result.shape[1] == 1:
        result = result[:, 0]
    if result.ndim != 1:
        raise ValueError(
            f"{name}: expected shape [n] or [n, 1], found {list(result.shape)}; pick one output, as in {name}[:, 0]"
        )
    return result


def same_rows(**values: Values) -> None:
    """Refuse frames and series whose rows have different indices, or whose columns another order, which would be paired by position."""
    (first, reference), *others = values.items()
    for name, other in others:
        check_index(reference, other, "plot", (first, name))
        check_columns(reference, other, "plot", name)


def same_shape(**values: Array) -> None:
    """Refuse arrays of different shapes, which numpy would silently broadcast."""
    if len({value.shape for value in values.values()}) > 1:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in values.items())
        raise ValueError(f"shapes do not match: {shapes}")


def vectors(**values: Values) -> list[Array]:
    """Convert values to arrays [n] of the same length."""
    same_rows(**values)
    result = {name: vector(value, name) for name, value in values.items()}
    same_shape(**result)
    return list(result.values())


def elements(**values: Values) -> list[Array]:
    """Convert values of one shape, with any number of outputs, to flat arrays; [n, 1] counts as [n]."""
    same_rows(**values)
    result = {name: array(value, name) for name, value in values.items()}
    result = {name: v[:, 0] if v.ndim == 2 and v.shape[1] == 1 else v for name, v in result.items()}
    same_shape(**result)
    return [v.ravel() for v in result.values()]


def pair(value: Any, name: str) -> tuple[Values, Values]:
    """Return the two members of a pair ``(x, y)``."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name}: expected a pair (x, y), found {type(value).__name__}")
    return value[0], value[1]


def of_models(
    first: Mapping[str, Values], name: str, second: Values | Mapping[str, Values], other: str
) -> dict[str, tuple[Values, Values]]:
    """Pair the two inputs of each model by name; the second may be shared by all models."""
    if not first or len(first) > len(MODELS):
        raise ValueError(f"{name}: expected 1 to {len(MODELS)} models by name, found {len(first)}")
    if isinstance(second, Mapping) and first.keys() != second.keys():
        raise ValueError(f"{name} has the models {', '.join(first)}, and {other} {', '.join(second) or 'none'}")
    return {model: (one, second[model] if isinstance(second, Mapping) else second) for model, one in first.items()}


def finite(**values: Array) -> None:
    """Refuse NaN and infinity, which only risks may contain."""
    for name, value in values.items():
        bad = ~np.isfinite(value)
        if bad.any():
            where = ", ".join(str(i) for i in np.argwhere(bad)[0])
            raise ValueError(f"{name}: {bad.sum()} of {bad.size} values are NaN or infinite, the first at [{where}]")


def not_negative(**values: Array) -> None:
    """Refuse negative standard deviations and absolute errors; NaN passes."""
    for name, value in values.items():
        if (value < 0).any():
            raise ValueError(f"{name}: expected values of at least 0, found {np.nanmin(value):g}")


def usable(risk: Array, *others: Array, name: str = "risk", infinite: bool = False) -> tuple[list[Array], list[str]]:
    """Keep the rows with a finite risk (with ``infinite``, all but NaN); also return legend notes on those that were dropped."""
    keep = ~np.isnan(risk) if infinite else np.isfinite(risk)
    if not keep.any():
        raise ValueError(f"{name}: none of its {risk.size} values is a finite number")
    dropped = int(risk.size - keep.sum())
    notes = [f"{dropped:,} of {risk.size:,} {name} values {'NaN' if infinite else 'not finite'}, dropped"]
    return [value[keep] for value in (risk, *others)], notes if dropped else []


def thinned(n: int, what: str = "points") -> tuple[Array, str]:
    """Choose at most MAX_POINTS of n points, reproducibly; return their indices and a legend label."""
    if n <= MAX_POINTS:
        return np.arange(n), f"{what} (n = {n:,})"
    chosen = np.random.default_rng(0).choice(n, MAX_POINTS, replace=False)
    return np.sort(chosen), f"{what} ({MAX_POINTS:,} of {n:,} drawn)"


def point_look(n: int) -> dict[str, Any]:
    """Return marker size and opacity at which n single points can still be seen."""
    return {"s": float(np.clip(4000 / n, 5, 22)), "alpha": float(np.clip(150 / n, 0.2, 0.75)), "linewidths": 0}


def new_axes(ax: Axes | None, size: tuple[float, float] = (6.4, 4.8), *, linear: str = "") -> Axes:
    """Style and return the given Axes, or those of a new figure of a size in inches.

    Args:
        ax: the given Axes, if any.
        size: width and height of a new figure.
        linear: "x", "y" or "xy", the axes that count rows or pixels from zero on, and so can't stay logarithmic.
    """
    if ax is None:
        plt = require("matplotlib.pyplot")
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    elif not isinstance(ax, require("matplotlib.axes").Axes):
        raise TypeError(f"ax: expected matplotlib Axes, or None for a new figure, found {type(ax).__name__}")
    elif ax.name != "rectilinear":
        raise ValueError(f"ax: found Axes with the projection {ax.name!r}; give some without a projection")
    for axis in linear:
        if getattr(ax, f"get_{axis}scale")() != "linear":
            ax.set(**{f"{axis}scale": "linear"})
    _style(ax)
    return ax


def _style(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, linewidth=0.6, alpha=0.35)
    ax.set_axisbelow(True)


def ink(ax: Axes) -> Any:
    """Return the text colour of the Axes, which is readable on a light or dark background."""
    return ax.xaxis.label.get_color()


def colour(ax: Axes, kind: str) -> str:
    """Return the colour of a risk, adapted to the background of the Axes."""
    from matplotlib.colors import to_rgb

    on_dark = float(np.dot(to_rgb(ink(ax)), (0.2126, 0.7152, 0.0722))) > 0.5
    return TOTAL_ON_DARK if kind == "total" and on_dark else COLOURS[kind]


def diagonal(ax: Axes, label: str, limits: tuple[float, float] = (0, 1)) -> None:
    """Draw a dashed diagonal as reference line."""
    dashes = (0, (4, 2))
    ax.plot(limits, limits, color=ink(ax), linestyle=dashes, linewidth=1, alpha=0.7, label=label, zorder=REFERENCE)


def risk_label(kind: str, unit: str = "") -> str:
    """Return the axis label of a risk, with its unit; vacuitic risk is standardized and has none. Refuse an unknown kind."""
    if kind not in COLOURS:
        raise ValueError(f"kind: expected one of {', '.join(COLOURS)}, found {kind!r}")
    return "vacuitic risk (standardized)" if kind == "vacuitic" else with_unit(f"{kind} risk", unit)


def with_unit(label: str, unit: str) -> str:
    return f"{label} ({unit})" if unit else label


@no_glyph_warnings()
def legend(
    ax: Axes,
    notes: Sequence[str] = (),
    *,
    extra: Sequence[tuple[Any, str]] = (),
    loc: Any = "best",
    columns: int = 1,
    headroom: bool = False,
    highest: float | None = None,
) -> None:
    """Add a legend: all labelled artists, then ``extra`` pairs (artist, label), then ``notes``, lines of text only.

    Its letters become smaller, and its texts are broken into lines, where Axes are small. ``headroom`` puts it at the top and raises the upper
    limit so that it covers no data, as any legend does that would cover some; unlike a legend outside the Axes, it never overlaps a title
    or neighbouring Axes. Where values cannot exceed ``highest``, there are no ticks above it.
    """
    from matplotlib import rcParams
    from matplotlib.collections import LineCollection, PathCollection
    from matplotlib.font_manager import FontProperties
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D

    handles, labels = ax.get_legend_handles_labels()
    handles += [handle for handle, _ in extra] + [Line2D([], [], linestyle="none") for _ in notes]
    labels += [label for _, label in extra] + list(notes)
    usual = 0.9 * FontProperties(size=rcParams["legend.fontsize"]).get_size_in_points()

    def put(columns: int, size: float) -> Any:
        box = ax.legend(
            handles,
            labels,
            loc="upper left" if headroom else loc,
            ncols=columns,
            fontsize=size,
            framealpha=0.75,
            edgecolor="none",
            borderaxespad=0.3,
            columnspacing=1.2,
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        )
        for text in box.get_texts():
            text.set_parse_math(ax.xaxis.label.get_parse_math())  # off where names with $ are shown literally
        box.set_in_layout(False)  # a legend wider than the Axes would otherwise shrink them further
        return box

    box = put(columns, usual)
    most, engine = most_room(ax), ax.figure.figure.get_layout_engine()
    if columns > 1 and engine is not None and ax.get_window_extent().width < box.get_window_extent().width < most:
        engine.execute(ax.figure.figure)  # the layout may make the Axes wide enough
    place = ax.get_window_extent()
    room, high = min(place.width, most), place.height
    low_enough = LOW * high
    # by columns and font size: width beyond the Axes, and height
    excess: dict[tuple[int, float], tuple[float, float]] = {}
    for columns_and_size in dict.fromkeys((n, size) for size in (usual, SMALL * usual) for n in (columns, 1)):
        extent = put(*columns_and_size).get_window_extent()
        excess[columns_and_size] = (max(extent.width - room, 0.0), max(extent.height, low_enough))
        if excess[columns_and_size] == (0.0, low_enough):
            break
    box = put(*min(excess, key=excess.__getitem__))
    _fit_texts(box, room, high)
    for handle in box.legend_handles:
        if isinstance(handle, PathCollection):
            handle.set_sizes([22])
        if isinstance(handle, PathCollection | LineCollection):
            handle.set_alpha(0.9)  # a single faint point would be invisible
    if headroom or _covers_data(ax, box):
        box.set_loc("upper left")
        _raise_limit(ax, box.get_window_extent().height / high, highest)


def _fit_texts(legend: Legend, width: float, height: float) -> None:
    """Break the texts of a legend into lines that fit a width in pixels, or shorten them if lines would take most of the height of the Axes."""
    texts = legend.get_texts()
    margins = legend.get_window_extent().width - max(text.get_window_extent().width for text in texts)
    room, whole_texts = width - margins, [text.get_text() for text in texts]
    for text in texts:
        break_lines(text, room)
    if legend.get_window_extent().height <= HIGHEST * height:
        return
    for text, words in zip(texts, whole_texts, strict=True):
        text.set_text(words)
        if (length := text.get_window_extent().width) > room:
            text.set_text(shortened(words, int(len(words) * room / length), 1))


def _raise_limit(ax: Axes, share: float, highest: float | None) -> None:
    """Raise the upper limit of the y axis so that a share of the height is free of data; there are no ticks above `highest`."""
    share = min(1.15 * share + 0.02, HIGHEST)
    transform = ax.yaxis.get_transform()
    low, top = transform.transform(np.array(ax.get_ylim()))
    above = transform.inverted().transform(np.array([low + (top - low) / (1 - share)]))[0]
    ax.set_ylim(top=above, auto=None)  # auto=None keeps autoscaling on for later artists
    if highest is not None:
        ax.yaxis.set_major_locator(require("matplotlib.ticker").AutoLocator())
        low, top = ax.get_ylim()
        ax.set_yticks([tick for tick in ax.get_yticks() if low <= tick <= min(top, highest + 1e-9)])


def _covers_data(ax: Axes, legend: Legend) -> bool:
    """Return whether a legend lies on a line, a point, an error bar, a bar or a text; lines of reference don't count."""
    from matplotlib.collections import LineCollection, PathCollection

    box = legend.get_window_extent().padded(4)
    paths = [line.get_transform().transform_path(line.get_path()) for line in ax.lines if line.get_zorder() >= 2]
    dots = [np.asarray(path.vertices) for path in paths]
    for part in ax.collections:
        if isinstance(part, PathCollection):
            dots.append(part.get_offset_transform().transform(np.asarray(part.get_offsets())))
        elif isinstance(part, LineCollection):
            paths += [part.get_transform().transform_path(path) for path in part.get_paths()]
    return (
        any(len(path) and path.intersects_bbox(box, False) for path in paths)
        or any(box.count_contains(points) for points in dots if len(points))
        or any(artist.get_window_extent().overlaps(box) for artist in (*ax.patches, *ax.texts))
    )


def whole_numbers(ax: Axes) -> None:
    """Put the ticks of the x axis at whole and round numbers, also if there is only one."""
    ticker = require("matplotlib.ticker")
    ax.xaxis.set_major_locator(ticker.MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def every_nth(ax: Axes, rows: int) -> int:
    """Return n such that the name of every nth row has a line of its own beside the Axes: 1, 2 or 5 times a power of ten."""
    lines = max(ax.get_window_extent().height / ax.figure.dpi / LINE, 1)
    return next(k * 10**i for i in count() for k in (1, 2, 5) if k * 10**i * lines >= rows)


def width_for(names: Sequence[str]) -> float:
    """Return the width in inches of a new figure in which names beside the y axis leave room for the Axes."""
    return float(np.clip(4.6 + 0.085 * max(map(len, names)), 6.4, 14))


def choose_scale(ax: Axes, axis: str, values: Array, *, typical: Array | None = None, tail: float = 0.05) -> None:
    """Make an axis logarithmic or symmetric-logarithmic if most values would overlap on a linear one.

    Args:
        ax: Axes to change.
        axis: "x" or "y".
        values: values drawn along the axis.
        typical: values that have to stay distinguishable; all, if None.
        tail: share of the values at each end that is ignored in the choice between linear and logarithmic.
    """
    kind, width = natural_scale(values, typical=typical, tail=tail)
    if kind == "log":
        set_log_scale(ax, axis, values)
    elif kind == "symlog":
        set_scale: Any = ax.set_xscale if axis == "x" else ax.set_yscale
        set_scale("symlog", linthresh=width)


def set_log_scale(ax: Axes, axis: str, values: Array) -> None:
    """Make an axis of positive values logarithmic, with few and plain numbers if they span less than two powers of ten."""
    ax.set(**{f"{axis}scale": "log"})
    low, high = values[np.isfinite(values)].min(), values[np.isfinite(values)].max()
    if high < 100 * low:
        ticker, chosen = require("matplotlib.ticker"), getattr(ax, f"{axis}axis")
        chosen.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)) if high > 5 * low else ticker.MaxNLocator(4))
        chosen.set_major_formatter(lambda value, _: f"{value:g}")
        chosen.set_minor_formatter(ticker.NullFormatter())


def natural_scale(values: Array, *, typical: Array | None = None, tail: float = 0.05) -> tuple[str, float]:
    """Return the scale for `choose_scale`, "linear", "log" or "symlog", and half the width of the linear part of a symlog one."""
    values = values[np.isfinite(values)]
    typical = values if typical is None else typical[np.isfinite(typical)]
    if values.size == 0:
        return "linear", 1.0
    low, high = np.quantile(values, [tail, 1 - tail])
    width = float(np.subtract(*np.quantile(typical, [0.75, 0.25])))
    if values.min() > 0 and high > 50 * low:
        return "log", 1.0
    if width > 0 and np.ptp(values) > 50 * width:
        # a power of ten: labels within the linear part would run into zero
        return "symlog", float(10 ** np.floor(np.log10(2 * width)))
    return "linear", 1.0
