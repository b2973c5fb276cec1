"""Metric classes for real-valued predictions, given with a risk, as samples or as a mixture of voters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.distributions import Normal
from workbench.metrics import ensembles, regression
from workbench.metrics._inputs import errors_of, level_in_unit, risks
from workbench.metrics.modules.base import AccumulatedMetric, MeanMetric
from workbench.metrics.regression import Family


class RMSE(MeanMetric, of=regression.rmse):
    """Root mean squared error; see `rmse`."""

    def update(self, prediction: Any, target: Any) -> None:
        """Add a batch: prediction and target of one shape."""
        self._add(errors_of(prediction, target).square())

    def compute(self) -> Tensor:
        """The root of the mean over everything seen since the last reset."""
        return super().compute().sqrt()


class MAE(MeanMetric, of=regression.mae):
    """Mean absolute error; see `mae`."""

    def update(self, prediction: Any, target: Any) -> None:
        """Add a batch: prediction and target of one shape."""
        self._add(regression.mae(prediction, target, reduction="none"))


class _Scored(MeanMetric):
    """The mean of a score of (prediction, risk, target) under a distribution."""

    def __init__(self, distribution: Family = Normal, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.distribution = distribution

    def update(self, prediction: Any, risk: Any, target: Any) -> None:
        """Add a batch: prediction, risk and target of one shape."""
        self._add(type(self).function(prediction, risk, target, distribution=self.distribution, reduction="none"))


class NLL(_Scored, of=regression.nll):
    """Negative log-likelihood; see `nll`."""


class CRPS(_Scored, of=regression.crps):
    """Continuous ranked probability score; see `crps`."""


class _Interval(MeanMetric):
    """A mean over central intervals of one level."""

    def __init__(self, level: float = 0.9, distribution: Family = Normal, **kwargs: Any) -> None:
        level_in_unit("level", level)
        super().__init__(**kwargs)
        self.level, self.distribution = level, distribution


class IntervalScore(_Interval, of=regression.interval_score):
    """Interval score; see `interval_score`."""

    def update(self, prediction: Any, risk: Any, target: Any) -> None:
        """Add a batch: prediction, risk and target of one shape."""
        self._add(regression.interval_score(prediction, risk, target, self.level, self.distribution, "none"))


class PICP(_Interval, of=regression.picp):
    """Prediction interval coverage probability, best at its level; see `picp`."""

    def update(self, prediction: Any, risk: Any, target: Any) -> None:
        """Add a batch: prediction, risk and target of one shape."""
        self._add(regression.picp(prediction, risk, target, self.level, self.distribution, "none"))


class MPIW(_Interval, of=regression.mpiw):
    """Mean prediction interval width; see `mpiw`."""

    def update(self, prediction: Any, risk: Any) -> None:
        """Add a batch: prediction and risk of one shape."""
        self._add(regression.mpiw(prediction, risk, self.level, self.distribution, "none"))


class Sharpness(MeanMetric, of=regression.sharpness):
    """Root mean square of the risks; see `sharpness`."""

    def update(self, risk: Any) -> None:
        """Add a batch of risks."""
        self._add(risks(risk).square())

    def compute(self) -> Tensor:
        """The root of the mean over everything seen since the last reset."""
        return super().compute().sqrt()


class CalibrationError(AccumulatedMetric, of=regression.calibration_error):
    """Gap between expected and observed coverage of central intervals; see `calibration_error`."""

    inside: Tensor
    count: Tensor
    levels: Tensor

    def __init__(
        self, distribution: Family = Normal, levels: Sequence[float] | Tensor | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.distribution = distribution
        self.register_buffer("levels", regression.checked_levels(levels), persistent=False)
        self._declare_sums("inside", shape=(len(self.levels),))
        self._declare_sums("count")

    def update(self, prediction: Any, risk: Any, target: Any) -> None:
        """Add a batch: prediction, risk and target of one shape."""
        u = regression.pit(prediction, risk, target, self.distribution)
        self._sums(regression.count_inside(self._position(u), self.levels.to(u.device)), torch.tensor(float(u.numel())))

    def compute(self) -> Tensor:
        """The mean absolute gap over everything seen since the last reset."""
        self._filled(self.count)
        return (self.inside / self.count - self.levels).abs().mean()

    def _position(self, u: Tensor) -> Tensor:
        return (2 * u - 1).abs()


class QuantileCalibrationError(CalibrationError, of=regression.quantile_calibration_error):
    """Gap between p and the share of targets below the p-quantile; see `quantile_calibration_error`."""

    def _position(self, u: Tensor) -> Tensor:
        return u


class SampleCRPS(MeanMetric, of=ensembles.crps_samples):
    """Continuous ranked probability score of samples; see `crps_samples`."""

    def __init__(self, fair: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fair = fair

    def update(self, samples: Any, target: Any) -> None:
        """Add a batch: samples [m, ...] and target [...]."""
        self._add(ensembles.crps_samples(samples, target, self.fair, "none"))


class MixtureNLL(MeanMetric, of=ensembles.mixture_nll):
    """Negative log-likelihood of a mixture of voters; see `mixture_nll`."""

    def __init__(self, distribution: Family = Normal, weights: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.distribution, self.weights = distribution, weights

    def update(self, predictions: Any, risk: Any, target: Any) -> None:
        """Add a batch: predictions and risk [voters, ...], target [...]."""
        self._add(ensembles.mixture_nll(predictions, risk, target, self.distribution, self.weights, "none"))


class MixtureCRPS(MeanMetric, of=ensembles.mixture_crps):
    """Continuous ranked probability score of a mixture of Normal voters; see `mixture_crps`."""

    def __init__(self, weights: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weights = weights

    def update(self, predictions: Any, risk: Any, target: Any) -> None:
        """Add a batch: predictions and risk [voters, ...], target [...]."""
        self._add(ensembles.mixture_crps(predictions, risk, target, weights=self.weights, reduction="none"))
