"""Curves of runs over their steps, such as losses over epochs."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import require
from .pictures import embedded
from .plots import COLOURS, PANELS, SERIES

Curves = Mapping[str, Sequence[tuple[int, float]]]  # name -> (step, value)


def curves_plot(runs: Mapping[str, Curves]) -> tuple[str, str] | None:
    """Draw what was measured over steps: a panel for each name, a line for each run.

    Args:
        runs: name of a run -> its curves; those of one step are left out.

    Returns:
        Address of a picture, and what it shows in words; None where there is no curve.
    """
    figure = curves_figure(runs)
    if figure is None:
        return None
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    words = f"{', '.join(ax.get_title() for ax in figure.axes if ax.get_visible())} over the steps, a line for each run"
    return embedded(base64.b64encode(buffer.getvalue()).decode()), words


def curves_figure(runs: Mapping[str, Curves]) -> Any:
    """The figure of `curves_plot`; of more runs than colours no line has a name."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for run, curves in runs.items():
        for name, points in curves.items():
            finite = [(step, value) for step, value in points if math.isfinite(value)]
            if len({step for step, _ in finite}) > 1:
                panels.setdefault(name, {})[run] = finite
    panels = dict(sorted(panels.items(), key=lambda item: -len(item[1]))[:PANELS])
    if not panels:
        return None
    shown = list(dict.fromkeys(run for panel in panels.values() for run in panel))
    named = len(shown) <= SERIES
    colours = dict(zip(shown, COLOURS, strict=False)) if named else dict.fromkeys(shown, COLOURS[1])
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = require("matplotlib.figure").Figure(figsize=(3.9 * columns, 2.6 * lines + 0.5), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for ax, (name, panel) in zip(axes, panels.items(), strict=False):
        for run, points in panel.items():
            steps, values = zip(*sorted(points), strict=True)
            ax.plot(steps, values, color=colours[run], linewidth=1.3, alpha=1.0 if named else 0.5, label=run)
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("step", fontsize=9)
        every = [value for points in panel.values() for _, value in points]
        if min(every) > 0 and max(every) > 50 * min(every):
            ax.set_yscale("log")
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", alpha=0.25)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    if named and len(shown) > 1:
        by_name = {label: line for ax in axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        short = [name if len(name) <= 40 else f"{name[:25]}…{name[-14:]}" for name in by_name]
        figure.legend(by_name.values(), short, loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    return figure


__all__ = ["Curves", "curves_figure", "curves_plot"]
