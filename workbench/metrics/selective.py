"""Metrics of selective prediction: the gain from rejecting the rows, pixels or tokens of highest risk.

Ties in risk are broken at random; the metrics are the exact expectation over these orders. Elements excluded by `mask` are ignored,
whatever their risk and error. A ranking needs all elements at once: about 80 bytes for each one that counts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.metrics._inputs import numbers, real, same_rows, same_shape
from workbench.metrics._pieces import check_not_empty, valid_mask, value_pieces
from workbench.metrics.out_of_distribution import auroc_of, ranks
from workbench.metrics.registry import metric


class RiskCoverageCurve(NamedTuple):
    """Share of accepted rows, and the mean error of these rows, each [rows], float64."""

    coverage: Tensor
    error: Tensor


class SparsificationCurve(NamedTuple):
    """Share of removed rows, mean error of the remaining rows relative to all, and the same for removal by error (oracle), each [rows]."""

    removed: Tensor
    error: Tensor
    oracle: Tensor

    @property
    def random(self) -> Tensor:
        """Expected curve for removal in random order: the remaining rows have the mean error of all, 1 (0 if all errors are 0)."""
        return self.error[:1].expand_as(self.error)


@metric("max", -1, 1)
def risk_error_correlation(
    prediction: Any, risk: Any, target: Any, *, void: float | None = None, mask: Any = None
) -> Tensor:
    """Spearman's rank correlation of risk and absolute error, from -1 to 1; higher is better.

    Args:
        prediction: [...], any shape, at least two elements.
        risk: Risk >= 0, shaped like prediction (or a Risk: its total).
        target: Shaped like prediction.
        void: Number that marks missing targets.
        mask: Boolean mask shaped like target, True for elements that count.

    Raises:
        ValueError: If all risks or all errors are equal, so that the correlation is undefined.

    Example:
        >>> risk_error_correlation(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, -0.3, 0.2]))
        tensor(0.5000, dtype=torch.float64)
    """
    columns = list(value_pieces(prediction=prediction, risk=risk, target=target, void=void, mask=mask))
    check_not_empty(len(columns))
    prediction, risk, target = (
        torch.cat([piece.flatten() for piece in column]) for column in zip(*columns, strict=True)
    )
    error = (prediction - target).abs()
    centred = [rank - rank.mean() for rank in (ranks(risk), ranks(error))]
    for name, rank in zip(("risk", "absolute error"), centred, strict=True):
        if not rank.any():
            raise ValueError(
                f"a correlation needs values that differ; every {name} of {rank.numel()} elements is the same"
            )
    first, second = centred
    return ((first @ second) / (first.norm() * second.norm())).clamp(-1, 1)


def risk_coverage_curve(risk: Any, error: Any, *, mask: Any = None) -> RiskCoverageCurve:
    """Mean error of the k rows of lowest risk, for every k (El-Yaniv & Wiener 2010).

    Args:
        risk: [...], one number per row; higher means less trust.
        error: Error >= 0 of each row (0 or 1 for a wrong class), shaped like risk.
        mask: Boolean mask shaped like risk, True for elements that count.

    Example:
        >>> risk_coverage_curve(torch.tensor([0.1, 0.9]), torch.tensor([0.0, 1.0])).error
        tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    ordered = _by_risk(*ranked(risk, error, mask))
    check_not_empty(ordered.numel())
    count = torch.arange(1, ordered.numel() + 1, dtype=torch.float64, device=ordered.device)
    return RiskCoverageCurve(count / ordered.numel(), ordered.cumsum(0) / count)


@metric("min")
def aurc(risk: Any, error: Any, *, mask: Any = None) -> Tensor:
    """Area under the risk-coverage curve, in units of the error; lower is better (Geifman & El-Yaniv 2017).

    The mean, over k, of the mean error of the k rows of lowest risk.

    Args:
        risk: [...], one number per row; higher means less trust.
        error: Error >= 0 of each row (0 or 1 for a wrong class), shaped like risk.
        mask: Boolean mask shaped like risk, True for elements that count.

    Example:
        >>> aurc(torch.tensor([0.1, 0.9]), torch.tensor([0.0, 1.0]))
        tensor(0.2500, dtype=torch.float64)
    """
    return risk_coverage_curve(risk, error, mask=mask).error.mean()


