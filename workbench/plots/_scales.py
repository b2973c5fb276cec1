"""Scales shared by several models, without outliers among the models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.plots._common import Array

OUTLIER_WIDTHS = 4.0  # a model that reaches further beyond the median range, in widths of that range, is an outlier
TYPICAL = 0.98  # quantile at which colours end: risks may grow without bound in one corner far from the data


def common_range(ranges: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the range of several models without outliers: those far outside the median range. Of two models, none is an outlier.

    Example:
        >>> common_range([(0.0, 1.0), (0.0, 1.5), (0.0, 80.0)]), common_range([(0.0, 1.0), (0.0, 80.0)])
        ((0.0, 1.5), (0.0, 80.0))
    """
    lows, highs = np.array(ranges, dtype=float).T
    middle = float(np.median(lows)), float(np.median(highs))
    room = OUTLIER_WIDTHS * (middle[1] - middle[0])
    if len(ranges) < 3 or room <= 0:
        return float(lows.min()), float(highs.max())
    return float(lows[lows >= middle[0] - room].min()), float(highs[highs <= middle[1] + room].max())


def scale(values: Sequence[Array], *, bottom: float | None = None, typical: float = 1.0) -> tuple[float, float]:
    """Return the limits of a colour scale for several models.

    Args:
        values: one array for each model; values that are not finite are ignored.
        bottom: the lower limit, if fixed.
        typical: quantile of each model's values that counts as its upper end.
    """
    numbers = [v for v in (v[np.isfinite(v)] for v in values) if v.size]
    if not numbers:
        return bottom or 0.0, (bottom or 0.0) + 1
    low, high = common_range([(float(v.min()), float(np.quantile(v, typical))) for v in numbers])
    low = low if bottom is None else bottom
    return low, high if high > low else low + 1


def extension(values: Sequence[Array], low: float, high: float) -> str:
    """Return matplotlib's `extend=` of a colour bar: at which of its ends some finite values are beyond it.

    Example:
        >>> extension([np.array([0.0, 3.0])], 0, 2), extension([np.array([0.0, np.nan])], 0, 2)
        ('max', 'neither')
    """
    known = [v for v in (v[np.isfinite(v)] for v in values) if v.size]
    over = any(v.max() > high + 1e-9 * (high - low) for v in known)
    under = any(v.min() < low - 1e-9 * (high - low) for v in known)
    return {(True, True): "both", (True, False): "max", (False, True): "min"}.get((over, under), "neither")


def beyond(drawn: Sequence[tuple[str, Array]], low: float, high: float) -> str:
    """Name the models that reach far beyond a scale, and how far; "" if there are none.

    Args:
        drawn: name and values of each model; values that are not finite are ignored.
        low, high: limits of the scale.
    """
    room, outliers = 0.5 * (high - low), []
    for name, v in drawn:
        v = v[np.isfinite(v)]
        if v.size and float(np.quantile(v, TYPICAL)) > high + room:
            outliers.append(f"{name} up to {float(v.max()):.2g}")
        elif v.size and float(v.min()) < low - room:
            outliers.append(f"{name} down to {float(v.min()):.2g}")
    return "; ".join(outliers)


__all__ = ["TYPICAL", "beyond", "common_range", "extension", "scale"]
