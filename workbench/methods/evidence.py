"""How much is not known of what could be, in nats, and what is left of an entropy without it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

PRIOR = 1.0  # rows, what the leverage takes for known beside those of the training
LEAST = 1e-9  # leverage or disagreement, so that there is an evidence


def ignorance(leverage: Tensor, classes: int) -> Tensor:
    """Mutual information in nats between a label and class probabilities from Dirichlet(S / K, ..., S / K), S = 1 / leverage.

    Example:
        >>> ignorance(torch.tensor([0.01, 1.0, 1e9], dtype=torch.float64), 3)
        tensor([0.0099, 0.5438, 1.0986], dtype=torch.float64)
    """
    rows = 1 / leverage
    return math.log(classes) - torch.digamma(rows + 1) + torch.digamma(rows / classes + 1)


def noise(total: Tensor, epistemic: Tensor, prior: Tensor, classes: int) -> Tensor:
    """What an entropy would be if nothing were left to learn, in nats: prior * (total / prior)^(1 / (1 - e)) with e = epistemic / log(classes).

    Args:
        total: entropy of the prediction.
        epistemic: between 0 and log(classes).
        prior: entropy of the frequencies of the classes; 0, where it is unknown, counts as log(classes).
        classes: how many there are.

    Example:
        >>> noise(torch.tensor([0.5, 0.5, 1.0]), torch.tensor([0.0, 0.5, 0.5]), torch.tensor(1.0), 3)
        tensor([0.5000, 0.2802, 1.0000])
    """
    highest, total = math.log(classes), total.clamp_min(0)
    prior = torch.where(prior > 0, prior, highest)
    known_share = (1 - epistemic / highest).clamp_min(LEAST)
    return torch.minimum(prior * (total / prior) ** (1 / known_share), total)


def level_of(h: Tensor, v: Tensor, classes: int) -> float:
    """k with which E(k v) has the mean of E(h), by bisection of its logarithm."""
    low, high, aim = -25.0, 25.0, ignorance(h, classes).mean()
    for _ in range(50):
        middle = (low + high) / 2
        below = ignorance((math.exp(middle) * v).clamp_min(LEAST), classes).mean() < aim
        low, high = (middle, high) if below else (low, middle)
    return math.exp(low)


def whitening_of(total: Tensor, rows: int, bias: bool) -> Tensor:
    """W [d, d] with phi^T W^T W phi the leverage of features phi as they come, from the sum of their products over the rows."""
    width = len(total)
    scale = torch.ones(width, dtype=total.dtype, device=total.device)
    squares = total.diagonal()[: width - bias].sum() / rows  # mean squared norm
    scale[: width - bias] = torch.where(squares > 0, squares, 1).rsqrt()
    scaled = scale[:, None] * total * scale
    ridge = (PRIOR * scaled.trace() / (width * rows)).clamp_min(torch.finfo(total.dtype).tiny)
    factor, failed = torch.linalg.cholesky_ex(scaled + ridge * torch.eye(width, dtype=total.dtype, device=total.device))
    if bool(failed):
        return torch.full_like(total, torch.nan)
    identity = torch.eye(width, dtype=total.dtype, device=total.device)
    return torch.linalg.solve_triangular(factor, identity, upper=False) * scale


__all__ = ["LEAST", "ignorance", "level_of", "noise", "whitening_of"]
