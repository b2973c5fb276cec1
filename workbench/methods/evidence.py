"""Epistemic risk of classes from the leverage of an input, and the aleatoric entropy that remains, in nats."""

from __future__ import annotations

import math

import torch
from torch import Tensor

PRIOR = 1.0  # rows that the ridge of the leverage counts for
EPS = 1e-9  # lower bound of leverage and disagreement, which are divided by


def ignorance(leverage: Tensor, classes: int) -> Tensor:
    """Return the mutual information in nats between a label and class probabilities from Dirichlet(S / K, ..., S / K), S = 1 / leverage.

    Args:
        leverage: leverage of each input, any shape.
        classes: number of classes K.

    Example:
        >>> ignorance(torch.tensor([0.01, 1.0, 1e9], dtype=torch.float64), 3)
        tensor([0.0099, 0.5438, 1.0986], dtype=torch.float64)
    """
    rows = 1 / leverage
    return math.log(classes) - torch.digamma(rows + 1) + torch.digamma(rows / classes + 1)


def noise(total: Tensor, epistemic: Tensor, prior: Tensor, classes: int) -> Tensor:
    """Return the entropy that would remain if nothing were left to learn: prior * (total / prior)^(1 / (1 - e)), e = epistemic / log(classes).

    Args:
        total: entropy of the prediction, in nats.
        epistemic: epistemic risk in nats, between 0 and log(classes).
        prior: entropy of the class frequencies in nats; 0, for unknown, counts as log(classes).
        classes: number of classes.

    Example:
        >>> noise(torch.tensor([0.5, 0.5, 1.0]), torch.tensor([0.0, 0.5, 0.5]), torch.tensor(1.0), 3)
        tensor([0.5000, 0.2802, 1.0000])
    """
    highest, total = math.log(classes), total.clamp_min(0)
    prior = torch.where(prior > 0, prior, highest)
    known_share = (1 - epistemic / highest).clamp_min(EPS)
    return torch.minimum(prior * (total / prior) ** (1 / known_share), total)


def level_of(h: Tensor, v: Tensor, classes: int) -> float:
    """Return the k for which E(k v) has the same mean as E(h), E being `ignorance`, by bisection of log(k)."""
    low, high, goal = -25.0, 25.0, ignorance(h, classes).mean()
    for _ in range(50):
        middle = (low + high) / 2
        below = ignorance((math.exp(middle) * v).clamp_min(EPS), classes).mean() < goal
        low, high = (middle, high) if below else (low, middle)
    return math.exp(low)


def whitening_of(total: Tensor, rows: int, bias: bool) -> Tensor:
    """Return W [d, d] such that phi^T W^T W phi is the leverage of features phi.

    Args:
        total: sum of phi phi^T over the training rows [d, d].
        rows: number of training rows.
        bias: whether the last feature is the constant of a bias.

    Returns:
        W; all NaN if the products have no Cholesky factor.
    """
    width = len(total)
    scale = torch.ones(width, dtype=total.dtype, device=total.device)
    mean_squared_norm = total.diagonal()[: width - bias].sum() / rows
    scale[: width - bias] = torch.where(mean_squared_norm > 0, mean_squared_norm, 1).rsqrt()
    scaled = scale[:, None] * total * scale
    ridge = (PRIOR * scaled.trace() / (width * rows)).clamp_min(torch.finfo(total.dtype).tiny)
    factor, failed = torch.linalg.cholesky_ex(scaled + ridge * torch.eye(width, dtype=total.dtype, device=total.device))
    if bool(failed):
        return torch.full_like(total, torch.nan)
    identity = torch.eye(width, dtype=total.dtype, device=total.device)
    return torch.linalg.solve_triangular(factor, identity, upper=False) * scale


__all__ = ["EPS", "ignorance", "level_of", "noise", "whitening_of"]
