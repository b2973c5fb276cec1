"""Figures of what a prediction, a risk or an error depends on: bars for the columns of a table, a map for the places of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import as_count
from workbench.plots._common import (
    COLOURS,
    SERIES,
    Array,
    Values,
    array,
    colour,
    finite,
    legend,
    new_axes,
    not_negative,
    same_shape,
    vector,
    width_for,
    with_unit,
)
from workbench.plots._images import picture
from workbench.plots._texts import fit_bar, label_axes, name_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RAISED = "#F0E442"  # where covering raises the risk: yellow, the colour of no risk (Okabe and Ito)
OTHER_COLOURS = {"prediction": SERIES[0], "error": SERIES[1]}


def importance(
    values: Mapping[str, Values],
    columns: Sequence[str],
    ax: Axes | None = None,
    *,
    standard_error: Mapping[str, Values] | None = None,
    most: int = 12,
    label: str = "importance (share of the variance over rows)",
) -> Axes:
    """Draw how important each column is for the prediction, the risks or the error: a group of bars for each column, the highest on top.

    Args:
        values: importances of the columns [n], by name ("prediction", "error", aleatoric, epistemic, vacuitic, total), such as
            `importance.mean` of `workbench.attributions.permutation_importance`. An entry of NaN only is left out and named in the legend.
            Shares and errors have different units and should not share one figure.
        columns: names of the n columns.
        ax: Axes to draw on; a new figure, whose height grows with the number of bars, if None.
        standard_error: standard errors [n] by the same names, drawn as error bars.
        most: maximum number of columns drawn, those with the highest bars.
        label: label of the axis.

    Returns:
        The Axes.

    Raises:
        ValueError: for an unknown name, shapes that do not match, infinite numbers, or nothing to draw.

    Example:
        >>> ax = importance({"aleatoric": [0.1, 0.9], "epistemic": [0.8, 0.3]}, ["age", "dose"])
        >>> [text.get_text() for text in ax.get_yticklabels()]
        ['dose', 'age']
    """
    bars = _bars(values)
    most = as_count("most", most)
    errors = _standard_errors(standard_error or {}, bars)
    count = len(next(iter(bars.values())))
    if not isinstance(columns, Sequence) or len(columns) != count:
        raise ValueError(f"columns: expected {count} names, one for each number, found {columns!r:.80}")
    constant = [name for name, value in bars.items() if np.isnan(value).all()]
    bars = {name: value for name, value in bars.items() if name not in constant}
    if not bars:
        raise ValueError(
            f"values: {', '.join(constant)} is NaN for every column, as where nothing varies over the rows"
        )
    finite(**bars)
    order = np.argsort(-np.max(list(bars.values()), 0), kind="stable")[:most]
    shown = [str(columns[i]) for i in order]
    ax = new_axes(
        ax, (width_for(shown), float(np.clip(1.3 + 0.13 * len(order) * (len(bars) + 1), 2.8, 14))), linear="y"
    )
    thickness = 0.8 / len(bars)
    look: dict[str, Any] = {"ecolor": ax.xaxis.label.get_color(), "error_kw": {"elinewidth": 1}}
    for k, (name, value) in enumerate(bars.items()):
        at = np.arange(len(order)) + (k + 0.5) * thickness - 0.4
        shade = OTHER_COLOURS[name] if name in OTHER_COLOURS else colour(ax, name)
        spread = errors[name][order] if name in errors else None
        ax.barh(at, value[order], 0.9 * thickness, color=shade, label=name, xerr=spread, **look)
    ax.grid(False, axis="y")
    ax.axvline(0, color=ax.xaxis.label.get_color(), linewidth=0.8)
    ax.set(ylim=(len(order) - 0.5, -0.5))
    name_rows(ax, np.arange(len(order)), shown)
    label_axes(ax, label)
    name_rows(ax, np.arange(len(order)), shown)  # the label may leave the rows less room
    notes = [f"{name}: the same for all rows" for name in constant]
    if len(order) < len(columns):
        notes.append(f"{len(order)} of {len(columns)} columns")
    legend(ax, notes, columns=2, headroom=True)
    return ax


def _bars(values: Mapping[str, Values]) -> dict[str, Array]:
    """Return the importances [n] by name; refuse unknown names and different lengths."""
    if not isinstance(values, Mapping) or not values or (unknown := set(values) - set(COLOURS) - set(OTHER_COLOURS)):
        what = ", ".join(sorted(map(str, unknown))) if isinstance(values, Mapping) and values else repr(values)[:80]
        raise ValueError(f"values: expected a dict with {', '.join((*OTHER_COLOURS, *COLOURS))}; found {what}")
    bars = {name: vector(value, name) for name, value in values.items()}
    same_shape(**bars)
    return bars


def _standard_errors(values: Mapping[str, Values], bars: Mapping[str, Array]) -> dict[str, Array]:
    """Return the standard errors [n] by name; refuse those without a bar."""
    if extra := values.keys() - bars.keys():
        raise ValueError(f"standard_error: {', '.join(sorted(extra))} is not among values ({', '.join(bars)})")
    errors = {name: vector(value, f"standard_error: {name}") for name, value in values.items()}
    for name, error in errors.items():
        same_shape(**{name: bars[name], f"standard_error of {name}": error})
        not_negative(**{f"standard_error of {name}": error})
    return errors


def occlusion_map(
    image: Values,
    change: Values,
    ax: Axes | None = None,
    *,
    kind: str = "total",
    unit: str = "",
    strength: float = 0.85,
) -> Axes:
    """Draw over a grey image how covering each place changes a risk.

    A place has the colour of the risk where covering it lowers the risk, yellow where covering it raises the risk, and stays grey where
    nothing changes.

    Args:
        image: [channels, height, width] of 1 or 3 channels, or [height, width].
        change: by how much the risk falls when a place is covered, [height, width], as from `workbench.attributions.occlusion`.
        ax: Axes to draw on; a new figure if None.
        kind: "prediction", or which risk it is: aleatoric, epistemic, vacuitic or total; for colour and label.
        unit: unit of the change, for the label.
        strength: opacity of the largest change, 0 to 1.

    Returns:
        The Axes.

    Raises:
        ValueError: for shapes that do not match, changes that are NaN or infinite, or an unknown kind.

    Example:
        >>> occlusion_map(np.ones((8, 8)), np.eye(8), kind="epistemic", unit="nats").get_title()
        'epistemic'
    """
    if kind not in COLOURS and kind != "prediction":
        raise ValueError(f"kind: expected prediction or one of {', '.join(COLOURS)}, found {kind!r}")
    if not 0 <= strength <= 1:
        raise ValueError(f"strength: expected a number from 0 to 1, found {strength}")
    values, grey = array(change, "change"), picture(image).mean(-1)
    same_shape(change=values, image=grey)
    finite(change=values)
    from matplotlib.colors import LinearSegmentedColormap

    ax = new_axes(ax, (4.8, 4.2), linear="xy")
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    ax.imshow(grey, cmap="gray", vmin=0, vmax=1)
    top = float(np.abs(values).max()) or 1.0
    shades = LinearSegmentedColormap.from_list(
        kind, [RAISED, RAISED, "#BBBBBB", *[OTHER_COLOURS.get(kind) or COLOURS[kind]] * 2]
    )
    opacity = np.abs(values) / top * strength
    drawn = ax.imshow(values, cmap=shades, vmin=-top, vmax=top, alpha=opacity, interpolation="nearest")
    bar = ax.figure.colorbar(drawn, ax=ax, fraction=0.046, pad=0.03)
    bar.solids.set_alpha(1)  # type: ignore[union-attr]  # otherwise the alpha of one pixel
    bar.set_label(with_unit("less when covered", unit))
    fit_bar(bar, ax)
    ax.set_title(kind)
    return ax


__all__ = ["importance", "occlusion_map"]
