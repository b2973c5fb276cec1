"""The picture of one model on one data set, by the kind of data, with its tooltips."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench import plots
from workbench.data import Data
from workbench.plots._common import with_unit

from ..common.inputs import sampled_rows
from ..common.pictures import INK, Spot, paint
from ..common.positions import has_several, is_map
from ..common.predictions import Predictions
from . import several
from .scales import Scales, columns_of, further, shared

MAX_ROWS = 1500  # test rows in a picture
COLUMNS, POINTS = 32, 24  # number of tooltips over a curve, and of points with tooltips
GRID = 48  # nodes along each side of a map


@dataclass(frozen=True, eq=False)
class PanelData:
    """The inputs a model predicts for its picture.

    Args:
        data: data set.
        kind: "curve" (one input), "plane" (two), "images", "maps", "several" (other targets per row) or "table" (everything else).
        x: inputs [n, ...].
        rows: numbers of these test rows [n]; empty for a curve and a plane, whose inputs are a grid.
        note: what the picture leaves out; "" if nothing.
        grid: xx and yy of a plane [GRID, GRID].
    """

    data: Data
    kind: str
    x: Tensor
    rows: Tensor
    note: str = ""
    grid: tuple[Any, Any] | None = field(default=None)

    @property
    def y(self) -> Tensor:
        """The true targets of the rows [n]."""
        return self.data.test.y[self.rows].reshape(-1)


def kind_of(data: Data) -> str:
    """Return the kind of picture that suits the data, see `PanelData`."""
    if has_several(data):
        return "maps" if is_map(data) else "several"
    if len(data.input_shape) == 3 and data.input_shape[0] in (1, 3) and min(data.input_shape[1:]) >= 4:
        return "images"
    if data.input_shape == (1,) and data.task == "regression":
        return "curve"
    return "plane" if data.input_shape == (2,) else "table"


def view_of(data: Data, fine: bool = True) -> PanelData:
    """Return the inputs of the picture: a grid over one or two inputs, else test rows, sampled if there are many.

    Args:
        data: data set.
        fine: False for fewer inputs, for a live picture.
    """
    kind, none = kind_of(data), torch.empty(0, dtype=torch.long)
    if kind in ("curve", "plane"):
        lines = [
            _line(data, i, (200 if fine else 100) if kind == "curve" else GRID if fine else 24)
            for i in range(data.input_shape[0])
        ]
        if kind == "curve":
            return PanelData(data, kind, lines[0][:, None], none)
        xx, yy = torch.meshgrid(*lines, indexing="xy")
        return PanelData(data, kind, torch.stack([xx.flatten(), yy.flatten()], 1), none, grid=(xx, yy))
    n = len(data.test)
    if kind in ("maps", "several"):
        rows = torch.arange(min(n, several.PICTURED_ROWS))
        shown = f"picture: the first {len(rows)} of {n:,} test rows" if kind == "maps" else ""
        return PanelData(data, kind, data.test.x[rows], rows, shown)
    most = MAX_ROWS if fine else 300
    rows = sampled_rows(n, most)
    note = f"picture: {most:,} of {n:,} test rows, drawn at random" if n > most else ""
    return PanelData(data, kind, data.test.x[rows], rows, note)


def _line(data: Data, column: int, n: int) -> Tensor:
    """Return evenly spaced values of an input, with a margin around all rows."""
    known, both = (
        x[x.isfinite()] for x in (data.train.x[:, column], torch.cat([data.train.x, data.test.x])[:, column])
    )
    low, high = float(both.min()), float(both.max())
    outside = high - low > 1.2 * float(known.max() - known.min())  # then the test rows already reach outside
    beyond = 0.0 if outside else 0.12 * (high - low) or 0.5
    return torch.linspace(low - beyond, high + beyond, n)


def size(view: PanelData, answers: Predictions) -> tuple[float, float]:
    """Return width and height of the picture, in inches."""
    if view.kind in ("maps", "several"):
        return several.picture_size(view)
    if view.kind == "curve":
        return 5.6, 3.7
    if view.kind == "plane":
        return 5.8, 2.5 * -(-(1 + len(_maps(answers))) // 2)
    if view.kind == "images":
        return 5.8, 1.35 * max(1, len(_ranked(answers)))
    return (6.0, 5.2 if view.data.classes is None and answers.causes else 2.8)


def draw(
    figure: Any, view: PanelData, answers: Predictions, unit: str = "", scales: Scales | None = None
) -> list[Spot]:
    """Draw the picture on an empty figure.

    Args:
        figure: matplotlib Figure or SubFigure.
        view: inputs of the picture.
        answers: predictions for `view.x`.
        unit: unit of the target.
        scales: limits of the colours, or of the axis of a curve, shared by all models; those of this model if None.

    Returns:
        The tooltips.
    """
    scaled = {"curve": _curve, "plane": _plane, "maps": several.draw, "several": several.draw}
    if view.kind in scaled:
        return scaled[view.kind](figure, view, answers, unit, scales)
    if view.kind == "images":
        return _images(figure, view, answers, unit)
    return (_table if view.data.classes is None else _classes)(figure, view, answers, unit)


# ---- one input
def _curve(figure: Any, view: PanelData, answers: Predictions, unit: str, scales: Scales | None = None) -> list[Spot]:
    data, ax = view.data, paint(figure.subplots())
    observed = (data.train.x, data.train.y)
    risks: dict[str, Any] = {name: answers.risk[name] for name in answers.causes}
    plots.bands(
        view.x, answers.y, **risks, observed=observed, xlabel=str(data.features[0]), ylabel=str(data.target), ax=ax
    )
    if scales:
        low, high = scales["prediction"]
        # room for the strip below and the legend above
        ax.set_ylim(low - 0.12 * (high - low), high + 0.4 * (high - low))
        ax.set_title(further(columns_of(view, answers)["prediction"], low, high), fontsize=8)
    at = torch.linspace(0, len(view.x) - 1, COLUMNS).round().long().tolist()
    width = float(view.x[-1] - view.x[0]) / (COLUMNS - 1)
    where = data.features[0].name
    return [
        Spot(ax, float(view.x[i]), None, [f"{where} {float(view.x[i]):.3g}", *tooltip(view, answers, i, unit)], width)
        for i in at
    ]


# ---- two inputs
def _maps(answers: Predictions) -> tuple[str, ...]:
    return answers.causes or (("total",) if answers.measured and "total" in answers.risk else ())


def _plane(figure: Any, view: PanelData, answers: Predictions, unit: str, scales: Scales | None = None) -> list[Spot]:
    data, maps = view.data, _maps(answers)
    ends = {**shared(view, [answers]), **(scales or {})}
    axes = list(figure.subplots(-(-(1 + len(maps)) // 2), 2, squeeze=False).flat)
    assert view.grid is not None
    if data.classes is None:
        value, label, limits = answers.y, str(data.target), ends["prediction"]
    elif len(data.classes) == 2:
        assert answers.probs is not None
        value, label, limits = answers.probs[:, 1], f"probability of {data.classes[1]}", (0.0, 1.0)
    else:
        value, label, limits = answers.y, "predicted class", (0.0, len(data.classes) - 1.0)
    chosen = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))[:150]
    points = (data.train.x[chosen], data.train.y[chosen]) if data.classes else None
    first = axes[0]
    _map(first, view, value, label, limits, points, "cividis")
    for ax, name in zip(axes[1 : 1 + len(maps)], maps, strict=True):
        in_unit = "nats" if data.classes else unit
        what = "vacuitic risk (sd)" if name == "vacuitic" else with_unit(f"{name} risk", in_unit)
        what += f"\n{more}" if name in ends and (more := further(answers.risk[name], *ends[name])) else ""
        _map(ax, view, answers.risk[name], what, ends.get(name, (0.0, 4.0)), None, "viridis")
    for ax in axes[1 + len(maps) :]:
        ax.set_visible(False)
    step = GRID // 5
    rows = [
        i
        for i in range(len(view.x))
        if (i % view.grid[0].shape[1]) % step == step // 2 and (i // view.grid[0].shape[1]) % step == step // 2
    ]
    names = [column.name for column in data.features]
    return [
        Spot(first, float(a), float(b), [f"{names[0]} {a:.2g}, {names[1]} {b:.2g}", *tooltip(view, answers, i, unit)])
        for i, (a, b) in ((i, view.x[i].tolist()) for i in rows)
    ]


def _map(ax: Any, view: PanelData, value: Tensor, label: str, limits: Any, points: Any, cmap: str) -> None:
    assert view.grid is not None
    plots.decision_map(*view.grid, value, paint(ax), label=label, limits=limits, points=points, cmap=cmap)
    first, second = view.data.features
    ax.set(xlabel=str(first), ylabel=str(second))
    ax.yaxis.labelpad = 0
    if ax.get_legend() is not None:
        ax.get_legend().remove()  # no room in small maps; light points are the first class, dark ones the second


# ---- tables
def _table(figure: Any, view: PanelData, answers: Predictions, unit: str) -> list[Spot]:
    risky = bool(answers.causes)
    axes = [paint(ax) for ax in figure.subplots(2 if risky else 1, 2, squeeze=False).flat]
    first, cover = axes[:2]
    total = answers.risk.get("total")
    plots.predicted_against_true(answers.y, view.y, total, first, unit=unit)
    if total is None:  # in a live picture no noise can be assumed yet
        cover.set_visible(False)
    else:
        plots.coverage(answers.y, total, view.y, cover)
        cover.set(xlabel="expected share inside", ylabel="observed share inside")
        for text in cover.get_legend().get_texts():  # type: ignore[union-attr]
            text.set_text(text.get_text().rpartition("), ")[2])
    if risky:
        _by_risk(axes[2], answers, (answers.y - view.y).abs(), unit)
        _spread(axes[3], answers, unit)
    _small(*axes)
    return [
        Spot(
            first,
            float(view.y[i]),
            float(answers.y[i]),
            [f"test row {int(view.rows[i])}", *tooltip(view, answers, i, unit)],
        )
        for i in _rows_with_tooltip(answers)
    ]


def _by_risk(ax: Any, answers: Predictions, error: Tensor, unit: str) -> None:
    plots.risk_against_error(
        answers.risk[answers.kind], error, ax, kind=answers.kind, unit="" if answers.kind == "vacuitic" else unit
    )
    if answers.kind == "vacuitic":
        ax.set(ylabel=with_unit("absolute error", unit))


def _spread(ax: Any, answers: Predictions, unit: str) -> None:
    """Draw the sorted values of each risk, which show its distribution over the rows."""
    causes = [name for name in answers.causes if name != "vacuitic"]
    if not causes:
        ax.set_visible(False)
        return
    share = np.linspace(0, 100, len(answers.y))
    for name in causes:
        ax.plot(share, np.sort(answers.risk[name].numpy()), color=plots.COLOURS[name], linewidth=1.8, label=name)
    plots._common._style(ax)
    ax.set(xlabel="share of the test rows (%)", ylabel=with_unit("risk at most", unit), ylim=(0, None))
    plots._common.legend(ax, loc="upper left")


def _classes(figure: Any, view: PanelData, answers: Predictions, unit: str) -> list[Spot]:
    first, second = (paint(ax) for ax in figure.subplots(1, 2))
    assert answers.probs is not None
    plots.reliability(answers.probs, view.y, ax=first)  # in the bins of the table's ECE
    right = answers.y == view.y
    risk = answers.risk[answers.kind]
    if right.all() or not right.any():
        _write_instead(second, f"all of these rows are {'right' if right.all() else 'wrong'}")
    else:
        unit = "" if answers.kind == "vacuitic" else "nats"
        plots.ood_histogram(
            risk[right], risk[~right], second, labels=("right", "wrong"), kind=answers.kind, unit=unit, n_bins=20
        )
        second.set(ylabel="share of rows per bin")
    _small(first, second)
    return []


def _small(*axes: Any) -> None:
    """Shrink labels and legends for small Axes; label logarithmic axes at 1, 2 and 5 only, so that labels do not overlap."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for ax in axes:
        for axis, scale in ((ax.xaxis, ax.get_xscale()), (ax.yaxis, ax.get_yscale())):
            if scale == "log":
                axis.set_major_locator(LogLocator(subs=(1, 2, 5) if axis is ax.xaxis else (1,), numticks=8))
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axis.set_minor_formatter(NullFormatter())
        ax.xaxis.label.set_fontsize(9.5)
        ax.yaxis.label.set_fontsize(9.5)
        if ax.get_legend() is not None:
            for text in ax.get_legend().get_texts():
                text.set_fontsize(7.5)


