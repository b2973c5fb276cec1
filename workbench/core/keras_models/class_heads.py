"""Risk heads of classes in the steps of Keras: the noise of the scores beside them, and its likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import torch
from torch import Tensor

from ...engine.run import Branched
from ..calls.risks import meanings_of, pair_of
from ..method import split_heads
from ..outputs.class_scores import Binary, Classes
from ..outputs.meanings import IGNORED


def noise_of(wrapped: Any, branched: Branched) -> tuple[Tensor, Classes]:
    """The standard deviations of class scores [..., classes] of a call, as LogitNormal takes them for a risk, and what the scores mean.

    Where several models have answered each row, the probabilities of their mean have the noise of each in them already: it is 0.

    Args:
        wrapped: the wrapped torch module.
        branched: what its branches gave in the call.

    Raises:
        NotImplementedError: if there are several outputs of classes.
    """
    pair = pair_of(wrapped._workbench, branched.axes)
    found = [
        (leaf, meaning)
        for leaf, meaning in zip(branched.leaves, meanings_of(wrapped._workbench, branched), strict=True)
        if isinstance(meaning, Classes)
    ]
    if len(found) != 1:
        raise NotImplementedError(
            f"a model of {len(found)} outputs of classes with a risk head: train it by workbench.fit(model.as_torch(), ...)"
        )
    leaf, meaning = found[0]
    noise = meaning.noise(pair.risk_of(split_heads(leaf, branched.axes.index(pair.name))[1]))
    for _ in branched.axes[1:]:
        noise = torch.zeros_like(noise[0])
    return noise, meaning


def losses_of_rows(
    distribution: Any, target: Tensor, scores: Tensor, noise: Tensor, meaning: Classes, ignored: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """The negative log-likelihood of each label, and which of them count, None if all do.

    Args:
        distribution: of the labels.
        target: class numbers [...] or [..., 1], or one number for each class, shaped like the scores.
        scores: as the model gives them.
        noise, meaning: of them, as of `noise_of`.
        ignored: class numbers that count nowhere.

    Raises:
        ValueError: if targets do not fit the scores.
    """
    if isinstance(meaning, Binary):
        target = target.to(scores.dtype)
    else:
        dims = scores.dim() - 1
        if target.dim() == dims + 1 and target.shape[-1] == 1:
            target = target.squeeze(-1)
        if target.shape == scores.shape:  # shares, or one-hot
            target = target.to(scores.dtype)
        elif bool((target != target.long()).any()):
            raise ValueError(f"class numbers are whole, and there is {float(target[target != target.long()][0]):g}")
        else:
            target = target.long()
    labels = meaning.labels(target, scores)
    kept = None
    if not labels.is_floating_point():
        counts = ~torch.isin(labels, labels.new_tensor([IGNORED, *ignored]))
        if not bool(counts.all()):
            kept, labels = counts, labels.where(counts, 0)
    return distribution.loss_function(labels, meaning.log_scores(scores), noise, reduction="none"), kept


def ignored_classes(loss: Any) -> list[int]:
    """The class numbers that compiled losses leave out."""
    of_each = [getattr(each, "ignore_class", None) for each in keras.tree.flatten(loss)]
    return [number for number in of_each if number is not None]


__all__ = ["ignored_classes", "losses_of_rows", "noise_of"]
