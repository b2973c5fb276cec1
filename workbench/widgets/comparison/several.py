"""Targets of several numbers a row in a comparison: maps, tokens and columns; their scores, and the picture of maps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.calibration.base import ask
from workbench.data import Data, Split, load
from workbench.data.reader import data_of
from workbench.data.targets import VOID
from workbench.engine.effects.private_random import own_random
from workbench.experiments.measure import measure
from workbench.experiments.positions import has_class_positions, measurable

from ..common.pictures import INK, paint
from ..common.predictions import CAUSES, Predictions

NAMES = {"picp90": "coverage"}  # of `measure` -> those of the table
OWN_COSTS = ("parameters", "passes", "predict_seconds")  # the table counts these for every kind of data by itself
SHOWN = 2  # rows whose maps are drawn


def comparable_data(data: Any, split: int) -> Data:
    """The Data that a comparison takes, of what the user has; targets may be maps, tokens or several columns.

    Raises:
        TypeError, ValueError: as `data_of` and `experiments.positions.measurable`.
    """
    if isinstance(data, str):
        data = load(data, split=split)
    elif isinstance(data, tuple | list) and len(data) == 2 and _is_several(data[1]):
        data = Data.from_arrays(*data, split=split)
    if not isinstance(data, Data):
        return data_of(data, split)
    suited = measurable(data)
    if not has_several(suited):
        return data_of(data, split)
    if len(suited.train) < 20 or not len(suited.test):
        raise ValueError(
            f"data: {data.name} has {len(data.train)} training and {len(data.test)} test rows; at least 20 and 1 are needed"
        )
    return suited


def _is_several(y: Any) -> bool:
    return tuple(getattr(y, "shape", ())[1:]) not in ((), (1,))


def has_several(data: Data) -> bool:
    """Whether a row has more than one number or class to be predicted."""
    return _is_several(data.train.y)


def is_map(data: Data) -> bool:
    """Whether the targets are maps that can be drawn."""
    shape = data.train.y.shape[1:]
    return len(shape) == 2 and min(shape) >= 4


def scores(wrapped: Any, plain: nn.Module, data: Data, held_out: Split, seed: int) -> dict[str, float]:
    """The scores of `experiments.measure`, by the names of the table."""
    with own_random(seed, *{p.device for p in wrapped.parameters()}):
        measured = measure(wrapped, plain, data, held_out)
    return {NAMES.get(name, name): value for name, value in measured.items() if name not in OWN_COSTS}


def answers(wrapped: Any, data: Data, x: Tensor, seed: int) -> Predictions:
    """Predictions (class numbers, or values) and risks [n, ...] of rows, on the CPU."""
    like = next((p for p in wrapped.parameters() if p.is_floating_point()), torch.empty(0))
    with torch.no_grad(), own_random(seed, like.device):
        was_training = wrapped.training
        try:
            y, risk = ask(wrapped.eval(), (x.to(like.device),), bool(wrapped._workbench.methods))
        finally:
            wrapped.train(was_training)
    by_name = {name: risk[name].cpu() for name in risk.names()}
    classes = has_class_positions(data)
    if classes and not by_name:
        by_name = {"total": torch.special.entr(y.softmax(-1)).sum(-1).cpu()}
    return Predictions((y.argmax(-1) if classes else y).cpu(), by_name, None, classes or "aleatoric" in by_name)


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
