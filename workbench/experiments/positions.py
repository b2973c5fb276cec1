"""Data with several targets per row (pixels, tokens, labels, columns): required model outputs, and selection of what is scored."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.batches.rows import first_weight
from ..core.outputs.class_scores import Binary, Logits
from ..data.reader import in_memory
from ..data.targets import VOID, kind
from ..engine.effects.private_random import own_random
from ..risk import Risk

if TYPE_CHECKING:
    from ..data import Data

MAX_TARGETS = 8  # target columns that are scored separately; more columns are treated as steps of a series
MAX_POSITIONS = 2**18  # pixels or tokens per prediction call


def measurable(data: Data) -> Data:
    """Convert data for training and scoring in a grid: uint8 inputs become floating-point numbers, counts become regression targets.

    Raises:
        ValueError: the data have several input or target tensors, or class probabilities as targets, which can't be scored.
    """
    if isinstance(data.task, Mapping):
        unsupported = f"the targets {', '.join(data.task)}"
    elif data.task == "probabilities":
        unsupported = "class probabilities as targets"
    elif isinstance(data.train.take([0]).load().x, Mapping):
        unsupported = f"the inputs {', '.join(data.train.take([0]).load().x)}"
    else:
        train, test = (in_memory(split) for split in (data.train, data.test))
        if train is data.train and test is data.test and data.task != "counts":
            return data
        return replace(data, train=train, test=test, task="regression" if data.task == "counts" else data.task)
    raise ValueError(
        f"data: {data.name} has {unsupported}; grids and `workbench compare` need one tensor x, and y with values or class numbers of "
        "rows, pixels, tokens, labels or several columns. Train with workbench.fit(wrapped, data), "
        "and score wrapped(x, return_risk=True) by workbench.metrics"
    )


def has_class_positions(data: Data) -> bool:
    """Return whether the targets are classes of pixels or tokens, not of rows."""
    return data.task == "classification" and data.train.y.ndim > 1


def has_labels(data: Data) -> bool:
    """Return whether the targets are several yes-or-no labels per row."""
    return data.task == "labels"


def output_for(model: nn.Module, data: Data) -> Any:
    """Return the `output` argument of wrappers for a model and data; None for regression.

    Args:
        model: plain model, which is not changed; a copy of it is run on a few rows.
        data: data to train on.

    Raises:
        ValueError: the model does not return class scores for each pixel or token, or their class dimension is ambiguous.
    """
    if has_labels(data):
        outputs = _outputs(model, data, 64)
        # so many outputs hardly all lie in [0, 1] by chance unless they are probabilities
        return Binary(logits=False) if isinstance(outputs, Tensor) and Binary().doubt(outputs) else "binary"
    if data.task != "classification":
        return None
    if not has_class_positions(data):
        return "logits"
    y, outputs = data.train.y[:2], _outputs(model, data, 2)
    classes_first, classes_last = [len(y), data.n_outputs, *y.shape[1:]], [*y.shape, data.n_outputs]
    shape = list(outputs.shape) if isinstance(outputs, Tensor) else None
    if shape not in (classes_first, classes_last):
        raise ValueError(
            f"model: {type(model).__name__} returns {type(outputs).__name__ if shape is None else shape} for targets {kind(y)} of "
            f"{data.name} with {data.n_outputs} classes; it must return {classes_first} (maps) or {classes_last} (tokens): "
            "give such a model, -m path/to/file.py:factory"
        )
    if classes_first == classes_last:
        raise ValueError(
            f"model: the classes of the scores {shape} for {data.name} could be dimension 1 or the last one; crop the inputs to another size"
        )
    return Logits(dim=1 if shape == classes_first else -1)


def _outputs(model: nn.Module, data: Data, n_rows: int) -> Any:
    """Return the outputs of a copy of the model for the first training rows."""
    like = first_weight(model)
    with torch.no_grad(), own_random(0, like.device):
        return copy.deepcopy(model).eval()(data.train.x[:n_rows].to(like.device))


def batch_rows(target: Tensor, most: int) -> int:
    """Return the number of rows per prediction call, at most `most`, for targets [n, ...]."""
    return max(1, min(most, MAX_POSITIONS // max(1, target.shape[1:].numel())))


def labelled(answers: Iterator[tuple[Tensor, Risk, Tensor]]) -> tuple[Tensor, Risk, Tensor, dict[str, Tensor]]:
    """Concatenate all pixels or tokens that have a class.

    Args:
        answers: for each batch, scores [n, ..., classes], risks, and class numbers [n, ...].

    Returns:
        Probabilities [m, classes], risks [m], class numbers [m], and the risks [n] that have one number per row.
    """
    probs, labels = [], []
    risks: dict[str, list[Tensor]] = {}
    row_risks: dict[str, list[Tensor]] = {}
    for scores, risk, target in answers:
        has_class = target != VOID
        probs.append(scores[has_class].softmax(-1))
        labels.append(target[has_class])
        for name in risk.names():
            by_position = risk[name].shape == target.shape
            (risks if by_position else row_risks).setdefault(name, []).append(
                risk[name][has_class] if by_position else risk[name]
            )
    position_risks = Risk(**{name: torch.cat(parts) for name, parts in risks.items()})
    return (
        torch.cat(probs),
        position_risks,
        torch.cat(labels),
        {name: torch.cat(parts) for name, parts in row_risks.items()},
    )


def target_names(data: Data, y: Tensor) -> list[str]:
    """Return the names of the columns of y [n, k] if they are scored separately; empty for one column, a series or a map."""
    columns = y.shape[1] if y.ndim == 2 else 1
    if not 1 < columns <= MAX_TARGETS:
        return []
    names = [name.strip() for name in data.target.name.split(",")]
    if len(set(names)) == columns:
        return names
    return [f"target {i + 1}" for i in range(columns)]
