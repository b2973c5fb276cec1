"""Metrics of predictions and of their risks.

Functions take (prediction, [risk,] target, ...) and return one number (a 0-dim float64 tensor on the device of the
input); the classes of the same names accumulate over batches and processes as torchmetrics do. Bad input (shapes that
differ, NaN, negative risk, probabilities that do not sum to one, no rows) is a ValueError that says what was found.

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

from workbench.metrics.classification import (
    ReliabilityCurve,
    accuracy,
    adaptive_ece,
    brier,
    categorical_nll,
    classwise_ece,
    ece,
    max_ece,
    reliability_curve,
)
from workbench.metrics.detection import aupr, auroc, fpr95
from workbench.metrics.ensembles import crps_samples, mixture_crps, mixture_nll
from workbench.metrics.regression import (
    CoverageCurve,
    calibration_error,
    coverage_curve,
    crps,
    interval_score,
    mae,
    mpiw,
    nll,
    picp,
    quantile_calibration_error,
    rmse,
    sharpness,
)
from workbench.metrics.selective import (
    RiskCoverageCurve,
    SparsificationCurve,
    augrc,
    aurc,
    ause,
    risk_coverage_curve,
    risk_error_correlation,
    sparsification_curve,
)

if TYPE_CHECKING:
    from workbench.metrics.modules import (
        AUGRC,
        AUPR,
        AURC,
        AUROC,
        AUSE,
        CRPS,
        ECE,
        FPR95,
        MAE,
        MPIW,
        NLL,
        PICP,
        RMSE,
        Accuracy,
        AdaptiveECE,
        Brier,
        CalibrationError,
        CategoricalNLL,
        ClasswiseECE,
        IntervalScore,
        MaxECE,
        MixtureCRPS,
        MixtureNLL,
        QuantileCalibrationError,
        RiskErrorCorrelation,
        SampleCRPS,
        Sharpness,
    )

__all__ = [
    "AUGRC",
    "AUPR",
    "AURC",
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
    "CoverageCurve",
    "IntervalScore",
    "MaxECE",
    "MixtureCRPS",
    "MixtureNLL",
    "QuantileCalibrationError",
    "ReliabilityCurve",
    "RiskCoverageCurve",
    "RiskErrorCorrelation",
    "SampleCRPS",
    "Sharpness",
    "SparsificationCurve",
    "accuracy",
    "adaptive_ece",
    "augrc",
    "aupr",
    "aurc",
    "auroc",
    "ause",
    "brier",
    "calibration_error",
    "categorical_nll",
    "classwise_ece",
    "coverage_curve",
    "crps",
    "crps_samples",
    "ece",
    "fpr95",
    "interval_score",
    "mae",
    "max_ece",
    "mixture_crps",
    "mixture_nll",
    "mpiw",
    "nll",
    "picp",
    "quantile_calibration_error",
    "reliability_curve",
    "risk_coverage_curve",
    "risk_error_correlation",
    "rmse",
    "sharpness",
    "sparsification_curve",
]


def __getattr__(name: str) -> Any:
    """The metric classes, loaded when first asked for: torchmetrics is a heavy import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("workbench.metrics.modules"), name)


def __dir__() -> list[str]:
    return __all__
