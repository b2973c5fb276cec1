"""Refusal of losses that pull predictions out of the middle of the targets, where cross-fitting and risk heads take them to be."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from workbench.core.calls.risks import pair_of
from workbench.core.outputs.options import has_classes
from workbench.core.wrapped import Wrapped
from workbench.distributions import Quantiles
from workbench.training.checks import shape_of_rows
from workbench.training.default_losses import Criterion
from workbench.training.unshadowed import unshadowed

PULL = 0.05  # share of the gradients that may be left over; quantiles between 0.475 and 0.525 pass for the median


def refuse_one_sided(wrapped: Wrapped, criterion: Criterion | None, prediction: Any, y: Any, has_folds: bool) -> None:
    """Raise ValueError if predictions cannot be compared with the targets, or are not in their middle by the criterion.

    Of equally many targets above and below, at one distance, the gradients cancel out if the optimum is the mean, as for squared errors and
    Bregman divergences (Banerjee et al. 2005), or if the loss is symmetric. For quantiles and expectiles, the share 2 level - 1 is left.

    Args:
        wrapped: the model.
        criterion: the loss that was given, None for the default.
        prediction, y: prediction and targets of a batch.
        has_folds: whether the model is cross-fitted.
    """
    record = wrapped._workbench
    output, pair = record.output, pair_of(record, unshadowed(wrapped, "methods"))
    if has_folds:
        harm = "folds choose weights and noise as if predictions were in the middle: leave folds out"
    elif pair is not None and not isinstance(pair.distribution, Quantiles):  # whose heads learn offsets of any size
        harm = f"the likelihood of {pair.name}'s risk heads pulls them to the middle: leave {pair.name} out"
    else:
        return
    if criterion is None or has_classes(output) or not isinstance(y, Tensor) or not y.is_floating_point():
        return
    if has_folds and isinstance(prediction, Tensor) and prediction.shape != y.shape:
        raise ValueError(
            f"y: targets are {shape_of_rows(y)}, but the model gives {shape_of_rows(prediction)}, and folds decide by how far predictions are "
            "from targets: give one target for each output, or leave folds out"
        )
    y = y[: len(y) // 2 * 2].detach()
    spread = y.std(0, correction=0) / 10
    # a power of two, so that targets are equally far on both sides, without rounding
    distance = spread.where(spread > 0, 1.0).log2().floor().exp2()
    middle = ((y.mean(0) / distance).round() * distance).expand_as(y)
    offsets = distance * torch.ones_like(y)
    offsets[::2] *= -1
    pulls: list[Tensor] = []
    with torch.enable_grad(), suppress(Exception):  # of criteria that other numbers make no sense for
        for targets in (middle + offsets, middle - offsets):  # both, for losses in which rows count differently
            start = middle.clone().requires_grad_()
            pulls += torch.autograd.grad(criterion(start, targets).sum(), start)
    if len(pulls) < 2:
        return
    pull = torch.cat(pulls)
    if bool((pull.sum(0).abs() > PULL * pull.abs().sum(0)).any()):
        raise ValueError(
            f"criterion: {getattr(criterion, '__name__', type(criterion).__name__)} pulls predictions to one side of the targets, as losses of "
            f"quantiles and expectiles do, and {harm}, or, for quantiles, wrap with "
            "sculpt.Wrapper(sculpt.Quantiles((0.1, 0.5, 0.9))) and leave criterion out"
        )


__all__ = ["refuse_one_sided"]
