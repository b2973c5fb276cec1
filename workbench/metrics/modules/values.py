"""Metric classes for real-valued predictions, given with a risk, as samples or as a mixture of voters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.distributions import Normal
from workbench.metrics import ensembles, forecasts, intervals, regression
from workbench.metrics._inputs import level_in_unit
from workbench.metrics._pieces import reduce_terms, value_pieces
from workbench.metrics.modules.base import AccumulatedMetric, MeanMetric
from workbench.metrics.regression import Family


class _MeanOfValues(MeanMetric):
    """The mean of a term over all elements that have a target."""

    def __init__(self, *, void: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.void = void


class RMSE(_MeanOfValues, of=regression.rmse):
    """Root mean squared error; see `rmse`."""

    def update(self, prediction: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of predictions and targets of one shape."""
        self._add(reduce_terms((e.square() for e in regression.errors(prediction, target, self.void, mask)), "none"))

    def compute(self) -> Tensor:
        """Return the root of the mean over everything seen since the last reset."""
        return super().compute().sqrt()


class MAE(_MeanOfValues, of=regression.mae):
    """Mean absolute error; see `mae`."""

    def update(self, prediction: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of predictions and targets of one shape."""
        self._add(regression.mae(prediction, target, reduction="none", void=self.void, mask=mask))


class _Scored(_MeanOfValues):
    """The mean of a score of (prediction, risk, target) under a distribution."""

    def __init__(self, distribution: Family = Normal, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.distribution = distribution

    def update(self, prediction: Any, risk: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of predictions, risks and targets of one shape."""
        options = {"distribution": self.distribution, "reduction": "none", "void": self.void, "mask": mask}
        self._add(type(self).function(prediction, risk, target, **options))


class NLL(_Scored, of=regression.nll):
    """Negative log-likelihood; see `nll`."""


class CRPS(_Scored, of=regression.crps):
    """Continuous ranked probability score; see `crps`."""


class _Interval(_MeanOfValues):
    """A mean over central intervals of one level."""

    def __init__(self, level: float = 0.9, distribution: Family = Normal, **kwargs: Any) -> None:
        level_in_unit("level", level)
        super().__init__(**kwargs)
        self.level, self.distribution = level, distribution

    def update(self, prediction: Any, risk: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of predictions, risks and targets of one shape."""
        options = {"void": self.void, "mask": mask}
        self._add(type(self).function(prediction, risk, target, self.level, self.distribution, "none", **options))


class IntervalScore(_Interval, of=intervals.interval_score):
    """Interval score; see `interval_score`."""


class PICP(_Interval, of=intervals.picp):
    """Prediction interval coverage probability, best at its level; see `picp`."""


class MPIW(_Interval, of=intervals.mpiw):
    """Mean prediction interval width; see `mpiw`."""

    def update(self, prediction: Any, risk: Any, mask: Any = None) -> None:  # type: ignore[override]
        """Add a batch of predictions and risks of one shape."""
        self._add(intervals.mpiw(prediction, risk, self.level, self.distribution, "none", mask=mask))


class Sharpness(MeanMetric, of=regression.sharpness):
    """Root mean square of the risks; see `sharpness`."""

    def update(self, risk: Any, mask: Any = None) -> None:
        """Add a batch of risks."""
        self._add(reduce_terms((piece.square() for (piece,) in value_pieces(risk=risk, mask=mask)), "none"))

    def compute(self) -> Tensor:
        """Return the root of the mean over everything seen since the last reset."""
        return super().compute().sqrt()


class CalibrationError(AccumulatedMetric, of=regression.calibration_error):
    """Gap between expected and observed coverage of central intervals; see `calibration_error`."""

    inside: Tensor
    count: Tensor
    levels: Tensor

    def __init__(
        self,
        distribution: Family = Normal,
        levels: Sequence[float] | Tensor | None = None,
        *,
        void: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.distribution, self.void = distribution, void
        self.register_buffer("levels", regression.checked_levels(levels), persistent=False)
        self._declare_sums("inside", shape=(len(self.levels),))
        self._declare_sums("count")

    def update(self, prediction: Any, risk: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of predictions, risks and targets of one shape."""
        pits = regression.pits(prediction, risk, target, self.distribution, self.void, mask)
        inside, count = regression.counts_inside(pits, self.levels, self._position)
        self._add_to_states(inside, torch.tensor(float(count)))

    def compute(self) -> Tensor:
        """Return the mean absolute gap over everything seen since the last reset."""
        self._check_not_empty(self.count)
        return (self.inside / self.count - self.levels).abs().mean()

    def _position(self, u: Tensor) -> Tensor:
        return regression.central(u)


class QuantileCalibrationError(CalibrationError, of=regression.quantile_calibration_error):
    """Gap between p and the share of targets below the p-quantile; see `quantile_calibration_error`."""

    def _position(self, u: Tensor) -> Tensor:
        return u


class SampleCRPS(_MeanOfValues, of=ensembles.crps_samples):
    """Continuous ranked probability score of samples; see `crps_samples`."""

    def __init__(self, fair: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fair = fair

    def update(self, samples: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of samples [m, ...] and targets [...]."""
        self._add(ensembles.crps_samples(samples, target, self.fair, "none", void=self.void, mask=mask))


class MixtureNLL(_MeanOfValues, of=ensembles.mixture_nll):
    """Negative log-likelihood of a mixture of voters; see `mixture_nll`."""

    def __init__(self, distribution: Family = Normal, weights: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.distribution, self.weights = distribution, weights

    def update(self, predictions: Any, risk: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of predictions and risks [voters, ...], and targets [...]."""
        options = {"weights": self.weights, "reduction": "none", "void": self.void, "mask": mask}
        self._add(ensembles.mixture_nll(predictions, risk, target, self.distribution, **options))


class MixtureCRPS(_MeanOfValues, of=ensembles.mixture_crps):
    """Continuous ranked probability score of a mixture of Normal voters; see `mixture_crps`."""

    def __init__(self, weights: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weights = weights

    def update(self, predictions: Any, risk: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of predictions and risks [voters, ...], and targets [...]."""
        options = {"weights": self.weights, "reduction": "none", "void": self.void, "mask": mask}
        self._add(ensembles.mixture_crps(predictions, risk, target, **options))


class WinklerScore(_MeanOfValues, of=intervals.winkler_score):
    """Interval score of any intervals; see `winkler_score`."""

    def __init__(self, level: float = 0.9, **kwargs: Any) -> None:
        level_in_unit("level", level)
        super().__init__(**kwargs)
        self.level = level

    def update(self, lower: Any, upper: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of ends of intervals and targets of one shape."""
        options = {"void": self.void, "mask": mask}
        self._add(intervals.winkler_score(lower, upper, target, self.level, "none", **options))


class EnergyScore(_MeanOfValues, of=forecasts.energy_score):
    """Energy score of samples of several targets; see `energy_score`."""

    def __init__(self, fair: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fair = fair

    def update(self, samples: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of samples [m, n, ...] and targets [n, ...]."""
        self._add(forecasts.energy_score(samples, target, self.fair, "none", void=self.void, mask=mask))


class PathCoverage(_MeanOfValues, of=forecasts.path_coverage):
    """Share of whole paths inside a joint band of samples, best at its level; see `path_coverage`."""

    def __init__(self, level: float = 0.9, **kwargs: Any) -> None:
        level_in_unit("level", level)
        super().__init__(**kwargs)
        self.level = level

    def update(self, samples: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of samples [m, n, ...] and targets [n, ...]."""
        self._add(forecasts.path_coverage(samples, target, self.level, "none", void=self.void, mask=mask))
