"""Default training losses of the outputs, according to their meaning."""

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


def default_criterion(wrapped: Wrapped, y: Any, structured: bool, unlabelled: bool) -> Criterion:
    """Return the loss of each output by its meaning; for outputs without a stated meaning, mean squared error or (class numbers) cross entropy.

    Args:
        wrapped: the model.
        y: targets of a batch.
        structured: whether the model returns a structure of outputs, one of which has the targets.
        unlabelled: whether some rows have no class (-100), so that a batch may have none at all.
    """
    output = wrapped._workbench.output
    if structured and output is not None:
        return LossByMeaning(output)
    if isinstance(y, Tensor) and y.is_floating_point() and form_of(output) == "values":
        return F.mse_loss
    if isinstance(y, Tensor) and not y.is_floating_point() and y.dim() == 1:
        if unlabelled and output is None:
            return LossByMeaning("logits")
        if unlabelled:
            return LossByMeaning(output)
        if output is None or output == "logits":
            return F.cross_entropy
        if output == "probs":
            return cross_entropy_of_probs
    return LossByMeaning(output)


def cross_entropy_of_probs(probs: Tensor, y: Tensor) -> Tensor:
    """Return the mean of -log p over the rows, for probabilities [n, classes] and class numbers [n]."""
    return F.nll_loss(probs.clamp_min(torch.finfo(probs.dtype).tiny).log(), y)


@dataclass(frozen=True)
class LossByMeaning:
    """Sum of the losses of all outputs that have a target, each according to its meaning.

    Values: mean squared error. Class scores: cross entropy, with class numbers (-100 is ignored) or probabilities of the shape of the
    scores. Binary: binary cross entropy, with 0 and 1 or probabilities.

    Args:
        output: as the option of the wrapper.
        class_weight: from the name of an output ("" for a single one) to the weights [classes] of its classes, for Binary [2] for no and yes, or
            [labels, 2]; the loss is the mean of the weighted losses divided by the mean weight, as in `torch.nn.CrossEntropyLoss`.

    Example:
        >>> from workbench.outputs import Logits
        >>> maps, labels = torch.zeros(2, 5, 8, 8), torch.zeros(2, 8, 8, dtype=torch.int64)
        >>> float(LossByMeaning(Logits(dim=1))(maps, labels).exp())
        5.0
    """

    output: Any
    class_weight: Mapping[str, Tensor] | None = None

    def __call__(self, prediction: Any, target: Any) -> Tensor:
        """Return the loss [] of a prediction, a tree of tensors; see `workbench.core.outputs.resolution.targets_of` for the target."""
        weights = self.class_weight or {}
        terms = [_loss(*match, weights.get(match[0])) for match in self.matched(prediction, target)]
        return torch.stack(terms).sum()

    def mean_weight(self, target: Any, like: Tensor) -> Tensor:
        """Return the mean weight [] of the targets of a batch, by which its loss counts in the mean over all rows; in the dtype of `like`."""
        weight = (self.class_weight or {}).get("")  # the losses of several outputs are means of their own
        if weight is None or not isinstance(target, Tensor):
            return labelled_share(target, like)
        weight = weight.to(like)
        if form_of(self.output) == "binary":
            yes = target.to(like)
            return (weight[..., 1] * yes + weight[..., 0] * (1 - yes)).mean()
        if target.is_floating_point():
            return labelled_share(target, like)
        return weight[target[target != IGNORED]].sum() / target.numel()

    def check_labels(self, prediction: Any, target: Any) -> None:
        """Raise ValueError if class numbers are outside the range of the scores; -100 is ignored."""
        for name, meaning, scores, labels in self.matched(prediction, target):
            if not isinstance(meaning, Logits | Probs) or labels.is_floating_point():
                continue
            classes, kept = meaning.log_scores(scores).shape[-1], labels[labels != IGNORED]
            if len(kept) and (kept.min() < 0 or kept.max() >= classes):
                raise ValueError(
                    f"{_label(name)}: class numbers go from {int(kept.min())} to {int(kept.max())}, but there are scores for 0 to "
                    f"{classes - 1}; mark rows to ignore with {IGNORED}"
                )

    def matched(self, prediction: Any, target: Any) -> Iterator[tuple[str, Meaning, Tensor, Tensor]]:
        """Yield name, meaning, prediction and target of each output that has a target."""
        leaves, paths = flatten(prediction)[0], names(prediction)
        meanings = resolve(self.output, lambda: paths, leaves, 0)
        for meaning, leaf, target_leaf, name in zip(
            meanings, leaves, targets_of(target, paths, meanings), paths, strict=True
        ):
            if target_leaf is not None and meaning is not None:
                yield name, meaning, leaf, target_leaf


def labelled_share(target: Any, like: Tensor) -> Tensor:
    """Return the share of the class numbers that are not -100, over which a loss is a mean; 1 for other targets.

    Args:
        target: targets of a batch.
        like: the loss [], or the losses [voters] of equally many rows each, one voter after another.
    """
    if not isinstance(target, Tensor) or target.is_floating_point() or not target.numel():
        return torch.ones_like(like)
    labelled = (target != IGNORED).reshape(*like.shape, -1)
    return labelled.sum(-1).to(like) / labelled.shape[-1]


def _label(name: str) -> str:
    return f"y[{name!r}]" if name else "y"


def _loss(name: str, meaning: Meaning, prediction: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    if isinstance(meaning, Values):
        if target.shape != prediction.shape:
            raise ValueError(
                f"{_label(name)}: targets are {list(target.shape)}, but the model gives {list(prediction.shape)}"
            )
        return F.mse_loss(prediction, target.to(prediction.dtype))
    assert isinstance(meaning, Classes)
    try:
        labels = meaning.labels(target, prediction)
    except ValueError as error:
        raise ValueError(f"{_label(name)}: {error}") from None
    log_probs = meaning.log_scores(prediction).log_softmax(-1)
    if weight is not None:
        return _weighted_cross_entropy(log_probs, labels, weight.to(log_probs), isinstance(meaning, Binary))
    loss = cross_entropy(log_probs, labels)
    # a batch may have no labels at all (crops of maps), and a mean over nothing is NaN
    return loss if labels.is_floating_point() else loss.where((labels != IGNORED).any(), 0.0)


def _weighted_cross_entropy(log_probs: Tensor, labels: Tensor, weight: Tensor, binary: bool) -> Tensor:
    """Return the weighted loss, normalized as in torch: by the sum of weights for class numbers and Binary, by the rows for probabilities."""
    if not labels.is_floating_point():
        kept = labels[labels != IGNORED]
        losses = F.cross_entropy(log_probs.flatten(0, -2), labels.flatten(), weight, reduction="sum")
        total = weight[kept].sum()
    else:
        losses = -(weight * labels * log_probs).sum()
        total = (weight * labels).sum() if binary else log_probs.new_tensor(log_probs[..., 0].numel())
    return losses / total.where(total > 0, 1.0)


__all__ = ["LossByMeaning", "cross_entropy_of_probs", "default_criterion", "labelled_share"]
