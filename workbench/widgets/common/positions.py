"""Data with several targets per row (maps, tokens, columns, labels) as widgets take them, and predictions for such rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.calibration.models import ask_as_given
from workbench.core.batches.rows import first_weight
from workbench.core.outputs.options import meaning_of
from workbench.data import Data, load
from workbench.data.reader import data_of
from workbench.engine.effects.private_random import own_random
from workbench.experiments.positions import has_class_positions, has_labels, measurable

from .predictions import Predictions


def comparable_data(data: Any, split: int = 0) -> Data:
    """Convert data given by the user to a Data for a comparison or an explorer; targets may be maps, tokens, several columns or labels.

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
            f"data: {data.name} has {len(data.train)} training and {len(data.test)} test rows; give at least 20 and 1"
        )
    return suited


def refuse_one_class(data: Data) -> None:
    """Raise ValueError if all rows are of one class."""
    if data.classes is not None and len(data.classes) < 2 and data.task == "classification":
        raise ValueError(
            f"data: all rows of {data.name} are of one class, {data.classes[0]!r}, so that there is nothing to classify; give rows of another "
            "class as well"
        )


def takes_several(data: Any) -> bool:
    """Return whether rows of the data given to an explorer have several targets of one kind."""
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
    """Return whether a row has more than one number or class to predict."""
    return _is_several(data.train.y)


def is_map(data: Data) -> bool:
    """Return whether the targets are maps large enough to draw."""
    shape = data.train.y.shape[1:]
    return len(shape) == 2 and min(shape) >= 4


def answers(wrapped: Any, data: Data, x: Tensor, seed: int) -> Predictions:
    """Predict class numbers or values, and risks, of rows [n, ...]; the result is on the CPU."""
    like = first_weight(wrapped)
    with torch.no_grad(), own_random(seed, like.device):
        was_training = wrapped.training
        try:
            y, risk = ask_as_given(wrapped.eval(), (x.to(like.device),), bool(wrapped._workbench.methods))
        finally:
            wrapped.train(was_training)
    by_name = {name: risk[name].cpu() for name in risk.names()}
    if has_labels(data):
        y = meaning_of(wrapped._workbench.output).log_scores(y)  # last dimension: no and yes
    elif not has_class_positions(data):
        return Predictions(y.cpu(), by_name, None, "aleatoric" in by_name)
    entropy = torch.special.entr(y.softmax(-1)).sum(-1).cpu()
    by_name = by_name or {"aleatoric": entropy, "total": entropy}  # as for single targets and in `plots.matrix`
    return Predictions(y.argmax(-1).cpu(), by_name, None, True)
