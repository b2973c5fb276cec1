"""Losses that each output is trained with by default, by what it means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.core.outputs.class_scores import Binary, Classes, Logits, Probs, cross_entropy
from workbench.core.outputs.meanings import IGNORED, Meaning, Values
from workbench.core.outputs.options import form_of
from workbench.core.outputs.resolution import resolve, targets_of
from workbench.core.wrapped import Wrapped
from workbench.engine.tree import flatten, names

Criterion = Callable[[Any, Any], Tensor]


def default_criterion(wrapped: Wrapped, y: Any, structured: bool = False) -> Criterion:
    """The loss of each output by its meaning; for one that nobody said, mean squared error or, for class numbers, cross entropy.

    Args:
        wrapped: the model.
        y: targets of a batch.
        structured: whether the model gives a structure of outputs, one of which has the targets.
    """
    output = wrapped._workbench.output
    if structured and output is not None:
        return LossByMeaning(output)
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
        class_weight: by the name of an output ("" of a single one) weights [classes] of its classes, of Binary [2] for no and yes, or
            [labels, 2]; the loss is the mean of the weighted losses, divided by the mean weight, as that of `torch.nn.CrossEntropyLoss`.

    Example:
        >>> from workbench.outputs import Logits
        >>> maps, labels = torch.zeros(2, 5, 8, 8), torch.zeros(2, 8, 8, dtype=torch.int64)
        >>> float(LossByMeaning(Logits(dim=1))(maps, labels).exp())
        5.0
    """

    output: Any
    class_weight: Mapping[str, Tensor] | None = None

    def __call__(self, prediction: Any, target: Any) -> Tensor:
        """The loss [] of a prediction, a tree; see `workbench.core.outputs.resolution.targets_of` for the target."""
        weights = self.class_weight or {}
        terms = [_loss(*match, weights.get(match[0])) for match in self.matched(prediction, target)]
        return torch.stack(terms).sum()

    def check_labels(self, prediction: Any, target: Any) -> None:
        """Raise ValueError if class numbers are none of the classes that there are scores for; -100 counts as left out."""
        for name, meaning, scores, labels in self.matched(prediction, target):
            if not isinstance(meaning, Logits | Probs) or labels.is_floating_point():
                continue
            classes, kept = meaning.log_scores(scores).shape[-1], labels[labels != IGNORED]
            if len(kept) and (kept.min() < 0 or kept.max() >= classes):
                raise ValueError(
                    f"{_written(name)}: class numbers go from {int(kept.min())} to {int(kept.max())}, but there are scores for 0 to "
                    f"{classes - 1}; those to leave out are {IGNORED}"
                )

    def matched(self, prediction: Any, target: Any) -> Iterator[tuple[str, Meaning, Tensor, Tensor]]:
        """Name, meaning, prediction and target of each output that has one."""
        leaves, paths = flatten(prediction)[0], names(prediction)
        meanings = resolve(self.output, lambda: paths, leaves, 0)
        for meaning, leaf, t, name in zip(meanings, leaves, targets_of(target, paths, meanings), paths, strict=True):
            if t is not None and meaning is not None:
                yield name, meaning, leaf, t


def _written(name: str) -> str:
    return f"y[{name!r}]" if name else "y"


def _loss(name: str, meaning: Meaning, prediction: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    if isinstance(meaning, Values):
        if target.shape != prediction.shape:
            raise ValueError(
                f"{_written(name)}: targets are {list(target.shape)}, but the model gives {list(prediction.shape)}"
            )
        return F.mse_loss(prediction, target.to(prediction.dtype))
    assert isinstance(meaning, Classes)
    try:
        labels = meaning.labels(target, prediction)
    except ValueError as error:
        raise ValueError(f"{_written(name)}: {error}") from None
    logs = meaning.log_scores(prediction).log_softmax(-1)
    if weight is not None:
        return _weighted_cross_entropy(logs, labels, weight.to(logs), isinstance(meaning, Binary))
    loss = cross_entropy(logs, labels)
    # a mean over nothing is NaN, and a crop may have no label
    return loss if labels.is_floating_point() else loss.where((labels != IGNORED).any(), 0.0)


def _weighted_cross_entropy(logs: Tensor, labels: Tensor, weight: Tensor, binary: bool) -> Tensor:
    """As torch's: of class numbers, and of yes or no, the weighted mean; of probabilities the sum of weighted terms over the number of rows."""
    if not labels.is_floating_point():
        kept = labels[labels != IGNORED]
        losses = F.cross_entropy(logs.flatten(0, -2), labels.flatten(), weight, reduction="sum")
        total = weight[kept].sum()
    else:
        losses = -(weight * labels * logs).sum()
        total = (weight * labels).sum() if binary else logs.new_tensor(logs[..., 0].numel())
    return losses / total.where(total > 0, 1.0)


__all__ = ["LossByMeaning", "cross_entropy_of_probs", "default_criterion"]
