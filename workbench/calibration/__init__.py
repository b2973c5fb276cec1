"""Calibration of trained wrapped models and decisions by their risk: calibrated risks, guaranteed intervals, and abstention.

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

from typing import TYPE_CHECKING

from workbench.calibration.abstention import (
    Decision,
    Selective,
    SelectivePredictor,
    selective,
)
from workbench.calibration.adaptation import adapt_batch_norm
from workbench.calibration.base import Calibrated
from workbench.calibration.choose import calibrate
from workbench.calibration.conformal import SplitConformal
from workbench.calibration.cross import CrossConformal
from workbench.calibration.online import OnlineConformal
from workbench.calibration.quantiles import QuantileRecalibration
from workbench.calibration.ranked_rows import TopUncertain, top_uncertain
from workbench.calibration.risk_control import control_risk, learn_then_test
from workbench.calibration.scaling import TemperatureScaling, VarianceScaling
from workbench.calibration.shift import DensityRatio
from workbench.deprecation import deprecated_names

__all__ = [
    "Calibrated",
    "CrossConformal",
    "Decision",
    "DensityRatio",
    "OnlineConformal",
    "QuantileRecalibration",
    "Selective",
    "SelectivePredictor",
    "SplitConformal",
    "TemperatureScaling",
    "TopUncertain",
    "VarianceScaling",
    "adapt_batch_norm",
    "calibrate",
    "control_risk",
    "learn_then_test",
    "selective",
    "top_uncertain",
]

if not TYPE_CHECKING:
    __getattr__ = deprecated_names(
        __name__,
        {
            "conformal_quantile": (f"{__name__}.conformal:conformal_quantile", "calibrate(..., 'conformal').interval"),
            "cv_plus": (f"{__name__}.cross:cv_plus", "calibrate(wrapped, history).interval"),
            "fit_recalibration": (f"{__name__}.quantiles:fit_recalibration", "calibrate(..., 'isotonic')"),
            "fit_temperature": (f"{__name__}.scaling:fit_temperature", "calibrate(..., 'temperature').temperature"),
            "fit_variance_scale": (f"{__name__}.scaling:fit_variance_scale", "calibrate(..., 'variance').scale"),
            "upper_bound": (f"{__name__}.abstention:upper_bound", "selective(...).threshold(risk=..., confidence=...)"),
        },
    )
