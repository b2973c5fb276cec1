"""Metrics of out-of-distribution detection: how well a risk separates inputs unlike the training data from inputs like it.

Functions take the risks of both splits; out-of-distribution rows are the positives and should have the higher risk.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from workbench.errors import WorkbenchWarning
from workbench.metrics._inputs import numbers, tensor_of
from workbench.metrics.registry import metric


@metric("max", 0, 1)
def auroc(risk_in: Any, risk_out: Any) -> Tensor:
    """Area under the ROC curve: the probability that an out-of-distribution row has the higher risk, ties counting half.

    From 0 to 1, higher is better, 0.5 is chance (Mann & Whitney 1947).

    Args:
        risk_in: Risks of the in-distribution rows, any shape.
        risk_out: Risks of the out-of-distribution rows, any shape.

    Example:
        >>> auroc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.3, 0.9]))
        tensor(0.9167, dtype=torch.float64)
    """
    return auroc_of(*splits(risk_in, risk_out))


@metric("max", 0, 1)
def aupr(risk_in: Any, risk_out: Any) -> Tensor:
    """Area under the precision-recall curve as average precision: the sum of precision times the step in recall.

    From 0 to 1, higher is better; chance is the share of out-of-distribution rows. Rows of equal risk share one threshold.

    Args:
        risk_in: Risks of the in-distribution rows, any shape.
        risk_out: Risks of the out-of-distribution rows, any shape.

    Example:
        >>> aupr(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.25, 0.9]))
        tensor(0.8333, dtype=torch.float64)
    """
    inside, outside = splits(risk_in, risk_out)
    values, index = torch.cat([inside, outside]).unique(return_inverse=True)
    is_out = torch.cat([torch.zeros_like(inside), torch.ones_like(outside)])
    empty = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
    hits = empty.index_add(0, index, is_out).flip(0)
    flagged = empty.index_add(0, index, torch.ones_like(is_out)).flip(0)
    return (hits * hits.cumsum(0) / flagged.cumsum(0)).sum() / outside.numel()


@metric("min", 0, 1)
def fpr95(risk_in: Any, risk_out: Any) -> Tensor:
    """Share of in-distribution rows flagged at the highest threshold that flags 95 % of the out-of-distribution rows.

    From 0 to 1, lower is better (the convention of OpenOOD, Yang et al. 2022). For the opposite convention, the share of
    out-of-distribution rows accepted when 95 % of the in-distribution rows are, call fpr95(-risk_out, -risk_in).

    Args:
        risk_in: Risks of the in-distribution rows, any shape.
        risk_out: Risks of the out-of-distribution rows, any shape.

    Example:
        >>> fpr95(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.35, 0.9]))
        tensor(0.2500, dtype=torch.float64)
    """
    inside, outside = splits(risk_in, risk_out)
    # integer arithmetic, so that 95 % of 20 is exactly 19
    needed = -(-95 * outside.numel() // 100)
    threshold = outside.sort(descending=True).values[needed - 1]
    return (inside >= threshold).double().mean()


def auroc_of(inside: Tensor, outside: Tensor) -> Tensor:
    """Return the area under the ROC curve of two vectors of risks."""
    outside_ranks = ranks(torch.cat([inside, outside]))[inside.numel() :]
    n_in, n_out = inside.numel(), outside.numel()
    return (outside_ranks.sum() - n_out * (n_out + 1) / 2) / (n_in * n_out)


def splits(risk_in: Any, risk_out: Any) -> tuple[Tensor, Tensor]:
    """Return both risks as float64 vectors; neither may be empty."""
    inside, outside = tensor_of(risk_in, "risk_in"), tensor_of(risk_out, "risk_out")
    if not (inside.numel() and outside.numel()):
        raise ValueError(
            f"both splits need rows, found {inside.numel()} in-distribution and {outside.numel()} out-of-distribution risks "
            f"(shapes {tuple(inside.shape)} and {tuple(outside.shape)})"
        )
    vectors = split("risk_in", risk_in), split("risk_out", risk_out)
    for name, labels, other in (("risk_out", outside, inside), ("risk_in", inside, outside)):
        _refuse_labels(name, labels, other)
    return vectors


def _refuse_labels(name: str, risk: Tensor, other: Tensor) -> None:
    """Raise (for floats, warn) if a split looks like labels, since other packages take the scores of all rows and labels."""
    # 0 and 1 may be risks; suspicious are both of them without other values, and as many as in the other split
    zero_one = risk.numel() == other.numel() > 1 and {0, 1} == set(risk.unique()[:3].tolist())
    if zero_one and set(other.unique()[:3].tolist()) <= {0, 1}:
        zero_one = False
    if risk.dtype != torch.bool and not zero_one:
        return
    message = (
        f"{name} (shape {tuple(risk.shape)}, {risk.dtype}) holds only 0 and 1, like labels: this metric takes the risks of both splits, "
        "metric(risk[~is_out], risk[is_out]), not (scores, labels)"
    )
    if risk.is_floating_point():
        warnings.warn(message, WorkbenchWarning, stacklevel=5)
    else:
        raise ValueError(message)


def split(name: str, risk: Any) -> Tensor:
    """Return the risks of one split as a float64 vector; infinite risks are allowed, NaN is not."""
    return numbers(name, risk, finite=False).flatten()


def ranks(values: Tensor) -> Tensor:
    """Return ranks from 1 of a vector; equal values share their mean rank."""
    _, index, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[index]
