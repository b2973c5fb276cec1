"""Plots of an index: recorded numbers over the parameters of the grid."""

from __future__ import annotations

import base64
import io
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import require
from ..experiments.directions import higher_is_better, metric_of
from .comparable import data_parameters
from .pictures import embedded, without_latex
from .tables import REPEATS, varied
from .values import as_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PANELS, MAX_SERIES = 12, 8
# Okabe and Ito's palette, which is safe for colour-blind readers, and one more colour
COLOURS = ("#444444", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
MARKERS = dict(zip(COLOURS, "osD^vPX*", strict=True))  # for readers and printers without colours

Panel = dict[str, list[tuple[Any, float]]]  # name of a series -> (position on the axis, value)


def grid_plot(runs: Sequence[tuple[Mapping[str, Any], Mapping[str, float]]]) -> tuple[str, str] | None:
    """Plot the recorded numbers over a parameter of the grid: a point per run, and means.

    Means of one data set over a numeric parameter are joined by a line; with more data sets than colours, no means are drawn.

    Args:
        runs: (parameters, recorded numbers) of each run.

    Returns:
        Data URL of a picture and its description; None if there is nothing to compare.
    """
    differing = varied([parameters for parameters, _ in runs])
    if not differing:
        return None
    main = [name for name in differing if name not in REPEATS]
    if not main and any((metric := metric_of(name)) and metric[0] for _, numbers in runs for name in numbers):
        return _picture(_panels_by_kind(runs), "")
    data = [name for name in data_parameters([parameters for parameters, _ in runs]) if name in differing]
    main = [*(name for name in main if name not in data), *(name for name in main if name in data)]
    axis = (main or differing)[0]
    extra_parameters = [name for name in data if name != axis] or main[1:2]
    panels = _panels(runs, axis, extra_parameters)
    pooled = len({series for panel in panels.values() for series in panel}) > MAX_SERIES
    if pooled:
        panels = _panels(runs, axis, [])
    values = [parameters.get(axis) for parameters, _ in runs]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    mean_style = (
        "no" if pooled and set(data) - {axis} else "line" if numbers and axis not in (*data, *REPEATS) else "mean"
    )
    return _picture(panels, axis, _distinct(values), mean_style)


@without_latex()
def _picture(
    panels: dict[str, Panel], axis: str, order: Sequence[str] = (), mean_style: str = "mean"
) -> tuple[str, str] | None:
    if not panels:
        return None
    distinct = dict.fromkeys(x for panel in panels.values() for points in panel.values() for x, _ in points)
    positions = {text: position for position, text in enumerate(order or distinct)}
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    series = list(dict.fromkeys(name for panel in panels.values() for name in panel))[:MAX_SERIES]
    colours = dict(zip(filter(None, series), COLOURS, strict=False)) | ({"": COLOURS[0]} if "" in series else {})
    figure = require("matplotlib.figure").Figure(
        figsize=(3.9 * columns, 2.6 * lines + 0.5 * (len(series) > 1)), layout="constrained"
    )
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for ax, (metric, panel) in zip(axes, panels.items(), strict=False):
        _draw(ax, metric, panel, positions, colours, axis, mean_style)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    if len(series) > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(len(series), 6), frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    words = f"{', '.join(panels)} over {axis or ', '.join(positions)}{f', for {chr(44).join(series)}' if len(series) > 1 else ''}"
    return embedded(base64.b64encode(buffer.getvalue()).decode()), words


def _panels_by_kind(runs: Sequence[tuple[Mapping[str, Any], Mapping[str, float]]]) -> dict[str, Panel]:
    """Return the panels for runs that only repeat each other: metric -> a point per run over the subjects of the metric."""
    panels: dict[str, Panel] = {}
    for _, numbers in runs:
        for name, value in numbers.items():
            if (parts := metric_of(name)) is not None:
                panels.setdefault(parts[1], {}).setdefault("", []).append((parts[0] or "all", value))
    return dict(list(panels.items())[:MAX_PANELS])


def _panels(
    runs: Sequence[tuple[Mapping[str, Any], Mapping[str, float]]], axis: str, groups: Sequence[str]
) -> dict[str, Panel]:
    """Return metric -> series -> points: known metrics first, constant numbers left out."""
    metric_panels: dict[str, Panel] = {}
    other_panels: dict[str, Panel] = {}
    for parameters, numbers in runs:
        for name, value in numbers.items():
            parts = metric_of(name)
            subject, metric = parts or ("", name)
            series = ", ".join(
                filter(None, [subject, *(f"{group} {as_text(parameters.get(group))}" for group in groups)])
            )
            panel = (metric_panels if parts else other_panels).setdefault(metric, {})
            panel.setdefault(series, []).append((as_text(parameters.get(axis)), value))
    changing = {
        metric: panel
        for metric, panel in {**metric_panels, **other_panels}.items()
        if len({value for points in panel.values() for _, value in points}) > 1
    }
    return dict(list(changing.items())[:MAX_PANELS])


def _draw(
    ax: Axes, metric: str, panel: Panel, positions: dict[str, int], colours: dict[str, str], axis: str, mean_style: str
) -> None:
    drawn_series = [series for series in colours if series in panel]
    for series, colour in colours.items():
        points = panel.get(series, [])
        # series are shifted sideways so that they do not overlap
        shift = (
            (drawn_series.index(series) - (len(drawn_series) - 1) / 2) * 0.5 / max(len(drawn_series), 4)
            if points
            else 0.0
        )
        ax.plot(
            [positions[x] + shift for x, _ in points],
            [y for _, y in points],
            MARKERS[colour],
            color=colour,
            markersize=4 if MARKERS[colour] in "osD" else 5.5,  # of about the same area
            alpha=0.55,
            label=series,
        )
        means = [
            (position + shift, statistics.fmean(values_here))
            for text, position in positions.items()
            if (values_here := [y for x, y in points if x == text])
        ]
        half_width = 0.2 / max(len(drawn_series), 1) if axis else 0.25
        if mean_style == "line":
            ax.plot([x for x, _ in means], [y for _, y in means], "-", color=colour, linewidth=1.3)
        elif mean_style == "mean":
            ax.hlines(
                [y for _, y in means],
                [x - half_width for x, _ in means],
                [x + half_width for x, _ in means],
                color=colour,
            )
    ax.set_xticks(
        list(positions.values()), [text if len(text) <= 14 else f"{text[:13]}…" for text in positions], fontsize=8
    )
    if sum(map(len, positions)) > 30:
        ax.tick_params(axis="x", rotation=45)
    ax.set_xlabel(axis, fontsize=9)
    ax.set_xlim(-0.5, len(positions) - 0.5)
    values = [value for points in panel.values() for _, value in points]
    if min(values) > 0 and max(values) > 50 * min(values):
        ax.set_yscale("log")
    ax.tick_params(axis="y", labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.25)
    higher = higher_is_better(metric)
    ax.set_title(metric + ("" if higher is None else f", {'higher' if higher else 'lower'} is better"), fontsize=10)


def _distinct(values: Sequence[Any]) -> list[str]:
    """Return the distinct values as texts: numbers sorted, others in order of appearance."""
    if all(isinstance(value, int | float) for value in values):
        values = sorted(values)
    return list(dict.fromkeys(map(as_text, values)))
