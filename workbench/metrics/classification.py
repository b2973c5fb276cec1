"""Metrics of class probabilities: accuracy, overlap, likelihood, Brier score and calibration errors.

Scores and probabilities have a dimension of classes, targets hold integer labels and have the remaining dimensions: rows [n, classes] and [n],
maps [n, classes, height, width] and [n, height, width] with `dim=1`, tokens [n, t, classes] and [n, t]. All rows, pixels or tokens have equal
weight; those excluded by `void` or `mask` are ignored, whatever their scores. Memory is bounded to tens of MiB besides the arguments, except for
`adaptive_ece` and `reduction="none"`, which hold one or two numbers per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.metrics._inputs import check_integer, tensor_of
from workbench.metrics._pieces import check_not_empty, class_pieces, reduce_terms
from workbench.metrics.registry import metric


class ReliabilityCurve(NamedTuple):
    """Mean confidence, accuracy (both NaN for empty bins) and number of rows of each confidence bin, each [bins]."""

    confidence: Tensor
    accuracy: Tensor
    rows: Tensor


@metric("max", 0, 1)
def accuracy(
    scores: Any,
    target: Any,
    reduction: str = "mean",
    *,
    dim: int | None = None,
    void: int | None = None,
    mask: Any = None,
) -> Tensor:
    """Share of rows whose largest score (logit or probability) is the target's; higher is better.

    Args:
        scores: Logits or probabilities, [n, classes] or with more dimensions.
        target: Integer labels, shaped like scores without the class dimension.
        reduction: "mean", or "none" for the terms of all elements that count, flattened.
        dim: Dimension of the classes: 1 for maps, as in torch's cross entropy. The last by default, which is an error if another
            dimension fits the target as well.
        void: Class number that marks missing labels, such as 255 or -100.
        mask: Boolean mask shaped like target, True for rows, pixels or tokens that count.

    Example:
        >>> accuracy(torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 1]))
        tensor(0.5000, dtype=torch.float64)
    """
    pieces = class_pieces(scores, target, "scores", dim, void, mask)
    return reduce_terms(((rows.argmax(-1) == labels).double() for rows, labels in pieces), reduction)


@metric("max", 0, 1)
def mean_iou(
    scores: Any,
    target: Any,
    reduction: str = "mean",
    *,
    dim: int | None = None,
    void: int | None = None,
    mask: Any = None,
) -> Tensor:
    """Mean over classes of intersection over union, counted over all pixels; higher is better (Everingham et al. 2010).

    TP / (TP + FP + FN) of each class, with counts over all images together (not the mean over images). Classes that are neither in the
    target nor predicted are ignored.

    Args:
        scores: Logits or probabilities, [n, classes] or with more dimensions.
        target: Integer labels, shaped like scores without the class dimension.
        reduction: "mean", or "none" for the value of each class, [classes], NaN for ignored ones.
        dim: Dimension of the classes: 1 for maps, as in torch's cross entropy. The last by default, which is an error if another
            dimension fits the target as well.
        void: Class number that marks missing labels, such as 255 or -100.
        mask: Boolean mask shaped like target, True for rows, pixels or tokens that count.

    Example:
        >>> scores = torch.tensor([[[2.0, -1.0, -1.0, 0.0]], [[0.0, 3.0, 3.0, 1.0]]])[None]  # one image: [1, classes, 1, 4]
        >>> mean_iou(scores, torch.tensor([[[0, 1, 0, 255]]]), dim=1, void=255)
        tensor(0.5000, dtype=torch.float64)
    """
    both, either = class_overlap(scores, target, dim, void, mask)
    if not isinstance(reduction, str) or reduction not in ("mean", "none"):
        raise ValueError(f"reduction must be 'mean' or 'none', found {reduction!r:.100}")
    mean = mean_iou_of_counts(both, either)
    return mean if reduction == "mean" else both / either


@metric("min")
def categorical_nll(
    probabilities: Any,
    target: Any,
    reduction: str = "mean",
    *,
    dim: int | None = None,
    void: int | None = None,
    mask: Any = None,
) -> Tensor:
    """Mean negative logarithm of the target's probability, in nats; lower is better, infinite if one is 0.

    Args:
        probabilities: [n, classes] or with more dimensions, summing to one over the classes.
        target: Integer labels, shaped like probabilities without the class dimension.
        reduction: "mean", or "none" for the terms of all elements that count, flattened.
        dim: Dimension of the classes: 1 for maps, as in torch's cross entropy. The last by default, which is an error if another
            dimension fits the target as well.
        void: Class number that marks missing labels, such as 255 or -100.
        mask: Boolean mask shaped like target, True for rows, pixels or tokens that count.

    Example:
        >>> categorical_nll(torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 0]))
        tensor(0.1643, dtype=torch.float64)
    """
    pieces = class_pieces(probabilities, target, "probabilities", dim, void, mask)
    return reduce_terms(
        (-p.gather(-1, labels[:, None]).squeeze(-1).clamp_min(0).log() for p, labels in pieces), reduction
    )


@metric("min", 0, 2)
def brier(
    probabilities: Any,
    target: Any,
    reduction: str = "mean",
    *,
    dim: int | None = None,
    void: int | None = None,
    mask: Any = None,
) -> Tensor:
    """Mean over rows of the squared distance to the one-hot target, summed over classes; from 0 to 2, lower is better.

    The multi-class form of Brier (1950); with two classes, twice the score of the positive class.

    Args:
        probabilities: [n, classes] or with more dimensions, summing to one over the classes.
        target: Integer labels, shaped like probabilities without the class dimension.
        reduction: "mean", or "none" for the terms of all elements that count, flattened.
        dim: Dimension of the classes: 1 for maps, as in torch's cross entropy. The last by default, which is an error if another
            dimension fits the target as well.
        void: Class number that marks missing labels, such as 255 or -100.
        mask: Boolean mask shaped like target, True for rows, pixels or tokens that count.

    Example:
        >>> brier(torch.tensor([[0.2, 0.8]]), torch.tensor([1]))
        tensor(0.0800, dtype=torch.float64)
    """
    pieces = class_pieces(probabilities, target, "probabilities", dim, void, mask)
    one_hot = torch.nn.functional.one_hot
    return reduce_terms(((p - one_hot(labels, p.shape[-1])).square().sum(-1) for p, labels in pieces), reduction)


def reliability_curve(
    probabilities: Any,
    target: Any,
    n_bins: int = 15,
    *,
    dim: int | None = None,
    void: int | None = None,
    mask: Any = None,
) -> ReliabilityCurve:
    """Accuracy as a function of confidence, in bins of equal width (k / n_bins, (k + 1) / n_bins].

    Args:
        probabilities: [n, classes] or with more dimensions, summing to one over the classes; the largest is the confidence of a row.
        target: Integer labels, shaped like probabilities without the class dimension.
        n_bins: Number of bins.
        dim: Dimension of the classes: 1 for maps, as in torch's cross entropy. The last by default, which is an error if another
            dimension fits the target as well.
        void: Class number that marks missing labels, such as 255 or -100.
        mask: Boolean mask shaped like target, True for rows, pixels or tokens that count.

    Returns:
        confidence, accuracy (both NaN for empty bins) and rows, each [n_bins], float64.

    Example:
        >>> curve = reliability_curve(torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 1]), n_bins=2)
        >>> curve.confidence[1], curve.accuracy[1], curve.rows.tolist()
        (tensor(0.8500, dtype=torch.float64), tensor(0.5000, dtype=torch.float64), [0.0, 2.0])
    """
    confidence, correct, count = _non_empty(bin_sums(probabilities, target, n_bins, dim, void, mask))
    return ReliabilityCurve(confidence / count, correct / count, count)


@metric("min", 0, 1)
def ece(
    probabilities: Any,
    target: Any,
    n_bins: int = 15,
    *,
    dim: int | None = None,
    void: int | None = None,
    mask: Any = None,
) -> Tensor:
    """Expected calibration error: mean over rows of |accuracy - confidence| of their bin; lower is better.

    Bins of equal width (Guo et al. 2017). The accuracy of a bin is off by chance, so that even true probabilities have an error, the more the
    fewer rows there are: compare only with equal numbers of rows.

    Args:
        probabilities: [n, classes] or with more dimensions, summing to one over the classes.
        target: Integer labels, shaped like probabilities without the class dimension.
        n_bins: Number of bins.
        dim: Dimension of the classes: 1 for maps, as in torch's cross entropy. The last by default, which is an error if another
            dimension fits the target as well.
        void: Class number that marks missing labels, such as 255 or -100.
        mask: Boolean mask shaped like target, True for rows, pixels or tokens that count.

    Example:
        >>> ece(torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 1]), n_bins=2)
        tensor(0.3500, dtype=torch.float64)
    """
    return ece_of_sums(*_non_empty(bin_sums(probabilities, target, n_bins, dim, void, mask)))


@metric("min", 0, 1)
def max_ece(
    probabilities: Any,
    target: Any,
    n_bins: int = 15,
    *,
    dim: int | None = None,
    void: int | None = None,
    mask: Any = None,
) -> Tensor:
    """Maximum calibration error: the largest |accuracy - confidence| over non-empty bins (Guo et al. 2017).

    Args:
        probabilities: [n, classes] or with more dimensions, summing to one over the classes.
        target: Integer labels, shaped like probabilities without the class dimension.
        n_bins: Number of bins of equal width.
        dim: Dimension of the classes: 1 for maps, as in torch's cross entropy. The last by default, which is an error if another
            dimension fits the target as well.
        void: Class number that marks missing labels, such as 255 or -100.
        mask: Boolean mask shaped like target, True for rows, pixels or tokens that count.

    Example:
        >>> max_ece(torch.tensor([[0.15, 0.85], [0.95, 0.05]]), torch.tensor([1, 1]), n_bins=10)
        tensor(0.9500, dtype=torch.float64)
    """
    return max_ece_of_sums(*_non_empty(bin_sums(probabilities, target, n_bins, dim, void, mask)))


@metric("min", 0, 1)
def adaptive_ece(
    probabilities: Any,
    target: Any,
    n_bins: int = 15,
    *,
    dim: int | None = None,
    void: int | None = None,
    mask: Any = None,
) -> Tensor:
    """Expected calibration error over bins of (nearly) equal numbers of rows (Nguyen & O'Connor 2015).

    Rows of equal confidence are divided between bins in equal shares, in whatever order they come.

    Args:
        probabilities: [n, classes] or with more dimensions, summing to one over the classes.
        target: Integer labels, shaped like probabilities without the class dimension.
        n_bins: Number of bins, at most the number of rows.
        dim: Dimension of the classes: 1 for maps, as in torch's cross entropy. The last by default, which is an error if another
            dimension fits the target as well.
        void: Class number that marks missing labels, such as 255 or -100.
        mask: Boolean mask shaped like target, True for rows, pixels or tokens that count.

    Example:
        >>> adaptive_ece(torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 1]), n_bins=2)
        tensor(0.5500, dtype=torch.float64)
    """
    return adaptive_ece_of_rows(*top_class(probabilities, target, dim, void, mask), n_bins)


@metric("min", 0, 1)
def classwise_ece(
    probabilities: Any,
    target: Any,
    n_bins: int = 15,
    *,
    dim: int | None = None,
    void: int | None = None,
    mask: Any = None,
) -> Tensor:
    """Mean over classes of the calibration error of the class's probability (Kull et al. 2019); lower is better.

    For a yes or no of probability p, `torch.stack([1 - p, p], -1)`, it is the binary calibration error, in bins of p; that of `ece` is in bins
    of the larger of p and 1 - p.

    Args:
        probabilities: [n, classes] or with more dimensions, summing to one over the classes.
        target: Integer labels, shaped like probabilities without the class dimension.
        n_bins: Number of bins of equal width.
        dim: Dimension of the classes: 1 for maps, as in torch's cross entropy. The last by default, which is an error if another
            dimension fits the target as well.
        void: Class number that marks missing labels, such as 255 or -100.
        mask: Boolean mask shaped like target, True for rows, pixels or tokens that count.

    Example:
        >>> classwise_ece(torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 1]), n_bins=2)
        tensor(0.5500, dtype=torch.float64)
    """
    return classwise_ece_of_sums(*_non_empty(classwise_bin_sums(probabilities, target, n_bins, dim, void, mask)))


Sums = tuple[Tensor, Tensor, Tensor]


def top_class(probabilities: Any, target: Any, dim: int | None, void: int | None, mask: Any) -> tuple[Tensor, Tensor]:
    """Return the confidence of each row, and whether its predicted class is correct (1 or 0), each [rows]."""
    columns = list(_top_classes(probabilities, target, dim, void, mask))
    if not columns:
        return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    confidence, correct = zip(*columns, strict=True)
    return torch.cat(confidence), torch.cat(correct)


def _top_classes(probabilities: Any, target: Any, dim: Any, void: Any, mask: Any) -> Iterator[tuple[Tensor, Tensor]]:
    for probs, labels in class_pieces(probabilities, target, "probabilities", dim, void, mask):
        confidence, choice = probs.max(-1)
        yield confidence, (choice == labels).double()


def bin_sums(probabilities: Any, target: Any, n_bins: int, dim: int | None, void: int | None, mask: Any) -> Sums:
    """Return the sums of confidence, of correct rows and of rows in each bin, each [n_bins]; they can be added over batches."""
    edges = bin_edges(n_bins, probabilities)
    sums = (_sum_by_bin(*columns, edges) for columns in _top_classes(probabilities, target, dim, void, mask))
    return _total(sums, (n_bins,))


def classwise_bin_sums(
    probabilities: Any, target: Any, n_bins: int, dim: int | None, void: int | None, mask: Any
) -> Sums:
    """Return `bin_sums` of the probability of each class, each [classes, n_bins]."""
    edges = bin_edges(n_bins, probabilities)

    def by_class(probs: Tensor, labels: Tensor) -> Sums:
        columns = [_sum_by_bin(p, (labels == k).double(), edges) for k, p in enumerate(probs.unbind(-1))]
        confidence, correct, count = (torch.stack(parts) for parts in zip(*columns, strict=True))
        return confidence, correct, count

    pieces = class_pieces(probabilities, target, "probabilities", dim, void, mask)
    return _total((by_class(*piece) for piece in pieces), (1, n_bins))


def class_overlap(scores: Any, target: Any, dim: int | None, void: int | None, mask: Any) -> tuple[Tensor, Tensor]:
    """Return the sizes of intersection and union of predicted and labelled rows of each class, each [classes]; they add up over batches."""
    both = either = torch.zeros(0, dtype=torch.float64)
    for rows, labels in class_pieces(scores, target, "scores", dim, void, mask):
        choice, n_classes = rows.argmax(-1), rows.shape[-1]
        hits, chosen, actual = (
            index.bincount(minlength=n_classes).double() for index in (labels[choice == labels], choice, labels)
        )
        if not both.numel():
            both = either = torch.zeros_like(hits)
        both, either = both + hits, either + chosen + actual - hits
    return both, either


def mean_iou_of_counts(both: Tensor, either: Tensor) -> Tensor:
    """Return the mean intersection over union of counts from `class_overlap`."""
    check_not_empty(either.any() if either.numel() else False)
    return (both / either)[either > 0].mean()


def _total(pieces: Iterable[Sums], shape: tuple[int, ...]) -> Sums:
    """Return the sums over all pieces; zeros if there are none."""
    totals: list[Tensor] = []
    for sums in pieces:
        totals = [total + addend for total, addend in zip(totals, sums, strict=True)] if totals else list(sums)
    confidence, correct, count = totals or [torch.zeros(shape, dtype=torch.float64)] * 3
    return confidence, correct, count


def _non_empty(sums: Sums) -> Sums:
    check_not_empty(sums[-1].any())
    return sums


def ece_of_sums(confidence: Tensor, correct: Tensor, count: Tensor) -> Tensor:
    """Return the expected calibration error of bin sums."""
    return (correct - confidence).abs().sum() / count.sum()


def max_ece_of_sums(confidence: Tensor, correct: Tensor, count: Tensor) -> Tensor:
    """Return the maximum calibration error of bin sums."""
    return ((correct - confidence).abs() / count.clamp_min(1)).max()


def classwise_ece_of_sums(confidence: Tensor, correct: Tensor, count: Tensor) -> Tensor:
    """Return the class-wise calibration error of bin sums."""
    return ((correct - confidence).abs().sum(-1) / count.sum(-1)).mean()


def adaptive_ece_of_rows(confidence: Tensor, correct: Tensor, n_bins: int) -> Tensor:
    """Return the adaptive calibration error of confidences and of whether they were correct, each [rows]."""
    check_integer("n_bins", n_bins)
    check_not_empty(confidence.numel())
    # rows of equal confidence count by their mean where an edge falls among them, so that the order of the rows does not matter
    _, index, count = confidence.unique(return_inverse=True, return_counts=True)
    gap = torch.zeros_like(count, dtype=torch.float64).index_add(0, index, correct - confidence) / count
    gaps = gap.repeat_interleave(count)
    bins = gaps.tensor_split(min(n_bins, gaps.numel()))
    return torch.stack([part.sum().abs() for part in bins]).sum() / gaps.numel()


def bin_edges(n_bins: int, probabilities: Any) -> Tensor:
    """Return the inner edges of bins of equal width, float64 [n_bins - 1], rounded as the probabilities are.

    The share 0.6 of ten voters is slightly more in float32 than in float64, but belongs to the bin up to 0.6 in both.
    """
    check_integer("n_bins", n_bins)
    dtype = tensor_of(probabilities, "probabilities").dtype
    edges = torch.arange(1, n_bins, dtype=torch.float64) / n_bins
    return edges.to(dtype).double() if dtype.is_floating_point else edges


def _sum_by_bin(confidence: Tensor, correct: Tensor, edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    index = torch.bucketize(confidence.contiguous(), edges.to(confidence.device))
    empty = torch.zeros(len(edges) + 1, dtype=torch.float64, device=confidence.device)
    sums = (empty.index_add(0, index, values) for values in (confidence, correct, torch.ones_like(confidence)))
    return tuple(sums)  # type: ignore[return-value]
