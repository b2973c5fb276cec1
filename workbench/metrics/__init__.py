"""Metrics of predictions and of their risks.

Functions take (prediction, [risk,] target, ...) and return one number (a 0-dim float64 tensor on the device of the
input); the classes of the same names accumulate over batches and processes as torchmetrics do. Invalid input (different
shapes, NaN, negative risk, probabilities that do not sum to one, no rows) raises a ValueError.

Example:
    >>> import torch
    >>> from workbench import metrics
    >>> prediction, target = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [3.0]])
    >>> risk = torch.ones(2, 1)
    >>> metrics.rmse(prediction, target)
    tensor(1.4142, dtype=torch.float64)
    >>> metric = metrics.NLL()
    >>> metric.update(prediction, risk, target)
    >>> metric.compute() == metrics.nll(prediction, risk, target)
    tensor(True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.errors import require
from workbench.metrics import (  # noqa: F401
    anomalies,
    boxes,
    classification,
    disentanglement,
    ensembles,
    forecasts,
    intervals,
    out_of_distribution,
    regression,
    selective,
)
from workbench.metrics.registry import METRICS, metric

if TYPE_CHECKING:
    from workbench.metrics.anomalies import *  # noqa: F403
    from workbench.metrics.boxes import *  # noqa: F403
    from workbench.metrics.classification import *  # noqa: F403
    from workbench.metrics.disentanglement import *  # noqa: F403
    from workbench.metrics.ensembles import *  # noqa: F403
    from workbench.metrics.forecasts import *  # noqa: F403
    from workbench.metrics.intervals import *  # noqa: F403
    from workbench.metrics.modules import *  # noqa: F403
    from workbench.metrics.out_of_distribution import *  # noqa: F403
    from workbench.metrics.regression import *  # noqa: F403
    from workbench.metrics.selective import *  # noqa: F403

# functions that return more than one number, and the tuples that they return
_NOT_SCALAR = {
    "AveragePrecision": boxes,
    "MatchedBoxes": boxes,
    "average_precision": boxes,
    "matched_boxes": boxes,
    "NABScore": anomalies,
    "nab_score": anomalies,
    "CoverageCurve": regression,
    "Disentanglement": disentanglement,
    "LeverCurves": disentanglement,
    "disentanglement_error": disentanglement,
    "StepCoverage": forecasts,
    "coverage_by_step": forecasts,
    "coverage_over_time": forecasts,
    "pit": regression,
    "pit_samples": ensembles,
    "ReliabilityCurve": classification,
    "RiskCoverageCurve": selective,
    "SparsificationCurve": selective,
    "coverage_curve": regression,
    "reliability_curve": classification,
    "risk_coverage_curve": selective,
    "sparsification_curve": selective,
}
_CLASSES = (
    "AUGRC",
    "AUPR",
    "AURC",
    "WinklerScore",
    "PathCoverage",
    "MeanIoU",
    "ErrorAUROC",
    "EnergyScore",
    "AURG",
    "AUROC",
    "AUSE",
    "CRPS",
    "ECE",
    "FPR95",
    "MAE",
    "MPIW",
    "NLL",
    "PICP",
    "RMSE",
    "Accuracy",
    "AdaptiveECE",
    "Brier",
    "CalibrationError",
    "CategoricalNLL",
    "ClasswiseECE",
    "IntervalScore",
    "MaxECE",
    "MixtureCRPS",
    "MixtureNLL",
    "QuantileCalibrationError",
    "RiskErrorCorrelation",
    "SampleCRPS",
    "Sharpness",
)
__all__ = ["METRICS", *sorted((*METRICS, *_NOT_SCALAR, *_CLASSES)), "metric"]

globals().update({name: info.function for name, info in METRICS.items()})
globals().update({name: getattr(module, name) for name, module in _NOT_SCALAR.items()})

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Load the metric classes on first use, since importing torchmetrics is slow."""
        if name not in _CLASSES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        require("torchmetrics")
        return getattr(import_module("workbench.metrics.modules"), name)


def __dir__() -> list[str]:
    return __all__
