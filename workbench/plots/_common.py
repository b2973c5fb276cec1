"""Inputs, Axes, legends and scales of all figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
import torch

from workbench.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import ArrayLike

Values: TypeAlias = Union[torch.Tensor, "ArrayLike"]
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: One colour for each risk, in every figure; told apart with every kind of colour blindness (Okabe and Ito, 2008).
COLOURS: dict[str, str] = {"aleatoric": "#0072B2", "epistemic": "#D55E00", "vacuitic": "#009E73", "total": "#444444"}
TOTAL_ON_DARK = "#BBBBBB"  # dark grey can't be seen on a dark ground
# two things to compare that are not risks; seen on white and on black (contrast 3 at least)
SERIES = (
    "#3E97CF",
    "#CC79A7",
)
#: One colour and dash for each of several models (Okabe and Ito), none of them that of a risk.
MODELS = tuple(
    (shade, dashes)
    for dashes in ("-", "--", ":")
    for shade in ("#56B4E9", "#CC79A7", "#E69F00", "#7F6BD0", "#8C6D31", "#888888")
)
MAX_POINTS = 5000  # more points than this only make a blot, and a file that no viewer opens


def array(value: Values, name: str) -> Array:
    """A float64 array of any tensor, array or list; empty input is refused."""
    try:
        result = (
            value.detach().cpu().double().numpy()
            if isinstance(value, torch.Tensor)
            else np.asarray(value, dtype=np.float64)
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name}: expected a tensor or an array of numbers, found {type(value).__name__} ({error}); "
            "of a risk by cause pass one part, such as risk.epistemic"
        ) from error
    if result.size == 0:
        raise ValueError(f"{name}: nothing to draw, its shape is {list(result.shape)}")
    return result


def vector(value: Values, name: str) -> Array:
    """One number for each row: [n] from [n] or [n, 1]."""
    result = array(value, name)
    if result.ndim == 2 and result.shape[1] == 1:
        result = result[:, 0]
    if result.ndim != 1:
        raise ValueError(
            f"{name}: expected shape [n] or [n, 1], found {list(result.shape)}; pick one output, as in {name}[:, 0]"
        )
    return result


def same_shape(**values: Array) -> None:
    """Refuse arrays whose shapes differ, as numpy would silently broadcast them."""
    if len({value.shape for value in values.values()}) > 1:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in values.items())
        raise ValueError(f"shapes do not match: {shapes}")


def vectors(**values: Values) -> list[Array]:
    """Vectors of one length."""
    result = {name: vector(value, name) for name, value in values.items()}
    same_shape(**result)
    return list(result.values())


def elements(**values: Values) -> list[Array]:
    """Flat vectors of arrays of one shape, of any number of outputs; [n, 1] counts as [n]."""
    result = {name: array(value, name) for name, value in values.items()}
    result = {name: v[:, 0] if v.ndim == 2 and v.shape[1] == 1 else v for name, v in result.items()}
    same_shape(**result)
    return [v.ravel() for v in result.values()]


def pair(value: Any, name: str) -> tuple[Values, Values]:
    """The two members of ``(x, y)``."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name}: expected a pair (x, y), found {type(value).__name__}")
    return value[0], value[1]


def of_models(
    first: Mapping[str, Values], name: str, second: Values | Mapping[str, Values], other: str
) -> dict[str, tuple[Values, Values]]:
    """Two things of each of several models, of which the second may be the same for all."""
    if not first or len(first) > len(MODELS):
        raise ValueError(f"{name}: expected 1 to {len(MODELS)} models by name, found {len(first)}")
    if isinstance(second, Mapping) and first.keys() != second.keys():
        raise ValueError(f"{name} has the models {', '.join(first)}, and {other} {', '.join(second) or 'none'}")
    return {model: (one, second[model] if isinstance(second, Mapping) else second) for model, one in first.items()}


