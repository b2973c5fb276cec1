"""Losses that models may compute from labels themselves: which shapes they accept, and how labels become targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..outputs.class_scores import Binary, Logits, Probs
from ..outputs.meanings import IGNORED, Meaning, Values


@dataclass(frozen=True)
class Kind:
    """One way in which labels correspond to scores.

    Args:
        words: description of the loss, for errors.
        meanings: meanings of the scores under this loss.
        line: how to declare that meaning, for errors.
        fits: fits(scores, labels) returns whether their shapes suit the loss (classes last).
        target: target(labels) returns targets aligned with the scores.
        loss: loss(scores, target) computes the loss.
    """

    words: str
    meanings: tuple[type[Meaning], ...]
    line: str
    fits: Callable[[Tensor, Tensor], bool]
    target: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]


def _next(labels: Tensor) -> Tensor:
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


def _column(labels: Tensor) -> Tensor:
    return _values(labels)[..., None]


def _values(labels: Tensor) -> Tensor:
    return labels if labels.is_floating_point() else labels.to(torch.get_default_dtype())


def _cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), target.flatten(), ignore_index=IGNORED)


def _are_classes(scores: Tensor, labels: Tensor) -> bool:
    return not labels.is_floating_point() and labels.shape == scores.shape[:-1] and scores.shape[-1] > 1


def _are_tokens(scores: Tensor, labels: Tensor) -> bool:
    return _are_classes(scores, labels) and labels.dim() == 2 and labels.shape[1] > 1


def _are_values(scores: Tensor, labels: Tensor) -> bool:
    return labels.shape == scores.shape


def _are_columns(scores: Tensor, labels: Tensor) -> bool:
    return (*labels.shape, 1) == scores.shape


CLASSES, _VALUES, _YES_OR_NO = ((Logits, Probs), "Logits(dim=-1)"), ((Values,), "Values()"), ((Binary,), "Binary()")
KINDS = (
    Kind(
        "the cross entropy of scores and labels at the same places",
        *CLASSES,
        _are_classes,
        lambda y: y,
        _cross_entropy,
    ),
    Kind(
        "the cross entropy of scores and the labels one place further on", *CLASSES, _are_tokens, _next, _cross_entropy
    ),
    Kind("the mean squared error", *_VALUES, _are_values, _values, F.mse_loss),
    Kind("the mean squared error of one column", *_VALUES, _are_columns, _column, F.mse_loss),
    Kind("the binary cross entropy", *_YES_OR_NO, _are_values, _values, F.binary_cross_entropy_with_logits),
    Kind(
        "the binary cross entropy of one column", *_YES_OR_NO, _are_columns, _column, F.binary_cross_entropy_with_logits
    ),
)


__all__ = ["CLASSES", "KINDS", "Kind"]
