"""Decide by out-of-fold predictions: from when the weights are taken, how wide the noise is, and how much each setting counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.core.outputs.meanings import IGNORED
from workbench.distributions import Normal, StudentT
from workbench.distributions.base import Distribution

DEGREES = (math.inf, 20.0, 10.0, 6.0, 4.0, 3.0)  # of freedom, tried where the distribution is Normal
FACTORS = torch.logspace(math.log10(0.3), math.log10(4), 36, dtype=torch.float64)
# Noise that is the same everywhere is best said by the first snapshot, which says about the spread of all targets.
SMALL_FACTORS = torch.logspace(math.log10(0.01), math.log10(0.3), 47, dtype=torch.float64)[:-1]
MOST_ROWS = 2000  # that scale and tails are chosen on: three numbers need no more
ROUNDS = 200  # of expectation maximisation


@dataclass(frozen=True, eq=False)
class Decisions:
    """What was decided.

    Args:
        mean_at: for each setting the number of the snapshot that predictions are taken from.
        scale_at: the same for the noise.
        factor: for each setting what the standard deviation of the noise is multiplied by; without risk heads that deviation itself.
        df: degrees of freedom of Student's t distribution, infinity for the distribution that was there.
        weights: of the settings; they sum to one.
        log_prob: log density (probability of the class) of every row by those who have not seen it [n, ...], in nats.
    """

    mean_at: tuple[int, ...]
    scale_at: tuple[int, ...]
    factor: tuple[float, ...]
    df: float
    weights: tuple[float, ...]
    log_prob: Tensor


def decide(loc: Tensor, risk: Tensor | None, y: Tensor, distribution: Distribution, members: int) -> Decisions:
    """Decide by out-of-fold predictions, by those alone.

    Predictions come from the snapshot with the least squared error that an ensemble of all members is expected to have: that of the mean of R
    members, less the V / R that their spread V adds to it, plus V / M for M of them. Noise comes from the snapshot, factor and degrees of
    freedom with the least negative log likelihood given these predictions. Weights of the settings are those of the linear pool with the
    greatest likelihood, by expectation maximisation.

    Args:
        loc: [times, settings, members of one fold, n, ...], the prediction of each row by members that have not seen it.
        risk: the standard deviation of the noise, of the same shape; None where nothing says it.
        y: [n, ...], the targets; float values.
        distribution: of the targets.
        members: how many a setting has in all folds.
    """
    loc, y = loc.double().reshape(*loc.shape[:4], -1), y.double().reshape(len(y), -1)
    risk = None if risk is None else risk.double().reshape(loc.shape)
    settings, repeats = loc.shape[1:3]
    unit = y.var(0, correction=0).clamp_min(1e-24)  # so that outputs of other units count alike
    errors = ((loc.mean(2) - y).square() / unit).mean((2, 3))
    if repeats > 1:
        errors = errors + (loc.var(2) / unit).mean((2, 3)) * (1 / members - 1 / repeats)
    mean_at = [int(i) for i in errors.argmin(0)]
    chosen = torch.stack([loc[mean_at[s], s] for s in range(settings)])  # [settings, repeats, n, elements]
    if risk is None:
        scale = (chosen.mean(1, keepdim=True) - y).square().mean((2, 3), keepdim=True).sqrt().clamp_min(1e-12)
        terms = Normal.log_prob(y.expand_as(chosen), chosen, scale.expand_as(chosen))
        weights, pooled = pool(_mixed(terms, 1))
        return Decisions(tuple(mean_at), tuple(mean_at), tuple(scale.flatten().tolist()), math.inf, weights, pooled)
    degrees = DEGREES if type(distribution) is Normal else (math.inf,)
    few = torch.linspace(0, len(y) - 1, min(len(y), MOST_ROWS)).round().long()
    best: tuple[float, Decisions] | None = None
    for df in degrees:
        family = distribution if math.isinf(df) else StudentT(df)
        scales = [_best_scale(chosen[s][:, few], risk[:, s][:, :, few], y[few], family) for s in range(settings)]
        scale_at, factor = [at for at, _ in scales], [value for _, value in scales]
        wide = torch.stack([risk[scale_at[s], s] * factor[s] for s in range(settings)])
        weights, pooled = pool(_mixed(family.log_prob(y.expand_as(chosen), chosen, wide), 1))
        score = float(pooled.mean())
        if best is None or score > best[0]:
            best = score, Decisions(tuple(mean_at), tuple(scale_at), tuple(factor), df, weights, pooled)
    assert best is not None
    return best[1]


def decide_classes(log_probs: Tensor, y: Tensor) -> Decisions:
    """As `decide`, for class numbers: snapshots and weights by the likelihood of the classes.

    Args:
        log_probs: [times, settings, members of one fold, n, classes, ...].
        y: int64 [n, ...], class numbers, of which those to leave out are -100; or probabilities [n, ..., classes].
    """
    if y.is_floating_point():
        terms = (_mixed(log_probs.double(), 2) * y.movedim(-1, 1)).sum(3)
    else:
        kept = y != IGNORED
        index = y.where(kept, 0)[None, None, None, :, None].expand(*log_probs.shape[:4], 1, *log_probs.shape[5:])
        terms = _mixed(log_probs.double().gather(4, index).squeeze(4), 2) * kept
    terms = terms.reshape(*terms.shape[:3], -1)  # [times, settings, n, elements]
    at = [int(i) for i in terms.mean((2, 3)).argmax(0)]
    weights, pooled = pool(torch.stack([terms[t, s] for s, t in enumerate(at)]))
    return Decisions(tuple(at), tuple(at), (1.0,) * len(at), math.inf, weights, pooled)


def _mixed(terms: Tensor, dim: int) -> Tensor:
    """Log density of the equal mixture over a dimension."""
    return terms.logsumexp(dim) - math.log(terms.shape[dim])


def _best_scale(loc: Tensor, risk: Tensor, y: Tensor, family: Distribution) -> tuple[int, float]:
    """The snapshot and the factor with the greatest likelihood: loc [members, n, e], risk [times, members, n, e], y [n, e].

    A small factor is taken if it gains more than the standard error of the gain (one-standard-error rule, Breiman et al. 1984): with few rows
    it may have been lucky, and noise that is said too small costs more than noise that is said too large.
    """

    def best(factors: Tensor) -> tuple[int, float, Tensor]:
        scores = []
        for one in risk:
            wide = factors.to(one.device)[:, None, None, None] * one
            scores.append(_mixed(family.log_prob(y.expand_as(wide), loc.expand_as(wide), wide), 1).mean(2))
        terms = torch.stack(scores)  # [times, factors, n]
        at, k = divmod(int(terms.mean(2).argmax()), len(factors))
        return at, float(factors[k]), terms[at, k]

    usual, small = best(FACTORS), best(SMALL_FACTORS)
    at, factor, _ = small if exceeds_error(small[2] - usual[2]) else usual
    return at, factor


def exceeds_error(gain: Tensor) -> bool:
    """Whether the mean of gains [n, ...] is larger than its standard error over the n rows.

    Example:
        >>> exceeds_error(torch.tensor([0.9, 1.1, 1.0])), exceeds_error(torch.tensor([-1.0, 1.0, 0.1]))
        (True, False)
    """
    of_rows = gain.reshape(len(gain), -1).mean(1)
    return bool(of_rows.mean() > of_rows.std() / math.sqrt(len(of_rows)))


def pool(terms: Tensor) -> tuple[tuple[float, ...], Tensor]:
    """Weights of the linear pool with the greatest likelihood, and its log density.

    Args:
        terms: [settings, n, ...], log density of every row under each.

    Returns:
        (weights, log density [n, ...]).

    Example:
        >>> pool(torch.tensor([[[0.0], [0.0]], [[-9.0], [-9.0]]], dtype=torch.float64))[0][0] > 0.99
        True
    """
    weights = torch.full((len(terms),), 1 / len(terms), dtype=torch.float64, device=terms.device)
    at = (-1, *[1] * (terms.dim() - 1))
    for _ in range(ROUNDS if len(terms) > 1 else 0):
        shares = torch.softmax(terms + weights.log().reshape(at), 0)
        weights = shares.flatten(1).mean(1).clamp_min(1e-12)
        weights = weights / weights.sum()
    return tuple(float(w) for w in weights), torch.logsumexp(terms + weights.log().reshape(at), 0)
