"""Figures of predictions along one input, with bands of their risk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.plots._common import (
    COLOURS,
    Array,
    Values,
    finite,
    ink,
    legend,
    new_axes,
    not_negative,
    pair,
    point_look,
    thinned,
    vector,
    vectors,
)
from workbench.plots._texts import label_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_ROWS, STRIPS = 20_000, 2_000  # of more rows, those are drawn that show in strips narrower than a dot of a printer
VACUITIC_RANGE = (0.0, 4.0)  # fixed, so that strips of different models are comparable


def bands(
    x: Values,
    prediction: Values,
    aleatoric: Values | None = None,
    epistemic: Values | None = None,
    vacuitic: Values | None = None,
    *,
    observed: tuple[Values, Values] | None = None,
    truth: tuple[Values, Values] | None = None,
    level: float = 2,
    xlabel: str = "x",
    ylabel: str = "y",
    ax: Axes | None = None,
) -> Axes:
    r"""Draw a prediction over one input, with bands of its risk by cause.

    The inner band is ``prediction ± level · epistemic``, the outer one
    :math:`\pm\,\mathrm{level}\,\sqrt{\mathrm{epistemic}^2 + \mathrm{aleatoric}^2}`, as variances add. Vacuitic risk
    is not a standard deviation of the prediction and is therefore drawn as a strip at the bottom.

    Args:
        x: inputs [n] or [n, 1], in any order.
        prediction: [n] or [n, 1].
        aleatoric: standard deviations [n] or [n, 1], in the units of the prediction; NaN leaves a gap
            in the band.
        epistemic: the same.
        vacuitic: standardized risk [n] or [n, 1].
        observed: training data ``(x, y)``, drawn as points.
        truth: the true curve ``(x, y)``, drawn as a dashed line.
        level: half the width of the bands, in standard deviations.
        xlabel: name and unit of the input.
        ylabel: name and unit of the target.
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes.

    Raises:
        ValueError: for shapes that do not match, negative risk, or NaN in anything but a risk.

    Example:
        >>> import torch
        >>> x = torch.linspace(-6, 6, 200)[:, None]
        >>> ax = bands(x, x**3 / 6, torch.full_like(x, 3.0), x.abs(), ylabel="force (N)")
        >>> ax.get_legend_handles_labels()[1]
        ['epistemic, ±2 sd', 'plus aleatoric, ±2 sd', 'prediction']
    """
    kinds = {"aleatoric": aleatoric, "epistemic": epistemic, "vacuitic": vacuitic}
    named = {name: value for name, value in kinds.items() if value is not None}
    inputs, centre, *values = vectors(x=x, prediction=prediction, **named)
    risks = dict(zip(named, values, strict=True))
    finite(x=inputs, prediction=centre)
    not_negative(**{name: value for name, value in risks.items() if name != "vacuitic"})
    curve, points = (_curve(p, name) for p, name in ((truth, "truth"), (observed, "observed")))
    if not 0 < level < np.inf:
        raise ValueError(f"level: expected a positive number of standard deviations, found {level:g}")

    order = np.argsort(inputs, kind="stable")
    inputs, centre = inputs[order], centre[order]
    risks = {name: np.where(np.isfinite(value), value, np.nan)[order] for name, value in risks.items()}
    notes = [
        f"{name}: {missing:,} of {value.size:,} not finite, left out"
        for name, value in risks.items()
        if (missing := int(np.isnan(value).sum()))
    ]
    outer = level * np.hypot(*(risks.get(name, np.zeros_like(centre)) for name in ("aleatoric", "epistemic")))
    seen = _seen(inputs, centre, centre - outer, centre + outer, *risks.values())
    inputs, centre, risks = inputs[seen], centre[seen], {name: value[seen] for name, value in risks.items()}
    if inputs.size == 1:  # drawn one unit wide, since a line through one point shows nothing
        inputs, centre = inputs + np.array([-0.5, 0.5]), np.repeat(centre, 2)
        risks = {name: np.repeat(value, 2) for name, value in risks.items()}
    ax = new_axes(ax)
    inner = np.zeros_like(centre)
    for name in ("epistemic", "aleatoric"):
        if name in risks:
            outer = np.hypot(inner, risks[name])
            label = f"{'plus ' if inner.any() else ''}{name}, ±{level:g} sd"
            _band(ax, inputs, centre, level * inner, level * outer, COLOURS[name], label)
            inner = outer
    if points is not None:
        chosen, label = thinned(points[0].size, "observed")
        ax.scatter(*(p[chosen] for p in points), color=ink(ax), label=label, zorder=3, **point_look(chosen.size))
    if curve is not None:
        ax.plot(*curve, color=ink(ax), linestyle=(0, (4, 2)), linewidth=1.2, label="truth", zorder=4)
    ax.plot(inputs, centre, color=ink(ax), linewidth=1.8, label="prediction", zorder=5)
    extra = [strip(ax, inputs, risks["vacuitic"])] if "vacuitic" in risks else []
    label_axes(ax, xlabel, ylabel)
    legend(ax, notes, extra=extra, columns=2, headroom=True)
    return ax


def _curve(value: Any, name: str) -> tuple[Array, Array] | None:
    if value is None:
        return None
    x, y = (vector(v, f"{name} {axis}") for v, axis in zip(pair(value, name), "xy", strict=True))
    if x.shape != y.shape:
        raise ValueError(f"{name}: shapes do not match: x {list(x.shape)}, y {list(y.shape)}")
    finite(**{f"{name} x": x, f"{name} y": y})
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    seen = _seen(x, y)
    return x[seen], y[seen]


def _seen(x: Array, *curves: Array) -> Array:
    """Return the numbers of the rows to draw: in each strip of the sorted x the first row, and the lowest and highest of each curve.

    Lines and bands through all of many rows look the same, but take minutes to draw.
    """
    if x.size <= MAX_ROWS:
        return np.arange(x.size)
    strip = np.minimum((x - x[0]) / ((x[-1] - x[0]) or 1) * STRIPS, STRIPS - 1).astype(int)
    starts = np.flatnonzero(np.diff(strip, prepend=-1))
    ends = np.append(starts[1:], x.size) - 1
    rows = [starts, ends]
    for curve in curves:
        ordered = np.lexsort((np.where(np.isnan(curve), curves[0], curve), strip))
        rows += [ordered[starts], ordered[ends]]
    return np.unique(np.concatenate(rows))


def _band(ax: Axes, x: Array, centre: Array, inner: Array, outer: Array, color: str, label: str) -> None:
    """Fill between inner and outer on both sides, with one labelled artist for one legend entry."""
    if not inner.any():
        ax.fill_between(x, centre - outer, centre + outer, color=color, alpha=0.5, linewidth=0, label=label)
        return
    ax.fill_between(x, centre + inner, centre + outer, color=color, alpha=0.5, linewidth=0, label=label)
    ax.fill_between(x, centre - outer, centre - inner, color=color, alpha=0.5, linewidth=0)


def strip(ax: Axes, x: Array, risk: Array) -> tuple[Any, str]:
    """Draw a strip along the bottom, darker where the risk is higher, and return its legend entry."""
    from matplotlib.collections import QuadMesh
    from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgba
    from matplotlib.patches import Patch

    full = to_rgba(COLOURS["vacuitic"])
    shades = LinearSegmentedColormap.from_list("vacuitic", [(*full[:3], 0.08), full])
    middle = (x[1:] + x[:-1]) / 2
    half = 0.5 if x.size == 1 else 0.0
    edges = np.concatenate([[x[0] - half], middle, [x[-1] + half]])
    low, high = ax.get_ylim()
    ax.set_ylim(low - 0.06 * (high - low), auto=None)
    corners = np.stack(np.meshgrid(edges, [0.0, 0.04]), axis=-1)
    mesh = QuadMesh(
        corners,
        array=np.ma.masked_invalid(risk)[None],
        cmap=shades,
        norm=Normalize(*VACUITIC_RANGE, clip=True),
        transform=ax.get_xaxis_transform(),
        label="_vacuitic",
    )
    ax.add_collection(mesh, autolim=False)
    key = tuple(Patch(facecolor=shades(share), linewidth=0) for share in (0.0, 0.33, 0.67, 1.0))
    return key, "vacuitic, {:g} to {:g} or more".format(*VACUITIC_RANGE)
