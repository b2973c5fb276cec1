"""Metric classes for class probabilities of rows, pixels and tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from workbench.metrics import classification
from workbench.metrics.modules.base import AccumulatedMetric, MeanMetric, RowsMetric


class _MeanOfClasses(MeanMetric):
    """The mean of a term over all rows, pixels or tokens that have a label."""

    def __init__(self, *, dim: int | None = None, void: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dim, self.void = dim, void

    def update(self, probabilities: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of probabilities, with a dimension of classes, and labels."""
        self._add(type(self).function(probabilities, target, "none", dim=self.dim, void=self.void, mask=mask))


class Accuracy(_MeanOfClasses, of=classification.accuracy):
    """Share of correctly classified rows, pixels or tokens; see `accuracy`."""

    def update(self, scores: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of scores, with a dimension of classes, and labels."""
        super().update(scores, target, mask)


class CategoricalNLL(_MeanOfClasses, of=classification.categorical_nll):
    """Negative log-likelihood of labels; see `categorical_nll`."""


class Brier(_MeanOfClasses, of=classification.brier):
    """Brier score, from 0 to 2; see `brier`."""


class MeanIoU(AccumulatedMetric, of=classification.mean_iou):
    """Mean intersection over union of a known number of classes, over all pixels of all batches; see `mean_iou`."""

    both: Tensor
    either: Tensor

    def __init__(self, num_classes: int, *, dim: int | None = None, void: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dim, self.void = dim, void
        self._declare_sums("both", "either", shape=(num_classes,))

    def update(self, scores: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of scores, with a dimension of classes, and labels."""
        both, either = classification.class_overlap(scores, target, self.dim, self.void, mask)
        if not len(both):  # no labels in this batch
            return
        if len(both) != len(self.both):
            raise ValueError(f"expected scores of {len(self.both)} classes, found {len(both)}")
        self._add_to_states(both, either)

    def compute(self) -> Tensor:
        """Return the mean over classes of everything seen since the last reset."""
        self._check_not_empty(self.either)
        return classification.mean_iou_of_counts(self.both, self.either)


class _Binned(AccumulatedMetric):
    """A calibration error over bins of equal width, whose sums are accumulated over batches."""

    confidence: Tensor
    correct: Tensor
    count: Tensor

    def __init__(self, n_bins: int = 15, *, dim: int | None = None, void: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.n_bins, self.dim, self.void = n_bins, dim, void
        self._declare_sums("confidence", "correct", "count", shape=self._shape())

    def _shape(self) -> tuple[int, ...]:
        return (self.n_bins,)

    def update(self, probabilities: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of probabilities, with a dimension of classes, and labels."""
        self._add_to_states(*classification.bin_sums(probabilities, target, self.n_bins, self.dim, self.void, mask))


class ECE(_Binned, of=classification.ece):
    """Expected calibration error; see `ece`."""

    def compute(self) -> Tensor:
        """Return the error over everything seen since the last reset."""
        self._check_not_empty(self.count)
        return classification.ece_of_sums(self.confidence, self.correct, self.count)


class MaxECE(_Binned, of=classification.max_ece):
    """Maximum calibration error; see `max_ece`."""

    def compute(self) -> Tensor:
        """Return the error over everything seen since the last reset."""
        self._check_not_empty(self.count)
        return classification.max_ece_of_sums(self.confidence, self.correct, self.count)


class ClasswiseECE(_Binned, of=classification.classwise_ece):
    """Class-wise calibration error for a known number of classes; see `classwise_ece`."""

    def __init__(self, num_classes: int, n_bins: int = 15, **kwargs: Any) -> None:
        self._classes = num_classes
        super().__init__(n_bins, **kwargs)

    def _shape(self) -> tuple[int, ...]:
        return (self._classes, self.n_bins)

    def update(self, probabilities: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of probabilities, with a dimension of classes, and labels."""
        sums = classification.classwise_bin_sums(probabilities, target, self.n_bins, self.dim, self.void, mask)
        if not sums[-1].any():  # no labels in this batch
            return
        if len(sums[0]) != self._classes:
            raise ValueError(f"expected probabilities of {self._classes} classes, found {len(sums[0])}")
        self._add_to_states(*sums)

    def compute(self) -> Tensor:
        """Return the error over everything seen since the last reset."""
        self._check_not_empty(self.count)
        return classification.classwise_ece_of_sums(self.confidence, self.correct, self.count)


class AdaptiveECE(RowsMetric, of=classification.adaptive_ece):
    """Calibration error over bins of equal numbers of rows; see `adaptive_ece`."""

    states = ("confidence", "correct")

    def __init__(self, n_bins: int = 15, *, dim: int | None = None, void: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.n_bins, self.dim, self.void = n_bins, dim, void

    def update(self, probabilities: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of probabilities, with a dimension of classes, and labels."""
        self._keep(*classification.top_class(probabilities, target, self.dim, self.void, mask))

    def compute(self) -> Tensor:
        """Return the error over everything seen since the last reset."""
        confidence, correct = self._columns()
        return classification.adaptive_ece_of_rows(confidence, correct, self.n_bins)