@metric("min")
def augrc(risk: Any, error: Any, *, mask: Any = None) -> Tensor:
    """Area under the generalized risk-coverage curve, in units of the error; lower is better (Traub et al. 2024).

    The generalized risk at coverage c is the error of the accepted rows summed and divided by all rows, so that it does
    not give the few rows of lowest risk the most weight; trapezoids over c from 0 to 1. For errors of 0 or 1 it is
    (1 - AUROC) acc (1 - acc) + (1 - acc)^2 / 2 with the AUROC of telling failures by their risk.

    Args:
        risk: [...], one number per row; higher means less trust.
        error: Error >= 0 of each row (0 or 1 for a wrong class), shaped like risk.
        mask: Boolean mask shaped like risk, True for elements that count.

    Example:
        >>> augrc(torch.tensor([0.1, 0.9]), torch.tensor([0.0, 1.0]))
        tensor(0.1250, dtype=torch.float64)
    """
    curve = risk_coverage_curve(risk, error, mask=mask)
    weighted_error = torch.nn.functional.pad(curve.error * curve.coverage, (1, 0))
    return ((weighted_error[1:] + weighted_error[:-1]) / 2).mean()


def sparsification_curve(risk: Any, error: Any, *, mask: Any = None) -> SparsificationCurve:
    """Mean error of the remaining rows when the rows of highest risk are removed, next to the best possible order of removal.

    Both curves are divided by the mean error of all rows and so start at 1 (Ilg et al. 2018). An uninformative risk
    gives a flat curve, `curve.random`. If all errors are 0, all curves are 0.

    Args:
        risk: [...], one number per row; higher means less trust.
        error: Error >= 0 of each row, shaped like risk.
        mask: Boolean mask shaped like risk, True for elements that count.

    Example:
        >>> sparsification_curve(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0])).error
        tensor([1., 1.], dtype=torch.float64)
    """
    risk, error = ranked(risk, error, mask)
    check_not_empty(error.numel())
    by_risk, by_error = risk_coverage_curve(risk, error), risk_coverage_curve(error, error)
    mean_error = error.mean() if error.any() else torch.ones_like(error[0])
    return SparsificationCurve(
        1 - by_risk.coverage.flip(0), by_risk.error.flip(0) / mean_error, by_error.error.flip(0) / mean_error
    )


@metric("min")
def ause(risk: Any, error: Any, normalize: str = "mean", *, mask: Any = None) -> Tensor:
    """Area under the sparsification error: mean distance of the sparsification curve from its oracle; lower is better.

    0 for a risk that ranks rows exactly as their errors do (Ilg et al. 2018: means of the remaining errors, divided by the
    mean of all). The value of an uninformative risk depends on the errors: its curve stays at 1, and its area is the mean of 1 - oracle.

    Args:
        risk: [...], one number per row; higher means less trust.
        error: Error >= 0 of each row, shaped like risk.
        normalize: "mean" divides the curves by the mean error, as in the paper; "random" divides the area by that of removal in random order, so
            that 0 is the oracle, 1 is chance, and different networks can be compared.
        mask: Boolean mask shaped like risk, True for elements that count.

    Raises:
        ValueError: If all errors are equal and normalize is "random", since then no order is better than another.

    Example:
        >>> ause(torch.tensor([0.9, 0.1]), torch.tensor([0.0, 1.0]))
        tensor(1., dtype=torch.float64)
        >>> ause(torch.tensor([0.9, 0.1]), torch.tensor([0.0, 1.0]), normalize="random")
        tensor(2., dtype=torch.float64)
    """
    if not isinstance(normalize, str) or normalize not in ("mean", "random"):
        raise ValueError(f"normalize must be 'mean' or 'random', found {normalize!r:.100}")
    curve = sparsification_curve(risk, error, mask=mask)
    area = (curve.error - curve.oracle).mean()
    if normalize == "mean":
        return area
    chance = (curve.random - curve.oracle).mean()
    if not chance > 1e-12:
        raise ValueError(f"all {len(curve.error)} errors are equal, so that random removal is as good as the oracle")
    return area / chance


