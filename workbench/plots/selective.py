"""Figure of selective prediction: what is gained by answering only where the risk is low?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.metrics.selective import aurc, risk_coverage_curve
from workbench.plots._common import (
    Values,
    colour,
    finite,
    ink,
    legend,
    new_axes,
    not_negative,
    risk_label,
    usable,
    vectors,
    with_unit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def risk_coverage(
    risk: Values,
    error: Values,
    ax: Axes | None = None,
    *,
    kind: str = "total",
    unit: str = "",
    label: str | None = None,
) -> Axes:
    """Draw the mean error of the rows that are answered over their share, when those of lowest risk are answered first.

    The less error at low coverage, the better the risk ranks rows (El-Yaniv and Wiener, On the foundations of noise-free selective
    classification, 2010). Beside it stand the best order there is, by the error itself, and one that says nothing. Of
    `workbench.selective` give `risk_coverage(chosen.risk, chosen.error)`.

    Args:
        risk: any kind of risk, one for each row [n] or [n, 1]; rows where it is NaN are dropped.
        error: error of each row, same shape, at least 0; for classes 0 where right and 1 where wrong.
        ax: Axes to draw on; a new figure if None. Call it again with the same Axes to compare risks of the same rows.
        kind: which risk it is: aleatoric, epistemic, vacuitic or total; for the colour.
        unit: unit of the error, for the label.
        label: name in the legend; the kind if None.

    Returns:
        The Axes; the legend has the area under the curve (AURC; Geifman and El-Yaniv, 2017).

    Raises:
        ValueError: for shapes that do not match, negative or NaN errors, no finite risk, or an unknown kind.

    Example:
        >>> import torch
        >>> ax = risk_coverage(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0.0, 0.0, 3.0]), unit="MPa")
        >>> ax.get_legend_handles_labels()[1], ax.get_ylabel()
        (['random order', 'best order', 'total: AURC 0.333'], 'mean error of rows answered (MPa)')
    """
    risks, errors = vectors(risk=risk, error=error)
    finite(error=errors)
    not_negative(error=errors)
    (risks, errors), notes = usable(risks, errors, infinite=True)
    risk_label(kind)  # refuses an unknown kind before a figure is made
    curve, best = risk_coverage_curve(risks, errors), risk_coverage_curve(errors, errors)
    ax = new_axes(ax)
    if "random order" not in ax.get_legend_handles_labels()[1]:
        mean = errors.mean()
        ax.plot(
            [0, 1], [mean, mean], color=ink(ax), linestyle=(0, (4, 2)), linewidth=1, alpha=0.7, label="random order"
        )
        ax.plot(best.coverage, best.error, color=ink(ax), linestyle=":", linewidth=1.4, label="best order")
    name = f"{label or kind}: AURC {aurc(risks, errors).item():.3g}"
    ax.plot(curve.coverage, curve.error, color=colour(ax, kind), linewidth=2, label=name)
    ax.set(xlabel="coverage (share of rows answered)", ylabel=with_unit("mean error of rows answered", unit))
    ax.set_xlim(0, 1.01)
    ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]), auto=None)  # what is drawn later still moves the limits
    legend(ax, notes, headroom=True, columns=2)
    return ax
