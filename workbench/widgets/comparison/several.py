"""Scores and pictures of a comparison over targets of several numbers a row: maps, tokens and columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from workbench.data import Data, Split
from workbench.data.targets import VOID
from workbench.engine.effects.private_random import own_random
from workbench.experiments.measure import measure

from ..common.pictures import INK, paint
from ..common.predictions import CAUSES, Predictions

NAMES = {"picp90": "coverage"}  # of `measure` -> those of the table
OWN_COSTS = ("parameters", "passes", "predict_seconds")  # the table counts these for every kind of data by itself
SHOWN = 2  # rows whose maps are drawn


def scores(wrapped: Any, plain: nn.Module, data: Data, held_out: Split, seed: int) -> dict[str, float]:
    """The scores of `experiments.measure`, by the names of the table."""
    with own_random(seed, *{p.device for p in wrapped.parameters()}):
        measured = measure(wrapped, plain, data, held_out)
    return {NAMES.get(name, name): value for name, value in measured.items() if name not in OWN_COSTS}


def _mapped(answers: Predictions, shape: torch.Size) -> list[str]:
    names = [name for name in CAUSES if name in answers.risk] or ["total"]
    return [name for name in names if name in answers.risk and answers.risk[name].shape == shape]


def picture_size(view: Any) -> tuple[float, float]:
    """Width and height of the picture of a `PanelData`, in inches."""
    return (5.8, 1.3 * len(view.rows) + 0.2) if view.kind == "maps" else (5.8, 0.5)


def draw(figure: Any, view: Any, answers: Predictions, unit: str) -> list[Any]:
    """Draw truth, prediction and risks of the first rows, with one scale a column; or say in a line that there is none."""
    truth = view.data.test.y[view.rows]
    if view.kind != "maps":
        ax = figure.subplots()
        ax.set_axis_off()
        said = f"no picture of targets [n, {', '.join(map(str, truth.shape[1:]))}]: the table has their scores"
        ax.text(0.5, 0.5, said, ha="center", va="center", color=INK, fontsize=10, transform=ax.transAxes)
        return []
    names = _mapped(answers, answers.y.shape)
    columns = {"truth": truth, "prediction": answers.y, **{name: answers.risk[name] for name in names}}
    if view.data.classes is not None:
        known = truth != VOID
        limits: tuple[float, float] = 0.0, max(1.0, len(view.data.classes) - 1.0)
    else:
        known = truth.isfinite()
        both = torch.cat([truth[known], answers.y.flatten()])
        limits = float(both.min()), float(both.max())
    axes = figure.subplots(len(truth), len(columns), squeeze=False)
    for place, (name, maps) in enumerate(columns.items()):
        low, high = limits if place < 2 else (min(0.0, float(maps.min())), float(maps.max()))
        cmap = "viridis" if place >= 2 else "cividis" if view.data.classes is None else "tab20"
        for row, ax in enumerate(axes[:, place]):
            paint(ax).set(xticks=[], yticks=[])
            shown = maps[row].float()
            shown = shown.masked_fill(~known[row], float("nan")) if name == "truth" else shown
            ax.imshow(shown.numpy(), cmap=cmap, vmin=low, vmax=high, interpolation="nearest")
        in_unit = " nats" if view.data.classes is not None and name != "vacuitic" else f" {unit}" if unit else ""
        axes[0, place].set_title(name if place < 2 else f"{name}\n{low:.2g} to {high:.2g}{in_unit}", fontsize=7.5)
    return []