def _write_instead(ax: Any, text: str) -> None:
    ax.set_axis_off()
    ax.text(0.5, 0.5, text, ha="center", va="center", color=INK, fontsize=10, transform=ax.transAxes)


# ---- images
def _ranked(answers: Predictions) -> tuple[str, ...]:
    return answers.causes or (("total",) if "total" in answers.risk else ())


def _images(figure: Any, view: PanelData, answers: Predictions, unit: str) -> list[Spot]:
    kinds = _ranked(answers)
    if not kinds:
        _write_instead(figure.subplots(), "no risk yet")
        return []
    across = 6
    axes = figure.subplots(len(kinds), across, squeeze=False)
    for row, name in zip(axes, kinds, strict=True):
        worst = answers.risk[name].argsort(descending=True)[:across].tolist()
        for place, ax in enumerate(row):
            paint(ax)
            ax.set(xticks=[], yticks=[])
            if place >= len(worst):
                ax.set_visible(False)
                continue
            i = worst[place]
            picture = view.x[i].permute(1, 2, 0)
            low, high = float(picture.min()), float(picture.max())
            ax.imshow(((picture - low) / (high - low or 1)).squeeze(-1).numpy(), cmap="gray", aspect="equal")
            predicted, true = answers.y[i], view.y[i]
            if view.data.classes is None:
                title = f"{float(predicted):.3g}\n(true {float(true):.3g})"
            else:
                names = view.data.classes
                title = names[int(predicted)] + ("" if predicted == true else f"\n(true {names[int(true)]})")
            ax.set_title(title, fontsize=7, pad=2)
            ax.set_xlabel(f"{float(answers.risk[name][i]):.2f}", fontsize=7, labelpad=1)
        row[0].set_ylabel(f"most\n{name}", fontsize=8, color=plots.COLOURS[name])
    return []


