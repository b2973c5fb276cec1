"""How risks and predictions agree with people, and how people agree with each other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench import metrics


def judged(
    probs: Tensor, total: Tensor, aleatoric: Tensor, epistemic: Tensor | None, truth: Tensor, counts: Tensor
) -> dict[str, float]:
    """How a prediction and its risks agree with true classes and people.

    Args:
        probs: class probabilities [n, classes].
        total: risk of each row [n], and so aleatoric and epistemic, which may be missing.
        truth: true classes [n].
        counts: how many people chose each class [n, classes].
    """
    said = entropy(shares(counts))
    found = {
        "total": rank_correlation(total, said),
        "aleatoric": rank_correlation(aleatoric, said),
        "accuracy": metrics.accuracy(probs, truth).item(),
        "nll": metrics.categorical_nll(probs, truth).item(),
        "ece": metrics.ece(probs, truth).item(),
        "cross_entropy": cross_entropy(probs, shares(counts)),
    }
    if epistemic is not None:
        found["epistemic"] = rank_correlation(epistemic, said)
        found["entangled"] = rank_correlation(aleatoric, epistemic)
    return found


def entropy(probs: Tensor) -> Tensor:
    """In nats [...], of probabilities [..., classes]."""
    return torch.special.entr(probs).sum(-1)


def shares(counts: Tensor) -> Tensor:
    """Of people who chose each class."""
    return counts / counts.sum(1, keepdim=True)


def cross_entropy(probs: Tensor, wanted: Tensor) -> float:
    """Mean of -sum_c wanted_c log p_c, in nats."""
    return F.cross_entropy(probs.log(), wanted.to(probs)).item()


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's, of two columns [n]."""
    a, b = a.double(), b.double()
    return metrics.risk_error_correlation(torch.zeros_like(b), a - a.min(), b - b.min()).item()


def halves_agree(counts: Tensor, seed: int) -> Tensor:
    """Spearman's correlation of the entropies of two random halves of the people of each image; an odd one out is left out."""
    first, second = halves_of(counts, seed)
    return torch.tensor(rank_correlation(entropy(shares(first)), entropy(shares(second))), dtype=torch.float64)


def halves_of(counts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Counts [n, classes] of two random halves of as many people each."""
    counts = counts.long()
    n, classes = counts.shape
    each = counts.sum(1)
    # one for each answer: image x classes + class
    chosen = torch.arange(n * classes).repeat_interleave(counts.flatten())
    drawn = torch.rand(len(chosen), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    chosen = chosen[(chosen // classes + drawn).argsort()]  # mixed within each image
    place = torch.arange(len(chosen)) - (each.cumsum(0) - each).repeat_interleave(each)
    half = (each // 2).repeat_interleave(each)
    sides = [chosen[place < half], chosen[(place >= half) & (place < 2 * half)]]
    first, second = (torch.bincount(side, minlength=n * classes).reshape(n, classes).double() for side in sides)
    return first, second


def ceiling(agreement: Tensor | float) -> float:
    """The largest correlation with all people that a perfect model is expected to have, sqrt(2 r / (1 + r)) (Spearman 1910; Brown 1910).

    Args:
        agreement: correlation r of two halves of them.
    """
    return float((2 * agreement / (1 + agreement)) ** 0.5)
