"""Metrics of class probabilities: accuracy, likelihood, Brier score and calibration errors.

Probabilities are [rows, classes] (or [..., classes]), targets integer labels [rows] (or [...]).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.metrics._inputs import classified, labels, numbers, reduce, whole
from workbench.metrics.registry import metric


class ReliabilityCurve(NamedTuple):
    """Mean confidence, accuracy (both NaN where empty) and number of rows of every bin of confidence, each [bins]."""

    confidence: Tensor
    accuracy: Tensor
    rows: Tensor


@metric("max", 0, 1)
def accuracy(scores: Any, target: Any, reduction: str = "mean") -> Tensor:
    """Share of rows whose largest score (logit or probability) is the target's; higher is better.

    Args:
        scores: [..., classes].
        target: Integer labels [...].
        reduction: "mean", or "none" for every row's term.

    Example:
        >>> accuracy(torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 1]))
        tensor(0.5000, dtype=torch.float64)
    """
    scores = numbers("scores", scores, finite=False)
    target = labels(target, scores, "scores")
    return reduce((scores.flatten(0, -2).argmax(-1) == target).double(), reduction)


@metric("min")
def categorical_nll(probabilities: Any, target: Any, reduction: str = "mean") -> Tensor:
    """Mean negative logarithm of the target's probability, in nats; lower is better, infinite if one is 0.

    Args:
        probabilities: [..., classes], summing to one.
        target: Integer labels [...].
        reduction: "mean", or "none" for every row's term.

    Example:
        >>> categorical_nll(torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 0]))
        tensor(0.1643, dtype=torch.float64)
    """
    probs, target = classified(probabilities, target)
    return reduce(-probs.gather(-1, target.unsqueeze(-1)).squeeze(-1).clamp_min(0).log(), reduction)


@metric("min", 0, 2)
def brier(probabilities: Any, target: Any, reduction: str = "mean") -> Tensor:
    """Mean over rows of the squared distance to the one-hot target, summed over classes; from 0 to 2, lower is better.

    The multi-class form of Brier (1950); for two classes twice the score of the positive class alone.

    Args:
        probabilities: [..., classes], summing to one.
        target: Integer labels [...].
        reduction: "mean", or "none" for every row's term.

    Example:
        >>> brier(torch.tensor([[0.2, 0.8]]), torch.tensor([1]))
        tensor(0.0800, dtype=torch.float64)
    """
    probs, target = classified(probabilities, target)
    return reduce((probs - torch.nn.functional.one_hot(target, probs.shape[-1])).square().sum(-1), reduction)


def reliability_curve(probabilities: Any, target: Any, n_bins: int = 15) -> ReliabilityCurve:
    """Confidence against accuracy in bins of equal width (k / n_bins, (k + 1) / n_bins].

    Args:
        probabilities: [..., classes], summing to one; a row's confidence is its largest.
        target: Integer labels [...].
        n_bins: Number of bins.

    Returns:
        confidence, accuracy (both NaN where a bin is empty) and rows, each [n_bins], float64.

    Example:
        >>> curve = reliability_curve(torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 1]), n_bins=2)
        >>> curve.confidence[1], curve.accuracy[1], curve.rows.tolist()
        (tensor(0.8500, dtype=torch.float64), tensor(0.5000, dtype=torch.float64), [0.0, 2.0])
    """
    confidence, correct, count = bin_sums(probabilities, target, n_bins)
    return ReliabilityCurve(confidence / count, correct / count, count)


@metric("min", 0, 1)
def ece(probabilities: Any, target: Any, n_bins: int = 15) -> Tensor:
    """Expected calibration error: mean over rows of |accuracy - confidence| of their bin; lower is better.

    Bins of equal width (Guo et al. 2017).

    Args:
        probabilities: [..., classes], summing to one.
        target: Integer labels [...].
        n_bins: Number of bins.

    Example:
        >>> ece(torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 1]), n_bins=2)
        tensor(0.3500, dtype=torch.float64)
    """
    return ece_of_sums(*bin_sums(probabilities, target, n_bins))


@metric("min", 0, 1)
def max_ece(probabilities: Any, target: Any, n_bins: int = 15) -> Tensor:
    """Maximum calibration error: the largest |accuracy - confidence| of a bin that is not empty (Guo et al. 2017).

    Args:
        probabilities: [..., classes], summing to one.
        target: Integer labels [...].
        n_bins: Number of bins of equal width.

    Example:
        >>> max_ece(torch.tensor([[0.15, 0.85], [0.95, 0.05]]), torch.tensor([1, 1]), n_bins=10)
        tensor(0.9500, dtype=torch.float64)
    """
    return max_ece_of_sums(*bin_sums(probabilities, target, n_bins))


@metric("min", 0, 1)
def adaptive_ece(probabilities: Any, target: Any, n_bins: int = 15) -> Tensor:
    """Expected calibration error over bins of (nearly) equal numbers of rows (Nguyen & O'Connor 2015).

    Args:
        probabilities: [..., classes], summing to one.
        target: Integer labels [...].
        n_bins: Number of bins; never more than rows.

    Example:
        >>> adaptive_ece(torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 1]), n_bins=2)
        tensor(0.5500, dtype=torch.float64)
    """
    return adaptive_ece_of_rows(*top_class(probabilities, target), n_bins)


@metric("min", 0, 1)
def classwise_ece(probabilities: Any, target: Any, n_bins: int = 15) -> Tensor:
    """Mean over classes of the calibration error of that class's probability (Kull et al. 2019); lower is better.

    Args:
        probabilities: [..., classes], summing to one.
        target: Integer labels [...].
        n_bins: Number of bins of equal width.

    Example:
        >>> classwise_ece(torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 1]), n_bins=2)
        tensor(0.5500, dtype=torch.float64)
    """
    return classwise_ece_of_sums(*classwise_bin_sums(probabilities, target, n_bins))


def top_class(probabilities: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Every row's confidence and whether its choice is correct (1 or 0), each [rows]."""
    probs, target = classified(probabilities, target)
    confidence, choice = probs.max(-1)
    return confidence, (choice == target).double()


