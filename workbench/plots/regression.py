"""Figures of regression: predictions against true values, and how well their risk is calibrated."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workbench.errors import require
from workbench.metrics.regression import calibration_error
from workbench.plots._common import (
    MODELS,
    Array,
    Values,
    array,
    choose_scale,
    colour,
    diagonal,
    elements,
    finite,
    ink,
    legend,
    new_axes,
    not_negative,
    of_models,
    point_look,
    risk_label,
    same_rows,
    same_shape,
    set_log_scale,
    thinned,
    usable,
    with_unit,
)
from workbench.plots._scales import TYPICAL
from workbench.plots._texts import label_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_TARGETS = 24  # in one figure
TITLE_WIDTH = 30  # characters of a title in a line


def coverage(prediction: Values, risk: Values, target: Values, ax: Axes | None = None) -> Axes:
    r"""Draw the share of targets within central intervals of the predicted normal distribution, over the level of the interval.

    A target lies within the central interval of level p if :math:`2\Phi(|y - \hat y| / \sigma) - 1 \le p`. Below the
    diagonal the risk is too small, above it too large (Kuleshov et al., Accurate uncertainties for deep learning using
    calibrated regression, 2018).

    Args:
        prediction: [n] or [n, outputs]; all outputs are pooled.
        risk: standard deviations, same shape and units as the prediction; elements that are not finite are dropped.
        target: same shape.
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes; the legend has `workbench.metrics.calibration_error`, the mean distance from the diagonal at 0.05, 0.10, ... 0.95.

    Raises:
        ValueError: for shapes that do not match, negative risk, or NaN in prediction or target.

    Example:
        >>> import numpy as np
        >>> draws = np.random.default_rng(0).normal(scale=2.0, size=10_000)
        >>> ax = coverage(np.zeros(10_000), np.full(10_000, 2.0), draws)
        >>> ax.get_legend_handles_labels()[1]
        ['ideal', 'observed (n = 10,000)']
        >>> ax.get_legend().get_texts()[-1].get_text()
        'calibration error 0.004'
    """
    erf = require("scipy.special").erf
    centre, sd, truth = elements(prediction=prediction, risk=risk, target=target)
    finite(prediction=centre, target=truth)
    not_negative(risk=sd)
    (sd, centre, truth), notes = usable(sd, centre, truth)
    error = np.abs(truth - centre)
    # with a risk of zero, an error of zero is within every interval and any other error in none
    z = np.divide(error, sd, out=np.where(error > 0, np.inf, 0.0), where=sd > 0)
    levels = np.linspace(0, 1, 101)
    observed = np.searchsorted(np.sort(erf(z / np.sqrt(2))), levels, side="right") / z.size
    ax = new_axes(ax, (4.8, 4.8))
    gap = float(calibration_error(centre, sd, truth))  # as in all tables: at levels 0.05 to 0.95
    diagonal(ax, "ideal")
    ax.fill_between(levels, levels, observed, color=colour(ax, "total"), alpha=0.2, linewidth=0)
    ax.plot(levels, observed, color=colour(ax, "total"), linewidth=2, label=f"observed (n = {z.size:,})")
    ax.set(xlim=(0, 1), ylim=(0, 1.005))
    label_axes(ax, "expected share within the interval", "observed share within the interval")
    # a line of its own, since one long line would reach the curve
    legend(ax, [f"calibration error {gap:.3f}", *notes], highest=1)
    return ax


def risk_against_error(
    risk: Values | Mapping[str, Values],
    error: Values | Mapping[str, Values],
    ax: Axes | None = None,
    *,
    kind: str = "total",
    unit: str = "",
    n_bins: int = 10,
) -> Axes:
    """Draw the error over the risk, as points and as means of bins with equally many points.

    Args:
        risk: any kind of risk, [n] or [n, outputs], or a dict of them by model, drawn as bin means without points. Elements that are not finite
            are dropped.
        error: absolute error, same shape; for classes 0 where right and 1 where wrong. A dict by model if risk is one.
        ax: Axes to draw on; a new figure if None.
        kind: which risk it is: aleatoric, epistemic, vacuitic or total; for the colour and the label.
        unit: unit of risk and error, for the labels.
        n_bins: number of bins.

    Returns:
        The Axes; the legend has Spearman's rank correlation over all points. An axis is logarithmic if its values
        span several orders of magnitude.

    Raises:
        ValueError: for shapes that do not match, negative or NaN errors, or an unknown kind.

    Example:
        >>> import torch
        >>> risk = torch.linspace(0.1, 1, 50)
        >>> ax = risk_against_error(risk, 2 * risk, kind="epistemic", unit="K")
        >>> ax.get_legend_handles_labels()[1], ax.get_xlabel()
        (['Spearman 1.00 (n = 50)', 'mean of 10 bins'], 'epistemic risk (K)')
    """
    if n_bins < 1:
        raise ValueError(f"n_bins: expected at least 1, found {n_bins}")
    xlabel = risk_label(kind, unit)
    if isinstance(risk, Mapping):
        several = {name: _in_bins(*both, n_bins) for name, both in of_models(risk, "risk", error, "error").items()}
        ax = new_axes(ax)
        for (name, model), (shade, dashes) in zip(several.items(), MODELS, strict=False):
            style: Any = {"color": shade, "linestyle": dashes, "marker": "o", "markersize": 4.5, "linewidth": 1.6}
            ax.plot(*model.means.T, label=f"{name}: Spearman {model.correlation}", **style)
        means = np.concatenate([model.means for model in several.values()])
        risks, errors = means.T
        notes = [f"{name}: {note}" for name, model in several.items() for note in model.notes]
    else:
        if isinstance(error, Mapping):
            raise ValueError("error: it is a dict by model and risk is not; give risks by the same names")
        risks, errors, means, correlation, notes = _in_bins(risk, error, n_bins)
        chosen, label = thinned(risks.size, f"Spearman {correlation}")
        ax = new_axes(ax)
        ax.scatter(risks[chosen], errors[chosen], color=colour(ax, kind), label=label, **point_look(chosen.size))
        label = f"mean of {len(means)} bin{'s' * (len(means) > 1)}"
        ax.plot(*means.T, color=ink(ax), marker="o", markersize=4.5, linewidth=1.6, label=label)
    choose_scale(ax, "x", risks)
    choose_scale(ax, "y", errors)
    if "log" in (ax.get_xscale(), ax.get_yscale()) and min(risks.min(), errors.min()) > 0:
        set_log_scale(ax, "x", risks)  # if both are, an error proportional to the risk is a straight line
        set_log_scale(ax, "y", errors)
    label_axes(ax, xlabel, with_unit("absolute error", unit))
    legend(ax, notes, headroom=True, columns=2)
    return ax


class _InBins(NamedTuple):
    """Usable risks and errors, their means in bins with equally many points [bins, 2], Spearman's correlation as text, and legend notes."""

    risks: Array
    errors: Array
    means: Array
    correlation: str
    notes: list[str]


