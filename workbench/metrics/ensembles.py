"""Metrics of predictions given as samples or as a mixture of voters, exact rather than moment-matched."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from workbench.distributions import Distribution, Normal
from workbench.metrics._inputs import family_of, numbers, reduce, risks, same_shape
from workbench.metrics.registry import metric
from workbench.metrics.regression import Family


@metric("min")
def crps_samples(samples: Any, target: Any, fair: bool = False, reduction: str = "mean") -> Tensor:
    """Continuous ranked probability score of samples: E|x - y| - E|x - x'| / 2, in units of the target.

    Sorted, so that m samples cost m log m and no m x m memory (Gneiting & Raftery 2007).

    Args:
        samples: [m, ...].
        target: [...].
        fair: Whether to estimate the score of the distribution behind the samples without bias (Ferro 2014; m >= 2)
            instead of scoring the samples themselves as the whole distribution.
        reduction: "mean", or "none" for every element's term.

    Example:
        >>> crps_samples(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]))
        tensor(0.5000, dtype=torch.float64)
    """
    samples, target = numbers("samples", samples), numbers("target", target)
    if not isinstance(fair, bool):
        raise TypeError(f"fair must be True or False, found {fair!r:.100}")
    m = samples.shape[0] if samples.ndim else 0
    if samples.shape[1:] != target.shape or m < 1 + fair:
        raise ValueError(
            f"samples must have shape [m >= {1 + fair}, *target], "
            f"found {tuple(samples.shape)} for target {tuple(target.shape)}"
        )
    ordered = (samples - target).sort(0).values
    # sum of |x_i - x_j| over all pairs: the i-th smallest (from 1) enters 2 i - m - 1 times, and twice over
    weight = 2 * torch.arange(1, m + 1, dtype=torch.float64, device=target.device) - m - 1
    spread = torch.tensordot(weight, ordered, 1) / (m * (m - 1) if fair else m * m)
    return reduce(ordered.abs().mean(0) - spread, reduction)


@metric("min", -math.inf)
def mixture_nll(
    predictions: Any,
    risk: Any,
    target: Any,
    distribution: Family = Normal,
    weights: Any = None,
    reduction: str = "mean",
) -> Tensor:
    """Exact negative log-likelihood of a mixture of k voters: -log sum_k w_k p_k(y), in nats; lower is better.

    Args:
        predictions: [k, ...], the location of every voter.
        risk: [k, ...], the standard deviation > 0 of every voter's own distribution.
        target: [...].
        distribution: Distribution of each voter, class or instance.
        weights: [k], >= 0 and summing to one; equal by default.
        reduction: "mean", or "none" for every element's term.

    Example:
        >>> mixture_nll(torch.tensor([[0.0], [0.0]]), torch.tensor([[1.0], [1.0]]), torch.tensor([0.0]))
        tensor(0.9189, dtype=torch.float64)
    """
    predictions, risk, target, weights = _mixture(predictions, risk, target, weights, positive=True)
    terms = family_of(distribution).log_prob(target.expand_as(predictions), predictions, risk)
    log_weights = weights.log().reshape(-1, *[1] * target.ndim)
    return reduce(-torch.logsumexp(terms + log_weights, 0), reduction)


@metric("min")
def mixture_crps(
    predictions: Any,
    risk: Any,
    target: Any,
    distribution: Family = Normal,
    weights: Any = None,
    reduction: str = "mean",
) -> Tensor:
    """Exact continuous ranked probability score of a mixture of k Normals, in units of the target; lower is better.

    sum_i w_i A(y - m_i, s_i^2) - 1/2 sum_ij w_i w_j A(m_i - m_j, s_i^2 + s_j^2), A(m, s^2) the mean absolute value of a
    Normal (Grimit et al. 2006).

    Args:
        predictions: [k, ...], the mean of every voter.
        risk: [k, ...], the standard deviation >= 0 of every voter's own distribution.
        target: [...].
        distribution: Normal; other mixtures have no closed form (draw samples and use crps_samples).
        weights: [k], >= 0 and summing to one; equal by default.
        reduction: "mean", or "none" for every element's term.

    Example:
        >>> mixture_crps(torch.tensor([[0.0], [0.0]]), torch.tensor([[1.0], [1.0]]), torch.tensor([0.0]))
        tensor(0.2337, dtype=torch.float64)
    """
    family_of(distribution)
    if not (distribution is Normal or isinstance(distribution, Normal)):
        name = repr(distribution) if isinstance(distribution, Distribution) else distribution.__name__
        raise ValueError(
            f"only a mixture of Normals has a closed crps, found {name}; draw samples and use crps_samples"
        )
    predictions, risk, target, weights = _mixture(predictions, risk, target, weights)
    score = torch.zeros_like(target)
    for i, w in enumerate(weights):  # a loop over voters keeps memory at k, not k^2, numbers for each element
        score = score + w * _mean_absolute(target - predictions[i], risk[i])
        pairs = _mean_absolute(predictions[i] - predictions, (risk[i] ** 2 + risk**2).sqrt())
        score = score - 0.5 * w * torch.tensordot(weights, pairs, 1)
    return reduce(score, reduction)


def _mean_absolute(mean: Tensor, sd: Tensor) -> Tensor:
    """E|x| of a Normal; |mean| at sd 0."""
    z = mean / sd.clamp_min(torch.finfo(sd.dtype).tiny)
    return mean * torch.erf(z / math.sqrt(2)) + sd * math.sqrt(2 / math.pi) * torch.exp(-0.5 * z**2)


def _mixture(predictions: Any, risk: Any, target: Any, weights: Any, positive: bool = False) -> tuple[Tensor, ...]:
    predictions, target = numbers("predictions", predictions), numbers("target", target)
    risk = risks(risk, positive)
    same_shape(predictions=predictions, risk=risk)
    if predictions.ndim == 0 or predictions.shape[1:] != target.shape:
        raise ValueError(
            "predictions must have shape [voters, *target], "
            f"found {tuple(predictions.shape)} for target {tuple(target.shape)}"
        )
    k = predictions.shape[0]
    if weights is None:
        return predictions, risk, target, torch.full((k,), 1 / k, dtype=torch.float64, device=predictions.device)
    weights = numbers("weights", weights).to(predictions.device)
    if weights.shape != (k,) or (weights < 0).any() or abs(weights.sum().item() - 1) > 1e-6:
        raise ValueError(f"weights must be {k} numbers >= 0 that sum to one, found {weights.tolist()}")
    return predictions, risk, target, weights
