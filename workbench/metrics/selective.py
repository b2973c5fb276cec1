"""Metrics of selective prediction: what is gained by refusing the rows of highest risk.

Rows of equal risk are taken in random order; the numbers are the exact expectation over those orders.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.metrics._inputs import errors_of, numbers, risks, same_shape
from workbench.metrics.detection import ranks
from workbench.metrics.registry import metric


class RiskCoverageCurve(NamedTuple):
    """Share of rows accepted, and the mean error of the accepted rows, each [rows], float64."""

    coverage: Tensor
    error: Tensor


class SparsificationCurve(NamedTuple):
    """Share of rows removed, mean error of the rest over that of all, the same for removal by error, each [rows]."""

    removed: Tensor
    error: Tensor
    oracle: Tensor


@metric("max", -1, 1)
def risk_error_correlation(prediction: Any, risk: Any, target: Any) -> Tensor:
    """Spearman's rank correlation of risk and absolute error, from -1 to 1; higher is better.

    Args:
        prediction: [...], any shape, at least two elements.
        risk: Risk >= 0, shaped like prediction (or a Risk: its total).
        target: Shaped like prediction.

    Raises:
        ValueError: If all risks or all errors are equal, where no correlation exists.

    Example:
        >>> risk_error_correlation(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, -0.3, 0.2]))
        tensor(0.5000, dtype=torch.float64)
    """
    error, risk = errors_of(prediction, target).abs(), risks(risk)
    same_shape(prediction=error, risk=risk)
    centred = [rank - rank.mean() for rank in (ranks(risk.flatten()), ranks(error.flatten()))]
    for name, rank in zip(("risk", "absolute error"), centred, strict=True):
        if not rank.any():
            raise ValueError(
                f"a correlation needs values that differ; every {name} of {rank.numel()} elements is the same"
            )
    first, second = centred
    return ((first @ second) / (first.norm() * second.norm())).clamp(-1, 1)


def risk_coverage_curve(risk: Any, error: Any) -> RiskCoverageCurve:
    """Mean error of the k rows of lowest risk, for every k (El-Yaniv & Wiener 2010).

    Args:
        risk: [...], one number for each row; higher means less trust.
        error: Error >= 0 of each row (0 or 1 for a wrong class), shaped like risk.

    Example:
        >>> risk_coverage_curve(torch.tensor([0.1, 0.9]), torch.tensor([0.0, 1.0])).error
        tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    ordered = _by_risk(*ranked(risk, error))
    count = torch.arange(1, ordered.numel() + 1, dtype=torch.float64, device=ordered.device)
    return RiskCoverageCurve(count / ordered.numel(), ordered.cumsum(0) / count)


@metric("min")
def aurc(risk: Any, error: Any) -> Tensor:
    """Area under the risk-coverage curve, in units of the error; lower is better (Geifman & El-Yaniv 2017).

    The mean over k of the mean error of the k rows of lowest risk.

    Args:
        risk: [...], one number for each row; higher means less trust.
        error: Error >= 0 of each row (0 or 1 for a wrong class), shaped like risk.

    Example:
        >>> aurc(torch.tensor([0.1, 0.9]), torch.tensor([0.0, 1.0]))
        tensor(0.2500, dtype=torch.float64)
    """
    return risk_coverage_curve(risk, error).error.mean()


@metric("min")
def augrc(risk: Any, error: Any) -> Tensor:
    """Area under the generalised risk-coverage curve, in units of the error; lower is better (Traub et al. 2024).

    The generalised risk at coverage c is the error of the accepted rows summed and divided by all rows, so that it does
    not give the few rows of lowest risk the most weight; trapezoids over c from 0 to 1. For errors of 0 or 1 it is
    (1 - AUROC) acc (1 - acc) + (1 - acc)^2 / 2 with the AUROC of telling failures by their risk.

    Args:
        risk: [...], one number for each row; higher means less trust.
        error: Error >= 0 of each row (0 or 1 for a wrong class), shaped like risk.

    Example:
        >>> augrc(torch.tensor([0.1, 0.9]), torch.tensor([0.0, 1.0]))
        tensor(0.1250, dtype=torch.float64)
    """
    curve = risk_coverage_curve(risk, error)
    generalised = torch.nn.functional.pad(curve.error * curve.coverage, (1, 0))
    return ((generalised[1:] + generalised[:-1]) / 2).mean()


def sparsification_curve(risk: Any, error: Any) -> SparsificationCurve:
    """Mean error of what is left when the rows of highest risk are removed, beside the best possible removal.

    Both curves are divided by the mean error of all rows and so start at 1 (Ilg et al. 2018). A risk that says nothing
    gives a flat curve. Of errors that are all 0 every curve is 0.

    Args:
        risk: [...], one number for each row; higher means less trust.
        error: Error >= 0 of each row, shaped like risk.

    Example:
        >>> sparsification_curve(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0])).error
        tensor([1., 1.], dtype=torch.float64)
    """
    risk, error = ranked(risk, error)
    by_risk, by_error = risk_coverage_curve(risk, error), risk_coverage_curve(error, error)
    whole = error.mean() if error.any() else torch.ones_like(error[0])
    return SparsificationCurve(
        1 - by_risk.coverage.flip(0), by_risk.error.flip(0) / whole, by_error.error.flip(0) / whole
    )


@metric("min")
def ause(risk: Any, error: Any) -> Tensor:
    """Area under the sparsification error: mean distance of the sparsification curve from its oracle; lower is better.

    0 for a risk that ranks rows exactly as their errors do (Ilg et al. 2018: means of the remaining errors, over the
    mean of all).

    Args:
        risk: [...], one number for each row; higher means less trust.
        error: Error >= 0 of each row, shaped like risk.

    Example:
        >>> ause(torch.tensor([0.9, 0.1]), torch.tensor([0.0, 1.0]))
        tensor(1., dtype=torch.float64)
    """
    curve = sparsification_curve(risk, error)
    return (curve.error - curve.oracle).mean()


def ranked(risk: Any, error: Any) -> tuple[Tensor, Tensor]:
    """Checked vectors of risks and errors >= 0."""
    risk, error = numbers("risk", getattr(risk, "total", risk), finite=False), numbers("error", error)
    same_shape(risk=risk, error=error)
    if (error < 0).any():
        raise ValueError(
            f"errors must be >= 0 (absolute or squared), found {error.min().item()} (shape {tuple(error.shape)})"
        )
    return risk.flatten(), error.flatten()


def _by_risk(risk: Tensor, error: Tensor) -> Tensor:
    """Errors in order of rising risk; within equal risks their mean, which is what a random order gives on average."""
    values, index, counts = risk.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(values.shape, dtype=torch.float64, device=error.device).index_add(0, index, error)
    return (sums / counts).repeat_interleave(counts)
