"""Pictures of the surroundings of a case: all cases, along one feature, the plane of two features, and the risk-coverage curve."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench import plots
from workbench.data import Data
from workbench.plots._common import choose_scale, colour, ink, legend, new_axes, point_look, with_unit
from workbench.plots.curves import strip
from workbench.plots.selective import of_kinds
from workbench.widgets.common.pictures import Spot
from workbench.widgets.common.predictions import Predictions, risk_unit
from workbench.widgets.explorer.editing import Knob

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SPOTS = 150  # points with tooltips in the plot of all cases
POINTS = 61  # values along a feature
GRID_SIZE = 50  # nodes along each side of a plane


def risk_label(data: Data, output: str, by: str) -> str:
    """Return the axis label of a ranking."""
    if by == "error":
        error = "|prediction − true|" if data.classes is None else "−log p(true class)"
        return f"error {with_unit(error, risk_unit(data, output, by))}"
    if by == "confidence":
        return "1 - confidence"
    if by == "vacuitic":
        return "vacuitic risk (standardized)"
    return with_unit(f"{by} risk", risk_unit(data, output, by))


def shade(ax: Axes, by: str) -> str:
    """Return the colour of a ranking."""
    return colour(ax, by if by in plots.COLOURS else "total")


def draw_overview(
    ax: Axes,
    data: Data,
    output: str,
    by: str,
    value: Tensor,
    error: Tensor,
    tell: Callable[[int], Sequence[str]],
) -> list[Spot]:
    """Draw the error over a risk of all cases, as points with tooltips.

    Args:
        ax: Axes to draw on.
        data: data set, for names and units.
        output: "values", "logits" or "probs".
        by: name of the risk on the x axis.
        value: risk of each case [n].
        error: error of each case [n].
        tell: returns the tooltip lines of the i-th case.
    """
    n = len(value)
    chosen = torch.arange(n)
    if n > MAX_SPOTS:
        # those of highest risk, and a fixed random sample of the others
        order = value.argsort(descending=True, stable=True)
        others = order[50:][torch.randperm(n - 50, generator=torch.Generator().manual_seed(0))[: MAX_SPOTS - 50]]
        chosen = torch.cat([order[:50], others])
    new_axes(ax)
    x, y = value[chosen].numpy(), error[chosen].numpy()
    label = "test cases" if n <= MAX_SPOTS else f"{MAX_SPOTS:,} of {n:,} test cases"
    ax.scatter(x, y, color=shade(ax, by), label=label, **point_look(len(chosen)))
    choose_scale(ax, "x", x)
    choose_scale(ax, "y", y)
    ax.set(xlabel=risk_label(data, output, by), ylabel=risk_label(data, output, "error"))
    legend(ax, headroom=True)
    return [Spot(ax, a, b, tell(i)) for a, b, i in zip(x.tolist(), y.tolist(), chosen.tolist(), strict=True)]


def draw_along(ax: Axes, data: Data, output: str, knob: Knob, values: Tensor, answers: Predictions) -> None:
    """Draw prediction and risks of a case while one of its properties changes.

    Args:
        ax: Axes to draw on.
        data: data set, for names, units and classes.
        output: "values", "logits" or "probs".
        knob: property that changes.
        values: its values [n], increasing.
        answers: predictions at these values.
    """
    if data.classes is None:
        known: dict[str, Any] = {name: risk for name, risk in answers.risk.items() if name != "total"}
        seen = (data.train.x, data.train.y) if data.input_shape == (1,) else None
        plots.bands(values, answers.y, **known, observed=seen, xlabel=knob.label, ylabel=str(data.target), ax=ax)
        return
    new_axes(ax)
    names = [name for name in answers.risk if name != "vacuitic"] or ["vacuitic"]
    for name in names:
        if name in answers.risk:
            style: Any = "--" if name == "total" else "-"
            ax.plot(values, answers.risk[name], color=colour(ax, name), linewidth=1.8, linestyle=style, label=name)
    unit = risk_unit(data, output)
    ax.set(xlabel=knob.label, ylabel=with_unit("risk", unit), xlim=(values[0].item(), values[-1].item()))
    ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]), auto=None)
    _classes(ax, data, values, answers.y)
    extra = []
    if "vacuitic" in answers.risk and names != ["vacuitic"]:
        extra = [strip(ax, values.numpy(), answers.risk["vacuitic"].numpy())]
    if extra or ax.get_legend_handles_labels()[0]:
        legend(ax, extra=extra, headroom=True, columns=2)


def _classes(ax: Axes, data: Data, values: Tensor, predicted: Tensor) -> None:
    """Write the predicted classes below the curves, with lines where they change."""
    assert data.classes is not None
    low, high = ax.get_ylim()
    ax.set_ylim(bottom=low - 0.12 * (high - low), auto=None)  # room for a line of text
    bounds = [0, *((predicted[1:] != predicted[:-1]).nonzero()[:, 0] + 1).tolist(), len(values)]
    for first, last in itertools.pairwise(bounds):
        if first:
            ax.axvline((values[first - 1].item() + values[first].item()) / 2, color=ink(ax), linewidth=0.8, alpha=0.6)
        name = data.classes[int(predicted[first])]
        if (last - first) / len(values) > 0.02 + 0.017 * len(name):
            middle = (values[first].item() + values[last - 1].item()) / 2
            ax.annotate(
                name,
                (middle, low),
                (0, -2),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=9,
                color=ink(ax),
                parse_math=False,
            )


def plane_grid(data: Data) -> tuple[Tensor, Tensor]:
    """Return a grid of two inputs over the range of training and test rows, each [rows, columns]."""
    both = torch.cat([data.train.x, data.test.x])
    low, high = both.amin(0), both.amax(0)
    margin = torch.where(high > low, 0.04 * (high - low), 1.0)
    sides = [
        torch.linspace(a, b, GRID_SIZE) for a, b in zip((low - margin).tolist(), (high + margin).tolist(), strict=True)
    ]
    xx, yy = torch.meshgrid(*sides, indexing="xy")
    return xx, yy


def draw_plane(ax: Axes, data: Data, output: str, by: str, xx: Tensor, yy: Tensor, value: Tensor) -> None:
    """Draw a risk as a map over two inputs, with training rows on top if they have classes."""
    some = torch.arange(0, len(data.train), max(1, len(data.train) // 200))
    points = (data.train.x[some], data.train.y[some]) if data.classes is not None else None
    plots.decision_map(xx, yy, value, ax=ax, label=risk_label(data, output, by), points=points, classes=data.classes)
    ax.set(xlabel=str(data.features[0]), ylabel=str(data.features[1]))


def draw_coverage(ax: Axes, data: Data, risks: Mapping[str, Tensor], error: Tensor) -> None:
    """Draw the risk-coverage curves of all risks."""
    unit = data.target.unit if data.classes is None else ""
    of_kinds(risks, error, ax, unit)
    ax.set(
        xlabel="coverage (share answered)",
        ylabel=with_unit("mean error", unit) if data.classes is None else "share wrong",
    )


# ---- marks over a picture, which move without redrawing it
def place(ax: Axes, x: float, y: float) -> tuple[float, float]:
    """Return the position of a point of the Axes in a drawn picture, in percent from the left and from the top."""
    figure: Any = ax.figure.figure
    across, up = figure.transFigure.inverted().transform(ax.transData.transform((x, y)))
    return 100 * float(across), 100 * (1 - float(up))


def dot(ax: Axes, x: float, y: float) -> str:
    """Return a ring at a point of the Axes as HTML; "" outside them."""
    box = ax.get_position()
    left, top = place(ax, x, y)
    if not (
        100 * box.x0 - 0.5 <= left <= 100 * box.x1 + 0.5 and -0.5 <= top - 100 * (1 - box.y1) <= 100 * box.height + 1
    ):
        return ""
    return f'<div class="wb-here" style="left:{left:.2f}%;top:{top:.2f}%"></div>'


def line(ax: Axes, x: float) -> str:
    """Return a vertical line through the Axes, up to the legend if that is above it, as HTML; "" outside them."""
    box = ax.get_position()
    left, top = place(ax, x, 0)[0], box.y1
    if not 100 * box.x0 - 0.5 <= left <= 100 * box.x1 + 0.5:
        return ""
    if (legend := ax.get_legend()) is not None:
        over = legend.get_window_extent().transformed(ax.figure.transFigure.inverted())
        top = over.y0 if over.x0 <= left / 100 <= over.x1 and over.y0 > box.y0 else top
    return f'<div class="wb-line" style="left:{left:.2f}%;top:{100 * (1 - top):.2f}%;height:{100 * (top - box.y0):.2f}%"></div>'


__all__ = ["draw_along", "draw_coverage", "draw_overview", "draw_plane", "line", "risk_label"]
