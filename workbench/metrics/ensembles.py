"""Metrics of predictions given as samples or as a mixture of voters, exact rather than moment-matched.

All elements of the target have equal weight, except those excluded by `void` or `mask`; memory is bounded as in `regression`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from workbench.distributions import Distribution, Normal
from workbench.metrics._inputs import family_of, numbers, tensor_of
from workbench.metrics._pieces import reduce_terms, sample_pieces
from workbench.metrics.registry import metric
from workbench.metrics.regression import Family


@metric("min")
def crps_samples(
    samples: Any,
    target: Any,
    fair: bool = False,
    reduction: str = "mean",
    *,
    void: float | None = None,
    mask: Any = None,
) -> Tensor:
    """Continuous ranked probability score of samples: E|x - y| - E|x - x'| / 2, in units of the target.

    Computed by sorting in O(m log m) time, without m x m memory (Gneiting & Raftery 2007).

    Args:
        samples: [m, ...].
        target: [...].
        fair: Whether to estimate the score of the distribution behind the samples without bias (Ferro 2014; m >= 2)
            instead of scoring the samples themselves as the whole distribution.
        reduction: "mean", or "none" for each element's term.
        void: Number that marks missing targets.
        mask: Boolean mask shaped like target, True for elements that count.

    Example:
        >>> crps_samples(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]))
        tensor(0.5000, dtype=torch.float64)
    """
    if not isinstance(fair, bool):
        raise TypeError(f"fair must be True or False, found {fair!r:.100}")
    shape = tuple(tensor_of(samples, "samples").shape)
    if fair and shape[:1] == (1,):
        raise ValueError(f"samples must have shape [m >= 2, *target] to be fair, found {shape}")
    return reduce_terms(
        (_sample_crps(x, y, fair) for x, y in sample_pieces(target, samples=samples, void=void, mask=mask)),
        reduction,
    )


def pit_samples(samples: Any, target: Any, *, void: float | None = None, mask: Any = None) -> Tensor:
    """Probability integral transform by samples: (r + 1/2) / (m + 1) for a target with r of m samples below it.

    The ranks of a rank histogram (Hamill 2001), uniform if target and samples are draws from one distribution; samples equal to the target
    count half.

    Args:
        samples: [m, ...].
        target: [...].
        void: Number that marks missing targets.
        mask: Boolean mask shaped like target, True for elements that count.

    Returns:
        Shaped like target, in (0, 1); with void or mask, flattened, of the elements that count.

    Example:
        >>> pit_samples(torch.tensor([[0.0], [2.0], [4.0]]), torch.tensor([3.0]))
        tensor([0.6250], dtype=torch.float64)
    """
    pieces = sample_pieces(target, samples=samples, void=void, mask=mask)
    return reduce_terms((_pit_of_samples(*piece) for piece in pieces), "none")


@metric("min", -math.inf)
def mixture_nll(
    predictions: Any,
    risk: Any,
    target: Any,
    distribution: Family = Normal,
    weights: Any = None,
    reduction: str = "mean",
    *,
    void: float | None = None,
    mask: Any = None,
) -> Tensor:
    """Exact negative log-likelihood of a mixture of k voters: -log sum_k w_k p_k(y), in nats; lower is better.

    Args:
        predictions: [k, ...], the location of each voter.
        risk: [k, ...], the standard deviation > 0 of each voter's distribution.
        target: [...].
        distribution: Distribution of each voter, class or instance.
        weights: [k], >= 0 and summing to one; equal by default.
        reduction: "mean", or "none" for each element's term.
        void: Number that marks missing targets.
        mask: Boolean mask shaped like target, True for elements that count.

    Example:
        >>> mixture_nll(torch.tensor([[0.0], [0.0]]), torch.tensor([[1.0], [1.0]]), torch.tensor([0.0]))
        tensor(0.9189, dtype=torch.float64)
    """
    log_prob = family_of(distribution).log_prob
    weights = _weights(weights, predictions)

    def term(locs: Tensor, sds: Tensor, y: Tensor) -> Tensor:
        log_weights = weights.to(y.device).log().reshape(-1, *[1] * y.ndim)
        return -torch.logsumexp(log_prob(y.expand_as(locs), locs, sds) + log_weights, 0)

    pieces = sample_pieces(target, predictions=predictions, risk=risk, void=void, mask=mask, positive=True)
    return reduce_terms((term(*piece) for piece in pieces), reduction)


@metric("min")
def mixture_crps(
    predictions: Any,
    risk: Any,
    target: Any,
    distribution: Family = Normal,
    weights: Any = None,
    reduction: str = "mean",
    *,
    void: float | None = None,
    mask: Any = None,
) -> Tensor:
    """Exact continuous ranked probability score of a mixture of k Normals, in units of the target; lower is better.

    sum_i w_i A(y - m_i, s_i^2) - 1/2 sum_ij w_i w_j A(m_i - m_j, s_i^2 + s_j^2), where A(m, s^2) is the mean absolute value of a
    Normal (Grimit et al. 2006).

    Args:
        predictions: [k, ...], the mean of each voter.
        risk: [k, ...], the standard deviation >= 0 of each voter's distribution.
        target: [...].
        distribution: Normal; other mixtures have no closed form (draw samples and use crps_samples).
        weights: [k], >= 0 and summing to one; equal by default.
        reduction: "mean", or "none" for each element's term.
        void: Number that marks missing targets.
        mask: Boolean mask shaped like target, True for elements that count.

    Example:
        >>> mixture_crps(torch.tensor([[0.0], [0.0]]), torch.tensor([[1.0], [1.0]]), torch.tensor([0.0]))
        tensor(0.2337, dtype=torch.float64)
    """
    family_of(distribution)
    if not (distribution is Normal or isinstance(distribution, Normal)):
        name = repr(distribution) if isinstance(distribution, Distribution) else distribution.__name__
        raise ValueError(
            f"only a mixture of Normals has a closed-form crps, found {name}; draw samples and use crps_samples"
        )
    weights = _weights(weights, predictions)
    pieces = sample_pieces(target, predictions=predictions, risk=risk, void=void, mask=mask)
    return reduce_terms((_mixture_crps(locs, sds, y, weights) for locs, sds, y in pieces), reduction)


def _sample_crps(samples: Tensor, target: Tensor, fair: bool) -> Tensor:
    m = len(samples)
    ordered = (samples - target).sort(0).values
    # sum of |x_i - x_j| over all pairs: the i-th smallest (from 1) enters 2 i - m - 1 times, and each pair twice
    weight = 2 * torch.arange(1, m + 1, dtype=torch.float64, device=target.device) - m - 1
    spread = torch.tensordot(weight, ordered, 1) / (m * (m - 1) if fair else m * m)
    return ordered.abs().mean(0) - spread


def _pit_of_samples(samples: Tensor, target: Tensor) -> Tensor:
    below, equal = (samples < target).sum(0), (samples == target).sum(0)
    return (below.double() + equal.double() / 2 + 0.5) / (len(samples) + 1)


def _mixture_crps(predictions: Tensor, risk: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    score, weights = torch.zeros_like(target), weights.to(target.device)
    for i, w in enumerate(weights):  # a loop over voters needs memory for k instead of k^2 numbers per element
        score = score + w * _mean_absolute(target - predictions[i], risk[i])
        pairs = _mean_absolute(predictions[i] - predictions, (risk[i] ** 2 + risk**2).sqrt())
        score = score - 0.5 * w * torch.tensordot(weights, pairs, 1)
    return score


def _mean_absolute(mean: Tensor, sd: Tensor) -> Tensor:
    """Return E|x| of a Normal; |mean| for sd 0."""
    z = mean / sd.clamp_min(torch.finfo(sd.dtype).tiny)
    return mean * torch.erf(z / math.sqrt(2)) + sd * math.sqrt(2 / math.pi) * torch.exp(-0.5 * z**2)


def _weights(weights: Any, predictions: Any) -> Tensor:
    """Return weights [k] of voters for predictions [k, ...], which may not have been checked yet."""
    shape = tensor_of(predictions, "predictions").shape
    k = shape[0] if shape else 0
    if weights is None:
        return torch.full((k,), 1 / max(1, k), dtype=torch.float64)
    weights = numbers("weights", weights)
    if weights.shape != (k,) or (weights < 0).any() or abs(weights.sum().item() - 1) > 1e-6:
        raise ValueError(f"weights must be {k} numbers >= 0 that sum to one, found {weights.tolist()}")
    return weights
