"""Thresholds with bounded expected loss, such as those of masks, label sets or any other decision by a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.calibration.answers import level as exact
from workbench.errors import require
from workbench.metrics._inputs import level_in_unit, numbers, tensor_of


def control_risk(losses: Any, thresholds: Any, level: float = 0.1, bound: float = 1.0) -> Tensor:
    """Return the first threshold at which the expected loss of a new row is at most `level` (conformal risk control).

    The smallest lambda with n / (n + 1) R(lambda) + bound / (n + 1) <= level, where R is the mean loss of n held-out rows, which must not
    increase along the thresholds: E[loss of a new row] <= level if rows are exchangeable (Angelopoulos, Bates, Fisch, Lei & Schuster 2024). With
    a 0-1 loss for missing the truth, it is split conformal prediction. For masks, the loss of an image can be the share of its object that the
    mask {p >= 1 - lambda} misses.

    Args:
        losses: loss of each held-out row at each threshold, [n, thresholds], between 0 and bound.
        thresholds: [thresholds], in the order of decreasing losses.
        level: acceptable expected loss.
        bound: largest possible loss of a row.

    Returns:
        The threshold, without dimensions.

    Raises:
        ValueError: a loss increases along the thresholds (use `learn_then_test`), is outside of [0, bound] or NaN, or no threshold is good
            enough.

    Example:
        >>> p = torch.rand(200, 8, generator=torch.Generator().manual_seed(0))  # of eight labels, of which all are true
        >>> thresholds = torch.linspace(0, 1, 101)
        >>> missed = (p[:, None] < 1 - thresholds[:, None]).double().mean(2)
        >>> control_risk(missed, thresholds, level=0.2)
        tensor(0.8200)
    """
    level, bound = _one_number("level", level), _one_number("bound", bound)
    losses, thresholds = _check_losses(losses, thresholds, bound)
    if not 0 < level < bound:
        raise ValueError(f"level must lie between 0 and the bound {bound:g}; found {level!r}")
    if (rises := (losses.diff(dim=1) > 0).any(1)).any():
        raise ValueError(
            f"losses rise along the thresholds in {int(rises.sum())} of {len(losses)} rows, first in row {int(rises.nonzero()[0])}: order the "
            "thresholds so that losses fall, or use learn_then_test, which does not need monotone losses"
        )
    n = len(losses)
    acceptable = (losses.sum(0) + bound) / (n + 1) <= level * (1 + 1e-12)
    if not acceptable.any():
        lowest_loss = float((losses[:, -1].sum() + bound) / (n + 1))
        raise ValueError(
            f"no threshold has an expected loss of at most {level:g}: the last reaches {lowest_loss:.4g} with {n} held-out rows; add thresholds "
            "with smaller losses, hold out more rows, or accept a larger loss"
        )
    return thresholds[acceptable.int().argmax()]


def learn_then_test(
    losses: Any, thresholds: Any, level: float | Sequence[float] | Tensor = 0.1, confidence: float = 0.9
) -> Tensor:
    """Return the thresholds at which, with this confidence over the held-out rows, the expected loss is at most `level`, simultaneously for all.

    Learn-then-Test (Angelopoulos, Bates, Candes, Jordan & Lei 2021): the hypothesis that the expected loss is above the level is tested for one
    threshold after another, in the given order, until one cannot be rejected (fixed sequence testing). The p-value is that
    of Hoeffding and Bentkus (Bates et al. 2021),

        min(exp(-n h(min(R, level), level)), e P[Binomial(n, level) <= ceil(n R)]),  h(a, b) = a log(a / b) + (1 - a) log((1 - a) / (1 - b)).

    Losses need not be monotone along the thresholds. With several losses, all levels hold together: the largest p-value counts.

    Args:
        losses: loss of each held-out row at each threshold, between 0 and 1: [n, thresholds], or [losses, n, thresholds].
        thresholds: [thresholds], the most promising first; chosen without using these rows.
        level: acceptable expected loss, or one for each of several losses.
        confidence: probability that all returned thresholds are good.

    Returns:
        These thresholds, [k]; empty if the first one can't be shown to be good.

    Raises:
        ValueError: a loss is outside of [0, 1] or NaN, or the number of levels differs from that of losses.

    Example:
        >>> wrong = torch.rand(500, 11, generator=torch.Generator().manual_seed(0)) < torch.linspace(0, 0.5, 11)
        >>> learn_then_test(wrong.double(), torch.linspace(0, 0.5, 11), level=0.2)
        tensor([0.0000, 0.0500, 0.1000])
    """
    all_losses = (
        torch.stack([torch.as_tensor(row_losses) for row_losses in losses]) if isinstance(losses, Sequence) else losses
    )
    all_losses = torch.as_tensor(all_losses)
    all_losses = all_losses if all_losses.dim() == 3 else all_losses[None]
    accepted_levels = tensor_of(level, "level").double()
    levels = accepted_levels.tolist() if accepted_levels.dim() else [accepted_levels.item()] * len(all_losses)
    if len(levels) != len(all_losses):
        raise ValueError(
            f"level has {len(levels)} numbers for {len(all_losses)} losses; give one for each, or one number for all"
        )
    p_values = []
    for row_losses, accepted_level in zip(all_losses, levels, strict=True):
        level_in_unit("level", accepted_level)
        checked, thresholds = _check_losses(row_losses, thresholds, 1.0)
        p_values.append(_p_values(checked, accepted_level))
    rejected = torch.stack(p_values).amax(0) <= 1 - float(exact("confidence", confidence))
    return thresholds[: int(rejected.int().cumprod(0).sum())]


def _p_values(losses: Tensor, level: float) -> Tensor:
    n, mean = len(losses), losses.mean(0)
    below = mean.clamp_max(level)
    # x log x is 0 at 0
    divergence = torch.special.xlogy(below, below / level) + torch.special.xlogy(1 - below, (1 - below) / (1 - level))
    hoeffding = (-n * divergence).exp()
    counts = (n * mean - 1e-9).ceil()  # for 0-1 losses, n times the mean is an integer up to rounding
    binomial = torch.as_tensor(require("scipy.stats").binom.cdf(counts.cpu().numpy(), n, level)).to(mean)
    return torch.minimum(hoeffding, torch.e * binomial)


def _one_number(name: str, value: Any) -> float:
    number = tensor_of(value, name)
    if number.dim() or number.dtype == torch.bool or number.isnan():
        raise TypeError(f"{name} must be one number, found {value!r:.100}")
    return number.double().item()


def _check_losses(losses: Any, thresholds: Any, bound: float) -> tuple[Tensor, Tensor]:
    checked = numbers("losses", losses)
    thresholds = tensor_of(thresholds, "thresholds")
    if bool(thresholds.isnan().any()):
        raise ValueError(f"thresholds has {int(thresholds.isnan().sum())} NaN of {thresholds.numel()}")
    if checked.dim() != 2 or thresholds.shape != checked.shape[1:]:
        raise ValueError(
            f"losses must have shape [rows, thresholds] for thresholds of shape {list(thresholds.shape)}; found {list(checked.shape)}"
        )
    if bool(((checked < 0) | (checked > bound)).any()):
        raise ValueError(
            f"losses must lie between 0 and {bound:g}; found {float(checked.min()):g} to {float(checked.max()):g}: scale them"
        )
    return checked, thresholds


__all__ = ["control_risk", "learn_then_test"]
