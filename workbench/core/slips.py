"""Slips in what an output is said to mean, which its numbers or the loss that it is trained with give away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..engine.effects.random import values_unavailable
from ..engine.tree import is_float
from .dealing import tell
from .outputs import Binary, Classes, Logits, meaning_of

LOOKS_AT = 16  # numbers of each branch, at least, for what they are to be told by their values
# what the losses of torch take a prediction for
_WANTS: tuple[tuple[Classes, tuple[Any, ...]], ...] = (
    (Logits(), (F.cross_entropy, nn.CrossEntropyLoss)),
    (Binary(), (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss)),
    (Binary(logits=False), (F.binary_cross_entropy, nn.BCELoss)),
)
_TAKEN = {
    Logits(): "scores of classes",
    Binary(): "scores of a yes or no, or of several labels",
    Binary(logits=False): "probabilities of a yes or no, or of several labels",
}
_LINES = {Logits(): '"logits"', Binary(): '"binary"', Binary(logits=False): "Binary(logits=False)"}


def _can_look(wrapped: Any, key: str, leaf: Tensor, depth: int) -> bool:
    """Whether to look at the numbers, which is done once: on the CPU only, since elsewhere it would make every call wait."""
    told = wrapped._workbench.told
    if key in told or leaf.device.type != "cpu" or values_unavailable() or torch.jit.is_tracing():  # which keeps looks
        return False
    if leaf.shape[depth:].numel() < LOOKS_AT:
        return False
    told.add(key)
    return True


def tell_doubts(wrapped: Any, meaning: Classes, scores: Tensor, depth: int) -> None:
    """Warn once of scores that look like something else; tensors have `depth` dimensions of branches in front."""
    if _can_look(wrapped, f"looked at {meaning.short}", scores, depth) and (doubt := meaning.doubt(scores.detach())):
        tell(wrapped, "doubt", doubt)


def tell_whole_numbers(wrapped: Any, leaf: Tensor, depth: int) -> None:
    """Whole numbers that the branches compute are decisions (classes, thresholds, rounding), whose mean and spread say little."""
    if not depth or leaf.is_complex() or leaf.requires_grad:  # a decision has no gradient
        return
    if not _can_look(wrapped, "looked at values", leaf, depth):
        return
    leaf = leaf.detach()
    first = leaf[(0,) * depth]
    if bool((leaf == first).all()) or not bool((leaf == leaf.round()).all()):
        return
    tell(
        wrapped,
        "whole numbers",
        "the model gives whole numbers that differ from branch to branch, as argmax, a threshold or rounding gives them: prediction and risk "
        'are their mean and spread. Return the scores, say what they are (output="logits", output="binary"), and decide outside the wrapped '
        "model",
    )


def warn_unsaid(wrapped: Any, criterion: Any, y: Any, leaves: Sequence[Any], depth: int = 0) -> None:
    """Warn once where scores are trained or judged as those of classes, and nobody said that they are, or said something else.

    Args:
        wrapped: the object.
        criterion: what it is trained with, if it is.
        y: targets.
        leaves: of the output; tensors have so many dimensions of branches in front.
        depth: that number.
    """
    record = wrapped._workbench
    if not isinstance(y, Tensor) or all(method.own_pass for method in record.methods):
        return
    wants = next((m for m, kinds in _WANTS if criterion in kinds or type(criterion) in kinds), None)
    if record.output is not None:
        said = meaning_of(record.output)
        if wants is not None and isinstance(said, Classes) and not _agrees(said, wants):
            name = getattr(criterion, "__name__", type(criterion).__name__)
            tell(
                wrapped,
                "contradicted",
                f"{name} takes what the model gives for {_TAKEN[wants]}, and the wrapper was told output={record.output!r}, by which prediction "
                f"and risk are computed. One of them is wrong: for {_TAKEN[wants]} wrap with output={_LINES[wants]}, or train without "
                "criterion=, by what the output was said to mean",
            )
        return
    scores = [leaf for leaf in leaves if is_float(leaf) and leaf.dim() > depth]
    binary = isinstance(wants, Binary)
    classes = len(scores) == 1 and not y.is_floating_point() and scores[0].dim() - depth == y.dim() + 1
    classes = classes and scores[0].dim() > depth + 1 and scores[0].shape[depth + 1] > 1
    if not binary and not classes:
        return
    what, line = ("yes or no", "binary") if binary else ("class numbers", "logits")
    tell(
        wrapped,
        "unsaid",
        f"the targets are {what}, and the wrapper was not told so: prediction and risk are the mean of the scores and their spread, no "
        f'probabilities and entropies. Wrap with output="{line}" (workbench.outputs has maps, probabilities and several outputs), or say '
        'output="values" if this is meant',
    )


def _agrees(said: Classes, wants: Classes) -> bool:
    return said == wants if isinstance(wants, Binary) else type(said) is type(wants)


__all__ = ["tell_doubts", "tell_whole_numbers", "warn_unsaid"]
