"""A yes or no, for which a model gives one number, as two classes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def no_and_yes(part: Tensor, logits: bool) -> Tensor:
    """Return log-probabilities or, unless `logits`, probabilities of no and yes [rows, ..., 2], for an output that means `Binary`.

    One decision per row, [rows] or [rows, 1], becomes [rows, 2].

    Example:
        >>> no_and_yes(torch.tensor([[0.0], [2.0]]), logits=True).softmax(-1)[:, 1]
        tensor([0.5000, 0.8808])
    """
    part = one_per_row(part)
    # not [0, logit], which has no softmax where a logit is infinite
    return torch.stack([logsigmoid(-part), logsigmoid(part)] if logits else [1 - part, part], -1)


def one_number(scores: Tensor, logits: bool) -> Tensor:
    """Return the logit or, unless `logits`, the probability of yes [...] for scores of both [..., 2]."""
    no, yes = scores.unbind(-1)
    return yes - no if logits else yes


def one_per_row(part: Tensor) -> Tensor:
    """Return [rows] for [rows, 1]; other tensors as they are."""
    return part[:, 0] if part.dim() == 2 and part.shape[1] == 1 else part


def class_numbers(target: Tensor, scores: Tensor) -> Tensor:
    """Return targets, 0 or 1, as class numbers for scores [rows, ..., 2]; fractions are no class numbers and stay."""
    is_whole = not target.is_floating_point() or bool((target == target.round()).all())
    target = target.long() if is_whole else target
    return one_per_row(target) if scores.dim() == 2 else target
