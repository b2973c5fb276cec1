"""Calibration and decisions on top of a wrapped model that is trained: risks that hold, intervals with a guarantee, and when to abstain.

Example:
    >>> import torch
    >>> from workbench import sculpt
    >>> from workbench.calibration import calibrate, selective
    >>> wrapped = sculpt.Wrapper()(torch.nn.Linear(2, 1))
    >>> held_out = torch.randn(200, 2, generator=torch.Generator().manual_seed(0)), torch.linspace(-9, 9, 200)[:, None]
    >>> calibrated = calibrate(wrapped, held_out)
    >>> y, risk = calibrated(torch.zeros(4, 2), return_risk=True)
    >>> lower, upper = calibrate(wrapped, held_out, "conformal").interval(torch.zeros(4, 2), coverage=0.9)
    >>> predictor = selective(calibrated, held_out).predictor(coverage=0.8)
"""

from __future__ import annotations

from workbench.calibration.abstention import (
    Decision,
    Selective,
    SelectivePredictor,
    TopUncertain,
    selective,
    top_uncertain,
    upper_bound,
)
from workbench.calibration.base import Calibrated
from workbench.calibration.choose import calibrate
from workbench.calibration.conformal import SplitConformal, conformal_quantile
from workbench.calibration.cross import CrossConformal, cv_plus
from workbench.calibration.quantiles import QuantileRecalibration, fit_recalibration
from workbench.calibration.scaling import TemperatureScaling, VarianceScaling, fit_temperature, fit_variance_scale

__all__ = [
    "Calibrated",
    "CrossConformal",
    "Decision",
    "QuantileRecalibration",
    "Selective",
    "SelectivePredictor",
    "SplitConformal",
    "TemperatureScaling",
    "TopUncertain",
    "VarianceScaling",
    "calibrate",
    "conformal_quantile",
    "cv_plus",
    "fit_recalibration",
    "fit_temperature",
    "fit_variance_scale",
    "selective",
    "top_uncertain",
    "upper_bound",
]
