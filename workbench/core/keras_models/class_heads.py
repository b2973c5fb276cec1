"""Risk heads for class scores in the training steps of Keras: the noise of the scores, and its likelihood."""

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
    """Return the standard deviations of class scores [..., classes] in a call, for LogitNormal, and the meaning of the scores.

    If several models answer each row, the noise is 0, since the mean probabilities already include the noise of each.

    Args:
        wrapped: the wrapped torch module.
        branched: outputs of its branches in the call.

    Raises:
        NotImplementedError: if there are several outputs of classes.
    """
    pair = pair_of(wrapped._workbench, branched.axes)
    class_outputs = [
        (leaf, meaning)
        for leaf, meaning in zip(branched.leaves, meanings_of(wrapped._workbench, branched), strict=True)
        if isinstance(meaning, Classes)
    ]
    if len(class_outputs) != 1:
        raise NotImplementedError(
            f"a model with {len(class_outputs)} outputs of classes and a risk head: train it with workbench.fit(model.as_torch(), ...)"
        )
    leaf, meaning = class_outputs[0]
    noise = meaning.noise(pair.risk_of(split_heads(leaf, branched.axes.index(pair.name))[1]))
    for _ in branched.axes[1:]:
        noise = torch.zeros_like(noise[0])
    return noise, meaning


def losses_of_rows(
    distribution: Any, target: Tensor, scores: Tensor, noise: Tensor, meaning: Classes, ignored: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Return the negative log-likelihood of each label, and a bool mask of those that count (None if all do).

    Args:
        distribution: output distribution of the labels.
        target: class numbers [...] or [..., 1], or one number per class, shaped like the scores.
        scores: scores as returned by the model.
        noise, meaning: as returned by `noise_of`.
        ignored: class numbers to ignore.

    Raises:
        ValueError: if targets do not fit the scores.
    """
    if isinstance(meaning, Binary):
        target = target.to(scores.dtype)
    else:
        dims = scores.dim() - 1
        if target.dim() == dims + 1 and target.shape[-1] == 1:
            target = target.squeeze(-1)
        if target.shape == scores.shape:  # probabilities or one-hot
            target = target.to(scores.dtype)
        elif bool((target != target.long()).any()):
            raise ValueError(f"class numbers must be whole, not {float(target[target != target.long()][0]):g}")
        else:
            target = target.long()
    labels = meaning.labels(target, scores)
    mask = None
    if not labels.is_floating_point():
        counts = ~torch.isin(labels, labels.new_tensor([IGNORED, *ignored]))
        if not bool(counts.all()):
            mask, labels = counts, labels.where(counts, 0)
    return distribution.loss_function(labels, meaning.log_scores(scores), noise, reduction="none"), mask


def ignored_classes(loss: Any) -> list[int]:
    """Return the class numbers that compiled losses ignore."""
    numbers = [getattr(each, "ignore_class", None) for each in keras.tree.flatten(loss)]
    return [number for number in numbers if number is not None]


__all__ = ["ignored_classes", "losses_of_rows", "noise_of"]
