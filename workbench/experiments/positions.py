"""Data whose rows have several targets: pixels, tokens, columns; what a model must give for them, and the rows that are scored."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.outputs.class_scores import Binary, Logits
from ..data.targets import VOID, kind
from ..engine.effects.private_random import own_random
from ..risk import Risk

if TYPE_CHECKING:
    from ..data import Data

MOST_TARGETS = 8  # columns of targets that are told apart; more are steps of a series
POSITIONS = 2**18  # pixels or tokens of one pass of prediction


def measurable(data: Data) -> Data:
    """The data in a form that a grid can train on and measure: bytes become floating-point numbers, and counts values.

    Raises:
        ValueError: there are several tensors of inputs or targets, or probabilities of classes, for which there are no scores.
    """
    if isinstance(data.task, Mapping):
        what = f"the targets {', '.join(data.task)}"
    elif data.task == "probabilities":
        what = "probabilities of classes as targets"
    elif isinstance(data.train.take([0]).load().x, Mapping):
        what = f"the inputs {', '.join(data.train.take([0]).load().x)}"
    else:
        train, test = (_floating(split) for split in (data.train, data.test))
        if train is data.train and test is data.test and data.task != "counts":
            return data
        return replace(data, train=train, test=test, task="regression" if data.task == "counts" else data.task)
    raise ValueError(
        f"data: {data.name} has {what}; grids and `workbench compare` take one tensor x, and y of values or class numbers, of rows, pixels, "
        "tokens, labels or several columns. Train with workbench.fit(wrapped, data), and score wrapped(x, return_risk=True) by workbench.metrics"
    )


def _floating(split: Any) -> Any:
    split = split.load()
    return split if split.x.dtype != torch.uint8 else replace(split, x=split.x.float())


def has_class_positions(data: Data) -> bool:
    """Whether there is a class for each pixel or token, not for each row."""
    return data.task == "classification" and data.train.y.ndim > 1


def has_labels(data: Data) -> bool:
    """Whether a row has several labels, each yes or no."""
    return data.task == "labels"


def output_for(model: nn.Module, data: Data) -> Any:
    """What a model gives for the data, as a wrapper's `output` says it; None of values.

    Args:
        model: the plain model, which is left as it is; a few rows are asked for.
        data: what it is to be trained on.

    Raises:
        ValueError: it gives no scores of the classes of each pixel or token, or scores whose classes could lie in two dimensions.
    """
    if has_labels(data):
        answer = _answer(model, data, 64)
        # probabilities already, unless all of so many scores lie in [0, 1] by chance
        return Binary(logits=False) if isinstance(answer, Tensor) and Binary().doubt(answer) else "binary"
    if data.task != "classification":
        return None
    if not has_class_positions(data):
        return "logits"
    y, answer = data.train.y[:2], _answer(model, data, 2)
    first, last = [len(y), data.n_outputs, *y.shape[1:]], [*y.shape, data.n_outputs]
    shape = list(answer.shape) if isinstance(answer, Tensor) else None
    if shape not in (first, last):
        raise ValueError(
            f"model: {type(model).__name__} gives {type(answer).__name__ if shape is None else shape} for targets {kind(y)} of {data.name} in "
            f"{data.n_outputs} classes; needed is {first} (maps) or {last} (tokens): give such a model, -m path/to/file.py:factory"
        )
    if first == last:
        raise ValueError(
            f"model: the scores {shape} of {data.name} could have their classes in dimension 1 or in the last one; cut the rows to another size"
        )
    return Logits(dim=1 if shape == first else -1)


def _answer(model: nn.Module, data: Data, n_rows: int) -> Any:
    """What a copy of the model says about the first training rows."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    with torch.no_grad(), own_random(0, like.device):
        return copy.deepcopy(model).eval()(data.train.x[:n_rows].to(like.device))


def batch_rows(target: Tensor, most: int) -> int:
    """How many rows to ask for at once, of targets [n, ...]."""
    return max(1, min(most, POSITIONS // max(1, target.shape[1:].numel())))


def labelled(answers: Iterator[tuple[Tensor, Risk, Tensor]]) -> tuple[Tensor, Risk, Tensor, dict[str, Tensor]]:
    """All pixels or tokens that have a class, one after another, of batches of rows.

    Args:
        answers: scores [n, ..., classes], risks and class numbers [n, ...] of each batch.

    Returns:
        Probabilities [m, classes], risks [m], class numbers [m], and the risks [n] that say one number for a whole row.
    """
    probs, labels = [], []
    risks: dict[str, list[Tensor]] = {}
    of_rows: dict[str, list[Tensor]] = {}
    for scores, risk, target in answers:
        known = target != VOID
        probs.append(scores[known].softmax(-1))
        labels.append(target[known])
        for name in risk.names():
            by_position = risk[name].shape == target.shape
            (risks if by_position else of_rows).setdefault(name, []).append(
                risk[name][known] if by_position else risk[name]
            )
    whole = Risk(**{name: torch.cat(parts) for name, parts in risks.items()})
    return torch.cat(probs), whole, torch.cat(labels), {name: torch.cat(parts) for name, parts in of_rows.items()}


def target_names(data: Data, y: Tensor) -> list[str]:
    """Names of the columns of y [n, k] that are told apart; none if there is one, or a series or map."""
    columns = y.shape[1] if y.ndim == 2 else 1
    if not 1 < columns <= MOST_TARGETS:
        return []
    names = [name.strip() for name in data.target.name.split(",")]
    return names if len(set(names)) == columns else [str(i + 1) for i in range(columns)]