def finite(**values: Array) -> None:
    """Refuse NaN and infinity: only risks may have them."""
    for name, value in values.items():
        bad = ~np.isfinite(value)
        if bad.any():
            where = ", ".join(str(i) for i in np.argwhere(bad)[0])
            raise ValueError(f"{name}: {bad.sum()} of {bad.size} values are NaN or infinite, the first at [{where}]")


def not_negative(**values: Array) -> None:
    """Refuse negative standard deviations and sizes of errors; NaN passes."""
    for name, value in values.items():
        if (value < 0).any():
            raise ValueError(f"{name}: expected values of at least 0, found {np.nanmin(value):g}")


def usable(risk: Array, *others: Array, name: str = "risk", infinite: bool = False) -> tuple[list[Array], list[str]]:
    """Rows with a finite risk (or not NaN, if ``infinite``), and a note for the legend on those that were dropped."""
    keep = ~np.isnan(risk) if infinite else np.isfinite(risk)
    if not keep.any():
        raise ValueError(f"{name}: none of its {risk.size} values is a finite number")
    dropped = int(risk.size - keep.sum())
    notes = [f"{dropped:,} of {risk.size:,} {name} values {'NaN' if infinite else 'not finite'}, dropped"]
    return [value[keep] for value in (risk, *others)], notes if dropped else []


def thinned(n: int, what: str = "points") -> tuple[Array, str]:
    """Indices of at most MAX_POINTS of n points, always the same ones, and what the legend says of them."""
    if n <= MAX_POINTS:
        return np.arange(n), f"{what} (n = {n:,})"
    chosen = np.random.default_rng(0).choice(n, MAX_POINTS, replace=False)
    return np.sort(chosen), f"{what} ({MAX_POINTS:,} of {n:,} drawn)"


def point_look(n: int) -> dict[str, Any]:
    """Size and opacity with which n points can still be seen one by one."""
    return {"s": float(np.clip(4000 / n, 5, 22)), "alpha": float(np.clip(150 / n, 0.2, 0.75)), "linewidths": 0}


def new_axes(ax: Axes | None, size: tuple[float, float] = (6.4, 4.8)) -> Axes:
    """The given Axes, or those of a new figure of a size in inches; with our look."""
    if ax is None:
        plt = require("matplotlib.pyplot")
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    elif not isinstance(ax, require("matplotlib.axes").Axes):
        raise TypeError(f"ax: expected matplotlib Axes, or None for a new figure, found {type(ax).__name__}")
    _style(ax)
    return ax


def _style(ax: Axes) -> None:
    ax.tick_params(labelsize=10)
    ax.xaxis.label.set_fontsize(11)
    ax.yaxis.label.set_fontsize(11)
    ax.title.set_fontsize(12)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, linewidth=0.6, alpha=0.35)
    ax.set_axisbelow(True)


def ink(ax: Axes) -> Any:
    """The colour of these Axes' text, which can be read on their ground, whether light or dark."""
    return ax.xaxis.label.get_color()


def colour(ax: Axes, kind: str) -> str:
    """The colour of a risk, on these Axes' ground."""
    from matplotlib.colors import to_rgb

    on_dark = float(np.dot(to_rgb(ink(ax)), (0.2126, 0.7152, 0.0722))) > 0.5
    return TOTAL_ON_DARK if kind == "total" and on_dark else COLOURS[kind]


def diagonal(ax: Axes, label: str, limits: tuple[float, float] = (0, 1)) -> None:
    """The dashed line to which the drawn is compared."""
    dashes = (0, (4, 2))
    ax.plot(limits, limits, color=ink(ax), linestyle=dashes, linewidth=1, alpha=0.7, label=label, zorder=1.5)


def risk_label(kind: str, unit: str = "") -> str:
    """The axis label of a risk, with its unit; vacuitic risk is standardised and has none. Checks the kind."""
    if kind not in COLOURS:
        raise ValueError(f"kind: expected one of {', '.join(COLOURS)}, found {kind!r}")
    return "vacuitic risk (standardised)" if kind == "vacuitic" else with_unit(f"{kind} risk", unit)