def bin_sums(probabilities: Any, target: Any, n_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of confidence, of correct rows and of rows in every bin, each [n_bins]: what adds up over batches."""
    return _sum_by_bin(*top_class(probabilities, target), n_bins)


def classwise_bin_sums(probabilities: Any, target: Any, n_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `bin_sums`, for the probability of every class: each [classes, n_bins]."""
    probs, target = classified(probabilities, target)
    columns = [_sum_by_bin(p, (target == k).double(), n_bins) for k, p in enumerate(probs.unbind(-1))]
    confidence, correct, count = (torch.stack(parts) for parts in zip(*columns, strict=True))
    return confidence, correct, count


def ece_of_sums(confidence: Tensor, correct: Tensor, count: Tensor) -> Tensor:
    """Expected calibration error of bin sums."""
    return (correct - confidence).abs().sum() / count.sum()


def max_ece_of_sums(confidence: Tensor, correct: Tensor, count: Tensor) -> Tensor:
    """Maximum calibration error of bin sums."""
    return ((correct - confidence).abs() / count.clamp_min(1)).max()


def classwise_ece_of_sums(confidence: Tensor, correct: Tensor, count: Tensor) -> Tensor:
    """Class-wise calibration error of bin sums."""
    return ((correct - confidence).abs().sum(-1) / count.sum(-1)).mean()


def adaptive_ece_of_rows(confidence: Tensor, correct: Tensor, n_bins: int) -> Tensor:
    """Adaptive calibration error of confidences and of whether they were correct, each [rows]."""
    whole("n_bins", n_bins)
    gaps = (correct - confidence)[confidence.argsort(stable=True)]
    bins = gaps.tensor_split(min(n_bins, gaps.numel()))
    return torch.stack([part.sum().abs() for part in bins]).sum() / gaps.numel()


def _sum_by_bin(confidence: Tensor, correct: Tensor, n_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    whole("n_bins", n_bins)
    edges = torch.linspace(0, 1, n_bins + 1, dtype=torch.float64, device=confidence.device)[1:-1]
    index = torch.bucketize(confidence.contiguous(), edges)
    empty = torch.zeros(n_bins, dtype=torch.float64, device=confidence.device)
    sums = (empty.index_add(0, index, values) for values in (confidence, correct, torch.ones_like(confidence)))
    return tuple(sums)  # type: ignore[return-value]