@metric("max", -math.inf, 1)
def aurg(risk: Any, error: Any, *, mask: Any = None) -> Tensor:
    """Area under the random gain: mean distance of the sparsification curve below that of random removal; higher is better.

    0 for an uninformative risk, negative for a worse one (Poggi et al. 2020), with the means and the normalization of `ause`.

    Args:
        risk: [...], one number per row; higher means less trust.
        error: Error >= 0 of each row, shaped like risk.
        mask: Boolean mask shaped like risk, True for elements that count.

    Example:
        >>> aurg(torch.tensor([0.1, 0.9]), torch.tensor([0.0, 1.0]))
        tensor(0.5000, dtype=torch.float64)
    """
    curve = sparsification_curve(risk, error, mask=mask)
    return (curve.random - curve.error).mean()


@metric("max", 0, 1)
def error_auroc(risk: Any, error: Any, *, mask: Any = None) -> Tensor:
    """Area under the ROC curve of detecting errors by their risk: the probability that a wrong row has the higher risk, ties counting half.

    From 0 to 1, 0.5 is chance (Hendrycks & Gimpel 2017). For pixels: `error_auroc(entropy, prediction != target, mask=target != 255)`.

    Args:
        risk: [...], one number for each row, pixel or token; higher means less trust.
        error: True or 1 for wrong predictions, False or 0 for correct ones, shaped like risk.
        mask: Boolean mask shaped like risk, True for elements that count.

    Raises:
        ValueError: If no row or all rows are wrong.

    Example:
        >>> error_auroc(torch.tensor([0.1, 0.2, 0.3, 0.9]), torch.tensor([False, False, True, True]))
        tensor(1., dtype=torch.float64)
    """
    risk, error = ranked(risk, error, mask)
    check_not_empty(error.numel())
    wrong = error == 1
    if not (wrong | (error == 0)).all():
        raise ValueError(f"error must be 1 (wrong) or 0 (right), found {error[~wrong].max().item():.6g}")
    if wrong.all() or not wrong.any():
        raise ValueError(f"right and wrong rows are needed, found {int(wrong.sum())} wrong of {wrong.numel()}")
    return auroc_of(risk[~wrong], risk[wrong])


def ranked(risk: Any, error: Any, mask: Any = None) -> tuple[Tensor, Tensor]:
    """Return checked vectors of the risks and errors >= 0 of the elements that count."""
    same_rows(risk=risk, error=error)
    full_risk, full_error = real("risk", getattr(risk, "total", risk)), real("error", error)
    same_shape(risk=full_risk, error=full_error)
    keep = valid_mask(mask, None, None, full_risk.shape)
    if keep is None:
        risk, error = full_risk.flatten(), full_error.flatten()
    else:
        if not keep.any():
            return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        risk, error = full_risk[keep.to(full_risk.device)], full_error[keep.to(full_error.device)]
    risk, error = numbers("risk", risk, finite=False, full=full_risk), numbers("error", error, full=full_error)
    if (error < 0).any():
        raise ValueError(
            f"errors must be >= 0 (absolute or squared), found {error.min().item()} (shape {tuple(full_error.shape)})"
        )
    return risk, error


def _by_risk(risk: Tensor, error: Tensor) -> Tensor:
    """Return errors in order of rising risk, averaged within equal risks, which is the expectation over random orders."""
    unique_risks, index, counts = risk.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(unique_risks.shape, dtype=torch.float64, device=error.device).index_add(0, index, error)
    return (sums / counts).repeat_interleave(counts)
