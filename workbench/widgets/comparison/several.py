"""Scores and pictures of a comparison with several targets per row: maps, tokens, columns and labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from workbench.data import Data, Split
from workbench.data.targets import VOID
from workbench.engine.effects.private_random import own_random
from workbench.experiments.measure import measure
from workbench.plots._images import MAX_CLASSES, class_colours, draw_panel

from ..common.pictures import INK, brief, paint
from ..common.predictions import Predictions
from .scales import Scales, columns_of, further, shared

NAMES = {"picp90": "coverage"}  # name in `measure` -> name in the table
SEPARATE_COSTS = ("parameters", "passes", "predict_seconds")  # measured by `trials` for all kinds of data
PICTURED_ROWS = 2  # rows whose maps are drawn


def scores(wrapped: Any, plain: nn.Module, data: Data, held_out: Split, seed: int) -> dict[str, float]:
    """Return the scores of `experiments.measure`, by the names of the table."""
    with own_random(seed, *{p.device for p in wrapped.parameters()}):
        measured = measure(wrapped, plain, data, held_out)
    return {NAMES.get(name, name): value for name, value in measured.items() if name not in SEPARATE_COSTS}


def picture_size(view: Any) -> tuple[float, float]:
    """Return width and height of the picture of a `PanelData`, in inches."""
    if view.kind != "maps":
        return 5.8, 0.6
    return 5.8, 1.3 * len(view.rows) + (0.2 if view.data.classes is None else 0.45)


def draw(figure: Any, view: Any, answers: Predictions, unit: str, scales: Scales | None = None) -> list[Any]:
    """Draw truth, prediction and risks of the first rows, with one scale per column; or a line of text if they are not maps.

    Args:
        figure: empty figure.
        view: inputs of the picture.
        answers: predictions for them.
        unit: unit of the target.
        scales: limits of the colours of each column, shared by all models; those of this model if None.
    """
    truth = view.data.test.y[view.rows]
    if view.kind != "maps":
        ax = figure.subplots()
        ax.set_axis_off()
        message = f"no picture of targets [n, {', '.join(map(str, truth.shape[1:]))}]: see their scores in the table"
        message += "" if view.data.task == "labels" else ",\nor the matrix of all models"
        ax.text(0.5, 0.5, message, ha="center", va="center", color=INK, fontsize=10, transform=ax.transAxes)
        return []
    classes = view.data.classes
    known = truth != VOID if classes is not None else truth.isfinite()
    quantities = columns_of(view, answers)
    truth = truth.double().masked_fill(~known, float("nan"))
    columns = {"truth": truth, "prediction": answers.y} | quantities
    ends = {**shared(view, [answers]), **(scales or {})}
    axes = figure.subplots(len(truth), len(columns), squeeze=False)
    for place, (name, maps) in enumerate(columns.items()):
        scale = ends.get("prediction" if place < 2 else name)
        look, title = class_look(len(classes or ())), name
        if scale is not None:
            look = {"cmap": "viridis" if place >= 2 else "cividis", "vmin": scale[0], "vmax": scale[1]}
            in_unit = " nats" if classes is not None and name != "vacuitic" else f" {unit}" if unit else ""
            more = further(maps, *scale) if place else ""
            title += f"\n{scale[0]:.2g} to {scale[1]:.2g}{in_unit}{more and f'; here {more}'}"
        for row, ax in enumerate(axes[:, place]):
            draw_panel(paint(ax), maps[row].double().numpy(), interpolation="nearest", **look)
        axes[0, place].set_title(title, fontsize=7.5)
    if classes is not None:
        _class_key(figure, classes)
    return []


def class_look(n: int) -> dict[str, Any]:
    """Return the colour map and limits of classes, as in `plots.matrix` and `plots.maps`."""
    cmap: Any = class_colours(n) if n <= MAX_CLASSES else "tab20"
    return {"cmap": cmap, "vmin": -0.5, "vmax": max(n, 2) - 0.5}


def _class_key(figure: Any, classes: Sequence[str]) -> None:
    if len(classes) > MAX_CLASSES:
        return
    from matplotlib.patches import Patch

    handles = [Patch(color=class_colours(len(classes))(i), label=brief(name, 14)) for i, name in enumerate(classes)]
    columns = min(len(classes), 6)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, fontsize=7.5, frameon=False, handlelength=1
    )
