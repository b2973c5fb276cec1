"""Metric classes for class probabilities."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from workbench.metrics import classification
from workbench.metrics.modules.base import AccumulatedMetric, MeanMetric, RowsMetric


class Accuracy(MeanMetric, of=classification.accuracy):
    """Share of rows classified right; see `accuracy`."""

    def update(self, scores: Any, target: Any) -> None:
        """Add a batch: scores [..., classes] and labels [...]."""
        self._add(classification.accuracy(scores, target, "none"))


class CategoricalNLL(MeanMetric, of=classification.categorical_nll):
    """Negative log-likelihood of labels; see `categorical_nll`."""

    def update(self, probabilities: Any, target: Any) -> None:
        """Add a batch: probabilities [..., classes] and labels [...]."""
        self._add(classification.categorical_nll(probabilities, target, "none"))


class Brier(MeanMetric, of=classification.brier):
    """Brier score, from 0 to 2; see `brier`."""

    def update(self, probabilities: Any, target: Any) -> None:
        """Add a batch: probabilities [..., classes] and labels [...]."""
        self._add(classification.brier(probabilities, target, "none"))


class _Binned(AccumulatedMetric):
    """A calibration error of bins of equal width, which add up over batches."""

    confidence: Tensor
    correct: Tensor
    count: Tensor

    def __init__(self, n_bins: int = 15, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.n_bins = n_bins
        self._declare_sums("confidence", "correct", "count", shape=self._shape())

    def _shape(self) -> tuple[int, ...]:
        return (self.n_bins,)

    def update(self, probabilities: Any, target: Any) -> None:
        """Add a batch: probabilities [..., classes] and labels [...]."""
        self._sums(*classification.bin_sums(probabilities, target, self.n_bins))


class ECE(_Binned, of=classification.ece):
    """Expected calibration error; see `ece`."""

    def compute(self) -> Tensor:
        """The error over everything seen since the last reset."""
        self._filled(self.count)
        return classification.ece_of_sums(self.confidence, self.correct, self.count)


class MaxECE(_Binned, of=classification.max_ece):
    """Maximum calibration error; see `max_ece`."""

    def compute(self) -> Tensor:
        """The error over everything seen since the last reset."""
        self._filled(self.count)
        return classification.max_ece_of_sums(self.confidence, self.correct, self.count)


class ClasswiseECE(_Binned, of=classification.classwise_ece):
    """Class-wise calibration error for a known number of classes; see `classwise_ece`."""

    def __init__(self, num_classes: int, n_bins: int = 15, **kwargs: Any) -> None:
        self._classes = num_classes
        super().__init__(n_bins, **kwargs)

    def _shape(self) -> tuple[int, ...]:
        return (self._classes, self.n_bins)

    def update(self, probabilities: Any, target: Any) -> None:
        """Add a batch: probabilities [..., classes] and labels [...]."""
        sums = classification.classwise_bin_sums(probabilities, target, self.n_bins)
        if len(sums[0]) != self._classes:
            raise ValueError(f"expected probabilities of {self._classes} classes, found {len(sums[0])}")
        self._sums(*sums)

    def compute(self) -> Tensor:
        """The error over everything seen since the last reset."""
        self._filled(self.count)
        return classification.classwise_ece_of_sums(self.confidence, self.correct, self.count)


class AdaptiveECE(RowsMetric, of=classification.adaptive_ece):
    """Calibration error over bins of equal numbers of rows; see `adaptive_ece`."""

    states = ("confidence", "correct")

    def __init__(self, n_bins: int = 15, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.n_bins = n_bins

    def update(self, probabilities: Any, target: Any) -> None:
        """Add a batch: probabilities [..., classes] and labels [...]."""
        self._keep(*classification.top_class(probabilities, target))

    def compute(self) -> Tensor:
        """The error over everything seen since the last reset."""
        confidence, correct = self._columns()
        return classification.adaptive_ece_of_rows(confidence, correct, self.n_bins)
