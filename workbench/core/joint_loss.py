"""One call of the criterion for all models, if the mean of their losses equals the loss of all their rows together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..engine.tree import is_float
from .outputs.meanings import Values
from .outputs.options import meaning_of

# means over the elements of a target that is shaped like the prediction
_FUNCTIONS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
_MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
_REGISTERS = 32  # numbers that a step of a vectorized loop computes: at most two registers of AVX-512, 16 float32 each


def joined(
    record: Any, models: Sequence[int], leaves: Sequence[Any], criterion: Any, y: Any, pair: Any
) -> tuple[Tensor, Tensor] | None:
    """Return the concatenated rows of all models and their targets; None if the criterion must be called for each model separately.

    Only criteria known to be means are called jointly. Gradients are bitwise equal to those of separate calls: the number of targets or that of
    models must be a power of two, so that dividing by it is exact, before or after dividing by the other. Targets whose number is no power of
    two must also fill the vector registers, since exp and log round differently for the numbers left over.

    Args:
        record: record of the wrapped object.
        models: number of models along each axis.
        leaves: output leaves, [*models, rows, ...], or with a pair [*models, 2, rows, ...].
        criterion, y, pair: as for `loss_of_model`.

    Returns:
        Pair (rows of all models [models * rows, ...], targets [models * rows, ...]), or None.
    """
    n_models, depth = math.prod(models), len(models) + (pair is not None)
    if n_models < 2 or len(leaves) != 1 or not is_float(leaf := leaves[0]) or leaf.layout is not torch.strided:
        return None
    of_classes = _is_mean(criterion, (F.cross_entropy,), (nn.CrossEntropyLoss,))
    if not (criterion is None or of_classes or _is_mean(criterion, _FUNCTIONS, _MODULES)):
        return None
    if not isinstance(y, Tensor) or not torch.is_grad_enabled():
        return None
    values = record.output is None or isinstance(meaning_of(record.output), Values)
    if pair is not None and not (pair.likelihood_of_rows and values):
        return None
    shape, n_targets = leaf.shape[depth:], y.numel()
    fits = y.shape == shape or (of_classes and len(shape) > 1 and y.shape == (shape[0], *shape[2:]))
    exact = _is_power_of_two(n_targets) or (_is_power_of_two(n_models) and n_targets % _REGISTERS == 0)
    if not fits or not shape or n_targets == 0 or not exact:
        return None
    stacked = leaf.reshape(n_models, *leaf.shape[len(models) :])
    rows = stacked.flatten(0, 1) if pair is None else stacked.movedim(0, 1).flatten(1, 2)
    return rows, y.expand(n_models, *y.shape).flatten(0, 1)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _is_mean(criterion: Any, functions: Sequence[Any], modules: Sequence[type[nn.Module]]) -> bool:
    """Return whether a criterion is one of these torch losses with the default reduction, unmodified."""
    if not isinstance(criterion, nn.Module):
        return any(criterion is function for function in functions)
    if type(criterion) not in modules or criterion.reduction != "mean":
        return False
    return not (criterion._forward_hooks or criterion._forward_pre_hooks or "forward" in vars(criterion))


__all__ = ["joined"]
