"""The metrics as torchmetrics classes: they accumulate over batches, merge over processes, reset and plot."""

from workbench.metrics.modules.classes import ECE, Accuracy, AdaptiveECE, Brier, CategoricalNLL, ClasswiseECE, MaxECE
from workbench.metrics.modules.ranking import AUGRC, AUPR, AURC, AUROC, AUSE, FPR95, RiskErrorCorrelation
from workbench.metrics.modules.values import (
    CRPS,
    MAE,
    MPIW,
    NLL,
    PICP,
    RMSE,
    CalibrationError,
    IntervalScore,
    MixtureCRPS,
    MixtureNLL,
    QuantileCalibrationError,
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
    "IntervalScore",
    "MaxECE",
    "MixtureCRPS",
    "MixtureNLL",
    "QuantileCalibrationError",
    "RiskErrorCorrelation",
    "SampleCRPS",
    "Sharpness",
]
