"""Decisions by out-of-fold predictions: which snapshot the weights come from, the scale of the noise, and the weight of each setting."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.core.outputs.meanings import IGNORED
from workbench.distributions import Normal, StudentT
from workbench.distributions.base import Distribution

DEGREES_OF_FREEDOM = (math.inf, 20.0, 10.0, 6.0, 4.0, 3.0)  # candidates for Student's t if the distribution is Normal
FACTORS = torch.logspace(math.log10(0.3), math.log10(4), 36, dtype=torch.float64)
# For constant noise the first snapshot is best, which predicts about the spread of all targets: much more than the noise.
SMALL_FACTORS = torch.logspace(math.log10(0.01), math.log10(0.3), 47, dtype=torch.float64)[:-1]
LEAST_SCALE = 1e-12  # of constant noise, relative to the largest target: predictions may be exact
MAX_ROWS = 2000  # rows on which scale and tails are chosen: enough for three numbers
EM_STEPS = 200  # steps of expectation maximization


@dataclass(frozen=True, eq=False)
class Decisions:
    """Decisions made by `decide`.

    Args:
        mean_at: for each setting, the index of the snapshot that predictions are taken from.
        scale_at: for each setting, the index of the snapshot that the noise is taken from.
        factor: for each setting, the factor of the standard deviation of the noise; without risk heads, that standard deviation itself.
        df: degrees of freedom of Student's t distribution; infinity keeps the original distribution.
        weights: weights of the settings; they sum to one.
        log_prob: log density (for classes: log probability) of each row under the voters that have not seen it [n, ...], in nats; 0 where a row
            has no class.
    """

    mean_at: tuple[int, ...]
    scale_at: tuple[int, ...]
    factor: tuple[float, ...]
    df: float
    weights: tuple[float, ...]
    log_prob: Tensor


def decide(loc: Tensor, risk: Tensor | None, y: Tensor, distribution: Distribution, members: int) -> Decisions:
    """Decide by the out-of-fold predictions alone.

    Predictions come from the snapshot with the least expected squared error of an ensemble of all members: that of the mean of R
    members, minus V / R, which their variance V adds to it, plus V / M for M members. Noise comes from the snapshot, factor and degrees of
    freedom with the least negative log likelihood given these predictions. The weights of the settings are those of the linear pool with the
    greatest likelihood, found by expectation maximization.

    Args:
        loc: [snapshots, settings, members of one fold, n, ...], the prediction of each row by members that have not seen it.
        risk: standard deviation of the noise, of the same shape; None for models without risk heads.
        y: float targets [n, ...].
        distribution: distribution of the targets.
        members: number of members of a setting in all folds together.
    """
    loc, y = loc.double().reshape(*loc.shape[:4], -1), y.double().reshape(len(y), -1)
    risk = None if risk is None else risk.double().reshape(loc.shape)
    settings, repeats = loc.shape[1:3]
    # makes outputs of different units count alike; one whose targets are all equal has no unit, and counts only alone
    varies = y.amin(0) < y.amax(0)
    variance = y.var(0, correction=0).where(varies, math.inf if bool(varies.any()) else 1.0)
    errors = ((loc.mean(2) - y).square() / variance).mean((2, 3))
    if repeats > 1:
        errors = errors + (loc.var(2) / variance).mean((2, 3)) * (1 / members - 1 / repeats)
    mean_at = [int(i) for i in errors.argmin(0)]
    chosen = torch.stack([loc[mean_at[s], s] for s in range(settings)])  # [settings, repeats, n, elements]
    if risk is None:
        scale = (chosen.mean(1, keepdim=True) - y).square().mean((2, 3), keepdim=True).sqrt()
        scale = scale.clamp_min(LEAST_SCALE * (float(y.abs().max()) or 1.0))
        log_probs = Normal.log_prob(y.expand_as(chosen), chosen, scale.expand_as(chosen))
        weights, pooled = pool(_mixture_log_prob(log_probs, 1))
        return Decisions(tuple(mean_at), tuple(mean_at), tuple(scale.flatten().tolist()), math.inf, weights, pooled)
    candidates = DEGREES_OF_FREEDOM if type(distribution) is Normal else (math.inf,)
    subset = torch.linspace(0, len(y) - 1, min(len(y), MAX_ROWS)).round().long()
    best: tuple[float, Decisions] | None = None
    for df in candidates:
        family = distribution if math.isinf(df) else StudentT(df)
        scales = [
            _best_scale(chosen[s][:, subset], risk[:, s][:, :, subset], y[subset], family) for s in range(settings)
        ]
        scale_at, factor = [at for at, _ in scales], [value for _, value in scales]
        scaled_risk = torch.stack([risk[scale_at[s], s] * factor[s] for s in range(settings)])
        weights, pooled = pool(_mixture_log_prob(family.log_prob(y.expand_as(chosen), chosen, scaled_risk), 1))
        score = float(pooled.mean())
        if best is None or score > best[0]:
            best = score, Decisions(tuple(mean_at), tuple(scale_at), tuple(factor), df, weights, pooled)
    assert best is not None
    return best[1]


def decide_classes(log_probs: Tensor, y: Tensor) -> Decisions:
    """Decide as `decide` does, for class scores: snapshots and weights by the likelihood of the classes.

    Args:
        log_probs: [snapshots, settings, members of one fold, n, classes, ...].
        y: class numbers int64 [n, ...], where -100 is ignored; or probabilities [n, ..., classes].
    """
    if y.is_floating_point():
        kept = torch.ones_like(y[..., 0], dtype=torch.bool)
        terms = (_mixture_log_prob(log_probs.double(), 2) * y.movedim(-1, 1)).sum(3)
    else:
        kept = y != IGNORED
        if not kept.any():
            raise ValueError(f"y: no row has a class, all class numbers are {IGNORED}")
        terms = _mixture_log_prob(log_likelihoods(log_probs, y), 2) * kept
    terms = terms.reshape(*terms.shape[:3], -1)  # [snapshots, settings, n, elements]
    best = [int(i) for i in terms.mean((2, 3)).argmax(0)]
    chosen, kept = torch.stack([terms[t, s] for s, t in enumerate(best)]), kept.reshape(len(y), -1)
    weights, pooled = pool(chosen[:, kept])
    log_prob = torch.zeros_like(chosen[0])
    log_prob[kept] = pooled
    return Decisions(tuple(best), tuple(best), (1.0,) * len(best), math.inf, weights, log_prob)


def log_likelihoods(log_probs: Tensor, y: Tensor) -> Tensor:
    """Return the log likelihood of each member, [snapshots, settings, members, n, ...], for arguments of `decide_classes`; -100 is class 0."""
    if y.is_floating_point():
        return (log_probs.double() * y.movedim(-1, 1)).sum(4)
    index = y.where(y != IGNORED, 0)[None, None, None, :, None].expand(*log_probs.shape[:4], 1, *log_probs.shape[5:])
    return log_probs.double().gather(4, index).squeeze(4)


def _mixture_log_prob(terms: Tensor, dim: int) -> Tensor:
    """Return the log density of the uniform mixture over a dimension."""
    return terms.logsumexp(dim) - math.log(terms.shape[dim])


def _best_scale(loc: Tensor, risk: Tensor, y: Tensor, family: Distribution) -> tuple[int, float]:
    """Return the snapshot and the factor with the greatest likelihood: loc [members, n, e], risk [snapshots, members, n, e], y [n, e].

    A factor from SMALL_FACTORS is used only if it gains more than the standard error of the gain (one-standard-error rule, Breiman et al. 1984):
    with few rows the gain may be luck, and underestimated noise costs more than overestimated noise.
    """

    def best(factors: Tensor) -> tuple[int, float, Tensor]:
        scores = []
        for snapshot_risk in risk:
            scaled_risk = factors.to(snapshot_risk.device)[:, None, None, None] * snapshot_risk
            scores.append(
                _mixture_log_prob(
                    family.log_prob(y.expand_as(scaled_risk), loc.expand_as(scaled_risk), scaled_risk), 1
                ).mean(2)
            )
        terms = torch.stack(scores)  # [snapshots, factors, n]
        at, k = divmod(int(terms.mean(2).argmax()), len(factors))
        return at, float(factors[k]), terms[at, k]

    usual, small = best(FACTORS), best(SMALL_FACTORS)
    at, factor, _ = small if exceeds_error(small[2] - usual[2]) else usual
    return at, factor


def exceeds_error(gain: Tensor) -> bool:
    """Return whether the mean of gains [n, ...] is larger than its standard error over the n rows.

    Example:
        >>> exceeds_error(torch.tensor([0.9, 1.1, 1.0])), exceeds_error(torch.tensor([-1.0, 1.0, 0.1]))
        (True, False)
    """
    row_gains = gain.reshape(len(gain), -1).mean(1)
    return bool(row_gains.mean() > row_gains.std() / math.sqrt(len(row_gains)))


def pool(terms: Tensor) -> tuple[tuple[float, ...], Tensor]:
    """Return the weights of the linear pool with the greatest likelihood, and its log density.

    Args:
        terms: log density of each row under each setting [settings, n, ...].

    Returns:
        (weights, log density [n, ...]).

    Example:
        >>> pool(torch.tensor([[[0.0], [0.0]], [[-9.0], [-9.0]]], dtype=torch.float64))[0][0] > 0.99
        True
    """
    weights = torch.full((len(terms),), 1 / len(terms), dtype=torch.float64, device=terms.device)
    shape = (-1, *[1] * (terms.dim() - 1))
    for _ in range(EM_STEPS if len(terms) > 1 else 0):
        shares = torch.softmax(terms + weights.log().reshape(shape), 0)
        weights = shares.flatten(1).mean(1).clamp_min(1e-12)
        weights = weights / weights.sum()
    return tuple(float(w) for w in weights), torch.logsumexp(terms + weights.log().reshape(shape), 0)
