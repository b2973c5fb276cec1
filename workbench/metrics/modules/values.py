"""Classes for real-valued predictions, given with a risk, as samples or as a mixture of voters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.distributions import Normal
from workbench.metrics import ensembles, regression
from workbench.metrics._inputs import errors_of, level_in_unit, risks
from workbench.metrics.modules.base import AccumulatedMetric, MeanMetric
from workbench.metrics.regression import Family


class RMSE(MeanMetric):
    """Root mean squared error; see `rmse`."""

    def update(self, prediction: Any, target: Any) -> None:
        """Add a batch: prediction and target of one shape."""
        self._add(errors_of(prediction, target).square())

    def compute(self) -> Tensor:
        """The root of the mean over everything seen since the last reset."""
        return super().compute().sqrt()


class MAE(MeanMetric):
    """Mean absolute error; see `mae`."""

    def update(self, prediction: Any, target: Any) -> None:
        """Add a batch: prediction and target of one shape."""
        self._add(regression.mae(prediction, target, reduction="none"))


class _Scored(MeanMetric):
    """The mean of a score of (prediction, risk, target) under a distribution."""

    score: ClassVar[Callable[..., Tensor]]

    def __init__(self, distribution: Family = Normal, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.distribution = distribution

    def update(self, prediction: Any, risk: Any, target: Any) -> None:
        """Add a batch: prediction, risk and target of one shape."""
        score = type(self).score
        self._add(score(prediction, risk, target, distribution=self.distribution, reduction="none"))


class NLL(_Scored):
    """Negative log-likelihood; see `nll`."""

    plot_lower_bound = None  # type: ignore[assignment]
    score = staticmethod(regression.nll)


class CRPS(_Scored):
    """Continuous ranked probability score; see `crps`."""

    score = staticmethod(regression.crps)


class _Interval(MeanMetric):
    """A mean over central intervals of one level."""

    def __init__(self, level: float = 0.9, distribution: Family = Normal, **kwargs: Any) -> None:
        level_in_unit("level", level)
        super().__init__(**kwargs)
        self.level, self.distribution = level, distribution


class IntervalScore(_Interval):
    """Interval score; see `interval_score`."""

    def update(self, prediction: Any, risk: Any, target: Any) -> None:
        """Add a batch: prediction, risk and target of one shape."""
        self._add(regression.interval_score(prediction, risk, target, self.level, self.distribution, "none"))


class PICP(_Interval):
    """Prediction interval coverage probability, best at its level; see `picp`."""

    higher_is_better = None  # type: ignore[assignment]
    plot_upper_bound = 1.0

    def update(self, prediction: Any, risk: Any, target: Any) -> None:
        """Add a batch: prediction, risk and target of one shape."""
        self._add(regression.picp(prediction, risk, target, self.level, self.distribution, "none"))


class MPIW(_Interval):
    """Mean prediction interval width; see `mpiw`."""

    def update(self, prediction: Any, risk: Any) -> None:
        """Add a batch: prediction and risk of one shape."""
        self._add(regression.mpiw(prediction, risk, self.level, self.distribution, "none"))


class Sharpness(MeanMetric):
    """Root mean square of the risks; see `sharpness`."""

    def update(self, risk: Any) -> None:
        """Add a batch of risks."""
        self._add(risks(risk).square())

    def compute(self) -> Tensor:
        """The root of the mean over everything seen since the last reset."""
        return super().compute().sqrt()


class CalibrationError(AccumulatedMetric):
    """Gap between expected and observed coverage of central intervals; see `calibration_error`."""

    plot_upper_bound = 1.0
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


class QuantileCalibrationError(CalibrationError):
    """Gap between p and the share of targets below the p-quantile; see `quantile_calibration_error`."""

    def _position(self, u: Tensor) -> Tensor:
        return u


class SampleCRPS(MeanMetric):
    """Continuous ranked probability score of samples; see `crps_samples`."""

    def __init__(self, fair: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fair = fair

    def update(self, samples: Any, target: Any) -> None:
        """Add a batch: samples [m, ...] and target [...]."""
        self._add(ensembles.crps_samples(samples, target, self.fair, "none"))


class MixtureNLL(MeanMetric):
    """Negative log-likelihood of a mixture of voters; see `mixture_nll`."""

    plot_lower_bound = None  # type: ignore[assignment]

    def __init__(self, distribution: Family = Normal, weights: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.distribution, self.weights = distribution, weights

    def update(self, predictions: Any, risk: Any, target: Any) -> None:
        """Add a batch: predictions and risk [voters, ...], target [...]."""
        self._add(ensembles.mixture_nll(predictions, risk, target, self.distribution, self.weights, "none"))


class MixtureCRPS(MeanMetric):
    """Continuous ranked probability score of a mixture of Normal voters; see `mixture_crps`."""

    def __init__(self, weights: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weights = weights

    def update(self, predictions: Any, risk: Any, target: Any) -> None:
        """Add a batch: predictions and risk [voters, ...], target [...]."""
        self._add(ensembles.mixture_crps(predictions, risk, target, weights=self.weights, reduction="none"))