def with_unit(label: str, unit: str) -> str:
    return f"{label} ({unit})" if unit else label


def legend(
    ax: Axes,
    notes: Sequence[str] = (),
    *,
    extra: Sequence[tuple[Any, str]] = (),
    loc: Any = "best",
    columns: int = 1,
    headroom: bool = False,
) -> None:
    """A legend of all that has a label, then ``extra`` (artist, label) pairs, then ``notes``, lines of mere text.

    ``headroom`` puts it at the top and moves the upper limit so far up that it covers nothing; unlike a legend outside
    the Axes, this never meets a title or a neighbour.
    """
    from matplotlib.collections import LineCollection, PathCollection
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D

    handles, labels = ax.get_legend_handles_labels()
    handles += [handle for handle, _ in extra] + [Line2D([], [], linestyle="none") for _ in notes]
    labels += [label for _, label in extra] + list(notes)
    box = ax.legend(
        handles,
        labels,
        loc="upper left" if headroom else loc,
        ncols=columns,
        fontsize=9,
        framealpha=0.75,
        edgecolor="none",
        borderaxespad=0.3,
        columnspacing=1.2,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )
    for text in box.get_texts():
        text.set_parse_math(ax.xaxis.label.get_parse_math())  # off where names are shown as they are
    box.set_in_layout(False)  # it lies inside; one that sticks out would make the Axes narrower still
    room, engine = ax.get_window_extent().width, ax.figure.figure.get_layout_engine()
    if columns > 1 and engine is not None and room < box.get_window_extent().width < 1.3 * room:
        engine.execute(ax.figure.figure)  # which may make the Axes wide enough
        room = ax.get_window_extent().width
    if columns > 1 and box.get_window_extent().width > room:
        legend(ax, notes, extra=extra, loc=loc, headroom=headroom)
        return
    for handle in box.legend_handles:
        if isinstance(handle, PathCollection):
            handle.set_sizes([22])
        if isinstance(handle, PathCollection | LineCollection):
            handle.set_alpha(0.9)  # one faint point of a cloud can't be seen
    if headroom:
        share = min(box.get_window_extent().height / ax.get_window_extent().height * 1.15 + 0.02, 0.6)
        transform = ax.yaxis.get_transform()
        low, high = transform.transform(np.array(ax.get_ylim()))
        top = transform.inverted().transform(np.array([low + (high - low) / (1 - share)]))[0]
        ax.set_ylim(top=top, auto=None)  # auto=None: what is drawn later still moves the limits


def choose_scale(ax: Axes, axis: str, values: Array, *, typical: Array | None = None, tail: float = 0.05) -> None:
    """Make an axis logarithmic, or symmetric-logarithmic, where on a linear one most values would be one blot.

    Args:
        axis: "x" or "y".
        values: what is drawn along the axis.
        typical: the values that have to be told apart; all, if None.
        tail: share of the values at each end that do not make an axis logarithmic.
    """
    kind, width = natural_scale(values, typical=typical, tail=tail)
    set_scale: Any = ax.set_xscale if axis == "x" else ax.set_yscale
    if kind != "linear":
        set_scale(kind, **({"linthresh": width} if kind == "symlog" else {}))


def natural_scale(values: Array, *, typical: Array | None = None, tail: float = 0.05) -> tuple[str, float]:
    """Which scale `choose_scale` chooses, "linear", "log" or "symlog", and the width of the linear middle of the last."""
    values = values[np.isfinite(values)]
    typical = values if typical is None else typical[np.isfinite(typical)]
    if values.size == 0:
        return "linear", 1.0
    low, high = np.quantile(values, [tail, 1 - tail])
    width = float(np.subtract(*np.quantile(typical, [0.75, 0.25])))
    if values.min() > 0 and high > 50 * low:
        return "log", 1.0
    return ("symlog", 2 * width) if width > 0 and np.ptp(values) > 50 * width else ("linear", 1.0)
