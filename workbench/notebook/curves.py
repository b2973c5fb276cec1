"""Plots of metrics over steps, such as losses over epochs."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import require
from ..plots._common import DASHES, whole_numbers
from .pictures import embedded, without_latex
from .plots import COLOURS, MAX_PANELS, MAX_SERIES

Curves = Mapping[str, Sequence[tuple[int, float]]]  # name -> (step, value)


@without_latex()
def curves_plot(runs: Mapping[str, Curves]) -> tuple[str, str] | None:
    """Plot metrics over steps: a panel per metric, a line per run.

    Args:
        runs: name of a run -> its curves; curves with a single step are left out.

    Returns:
        Data URL of a picture and its description; None if there are no curves.
    """
    figure = curves_figure(runs)
    if figure is None:
        return None
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    words = f"{', '.join(ax.get_title() for ax in figure.axes if ax.get_visible())} over the steps, a line for each run"
    return embedded(base64.b64encode(buffer.getvalue()).decode()), words


def curves_figure(runs: Mapping[str, Curves]) -> Any:
    """Return the figure of `curves_plot`; with more runs than colours there is no legend."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for run, curves in runs.items():
        for name, points in curves.items():
            finite = [(step, value) for step, value in points if math.isfinite(value)]
            if len({step for step, _ in finite}) > 1:
                panels.setdefault(name, {})[run] = finite
    panels = dict(sorted(panels.items(), key=lambda item: -len(item[1]))[:MAX_PANELS])
    if not panels:
        return None
    run_names = list(dict.fromkeys(run for panel in panels.values() for run in panel))
    has_legend = len(run_names) <= MAX_SERIES
    colours = dict(zip(run_names, COLOURS, strict=False)) if has_legend else dict.fromkeys(run_names, COLOURS[1])
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = require("matplotlib.figure").Figure(figsize=(3.9 * columns, 2.6 * lines + 0.5), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for ax, (name, panel) in zip(axes, panels.items(), strict=False):
        for run, points in panel.items():
            steps, values = zip(*sorted(points), strict=True)
            colour, dashes = colours[run], DASHES[run_names.index(run) % len(DASHES)] if has_legend else "-"
            alpha = 1.0 if has_legend else 0.5
            ax.plot(steps, values, color=colour, linestyle=dashes, linewidth=1.3, alpha=alpha, label=run)
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("step", fontsize=9)
        whole_numbers(ax)
        all_values = [value for points in panel.values() for _, value in points]
        if min(all_values) > 0 and max(all_values) > 50 * min(all_values):
            ax.set_yscale("log")
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", alpha=0.25)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    if has_legend and len(run_names) > 1:
        by_name = {label: line for ax in axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        short = [name if len(name) <= 40 else f"{name[:25]}…{name[-14:]}" for name in by_name]
        figure.legend(by_name.values(), short, loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    return figure


__all__ = ["Curves", "curves_figure", "curves_plot"]
