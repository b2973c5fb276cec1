"""One scale for several models, which no outlier among them stretches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.plots._common import Array

ROOM = 4.0  # widths of a typical model's range that others may reach beyond it
TYPICAL = 0.98  # far from the data risks may grow without end, and one corner would leave no colour for all else


def common_range(ranges: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The range of several models, without those that lie far outside that of a typical one; of two models there is no typical one.

    Example:
        >>> common_range([(0.0, 1.0), (0.0, 1.5), (0.0, 80.0)]), common_range([(0.0, 1.0), (0.0, 80.0)])
        ((0.0, 1.5), (0.0, 80.0))
    """
    lows, highs = np.array(ranges, dtype=float).T
    middle = float(np.median(lows)), float(np.median(highs))
    room = ROOM * (middle[1] - middle[0])
    if len(ranges) < 3 or room <= 0:
        return float(lows.min()), float(highs.max())
    return float(lows[lows >= middle[0] - room].min()), float(highs[highs <= middle[1] + room].max())


def scale(values: Sequence[Array], *, bottom: float | None = None, typical: float = 1.0) -> tuple[float, float]:
    """Ends of the colours of what several models give, an array each.

    Args:
        values: what is not finite does not count.
        bottom: the lower end, if it is known.
        typical: share of the numbers of each model that its range holds, from below.
    """
    numbers = [v for v in (v[np.isfinite(v)] for v in values) if v.size]
    if not numbers:
        return bottom or 0.0, (bottom or 0.0) + 1
    low, high = common_range([(float(v.min()), float(np.quantile(v, typical))) for v in numbers])
    low = low if bottom is None else bottom
    return low, high if high > low else low + 1


def beyond(names: Sequence[str], values: Sequence[Array], low: float, high: float) -> str:
    """Which models reach far beyond a scale, and how far: "" if none does."""
    room, said = 0.5 * (high - low), []
    for name, v in zip(names, values, strict=True):
        v = v[np.isfinite(v)]
        if v.size and float(np.quantile(v, TYPICAL)) > high + room:
            said.append(f"{name} up to {float(v.max()):.2g}")
        elif v.size and float(v.min()) < low - room:
            said.append(f"{name} down to {float(v.min()):.2g}")
    return "; ".join(said)


__all__ = ["TYPICAL", "beyond", "common_range", "scale"]
