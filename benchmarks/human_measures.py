"""Agreement of risks and predictions with people, and of people with each other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench import metrics


def judged(
    probs: Tensor, total: Tensor, aleatoric: Tensor, epistemic: Tensor | None, truth: Tensor, counts: Tensor
) -> dict[str, float]:
    """Return scores of a prediction and its risks against true classes and people.

    Args:
        probs: class probabilities [n, classes].
        total, aleatoric, epistemic: risks [n]; epistemic may be None.
        truth: true classes [n].
        counts: number of people who chose each class [n, classes].
    """
    human_entropy = entropy(shares(counts))
    scores = {
        "total": rank_correlation(total, human_entropy),
        "aleatoric": rank_correlation(aleatoric, human_entropy),
        "accuracy": metrics.accuracy(probs, truth).item(),
        "nll": metrics.categorical_nll(probs, truth).item(),
        "ece": metrics.ece(probs, truth).item(),
        "cross_entropy": cross_entropy(probs, shares(counts)),
    }
    if epistemic is not None:
        scores["epistemic"] = rank_correlation(epistemic, human_entropy)
        scores["entangled"] = rank_correlation(aleatoric, epistemic)
    return scores


def entropy(probs: Tensor) -> Tensor:
    """Return the entropy [...] in nats of probabilities [..., classes]."""
    return torch.special.entr(probs).sum(-1)


def shares(counts: Tensor) -> Tensor:
    """Return the share of people who chose each class."""
    return counts / counts.sum(1, keepdim=True)


def cross_entropy(probs: Tensor, target: Tensor) -> float:
    """Return the mean of -sum_c target_c log p_c, in nats."""
    return F.cross_entropy(probs.log(), target.to(probs)).item()


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's correlation of two columns [n]."""
    a, b = a.double(), b.double()
    return metrics.risk_error_correlation(torch.zeros_like(b), a - a.min(), b - b.min()).item()


def halves_agree(counts: Tensor, seed: int) -> Tensor:
    """Return Spearman's correlation of the entropies of two random halves of each image's people; of an odd number, one is left out."""
    first, second = halves_of(counts, seed)
    return torch.tensor(rank_correlation(entropy(shares(first)), entropy(shares(second))), dtype=torch.float64)


def halves_of(counts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return counts [n, classes] of two random halves of equally many people."""
    counts = counts.long()
    n, classes = counts.shape
    each = counts.sum(1)
    # one entry for each answer: image x classes + class
    chosen = torch.arange(n * classes).repeat_interleave(counts.flatten())
    drawn = torch.rand(len(chosen), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    chosen = chosen[(chosen // classes + drawn).argsort()]  # shuffled within each image
    place = torch.arange(len(chosen)) - (each.cumsum(0) - each).repeat_interleave(each)
    half = (each // 2).repeat_interleave(each)
    sides = [chosen[place < half], chosen[(place >= half) & (place < 2 * half)]]
    first, second = (torch.bincount(side, minlength=n * classes).reshape(n, classes).double() for side in sides)
    return first, second


def ceiling(agreement: Tensor | float) -> float:
    """Return the correlation with all people that is expected of a perfect model, sqrt(2 r / (1 + r)) (Spearman 1910; Brown 1910).

    Args:
        agreement: correlation r of two halves of the people.
    """
    return float((2 * agreement / (1 + agreement)) ** 0.5)
