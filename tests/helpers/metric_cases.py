"""Every metric class with the function that it must agree with, and arguments for both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench import metrics
from workbench.distributions import Laplace, StudentT

GENERATOR = torch.Generator().manual_seed(0)
PREDICTION, TARGET = torch.randn(2, 40, 2, generator=GENERATOR)
RISK = torch.rand(40, 2, generator=GENERATOR) + 0.5
PROBS = torch.randn(40, 3, generator=GENERATOR).softmax(-1)
LABELS = torch.randint(0, 3, (40,), generator=GENERATOR)
VOTERS = torch.randn(40, 4, generator=GENERATOR)
VALUES = (PREDICTION, RISK, TARGET)


def voters_first(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda samples, *rest: function(samples.T, *(r.T if r.ndim == 2 else r for r in rest))


class VotersFirst:
    """Adapter that feeds batches [rows, voters] to a metric of inputs [voters, rows]."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric

    def update(self, samples: Tensor, *rest: Tensor) -> None:
        self.metric.update(samples.T, *(r.T if r.ndim == 2 else r for r in rest))


# name -> (new metric, the function that it must agree with, arguments with rows first)
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "RMSE": (metrics.RMSE, metrics.rmse, (PREDICTION, TARGET)),
    "MAE": (metrics.MAE, metrics.mae, (PREDICTION, TARGET)),
    "NLL": (metrics.NLL, metrics.nll, VALUES),
    "NLL of Laplace": (partial(metrics.NLL, Laplace), partial(metrics.nll, distribution=Laplace), VALUES),
    "CRPS": (partial(metrics.CRPS, StudentT(3.0)), partial(metrics.crps, distribution=StudentT(3.0)), VALUES),
    "IntervalScore": (partial(metrics.IntervalScore, 0.5), partial(metrics.interval_score, level=0.5), VALUES),
    "WinklerScore": (metrics.WinklerScore, metrics.winkler_score, (PREDICTION, PREDICTION + RISK, TARGET)),
    "PICP": (metrics.PICP, metrics.picp, VALUES),
    "MPIW": (metrics.MPIW, metrics.mpiw, (PREDICTION, RISK)),
    "Sharpness": (metrics.Sharpness, metrics.sharpness, (RISK,)),
    "CalibrationError": (metrics.CalibrationError, metrics.calibration_error, VALUES),
    "QuantileCalibrationError": (metrics.QuantileCalibrationError, metrics.quantile_calibration_error, VALUES),
    "Accuracy": (metrics.Accuracy, metrics.accuracy, (PROBS, LABELS)),
    "MeanIoU": (partial(metrics.MeanIoU, 3), metrics.mean_iou, (PROBS, LABELS)),
    "CategoricalNLL": (metrics.CategoricalNLL, metrics.categorical_nll, (PROBS, LABELS)),
    "Brier": (metrics.Brier, metrics.brier, (PROBS, LABELS)),
    "ECE": (metrics.ECE, metrics.ece, (PROBS, LABELS)),
    "MaxECE": (partial(metrics.MaxECE, 4), partial(metrics.max_ece, n_bins=4), (PROBS, LABELS)),
    "ClasswiseECE": (partial(metrics.ClasswiseECE, 3), metrics.classwise_ece, (PROBS, LABELS)),
    "AdaptiveECE": (partial(metrics.AdaptiveECE, 4), partial(metrics.adaptive_ece, n_bins=4), (PROBS, LABELS)),
    "AUROC": (metrics.AUROC, metrics.auroc, (RISK, RISK + 0.2)),
    "AUPR": (metrics.AUPR, metrics.aupr, (RISK, RISK + 0.2)),
    "FPR95": (metrics.FPR95, metrics.fpr95, (RISK, RISK + 0.2)),
    "RiskErrorCorrelation": (metrics.RiskErrorCorrelation, metrics.risk_error_correlation, VALUES),
    "AURC": (metrics.AURC, metrics.aurc, (RISK, TARGET.abs())),
    "AUGRC": (metrics.AUGRC, metrics.augrc, (RISK, TARGET.abs())),
    "AURG": (metrics.AURG, metrics.aurg, (RISK, TARGET.abs())),
    "ErrorAUROC": (metrics.ErrorAUROC, metrics.error_auroc, (RISK, (TARGET > 0).double())),
    "AUSE": (metrics.AUSE, metrics.ause, (RISK, TARGET.abs())),
    "SampleCRPS": (metrics.SampleCRPS, voters_first(metrics.crps_samples), (VOTERS, TARGET[:, 0])),
    "EnergyScore": (metrics.EnergyScore, voters_first(metrics.energy_score), (VOTERS, TARGET[:, 0])),
    "PathCoverage": (
        partial(metrics.PathCoverage, 0.5), voters_first(partial(metrics.path_coverage, level=0.5)), (VOTERS, TARGET[:, 0])
    ),
    "MixtureNLL": (metrics.MixtureNLL, voters_first(metrics.mixture_nll), (VOTERS, VOTERS.abs() + 1, TARGET[:, 0])),
    "MixtureCRPS": (metrics.MixtureCRPS, voters_first(metrics.mixture_crps), (VOTERS, VOTERS.abs() + 1, TARGET[:, 0])),
}  # fmt: skip


VOTERS_FIRST = ("SampleCRPS", "EnergyScore", "PathCoverage", "MixtureNLL", "MixtureCRPS")


def fed(name: str, metric: Any, rows: slice) -> None:
    target = VotersFirst(metric) if name in VOTERS_FIRST else metric
    target.update(*(argument[rows] for argument in CASES[name][2]))