def _in_bins(risk: Values, error: Values, n_bins: int) -> _InBins:
    rankdata = require("scipy.stats").rankdata
    risks, errors = elements(risk=risk, error=error)
    finite(error=errors)
    not_negative(error=errors)
    (risks, errors), notes = usable(risks, errors)
    correlation = "undefined (all values equal)"
    if np.ptp(risks) > 0 and np.ptp(errors) > 0:
        correlation = f"{np.corrcoef(rankdata(risks), rankdata(errors))[0, 1]:.2f}"
    binned = np.array_split(np.argsort(risks, kind="stable"), min(n_bins, risks.size))
    # a bin may hold some of the points of equal risk: their mean error is independent of the order of the rows
    _, index, counts = np.unique(risks, return_inverse=True, return_counts=True)
    expected = (np.bincount(index, errors) / counts)[index]
    means = np.array([(risks[i].mean(), expected[i].mean()) for i in binned])
    return _InBins(risks, errors, means, correlation, notes)


def predicted_against_true(
    prediction: Values,
    target: Values,
    risk: Values | None = None,
    ax: Axes | None = None,
    *,
    unit: str = "",
    kind: str = "total",
    level: float = 1,
) -> Axes:
    """Draw predictions over true values, with error bars and the diagonal.

    Args:
        prediction: [n] or [n, outputs].
        target: same shape.
        risk: standard deviations, same shape and units; elements that are not finite are dropped.
        ax: Axes to draw on; a new figure if None.
        unit: unit of prediction and target, for the labels.
        kind: which risk it is: aleatoric, epistemic or total; for the colour and the legend.
        level: half the length of the error bars, in standard deviations.

    Returns:
        The Axes; the legend has the root mean square error over all points.

    Raises:
        ValueError: for shapes that do not match, negative risk, NaN in prediction or target, or an unknown kind.

    Example:
        >>> import torch
        >>> y = torch.arange(10.0)[:, None]
        >>> ax = predicted_against_true(y + 1, y, risk=torch.ones(10, 1), unit="MPa")
        >>> ax.get_legend_handles_labels()[1], ax.get_ylabel()
        (['ideal', 'RMSE 1 MPa (n = 10)', 'total risk, ±1 sd'], 'prediction (MPa)')
    """
    centre, truth = elements(prediction=prediction, target=target)
    finite(prediction=centre, target=truth)
    risk_name = risk_label(kind)
    if not 0 <= level < np.inf:
        raise ValueError(f"level: expected a finite number of standard deviations of at least 0, found {level:g}")
    notes: list[str] = []
    sd = None
    if risk is not None:
        spread = elements(prediction=prediction, risk=risk)[1]
        not_negative(risk=spread)
        (sd, centre, truth), notes = usable(spread, centre, truth)
    rmse = np.sqrt(np.mean((centre - truth) ** 2))
    chosen, label = thinned(
        centre.size, f"RMSE {f'{rmse:,.0f}' if 999.5 <= rmse < 1e7 else f'{rmse:.3g}'}{f' {unit}' if unit else ''}"
    )
    ax = new_axes(ax, (4.8, 4.8))
    shade, style = colour(ax, kind), point_look(chosen.size)
    low, high = min(centre.min(), truth.min()), max(centre.max(), truth.max())
    margin = 0.04 * (high - low) or 0.5
    diagonal(ax, "ideal", (low - margin, high + margin))
    ax.scatter(truth[chosen], centre[chosen], color=shade, label=label, zorder=3, **style)
    if sd is not None:
        ax.errorbar(
            truth[chosen],
            centre[chosen],
            level * sd[chosen],
            fmt="none",
            ecolor=shade,
            elinewidth=0.8,
            alpha=style["alpha"] * 0.6,
            label=f"{risk_name}, ±{level:g} sd",
        )
        notes += _shorten_bars(ax, centre[chosen], level * sd[chosen], (low - margin, high + margin))
    ax.set_xlim(low - margin, high + margin)
    label_axes(ax, with_unit("true value", unit), with_unit("prediction", unit))
    legend(ax, notes)
    return ax


