"""Figures of out-of-distribution detection: does the risk separate known from unknown inputs?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import require
from workbench.plots._common import (
    SERIES,
    Values,
    choose_scale,
    colour,
    diagonal,
    legend,
    new_axes,
    risk_label,
    usable,
    vector,
)
from workbench.plots._texts import label_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def ood_histogram(
    risk_in: Values,
    risk_out: Values,
    ax: Axes | None = None,
    *,
    labels: tuple[str, str] = ("in distribution", "out of distribution"),
    kind: str = "total",
    unit: str = "",
    n_bins: int = 40,
) -> Axes:
    """Draw the distribution of a risk on known and on unknown inputs.

    Args:
        risk_in: risk of inputs like the training data, [n] or [n, 1]; values that are not finite are dropped.
        risk_out: risk of inputs unlike it, [m] or [m, 1].
        ax: Axes to draw on; a new figure if None.
        labels: names of the two sets.
        kind: which risk it is: aleatoric, epistemic, vacuitic or total; for the label.
        unit: unit of the risk, for the label.
        n_bins: number of bins, the same for both sets.

    Returns:
        The Axes; heights are shares of a set. The x axis is logarithmic if the risk spans orders of magnitude.

    Raises:
        ValueError: for more than one number per row, no finite values, or an unknown kind.

    Example:
        >>> import torch
        >>> ax = ood_histogram(torch.linspace(0, 1, 50), torch.linspace(2, 3, 20), kind="vacuitic")
        >>> ax.get_legend_handles_labels()[1]
        ['in distribution (n = 50)', 'out of distribution (n = 20)']
    """
    if n_bins < 1:
        raise ValueError(f"n_bins: expected at least 1, found {n_bins}")
    sets = [usable(vector(v, name), name=name) for v, name in ((risk_in, "risk_in"), (risk_out, "risk_out"))]
    values, notes = [rows[0] for rows, _ in sets], [note for _, lines in sets for note in lines]
    both = np.concatenate(values)
    xlabel = risk_label(kind, unit)
    ax = new_axes(ax)
    choose_scale(ax, "x", both, typical=values[0])
    transform = ax.xaxis.get_transform()  # bins of equal width on the axis, also where it is logarithmic
    low, high = transform.transform(np.array([both.min(), both.max()]))
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = transform.inverted().transform(np.linspace(low, high, n_bins + 1))
    # rounding must not lose the outermost values
    edges[[0, -1]] = min(edges[0], both.min()), max(edges[-1], both.max())
    for v, name, shade in zip(values, labels, SERIES, strict=True):
        style: dict[str, Any] = {"bins": edges, "weights": np.full(v.size, 1 / v.size)}
        ax.hist(v, **style, histtype="stepfilled", color=shade, alpha=0.5, label=f"{name} (n = {v.size:,})")
        ax.hist(v, **style, histtype="step", color=shade, linewidth=1.4)
    label_axes(ax, xlabel, "share of inputs per bin")
    legend(ax, notes, headroom=True)
    return ax


def roc(
    risk_in: Values, risk_out: Values, ax: Axes | None = None, *, kind: str = "total", label: str | None = None
) -> Axes:
    """Draw the receiver operating characteristic of a risk as detector of unknown inputs.

    The area under it is the probability that an unknown input has a higher risk than a known one, where ties count half
    (Hendrycks and Gimpel, A baseline for detecting misclassified and out-of-distribution examples, 2017).

    Args:
        risk_in: risk of inputs like the training data, [n] or [n, 1]; NaN is dropped.
        risk_out: risk of inputs unlike it, [m] or [m, 1].
        ax: Axes to draw on; a new figure if None. Call it again with the same Axes to compare risks.
        kind: which risk it is: aleatoric, epistemic, vacuitic or total; for the colour.
        label: name in the legend; the kind if None.

    Returns:
        The Axes; the legend has the area under the curve.

    Raises:
        ValueError: for more than one number per row, only NaN, or an unknown kind.

    Example:
        >>> import torch
        >>> ax = roc(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), kind="vacuitic")
        >>> ax.get_legend_handles_labels()[1]
        ['chance', 'vacuitic: AUROC 0.875']
    """
    rankdata = require("scipy.stats").rankdata
    metrics = require("sklearn.metrics")
    sets = [
        usable(vector(v, name), name=name, infinite=True) for v, name in ((risk_in, "risk_in"), (risk_out, "risk_out"))
    ]
    (known,), (unknown,) = (rows for rows, _ in sets)
    risk_label(kind)  # refuses an unknown kind before a figure is made
    # ranks have the same curve, and make an infinite risk simply the highest
    ranks = rankdata(np.concatenate([known, unknown]))
    false, true, _ = metrics.roc_curve(np.repeat([0, 1], [known.size, unknown.size]), ranks)
    ax = new_axes(ax, (4.8, 4.8))
    shade = colour(ax, kind)
    if "chance" not in ax.get_legend_handles_labels()[1]:
        diagonal(ax, "chance")
    ax.plot(false, true, color=shade, linewidth=2, label=f"{label or kind}: AUROC {metrics.auc(false, true):.3f}")
    ax.set(xlim=(-0.01, 1), ylim=(0, 1.01))
    label_axes(ax, "false positive rate (known inputs)", "true positive rate (unknown inputs)")
    legend(ax, [note for _, lines in sets for note in lines], highest=1)
    return ax


def ood(risk_in: Values, risk_out: Values, *, kind: str = "total", unit: str = "") -> np.ndarray[Any, Any]:
    """Draw :func:`ood_histogram` and :func:`roc` side by side, in a new figure.

    Args:
        risk_in: risk of inputs like the training data, [n] or [n, 1].
        risk_out: risk of inputs unlike it, [m] or [m, 1].
        kind: which risk it is: aleatoric, epistemic, vacuitic or total.
        unit: unit of the risk, for the label.

    Returns:
        Array of the two Axes [2].

    Raises:
        ValueError: as the two functions raise; no figure is left open.

    Example:
        >>> import torch
        >>> ood(torch.linspace(0, 1, 50), torch.linspace(2, 3, 20)).shape
        (2,)
    """
    plt = require("matplotlib.pyplot")
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 4.2), layout="constrained", width_ratios=(1.3, 1))
    try:
        ood_histogram(risk_in, risk_out, axes[0], kind=kind, unit=unit)
        roc(risk_in, risk_out, axes[1], kind=kind)
    except Exception:
        plt.close(figure)
        raise
    return axes