# ---- tooltips
def tooltip(view: PanelData, answers: Predictions, i: int, unit: str) -> list[str]:
    """Return the lines of the tooltip of a row: prediction, true value and risks by cause."""
    data, in_unit = view.data, f" {unit}" if unit else ""
    if data.classes is None:
        lines = [f"prediction {float(answers.y[i]):.4g}{in_unit}"]
    else:
        assert answers.probs is not None
        lines = [f"prediction {data.classes[int(answers.y[i])]} ({float(answers.probs[i].max()):.0%})"]
    if len(view.rows):
        true = view.y[i]
        lines.append(f"true {data.classes[int(true)] if data.classes else f'{float(true):.4g}{in_unit}'}")
    for name in answers.causes:
        of = " sd" if name == "vacuitic" else " nats" if data.classes else in_unit
        lines.append(f"{name} {float(answers.risk[name][i]):.3g}{of}")
    return lines


def _rows_with_tooltip(answers: Predictions) -> list[int]:
    """Return the rows that get a tooltip: those of highest risk, and some others."""
    n = len(answers.y)
    risk = answers.risk.get(answers.kind, torch.zeros(n))
    highest = risk.argsort(descending=True)[: POINTS // 2].tolist()
    others = torch.linspace(0, n - 1, min(n, POINTS // 2)).long().tolist()
    return list(dict.fromkeys([*highest, *others]))
