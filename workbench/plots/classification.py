"""Figures of classification: calibration, and maps of a risk over two inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workbench.errors import require
from workbench.metrics.classification import bin_edges
from workbench.plots._common import (
    MODELS,
    Array,
    Values,
    array,
    colour,
    diagonal,
    finite,
    legend,
    new_axes,
    of_models,
    pair,
    same_rows,
    thinned,
    vector,
)
from workbench.plots._scales import extension
from workbench.plots._texts import fit_bar, label_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "o^sDvP*X"


def reliability(
    probabilities: Values | Mapping[str, Values], target: Values, n_bins: int = 15, ax: Axes | None = None
) -> Axes:
    r"""Draw accuracy over confidence in bins of equal width, with the number of rows in each bin.

    Below the diagonal the model is overconfident. The legend has the expected calibration error
    :math:`\sum_b \frac{n_b}{n} |\mathrm{accuracy}_b - \mathrm{confidence}_b|` (Guo et al., On calibration of modern
    neural networks, 2017).

    Args:
        probabilities: [n, classes], rows sum to 1; or a dict of them by model, drawn as one line each, without row counts.
        target: labels [n], integers from 0 to classes - 1.
        n_bins: number of bins, each open to the left: (0, 1/n_bins], ...
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes.

    Raises:
        ValueError: for shapes that do not match, rows that are not probabilities, or labels outside the classes.

    Example:
        >>> import torch
        >>> ax = reliability(torch.tensor([[0.7, 0.3], [0.1, 0.9]]), torch.tensor([0, 0]))
        >>> ax.get_legend_handles_labels()[1]
        ['ideal', 'ECE 0.600 (n = 2)', 'rows per bin']
    """
    if isinstance(probabilities, Mapping):
        pairs = of_models(probabilities, "probabilities", target, "target")
        several = {name: _in_bins(*both, n_bins) for name, both in pairs.items()}
        ax = new_axes(ax, (4.8, 4.8 + 0.17 * (len(several) + 2)))  # with a line of the legend for each
        diagonal(ax, "ideal")
        for (name, model), (shade, dashes) in zip(several.items(), MODELS, strict=False):
            style: Any = {"color": shade, "linestyle": dashes, "marker": "o", "markersize": 5, "linewidth": 1.8}
            ax.plot(model.confidence, model.accuracy, label=f"{name}: ECE {model.ece:.3f}", **style)
        ax.set(xlim=(0, 1), ylim=(0, 1.02))
        label_axes(ax, "confidence", "accuracy")
        legend(ax, [f"n = {int(next(iter(several.values())).counts.sum()):,}"], headroom=True, highest=1)
        return ax
    mean_confidence, accuracy, counts, centre, ece = _in_bins(probabilities, target, n_bins)
    ax = new_axes(ax, (4.8, 4.8))
    main = colour(ax, "total")
    diagonal(ax, "ideal")
    ax.plot(
        mean_confidence,
        accuracy,
        color=main,
        marker="o",
        markersize=5,
        linewidth=1.8,
        label=f"ECE {ece:.3f} (n = {counts.sum():,})",
    )
    # shares of all rows fit on the axis of the accuracy
    shares = counts / counts.sum()
    ax.bar(centre, shares, 0.9 / n_bins, color=main, alpha=0.22, linewidth=0, label="rows per bin", zorder=1)
    for x, height, count in zip(centre, shares, counts, strict=True):
        ax.annotate(
            f"{count:,}",
            (x, height),
            (0, 2),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=7,
        )
    ax.set(xlim=(0, 1), ylim=(0, 1.02))
    label_axes(ax, "confidence", "accuracy; share of rows")
    legend(ax, highest=1)
    return ax


class _InBins(NamedTuple):
    """Mean confidence, accuracy, row count and centre of each non-empty bin, and the expected calibration error."""

    confidence: Array
    accuracy: Array
    counts: Array
    centre: Array
    ece: float


def _in_bins(probabilities: Values, target: Values, n_bins: int) -> _InBins:
    same_rows(probabilities=probabilities, target=target)
    scores, labels = array(probabilities, "probabilities"), vector(target, "target")
    if scores.ndim != 2 or len(scores) != len(labels):
        shapes = f"probabilities {list(scores.shape)}, target {list(labels.shape)}"
        raise ValueError(f"shapes do not match: expected [n, classes] and [n], found {shapes}")
    finite(probabilities=scores, target=labels)
    sums = scores.sum(1)
    if (scores < -1e-6).any() or np.abs(sums - 1).max() > 1e-3:
        worst = int(np.argmax(np.abs(sums - 1)))
        raise ValueError(
            f"probabilities: expected rows of values of at least 0 that sum to 1, found a minimum of "
            f"{scores.min():.3g} and a sum of {sums[worst]:.4g} in row {worst}; pass logits.softmax(-1)"
        )
    if (labels != np.round(labels)).any() or labels.min() < 0 or labels.max() >= scores.shape[1]:
        values = f"values from {labels.min():g} to {labels.max():g}"
        raise ValueError(f"target: expected integers from 0 to {scores.shape[1] - 1}, found {values}")
    if n_bins < 1:
        raise ValueError(f"n_bins: expected at least 1, found {n_bins}")

    confidence, right = scores.max(1), scores.argmax(1) == labels
    inner = bin_edges(n_bins, probabilities).numpy()
    edges = np.r_[0, inner, 1]
    index = np.digitize(confidence, inner, right=True)
    counts = np.bincount(index, minlength=n_bins)
    used = counts > 0
    mean_confidence = np.bincount(index, confidence, n_bins)[used] / counts[used]
    accuracy = np.bincount(index, right, n_bins)[used] / counts[used]
    ece = np.sum(counts[used] * np.abs(accuracy - mean_confidence)) / counts.sum()
    centre = (edges[1:] + edges[:-1])[used] / 2
    return _InBins(mean_confidence, accuracy, counts[used], centre, float(ece))


def decision_map(
    xx: Values,
    yy: Values,
    value: Values,
    ax: Axes | None = None,
    *,
    label: str = "",
    points: tuple[Values, Values] | None = None,
    classes: Sequence[str] | None = None,
    limits: tuple[float, float] | None = None,
    cmap: str = "viridis",
) -> Axes:
    """Draw a value, such as one risk, as a map over a grid of two inputs, with the data on top.

    Args:
        xx: first input of each grid node [rows, columns], as from ``torch.meshgrid`` or ``numpy.meshgrid``.
        yy: second input, same shape.
        value: [rows, columns], or flat [rows * columns] or [rows * columns, 1]; values that are not finite stay blank.
        ax: Axes to draw on; a new figure if None.
        label: name and unit of the value, beside the colour bar.
        points: data ``(x, y)``: inputs [n, 2] and labels [n], with one marker shape for each of up to 8 labels.
        classes: names of the labels 0, 1, ... of ``points``, for the legend; "class 0" and so on if None.
        limits: values of the first and last colour, to make several maps comparable; the range of the finite values if None. The
            colour bar ends in an arrow where values are beyond it. Without limits, colours are logarithmic, and the label says so, if
            nineteen of twenty values would have the lowest hundredth of the colours.
        cmap: name of a perceptually uniform matplotlib colour map.

    Returns:
        The Axes, with a colour bar next to them.

    Raises:
        ValueError: for shapes that do not match, labels of ``points`` without a name in ``classes``, or values that colours can't show.

    Example:
        >>> import torch
        >>> xx, yy = torch.meshgrid(torch.linspace(-2, 2, 30), torch.linspace(-1, 1, 20), indexing="xy")
        >>> ax = decision_map(xx, yy, xx**2 + yy**2, label="epistemic risk (nats)")
        >>> ax.get_xlabel(), ax.figure.axes[1].get_ylabel()
        ('x₁', 'epistemic risk (nats)')
    """
    first, second, values = array(xx, "xx"), array(yy, "yy"), array(value, "value")
    flat = values.shape in {(first.size,), (first.size, 1)}
    if first.ndim != 2 or first.shape != second.shape or not (values.shape == first.shape or flat):
        raise ValueError(
            f"shapes do not match: expected xx and yy [rows, columns] and value of the same shape or flat, "
            f"found xx {list(first.shape)}, yy {list(second.shape)}, value {list(values.shape)}"
        )
    finite(xx=first, yy=second)
    data = None if points is None else _labelled(*pair(points, "points"))
    if data is not None and classes is not None:
        unnamed = data[1][~np.isin(data[1], np.arange(len(classes)))]
        if unnamed.size:
            raise ValueError(f"classes: {len(classes)} names, but a label of points is {unnamed[0]:g}")
    values = np.ma.masked_invalid(values.reshape(first.shape))
    missing = int(np.ma.count_masked(values))
    if missing == values.size:
        raise ValueError(f"value: none of its {values.size} values is a finite number")

    norm, scale_note = _norm(values.compressed(), limits)
    _check_range(norm.vmin, norm.vmax, scale_note, limits)
    ax = new_axes(ax, (6.0, 4.5))
    ax.grid(False)
    # rasterized: ten thousand vector cells would make a slow file with visible seams
    mesh = ax.pcolormesh(first, second, values, shading="nearest", cmap=cmap, norm=norm, rasterized=True)
    title = ", ".join(part for part in (label, scale_note) if part)
    extend = extension([values.compressed()], norm.vmin, norm.vmax)
    bar = ax.figure.colorbar(mesh, ax=ax, label=title, extend=extend)
    bar.outline.set_visible(False)
    fit_bar(bar, ax)
    ax.set(xlim=(first.min(), first.max()), ylim=(second.min(), second.max()))
    label_axes(ax, "x₁", "x₂")
    # points beyond the map stay hidden where the legend raises the limit
    corner, size = (first.min(), second.min()), (np.ptp(first), np.ptp(second))
    ground = require("matplotlib.patches").Rectangle(corner, *size, transform=ax.transData)
    notes = [] if data is None else _draw_points(ax, *data, classes, ground)
    if missing:
        notes.append(f"{missing:,} of {values.size:,} values not finite, blank")
    if data is not None or missing:
        legend(ax, notes)
    return ax


def _draw_points(
    ax: Axes, inputs: np.ndarray, labels: np.ndarray, classes: Sequence[str] | None, ground: Any
) -> list[str]:
    """Draw data on a map, one marker shape for each label, and return a note for the legend if only some are drawn.

    Args:
        ax: Axes of the map.
        inputs: [n, 2].
        labels: [n].
        classes: names of the labels, None for numbers.
        ground: the patch of the map, beyond which no point is drawn.
    """
    chosen, note = thinned(len(labels), "data")
    inputs, labels = inputs[chosen], labels[chosen]
    names = np.unique(labels)
    groups = [(labels == name, f"class {name:g}" if classes is None else classes[int(name)]) for name in names]
    if len(names) > len(MARKERS):  # markers would repeat, and a legend of so many have no room
        groups = [(np.full(len(labels), True), f"data of {len(names)} classes")]
    for i, (members, words) in enumerate(groups):
        drawn = ax.scatter(
            inputs[members, 0],
            inputs[members, 1],
            s=16,
            marker=MARKERS[i],
            facecolor=("white", "black")[i % 2],
            edgecolor=("black", "white")[i % 2],
            linewidth=0.6,
            label=words,
        )
        drawn.set_clip_path(ground)
    return [note] if "drawn" in note else []


def _check_range(low: float, high: float, scale_note: str, limits: tuple[float, float] | None) -> None:
    """Raise if colours from low to high exceed the range of floating-point numbers, beyond which matplotlib draws wrong scales or fails."""
    width = high / 2 - low / 2
    is_too_wide = width > 5e307
    if scale_note and high > 0:  # ticks lie up to half of the decades above the highest
        decades = math.log10(high) - (math.log10(low) if low > 0 else 0)
        is_too_wide |= math.log10(high) + decades / 2 > 308
    if is_too_wide or 0 < width < 1e-280:
        name, remedy = ("value", "give limits=, or draw its logarithm") if limits is None else ("limits", "give others")
        raise ValueError(f"{name}: colours can't show numbers from {low:.3g} to {high:.3g}; {remedy}")


def _norm(values: Array, limits: tuple[float, float] | None) -> tuple[Any, str]:
    """Return how values become colours, and a note on it for the label: "" if in proportion."""
    colors = require("matplotlib.colors")
    if limits is not None:
        return colors.Normalize(*limits), ""
    low, middle, high = float(values.min()), float(np.median(values)), float(values.max())
    most = float(np.quantile(values, 0.95, method="lower"))
    if high - low <= 100 * (most - low) or middle == low:
        return colors.Normalize(low, high), ""
    if low > 0:
        return colors.LogNorm(low, high), "log scale"
    threshold = float(f"{max(abs(low), abs(middle)):.1g}")
    return colors.SymLogNorm(threshold, vmin=low, vmax=high), f"log scale above {threshold:g}"


def _labelled(x: Values, y: Values) -> tuple[Array, Array]:
    inputs, labels = array(x, "points x"), vector(y, "points y")
    if inputs.ndim != 2 or inputs.shape[1] != 2 or len(inputs) != len(labels):
        shapes = f"x {list(inputs.shape)}, y {list(labels.shape)}"
        raise ValueError(f"points: shapes do not match: expected x [n, 2] and y [n], found {shapes}")
    finite(**{"points x": inputs, "points y": labels})
    return inputs, labels
