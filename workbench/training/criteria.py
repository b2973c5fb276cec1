"""Losses that each output is trained with by default, by what it means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.core.outputs import LEFT_OUT, Binary, Classes, Logits, Meaning, Probs, Values, form_of
from workbench.core.resolution import resolve, targets_of
from workbench.core.wrapped import Wrapped
from workbench.engine.tree import flatten, names

Criterion = Callable[[Any, Any], Tensor]


def default_criterion(wrapped: Wrapped, y: Any) -> Criterion:
    """The loss of each output by its meaning; for one that nobody said, mean squared error or, for class numbers, cross entropy.

    Args:
        wrapped: the model.
        y: targets of a batch.
    """
    output = wrapped._workbench.output
    if isinstance(y, Tensor) and y.is_floating_point() and form_of(output) == "values":
        return F.mse_loss
    if isinstance(y, Tensor) and not y.is_floating_point() and y.dim() == 1:
        if output is None or output == "logits":
            return F.cross_entropy
        if output == "probs":
            return cross_entropy_of_probs
    return LossByMeaning(output)


def cross_entropy_of_probs(probs: Tensor, y: Tensor) -> Tensor:
    """Mean of -log p over the rows, for probabilities [n, classes] and class numbers [n]."""
    return F.nll_loss(probs.clamp_min(torch.finfo(probs.dtype).tiny).log(), y)


@dataclass(frozen=True)
class LossByMeaning:
    """The sum of the losses of all outputs that have a target, each by what it means.

    Values: mean squared error. Class scores: cross entropy, of class numbers (-100 is left out) or of probabilities of the shape of the
    scores. Binary: binary cross entropy, of 0 and 1 or of probabilities.

    Args:
        output: as the option of the wrapper.

    Example:
        >>> from workbench.outputs import Logits
        >>> maps, labels = torch.zeros(2, 5, 8, 8), torch.zeros(2, 8, 8, dtype=torch.int64)
        >>> float(LossByMeaning(Logits(dim=1))(maps, labels).exp())
        5.0
    """

    output: Any

    def __call__(self, prediction: Any, target: Any) -> Tensor:
        """The loss [] of a prediction, a tree; see `workbench.core.resolution.targets_of` for the target."""
        return torch.stack([_loss(*pairs) for pairs in self._matched(prediction, target)]).sum()

    def check_labels(self, prediction: Any, target: Any) -> None:
        """Raise ValueError if class numbers are none of the classes that there are scores for; -100 counts as left out."""
        for meaning, scores, labels, what in self._matched(prediction, target):
            if not isinstance(meaning, Logits | Probs) or labels.is_floating_point():
                continue
            classes, kept = meaning.log_scores(scores).shape[-1], labels[labels != LEFT_OUT]
            if len(kept) and (kept.min() < 0 or kept.max() >= classes):
                raise ValueError(
                    f"{what}: class numbers go from {int(kept.min())} to {int(kept.max())}, but there are scores for 0 to "
                    f"{classes - 1}; those to leave out are {LEFT_OUT}"
                )

    def _matched(self, prediction: Any, target: Any) -> Iterator[tuple[Meaning, Tensor, Tensor, str]]:
        """Meaning, prediction, target and the target's name of each output that has one."""
        leaves, paths = flatten(prediction)[0], names(prediction)
        meanings = resolve(self.output, lambda: paths, leaves, 0)
        for meaning, leaf, t, name in zip(meanings, leaves, targets_of(target, paths, meanings), paths, strict=True):
            if t is not None and meaning is not None:
                yield meaning, leaf, t, f"y[{name!r}]" if name else "y"


def _loss(meaning: Meaning, prediction: Tensor, target: Tensor, what: str) -> Tensor:
    if isinstance(meaning, Values):
        if target.shape != prediction.shape:
            raise ValueError(f"{what}: targets are {list(target.shape)}, but the model gives {list(prediction.shape)}")
        return F.mse_loss(prediction, target.to(prediction.dtype))
    assert isinstance(meaning, Classes)
    scores = meaning.log_scores(prediction).log_softmax(-1)
    if isinstance(meaning, Binary):
        yes = _of_shape(target, prediction, what).to(scores.dtype)
        return -(yes * scores[..., 1] + (1 - yes) * scores[..., 0]).mean()
    if target.is_floating_point():
        weights = meaning.noise(target) if target.shape == prediction.shape else None
        if (
            weights is None
            or bool((weights < 0).any())
            or not torch.allclose(weights.sum(-1), weights.new_ones(()), atol=1e-3)
        ):
            raise ValueError(
                f'{what}: the output is class scores (output="{meaning.short}") {list(prediction.shape)}, and the targets are floats '
                f'{list(target.shape)}: give class numbers, or probabilities of the same shape that sum to one; for values say output="values"'
            )
        return -(weights * scores).sum(-1).mean()
    if target.shape != scores.shape[:-1]:
        raise ValueError(
            f"{what}: class numbers have shape {list(target.shape)}, but scores {list(prediction.shape)} of output={meaning!r} want "
            f"{list(scores.shape[:-1])}"
        )
    return F.cross_entropy(scores.flatten(0, -2), target.flatten())


def _of_shape(target: Tensor, prediction: Tensor, what: str) -> Tensor:
    """Yes or no in the shape of its scores; [n] and [n, 1] are the same."""
    if target.shape != prediction.shape and target.squeeze(-1).shape != prediction.squeeze(-1).shape:
        raise ValueError(
            f"{what}: yes or no of shape {list(target.shape)}, but the model gives {list(prediction.shape)}; give targets of that shape"
            + (", such as y[:, None]" if target.shape == prediction.select(1, 0).shape else "")
        )
    if bool(((target < 0) | (target > 1)).any()):
        raise ValueError(
            f"{what}: yes or no is 1 or 0, and there is {target.min().item():g} to {target.max().item():g}"
        )
    return target.reshape(prediction.shape)


__all__ = ["LossByMeaning", "cross_entropy_of_probs", "default_criterion"]
