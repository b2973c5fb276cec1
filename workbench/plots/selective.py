"""Figures of selective prediction: how much does answering only at low risk lower the error?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.metrics.selective import aurc, ause, risk_coverage_curve, sparsification_curve
from workbench.plots._common import (
    COLOURS,
    MODELS,
    Values,
    array,
    colour,
    finite,
    ink,
    legend,
    new_axes,
    not_negative,
    of_models,
    risk_label,
    same_rows,
    same_shape,
    usable,
    vectors,
    with_unit,
)
from workbench.plots._texts import label_axes
from workbench.risk import Risk

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIE_TOLERANCE = 1e-9  # two risks whose areas differ by less, relatively, rank rows alike
MAX_LINE_POINTS = 1000  # a curve over all rows or pixels is thinned out to this


def risk_coverage(
    risk: Values | Risk | Mapping[str, Values],
    error: Values | Mapping[str, Values],
    ax: Axes | None = None,
    *,
    kind: str = "total",
    unit: str = "",
    label: str | None = None,
) -> Axes:
    """Draw the mean error of the rows answered over their share, when the rows of lowest risk are answered first.

    The lower the error at low coverage, the better the risk ranks rows (El-Yaniv and Wiener, On the foundations of noise-free selective
    classification, 2010). For comparison, it also draws the best possible order, by the error itself, and a random order. For a result of
    `workbench.selective` use `risk_coverage(chosen.risk, chosen.error)`.

    Args:
        risk: any kind of risk, one number per row [n] or [n, 1]; rows where it is NaN are dropped. A dict of risks by model gives a curve for
            each, without best and random order, which differ between models. A `Risk` gives a curve for each kind with one number per row, and
            the legend marks the lowest.
        error: error of each row, same shape, at least 0; for classes 0 where right and 1 where wrong. A dict by model if risk is one.
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
        >>> ax = risk_coverage(Risk(epistemic=torch.tensor([0.1, 0.2, 0.9]), total=torch.tensor([0.9, 0.2, 0.1])), torch.tensor([0.0, 0.0, 3.0]))
        >>> ax.get_legend_handles_labels()[1][2:]
        ['epistemic: AURC 0.333, lowest', 'total: AURC 1.83']
    """
    risk_label(kind)  # refuses an unknown kind before a figure is made
    if isinstance(risk, Risk):
        kinds = {name: risk[name] for name in COLOURS if name in risk.names()}
        rows = 0 if isinstance(error, Mapping) else array(error, "error").size
        per_row = {name: value for name, value in kinds.items() if torch.as_tensor(value).numel() == rows}
        return of_kinds(per_row or kinds, error, ax, unit)
    if isinstance(risk, Mapping):
        return _of_models(risk, error, ax, unit)
    if isinstance(error, Mapping):
        raise ValueError("error: it is a dict by model and risk is not; give risks by the same names")
    risks, errors, notes = _checked(risk, error)
    curve = risk_coverage_curve(risks, errors)
    ax = new_axes(ax)
    _orders(ax, errors)
    name = f"{label or kind}: AURC {aurc(risks, errors).item():.3g}"
    ax.plot(curve.coverage, curve.error, color=colour(ax, kind), linewidth=2, label=name, marker=_marker(risks))
    return _finished(ax, unit, notes)


def _marker(rows: np.ndarray) -> str | None:
    """Return the marker of a curve: a line through the point of a single row shows nothing."""
    return "o" if rows.size == 1 else None


def _orders(ax: Axes, errors: np.ndarray) -> None:
    """Draw the random and the best order, unless they are there already."""
    if "random order" in ax.get_legend_handles_labels()[1]:
        return
    mean, best = errors.mean(), risk_coverage_curve(errors, errors)
    ax.plot([0, 1], [mean, mean], color=ink(ax), linestyle=(0, (4, 2)), linewidth=1, alpha=0.7, label="random order")
    ax.plot(best.coverage, best.error, color=ink(ax), linestyle=":", linewidth=1.4, label="best order")


def of_kinds(risks: Mapping[str, Values], error: Values | Mapping[str, Values], ax: Axes | None, unit: str) -> Axes:
    """Draw a curve for each risk of the same rows and mark the lowest; scores that are no kind of risk, such as confidence, are dashed."""
    if isinstance(error, Mapping):
        raise ValueError("error: it is a dict by model and risk is that of one model; give risks by the same names")
    if not risks:
        raise ValueError("risk: there is none to draw")
    named = dict(zip((*risks, "error"), vectors(**risks, error=error), strict=True))
    # areas are comparable only over the same rows
    known = np.logical_and.reduce([~np.isnan(named[name]) for name in risks])
    if not known.any():
        raise ValueError(f"risk: none of {known.size} rows has a number for each of {', '.join(risks)}")
    errors = named.pop("error")
    finite(error=errors)
    not_negative(error=errors)
    errors, kept = errors[known], {name: value[known] for name, value in named.items()}
    areas = {name: aurc(value, errors).item() for name, value in kept.items()}
    highest_lowest = min(areas.values()) * (1 + TIE_TOLERANCE)
    differ = max(areas.values()) > highest_lowest
    ax = new_axes(ax)
    _orders(ax, errors)
    for name, value in kept.items():
        curve, lowest = risk_coverage_curve(value, errors), differ and areas[name] <= highest_lowest
        label = f"{name}: AURC {areas[name]:.3g}{', lowest' if lowest else ''}"
        look: dict[str, Any] = {
            "color": colour(ax, name if name in COLOURS else "total"),
            "linewidth": 2.6 if lowest else 1.6,
            "marker": _marker(value),
        }
        ax.plot(curve.coverage, curve.error, linestyle="-" if name in COLOURS else (0, (3, 1.5)), label=label, **look)
    dropped = int(known.size - known.sum())
    return _finished(ax, unit, [f"{dropped:,} of {known.size:,} rows with a NaN risk, dropped"] if dropped else [])


def _checked(risk: Values, error: Values) -> tuple[np.ndarray, np.ndarray, list[str]]:
    risks, errors = vectors(risk=risk, error=error)
    finite(error=errors)
    not_negative(error=errors)
    (risks, errors), notes = usable(risks, errors, infinite=True)
    return risks, errors, notes


def _of_models(risk: Mapping[str, Values], error: Values | Mapping[str, Values], ax: Axes | None, unit: str) -> Axes:
    """Draw a curve for each model."""
    checked = {name: _checked(*values) for name, values in of_models(risk, "risk", error, "error").items()}
    ax = new_axes(ax)
    for (name, (risks, errors, _)), (shade, dashes) in zip(checked.items(), MODELS, strict=False):
        curve, label = risk_coverage_curve(risks, errors), f"{name}: AURC {aurc(risks, errors).item():.3g}"
        look: dict[str, Any] = {"color": shade, "linestyle": dashes, "linewidth": 2, "marker": _marker(risks)}
        ax.plot(curve.coverage, curve.error, label=label, **look)
    return _finished(ax, unit, [f"{name}: {note}" for name, (_, _, notes) in checked.items() for note in notes])


def _finished(ax: Axes, unit: str, notes: list[str]) -> Axes:
    ax.set_xlim(0, 1.01)
    ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]), auto=None)  # auto=None keeps autoscaling on for later curves
    label_axes(ax, "coverage (share of rows answered)", with_unit("mean error of rows answered", unit))
    legend(ax, notes, headroom=True, columns=2)
    return ax


def sparsification(
    risk: Risk | Mapping[str, Values] | Values,
    error: Values,
    ax: Axes | None = None,
    *,
    mask: Values | None = None,
) -> Axes:
    """Draw the mean error that remains after the rows or pixels of highest risk are removed, over the share removed.

    The error is relative to the mean of all. A good risk falls like the oracle, which removes by the error itself; an uninformative one stays
    at 1, like removal in random order (Ilg et al., Uncertainty estimates and multi-hypotheses networks for optical flow, 2018).

    Args:
        risk: a `Risk`, a dict of risks by kind, or one risk, taken as total; each shaped like error. Kinds of a `Risk` with another shape, such
            as one number per image, are left out.
        error: errors of rows, pixels or tokens, any shape, at least 0; for classes 0 where right and 1 where wrong.
        ax: Axes to draw on; a new figure if None.
        mask: boolean, shaped like error, true where an element counts.

    Returns:
        The Axes; the legend has the area between each curve and the oracle's, `metrics.ause`.

    Raises:
        ValueError: for shapes that do not match, NaN, negative errors, errors that are all 0, an unknown kind, or a mask that leaves nothing.

    Example:
        >>> import torch
        >>> ax = sparsification(torch.tensor([0.1, 0.2, 0.9, 0.8]), torch.tensor([0.0, 0.0, 3.0, 1.0]))
        >>> ax.get_legend_handles_labels()[1]
        ['random order', 'oracle', 'total: AUSE 0']
    """
    errors = array(error, "error")
    counts = np.ones(errors.shape, dtype=bool) if mask is None else array(mask, "mask").astype(bool)
    same_shape(error=errors, mask=counts)
    if not counts.any():
        raise ValueError(f"mask: it leaves none of {counts.size} errors")
    errors = errors[counts]
    finite(error=errors)
    not_negative(error=errors)
    if not errors.any():
        raise ValueError(f"error: all {errors.size} are 0, so that removing rows can't lower their mean")
    by_kind = _by_kind(risk, error, counts.shape)
    kept = {name: torch.as_tensor(values[counts]) for name, values in by_kind.items()}
    curves = {name: (sparsification_curve(values, errors), ause(values, errors)) for name, values in kept.items()}
    ax = new_axes(ax)
    rows = np.unique(np.linspace(0, errors.size - 1, MAX_LINE_POINTS).round().astype(int))
    first = next(iter(curves.values()))[0]
    removed, grey = first.removed[rows], ink(ax)
    ax.plot(
        removed, first.random[rows], color=grey, linestyle=(0, (4, 2)), linewidth=1, alpha=0.7, label="random order"
    )
    ax.plot(removed, first.oracle[rows], color=grey, linestyle=":", linewidth=1.4, label="oracle")
    for name, (curve, area) in curves.items():
        label = f"{name}: AUSE {area.item():.3g}"
        look: dict[str, Any] = {"color": colour(ax, name), "linewidth": 2, "marker": _marker(errors)}
        ax.plot(removed, curve.error[rows], label=label, **look)
    ax.set_xlim(0, 1.01)
    label_axes(ax, "share removed", "mean error of the rest, over that of all")
    # the mean of the last few rows may be many times that of all
    highest = max(curve.error[curve.removed <= 0.98].max().item() for curve, _ in curves.values())
    ax.set_ylim(0, 1.05 * max(1.0, highest))
    legend(ax, headroom=True, columns=2)
    return ax


def _by_kind(
    risk: Risk | Mapping[str, Values] | Values, error: Values, shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Return the risks of the given shape by kind, in the order of `COLOURS`."""
    if isinstance(risk, Risk):
        arrays = {name: array(risk[name], f"risk.{name}") for name in risk.names()}
        arrays = {name: values for name, values in arrays.items() if values.shape == shape} or arrays
    else:
        named = risk if isinstance(risk, Mapping) else {"total": risk}
        for name, values in named.items():
            same_rows(error=error, **{f"risk.{name}": values})
        arrays = {name: array(values, f"risk.{name}") for name, values in named.items()}
    if not arrays:
        raise ValueError("risk: there is none to draw")
    for name, values in arrays.items():
        risk_label(name)
        if values.shape != shape:
            raise ValueError(f"shapes do not match: risk.{name} {list(values.shape)}, error {list(shape)}")
    return {name: arrays[name] for name in COLOURS if name in arrays}