def _shorten_bars(ax: Axes, centre: Array, half: Array, data: tuple[float, float]) -> list[str]:
    """Limit the y axis if few error bars are far longer than all others, which would leave the points no room; return a note on these."""
    bottom = min(data[0], np.quantile(centre - half, 1 - TYPICAL, method="higher"))
    top = max(data[1], np.quantile(centre + half, TYPICAL, method="lower"))
    room = 0.5 * (top - bottom)
    long = int(((centre - half < bottom - room) | (centre + half > top + room)).sum())
    if not long:
        return []
    ax.set_ylim(bottom - room, top + room)
    return [f"{long:,} error bar{'s' * (long > 1)} longer than drawn"]


def targets(
    prediction: Values,
    target: Values,
    risk: Values | None = None,
    *,
    names: Sequence[str] | None = None,
    units: Sequence[str] | None = None,
    kind: str = "total",
    level: float = 1,
    columns: int = 3,
) -> np.ndarray[Any, Any]:
    """Draw several targets as a grid of `predicted_against_true`, each with its own scales, in a new figure.

    Args:
        prediction: [n, targets].
        target: same shape.
        risk: standard deviations, same shape and units.
        names: names of the targets, for the titles.
        units: units of the targets, for the labels.
        kind: which risk it is: aleatoric, epistemic or total.
        level: half the length of the error bars, in standard deviations.
        columns: maximum number of columns of the grid.

    Returns:
        Array of the Axes [targets]; each legend has the root mean square error of its target.

    Raises:
        ValueError: for shapes that do not match, more than 24 targets, or anything `predicted_against_true` refuses.

    Example:
        >>> import torch
        >>> y = torch.arange(20.0).reshape(10, 2)
        >>> axes = targets(y + 1, y, names=["heating", "cooling"], units=["kWh", "kWh"])
        >>> [ax.get_title() for ax in axes], axes[0].get_ylabel()
        (['heating', 'cooling'], 'prediction (kWh)')
    """
    values = {"prediction": prediction, "target": target} | ({} if risk is None else {"risk": risk})
    same_rows(**values)
    named = {name: array(value, name) for name, value in values.items()}
    same_shape(**named)
    shape = named["prediction"].shape
    if len(shape) != 2 or shape[1] > MAX_TARGETS:
        raise ValueError(f"prediction: expected [n, targets] of at most {MAX_TARGETS} targets, found {list(shape)}")
    count = shape[1]
    for label, words in (("names", names), ("units", units)):
        if words is not None and len(words) != count:
            raise ValueError(f"{label}: expected one for each of {count} targets, found {len(words)}")
    if columns < 1:
        raise ValueError(f"columns: expected at least 1, found {columns}")
    wide = min(columns, count)
    high = -(-count // wide)
    plt = require("matplotlib.pyplot")
    figure, axes = plt.subplots(high, wide, figsize=(3.6 * wide, 3.7 * high), layout="constrained", squeeze=False)
    flat = axes.ravel()
    for ax, unit in zip(flat, units or (), strict=False):
        for axis, what in ((ax.xaxis, "true value"), (ax.yaxis, "prediction")):
            axis.set_label_text(textwrap.fill(with_unit(what, unit), TITLE_WIDTH))
    if units and max(map(len, units)) > TITLE_WIDTH / 2:
        engine: Any = figure.get_layout_engine()
        engine.execute(figure)  # of long labels, so that texts are broken to the widths that Axes will have
    try:
        for i, ax in enumerate(flat[:count]):
            at = {name: values[:, i] for name, values in named.items()}
            predicted_against_true(**at, ax=ax, unit=units[i] if units else "", kind=kind, level=level)
            ax.set_title(textwrap.fill(str(names[i]), TITLE_WIDTH) if names else f"target {i + 1}")
    except ValueError as error:
        plt.close(figure)
        raise ValueError(f"target {names[i] if names else i + 1}: {error}") from error
    for ax in flat[count:]:
        ax.remove()
    return flat[:count]
