"""Data of several numbers or classes a row (maps, tokens, columns, labels) as widgets take them, and what models say about rows of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.calibration.base import ask
from workbench.core.outputs.options import meaning_of
from workbench.data import Data, load
from workbench.data.reader import data_of
from workbench.engine.effects.private_random import own_random
from workbench.experiments.positions import has_class_positions, has_labels, measurable

from .predictions import Predictions


def comparable_data(data: Any, split: int = 0) -> Data:
    """The Data that a comparison or an explorer takes, of what the user has; targets may be maps, tokens, several columns or labels.

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
            f"data: {data.name} has {len(data.train)} training and {len(data.test)} test rows; at least 20 and 1 are needed: give more"
        )
    return suited


def takes_several(data: Any) -> bool:
    """Whether rows of what the user has, such as an explorer takes, have several targets of one kind."""
    if isinstance(data, str):
        data = load(data)
    if isinstance(data, Data):
        if isinstance(data.task, Mapping) or not len(data.train):
            return False
        return data.task == "labels" or _is_several(data.train.take([0]).load().y)
    return isinstance(data, tuple | list) and len(data) == 2 and _is_several(data[1])


def _is_several(y: Any) -> bool:
    return tuple(getattr(y, "shape", ())[1:]) not in ((), (1,))


def has_several(data: Data) -> bool:
    """Whether a row has more than one number or class to be predicted."""
    return _is_several(data.train.y)


def is_map(data: Data) -> bool:
    """Whether the targets are maps that can be drawn."""
    shape = data.train.y.shape[1:]
    return len(shape) == 2 and min(shape) >= 4


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
    if has_labels(data):
        y = meaning_of(wrapped._workbench.output).log_scores(y)  # of no and of yes
    elif not has_class_positions(data):
        return Predictions(y.cpu(), by_name, None, "aleatoric" in by_name)
    entropy = torch.special.entr(y.softmax(-1)).sum(-1).cpu()
    by_name = by_name or {"aleatoric": entropy, "total": entropy}  # as of rows, and as `plots.matrix` has it
    return Predictions(y.argmax(-1).cpu(), by_name, None, True)
